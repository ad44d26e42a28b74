"""Child processes that cannot outlive a test, nor hang it."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

DEADLINE_S = 300.0  # includes a cold start that compiles kernels, on a busy core


@contextmanager
def child_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process that is killed when the block ends, or after `DEADLINE_S`.

    So reading its output or waiting for it ends, whatever it does.
    """
    with subprocess.Popen(command, **options) as process:
        timer = threading.Timer(DEADLINE_S, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def fork() -> int:
    """As `os.fork`; skips the test where torch cannot work in a forked process."""
    if torch.cuda.is_available():
        pytest.skip("after a backward pass beside a GPU, none works in a forked process")
    return os.fork()


class Forked:
    """A process that does `work` without output, forked from the test: torch is loaded already."""

    def __init__(self, work: Callable[[], object]):
        self.returncode: int | None = None
        self._process = fork()
        if self._process == 0:
            try:
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, 1)
                os.dup2(devnull, 2)
                work()
                os._exit(0)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            process, status = os.waitpid(self._process, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._process, signal.SIGKILL)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


def wait_until(is_so: Callable[[], bool], process: "subprocess.Popen | Forked") -> None:
    """Until a condition holds, at most `DEADLINE_S` and while the process runs."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        has_ended = process.poll() is not None
        if is_so():
            return
        assert not has_ended, f"the process ended by itself: {process.returncode}"
        assert time.monotonic() < deadline, f"nothing in {DEADLINE_S} s"
        time.sleep(0.02)


def wait_for_the_next_second() -> None:
    """TensorBoard reads event files in the order of the seconds in which they were created.

    A process that loads torch takes longer; one that is forked, or goes on, does not.
    """
    time.sleep(1 - time.time() % 1)
