"""Metrics of a run as TensorBoard curves, its settings, and a picture of its evaluation."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from esper.runtime.plain_config import flat


class TensorBoardSink:
    """Logs every metric as a scalar of the same name."""

    def __init__(
        self,
        folder: str | Path,
        *,
        first_step: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        """Purge events from `first_step` on; a resumed run logs them again."""
        self._writer = SummaryWriter(str(folder), purge_step=first_step)
        if settings:  # in the run's own file; add_hparams would write another one
            file_writer: Any = self._writer.file_writer
            make: Any = hparams  # torch has no types for it
            for summary in make(flat(settings), {"episode/score": 0.0, "episode/lead": 0.0}):
                file_writer.add_summary(summary)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def log_picture(
    folder: Path, name: str, panels: Mapping[str, Mapping[str, tuple[float, float]]]
) -> None:
    """Log bars of shares in percent, a panel for each title; nothing without matplotlib.

    A bar is a mean and half its interval.
    """
    if not panels or find_spec("matplotlib") is None:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 3.2), layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    for place, (title, bars) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), place, title=f"score, {title}")
        means, halves = (100 * np.array(values) for values in zip(*bars.values(), strict=True))
        colors = ["#1f7a4d" if arm == "learned" else "#a09c92" for arm in bars]
        axes.barh(list(bars), means, xerr=halves, color=colors)
        axes.set_xlim(min(means) - max(halves) - 2)
    canvas.draw()
    with SummaryWriter(str(folder)) as writer:
        writer.add_image(name, np.asarray(canvas.buffer_rgba())[..., :3], dataformats="HWC")
