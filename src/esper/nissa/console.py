"""Progress of a run in the terminal."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressSink:
    """A progress bar with the latest values of some metrics."""

    def __init__(
        self,
        total_steps: int,
        shown: Mapping[str, str],
        *,
        unit: str = "steps",
        done: int = 0,
        console: Console | None = None,
    ):
        """`shown` maps metric names to labels."""
        self._shown = shown
        self._progress = Progress(
            TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}"),
            BarColumn(bar_width=None),  # use the remaining width
            TimeRemainingColumn(compact=True),
            TextColumn("{task.description}"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=done)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        words = [
            f"{label} {metrics[name]:,.3g}"
            for name, label in self._shown.items()
            if name in metrics
        ]
        self._progress.update(self._task, completed=step, description="  ".join(words))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be closed
            self._progress.stop()
