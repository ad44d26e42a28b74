"""Statistics of the published claims: the best of k runs, and accuracy against network size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.simic.evaluation.arms import Array
from esper.simic.evaluation.claims import Estimate, estimate, interval, variance_of_mean

Groups = NDArray[np.int64]


def estimate_over_groups(values: Array) -> Estimate:
    """The mean of `[G, repeats]`; groups are fixed and repeats are samples."""
    return interval(float(values.mean()), [variance_of_mean(row) for row in values / len(values)])


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


class Frontier:
    """Accuracy by network size in each of G groups, linear in log size and flat beyond the ends.

    A group is the data, or the data and the host, that a network is compared on.
    """

    def __init__(self, sizes: Array, accuracies: Array):
        """`sizes [n, G]`, rising along n, and `accuracies [n, G, repeats]`."""
        if len(sizes) < 2 or bool((np.diff(sizes, axis=0) <= 0).any()) or accuracies.shape[2] < 2:
            raise ValueError(
                f"a frontier needs two sizes or more, rising, with two networks each; got sizes "
                f"{sizes.tolist()} and accuracies {accuracies.shape}"
            )
        self.sizes, self.accuracies = sizes, accuracies

    def at(self, size: Array, group: Groups) -> Array:
        """Accuracy at each size `[..., H]` in its group `[H]`."""
        means = self.accuracies.mean(-1)[:, group]
        found: Array = np.einsum("n...h,nh->...h", self._weights(size, group), means)
        return found

    def excess(self, accuracy: Array, size: Array, group: Groups) -> Estimate:
        """Accuracy of networks `[H]` or `[K, H]` minus the frontier's at their sizes and groups.

        The frontier's own noise enters with the weights of the interpolation. With small groups it
        also appears as a spread between hosts; the interval is then slightly too wide.
        """
        accuracy, size = np.atleast_2d(accuracy), np.atleast_2d(size)
        in_group = np.eye(self.sizes.shape[1])[group]  # [H, G]
        weights = np.einsum("nkh,hg->ng", self._weights(size, group), in_group) / size.size
        parts = np.einsum("ng,ngr->gr", weights, self.accuracies)
        return estimate(accuracy - self.at(size, group), [variance_of_mean(part) for part in parts])

    def covers(self, size: Array, group: Groups) -> float:
        """Share of the sizes `[..., H]` within the size range of their groups `[H]`."""
        first, last = self.sizes[0, group], self.sizes[-1, group]
        return float(((size >= first) & (size <= last)).mean())

    def _weights(self, size: Array, group: Groups) -> Array:
        """Interpolation weights of a group's n networks at `size [..., H]`, `[n, ..., H]`."""
        logs = np.log(self.sizes)[:, np.broadcast_to(group, size.shape)]
        passed = np.clip((np.log(size) - logs[:-1]) / np.diff(logs, axis=0), 0.0, 1.0)
        return -np.diff(passed, axis=0, prepend=1.0, append=0.0)
