"""Files: atomic, plain, and refused with a reason when they do not fit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from esper.runtime.files import (
    UnreadableFile,
    atomic_write,
    read_file,
    require_same_layout,
    write_file,
)


def test_other_shapes_missing_and_unknown_keys_are_named():
    expected = {"net": {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, "count": 0}
    found = {"net": {"weight": torch.zeros(5, 2), "extra": torch.zeros(1)}, "count": 1.5}
    with pytest.raises(UnreadableFile) as caught:
        require_same_layout(found, expected, "a.pt")
    for part in (
        r"net.weight: found float32 [5, 2], expected float32 [3, 2]",
        "net.bias: missing",
        "net.extra: not expected",
        "count: found float, expected int",
    ):
        assert part in str(caught.value)


def test_another_version_kind_or_file_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    write_file(path, "apple", {})
    with pytest.raises(UnreadableFile, match="is a file of kind 'apple'; expected 'pear'"):
        read_file(path, "pear")
    with pytest.raises(UnreadableFile, match="version 1 of the kind 'apple'; .* reads version 7"):
        read_file(path, "apple", version=7)
    torch.save({"weights": torch.zeros(2)}, path)
    with pytest.raises(UnreadableFile, match="not a file that Esper wrote"):
        read_file(path, "apple")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnreadableFile, match="is damaged, or not a file that Esper wrote"):
        read_file(path, "apple")
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none.pt", "apple")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        write_file(tmp_path, "apple", {})


def test_a_flipped_byte_is_refused_or_changes_nothing(tmp_path):
    path, damaged = tmp_path / "a.pt", tmp_path / "damaged.pt"
    write_file(path, "apple", {"n": 1, "weights": torch.arange(40.0)})
    whole, refused = path.read_bytes(), 0
    directory = len(whole) * 2 // 3  # of the archive: names, lengths and flags
    for place in (*range(0, directory, 4), *range(directory, len(whole))):
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 0x90]) + whole[place + 1 :])
        try:
            contents = read_file(damaged, "apple")
        except UnreadableFile:
            refused += 1
        else:
            assert contents["n"] == 1
            assert torch.equal(contents["weights"], torch.arange(40.0)), place
    assert refused > 100


def test_another_zip_file_is_refused(tmp_path):
    with ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("readme.txt", "hello")
    with pytest.raises(UnreadableFile, match="not a file that Esper wrote"):
        read_file(tmp_path / "a.pt", "apple")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_file_that_would_execute_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": "esper checkpoint", "contents": Malicious()}, "a.pt")
    with pytest.raises(UnreadableFile, match="more than tensors and plain containers"):
        read_file("a.pt", "apple")
    assert not Path("executed").exists()


def test_what_cannot_be_read_without_executing_code_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="was not written: it could not be read back"):
        write_file(tmp_path / "a.pt", "apple", {"a": [1, Path("x")]})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    write_file(path, "apple", {"n": 1})

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_file(path, "apple", {"n": 2})
    assert read_file(path, "apple") == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


WRITER = """
import sys, torch
from esper.runtime.files import write_file
n = 0
while True:
    n += 1
    write_file(sys.argv[1], "apple", {"n": n, "same": torch.full((500_000,), float(n))})
    print(n, flush=True)
"""


def test_a_kill_during_writing_leaves_the_last_good_file(tmp_path):
    path = tmp_path / "a.pt"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    written = [int(writer.stdout.readline()) for _ in range(3)][-1]
    time.sleep(0.004)
    writer.send_signal(signal.SIGKILL)
    written = max([written, *map(int, writer.stdout.read().split())])
    writer.wait()
    writer.stdout.close()
    contents = read_file(path, "apple")
    assert contents["n"] in (written, written + 1)
    assert bool((contents["same"] == contents["n"]).all())


def test_files_of_killed_writers_are_removed_by_the_next_write(tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    stale = tmp_path / f".run.pt.{killed.pid}.partial"
    alive, other, long = (
        tmp_path / name
        for name in (
            f".run.pt.{os.getppid()}.partial",
            f".other.pt.{killed.pid}.partial",
            f".run.pt.x.{killed.pid}.partial",
        )
    )
    for file in (stale, alive, other, long):
        file.write_bytes(b"half")
    atomic_write(tmp_path / "run.pt", lambda file: file.write(b"whole"))
    assert sorted(tmp_path.iterdir()) == sorted([alive, other, long, tmp_path / "run.pt"])


def test_a_header_without_its_parts_is_refused(tmp_path):
    torch.save({"format": "esper checkpoint", "version": 1}, tmp_path / "a.pt")
    with pytest.raises(UnreadableFile, match="not a file that Esper wrote"):
        read_file(tmp_path / "a.pt", "apple")


def test_a_run_resumed_with_other_threads_is_warned_of(tmp_path):
    write_file(tmp_path / "a.pt", "apple", {"n": 1})
    assert read_file(tmp_path / "a.pt", "apple", resumes=True) == {"n": 1}  # no warning
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    saved["machine"]["threads"] += 1
    torch.save(saved, tmp_path / "a.pt")
    assert read_file(tmp_path / "a.pt", "apple") == {"n": 1}
    with pytest.warns(UserWarning, match="threads 2, now 1: the resumed run will not be bit-exact"):
        read_file(tmp_path / "a.pt", "apple", resumes=True)
