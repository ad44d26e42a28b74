"""Time spent in the named phases of a loop."""

from collections import defaultdict
from time import perf_counter


class PhaseClock:
    """Each lap adds the time since the previous one to a named phase."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = perf_counter()

    def start(self) -> None:
        """Discard the time since the last lap."""
        self._last = perf_counter()

    def lap(self, phase: str) -> None:
        now = perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last `take`."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds
