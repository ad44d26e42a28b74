"""Progress of a run in the terminal: a bar if `rich` is installed, else a line now and then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

Report = Callable[[int, str], None]  # steps done, and a short status

LINES = 20  # printed in all, without a bar


@contextmanager
def progress_bar(total_steps: int, heading: str, *, enabled: bool = True) -> Iterator[Report]:
    if not enabled:
        yield lambda steps, status: None
        return
    print(heading)
    if find_spec("rich") is None:
        yield lambda steps, status: _print_line(steps, total_steps, status)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    counted = TextColumn("{task.completed:>7,.0f} / {task.total:,.0f} steps")
    with Progress(
        counted, BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    ) as progress:
        task = progress.add_task("", total=total_steps)
        yield lambda steps, status: progress.update(task, completed=steps, description=status)


def _print_line(steps: int, total_steps: int, status: str) -> None:
    if steps * LINES // total_steps > (steps - 1) * LINES // total_steps:
        print(f"{steps:>7,} / {total_steps:,} steps  {status}")
