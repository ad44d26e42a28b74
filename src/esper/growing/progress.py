"""A run in the terminal: how far it is, and how it is stopped there.

Progress is a bar where `rich` is installed, else a line now and then.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

Report = Callable[[int, str], None]  # steps done, and how things stand

LINES = 20  # printed in all, without a bar


@contextmanager
def progress_bar(total_steps: int, heading: str, *, enabled: bool = True) -> Iterator[Report]:
    if not enabled:
        yield lambda steps, standing: None
        return
    print(heading)
    if find_spec("rich") is None:
        yield lambda steps, standing: _print_line(steps, total_steps, standing)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    counted = TextColumn("{task.completed:>7,.0f} / {task.total:,.0f} steps")
    with Progress(
        counted, BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    ) as progress:
        task = progress.add_task("", total=total_steps)
        yield lambda steps, standing: progress.update(task, completed=steps, description=standing)


def _print_line(steps: int, total_steps: int, standing: str) -> None:
    if steps * LINES // total_steps > (steps - 1) * LINES // total_steps:
        print(f"{steps:>7,} / {total_steps:,} steps  {standing}")


@contextmanager
def stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: a wish to stop after the step. A second one interrupts at once.

    A handler of the user's own stays in place; outside of the main thread there can be none.
    """
    is_asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal is_asked
        is_asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: is_asked
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
