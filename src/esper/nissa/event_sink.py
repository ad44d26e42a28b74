"""Where metrics go: the interface of sinks, such as `esper train --sink my_sinks:WandbSink`."""

from collections.abc import Mapping
from typing import Protocol, Self


class EventSink(Protocol):
    """Records the metrics of a run; a context manager."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics at a step, by the names in docs/metrics.md."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
