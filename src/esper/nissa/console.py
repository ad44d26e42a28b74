"""Progress of a run in the terminal."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Self

LINES = 10  # per run, where there is no bar

Report = Callable[[int, str], None]  # steps done, and a short status


@contextmanager
def progress_bar(total_steps: int, heading: str, *, enabled: bool) -> Iterator[Report]:
    """A heading and a bar, or nothing."""
    if not enabled:
        yield lambda steps, status: None
        return
    print(heading)
    with ProgressSink(total_steps) as sink:
        yield sink.update


class ProgressSink:
    """A moving line with a bar, the time and some metrics; lines now and then where there is no
    terminal or no `rich`."""

    def __init__(
        self,
        total_steps: int,
        shown: Mapping[str, Callable[[float], str]] | None = None,
        *,
        unit: str = "steps",
        done: int = 0,
        window: int = 1,
        text: str = "",
    ):
        """`shown` maps metrics to their text; each is a mean of its last `window` values.

        `text` is shown before the first step.
        """
        self._shown, self._unit, self._total, self._done = shown or {}, unit, total_steps, done
        self._values: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))
        self._bar, self._started = _bar(unit), time.monotonic()
        if self._bar:
            self._task = self._bar.add_task(text, total=total_steps, completed=done)
        elif text:
            print(text, flush=True)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        words = []
        for name, show in self._shown.items():
            value, values = metrics.get(name, float("nan")), self._values[name]
            if value == value:
                values.append(value)
            if values:
                words.append(show(sum(values) / len(values)))
        self.update(step, "  ".join(words))

    def update(self, step: int, text: str) -> None:
        before, self._done = self._done, step
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
        elif step * LINES // self._total > before * LINES // self._total:
            count = f"{step:>7,} / {self._total:,} {self._unit}"
            print(f"{count}  {time_since(self._started)}  {text}", flush=True)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be closed
            if self._bar:
                self._bar.stop()


def time_since(start: float) -> str:
    """Minutes and seconds since a time of the monotonic clock."""
    minutes, seconds = divmod(int(time.monotonic() - start), 60)
    return f"{minutes}:{seconds:02}"


def _bar(unit: str) -> Any:
    """A `rich` progress display; None if `rich` or a terminal is missing."""
    if find_spec("rich") is None:
        return None
    from rich import progress

    bar = progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}"),
        progress.BarColumn(bar_width=None),  # use the remaining width
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(compact=True),
        progress.TextColumn("{task.description}"),
        expand=True,
    )
    return bar if bar.console.is_terminal else None
