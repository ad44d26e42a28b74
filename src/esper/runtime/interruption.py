"""Ctrl-C, SIGTERM and SIGHUP as a request that a loop checks between two steps.

with stop_on_interrupt() as should_stop:
    while not should_stop():
        ...
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# the signals that ask a process to end, with Python's handlers for them
_DEFAULT_HANDLERS: dict[signal.Signals, Any] = {
    getattr(signal, name): signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)
}


class StopRequest:
    """Whether a signal has asked to stop, and which."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """Yields `should_stop`: whether a signal has asked to stop. A second one ends the process.

    Only default handlers are replaced: a custom handler stays in place, and so does a signal that
    is ignored. Outside the main thread Python allows no handlers: `should_stop()` is always False.
    """
    request = StopRequest()
    replaced: list[signal.Signals] = []

    def restore() -> None:
        for number in replaced:
            signal.signal(number, _DEFAULT_HANDLERS[number])

    def stop(number: int, _frame: FrameType | None) -> None:
        request.signal = number
        restore()

    if threading.current_thread() is threading.main_thread():
        for number, handler in _DEFAULT_HANDLERS.items():
            if signal.getsignal(number) == handler:
                replaced.append(number)
                signal.signal(number, stop)
    try:
        yield request
    finally:
        restore()
