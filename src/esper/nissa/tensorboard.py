"""Metrics of a run as TensorBoard curves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Logs every metric as a scalar of the same name."""

    def __init__(self, folder: str | Path, *, first_step: int | None = None):
        """Purge events from `first_step` on; a resumed run logs them again."""
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
