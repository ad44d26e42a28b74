"""Stop a loop cleanly on Ctrl-C.

with stop_on_interrupt() as should_stop:
    while not should_stop():
        ...  # one step
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once Ctrl-C was pressed.

    A second Ctrl-C raises KeyboardInterrupt. Outside the main thread, or if SIGINT is ignored or
    has a custom handler, nothing is installed and the function always returns False.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    is_interrupted = False

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the second one raises

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: is_interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
