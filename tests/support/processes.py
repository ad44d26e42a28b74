"""Child processes that cannot outlive a test, nor hang it."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen) -> None:
    """Until a condition holds, at most `DEADLINE_S` and while the process runs."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        has_ended = process.poll() is not None
        if is_so():
            return
        assert not has_ended, f"the process ended by itself: {process.returncode}"
        assert time.monotonic() < deadline, f"nothing in {DEADLINE_S} s"
        time.sleep(0.02)
