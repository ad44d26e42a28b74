"""Ctrl-C as a request that a loop checks between two steps.

with stop_on_interrupt() as should_stop:
    while not should_stop():
        ...
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields `should_stop`: whether Ctrl-C was pressed. A second Ctrl-C interrupts at once.

    Only the default handler is replaced: a custom handler stays in place, and so does a SIGINT that
    is ignored. Outside the main thread Python allows no handler, so `should_stop` is always False.
    """
    is_pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
