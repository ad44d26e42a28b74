"""A run's metrics as TensorBoard curves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Every metric becomes a curve of its own name over the steps."""

    def __init__(self, folder: str | Path, *, first_step: int | None = None):
        """What an earlier run wrote for `first_step` and later is hidden: it is told again."""
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
