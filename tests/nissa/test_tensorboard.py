"""TensorBoard's curves on a full disk."""

import errno
import threading

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from esper.nissa.tensorboard import TensorBoardSink


def test_a_full_disk_raises_in_the_run_without_a_traceback_of_the_writer(
    tmp_path, monkeypatch, capfd
):
    def fail(_writer, _record):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = threading.excepthook

    def record_until_it_raises():
        with TensorBoardSink(tmp_path) as sink:
            monkeypatch.setattr(RecordWriter, "write", fail)
            for step in range(1000):
                sink.record(step, {"episode/score": 0.5})

    with pytest.raises(OSError, match="No space left"):
        record_until_it_raises()
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook is before
