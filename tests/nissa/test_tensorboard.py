"""TensorBoard's curves, settings and pictures; a full disk."""

import errno
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

from esper.nissa.tensorboard import TensorBoardSink, log_picture


def test_a_full_disk_raises_in_the_run(tmp_path, monkeypatch):
    def fail(_writer, _record):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", lambda failure: None)  # the writer's traceback
    threads = set(threading.enumerate())

    def record_until_it_raises():
        with TensorBoardSink(tmp_path) as sink:
            monkeypatch.setattr(RecordWriter, "write", fail)
            for step in range(1000):
                sink.record(step, {"episode/score": 0.5})

    with pytest.raises(OSError, match="No space left"):
        record_until_it_raises()
    for writer in set(threading.enumerate()) - threads:
        writer.join()


def test_settings_are_hparams_of_the_run_itself_and_pictures_are_logged(tmp_path):
    settings = {"task": "mnist1d", "ppo": {"learning_rate": 0.1}, "widths": [4, 8]}
    with TensorBoardSink(tmp_path, settings=settings) as sink:
        sink.record(1, {"episode/score": 0.5})
    bars = {"host alone": (0.40, 0.01), "learned": (0.45, 0.02)}
    log_picture(tmp_path, "evaluation", {"rent 0.05": bars, "rent 0.15": bars})
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    events = EventAccumulator(str(tmp_path)).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["ppo.learning_rate"].number_value == 0.1
    assert hparams["widths"].string_value == "[4, 8]"
    (image,) = events.Images("evaluation")
    assert (image.width, image.height) == (1000, 320)


def test_a_resumed_run_adds_to_its_curves(tmp_path):
    with TensorBoardSink(tmp_path) as sink:
        sink.record(1, {"score": 0.1})
        sink.record(2, {"score": 0.2})
    (file,) = tmp_path.iterdir()
    # files are read in the order of their names, which hold the second of their creation
    file.rename(tmp_path / "events.out.tfevents.1700000000.host")
    with TensorBoardSink(tmp_path, first_step=2) as sink:
        sink.record(2, {"score": 0.3})
    curve = EventAccumulator(str(tmp_path)).Reload().Scalars("score")
    assert [event.step for event in curve] == [1, 2]
    assert curve[-1].value == pytest.approx(0.3)
