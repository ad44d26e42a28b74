"""Metrics of a run as TensorBoard curves."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Logs every metric as a scalar of the same name."""

    def __init__(self, folder: str | Path, *, first_step: int | None = None):
        """Purge events from `first_step` on; a resumed run logs them again."""
        self._excepthook = threading.excepthook
        threading.excepthook = self._hide_writer_errors
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._excepthook

    def _hide_writer_errors(self, failure: threading.ExceptHookArgs) -> None:
        """No traceback for a full disk: the next `record` or the end raises the same error."""
        if not issubclass(failure.exc_type, OSError):
            self._excepthook(failure)
