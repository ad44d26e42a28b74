"""A folder that one process writes to."""

import fcntl
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

LEAST_FREE_BYTES = 100 * 2**20  # that a run needs to start


class LockedFolder(ExitStack):
    """A writable folder, made if missing and locked against other processes."""

    def __init__(self, path: str | Path):
        super().__init__()
        self.callback(os.close, _locked(Path(path)))  # releases the lock
        for unfinished in Path(path).glob(".*.partial"):  # left by a killed run
            unfinished.unlink(missing_ok=True)


def _locked(path: Path) -> int:
    """A file descriptor that holds the lock; the system releases it when the process ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        free, least = (size / 2**20 for size in (shutil.disk_usage(path).free, LEAST_FREE_BYTES))
        if free < least:
            raise ValueError(f"{path} has {free:.0f} MiB left; a run needs {least:.0f}")
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(descriptor, 32).decode().strip()
        os.close(descriptor)
        raise ValueError(f"another run (process {owner}) is using {path}") from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
