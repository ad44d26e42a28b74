"""The best of k runs that a random search tries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from growth_evaluation.estimates import Array, estimate


@dataclass(frozen=True)
class RunsToMatch:
    """Runs that a search needs to match a rival, with a 95 % interval; None: more than `tried`."""

    k: int | None
    low: int | None
    high: int | None
    tried: int

    def __str__(self) -> str:
        k, low, high = (
            f"more than {self.tried}" if count is None else str(count)
            for count in (self.k, self.low, self.high)
        )
        return f"{k} [{low} to {high}]"


@dataclass(frozen=True, eq=False)
class RandomSearch:
    """M runs on each of H hosts, chosen by validation score and measured by test score."""

    validation_scores: Array  # [M, H], as the test scores
    test_scores: Array

    def best_of(self, k: int) -> Array:
        """Expected test score of the best of k runs by validation, exact over all subsets, `[H]`.

        The run of rank i (0 is the worst) is the best of k in C(i, k - 1) of the C(M, k) subsets.
        """
        num_runs = len(self.test_scores)
        if not 1 <= k <= num_runs:
            raise ValueError(f"the best of k={k} runs; there are {num_runs}: use 1 to {num_runs}")
        shares = [math.comb(i, k - 1) / math.comb(num_runs, k) for i in range(num_runs)]
        order = np.argsort(self.validation_scores, axis=0, kind="stable")
        mean: Array = np.asarray(shares) @ np.take_along_axis(self.test_scores, order, axis=0)
        return mean

    def runs_to_match(self, rival: Array) -> RunsToMatch:
        """The smallest k whose best run matches a rival's scores, `[H]` or `[K, H]`."""
        num_runs = len(self.test_scores)
        gaps = [estimate(self.best_of(k) - rival) for k in range(1, num_runs + 1)]

        def first(values: Sequence[float]) -> int | None:
            return next((k for k, value in enumerate(values, start=1) if value >= 0), None)

        return RunsToMatch(
            first([gap.mean for gap in gaps]),
            first([gap.high for gap in gaps]),
            first([gap.low for gap in gaps]),
            num_runs,
        )
