"""Means with 95 % intervals: over paired hosts, over several controllers, over a frontier.

Arrays are float64 numpy, `[H]` or `[K, H]`: K controllers on the same H hosts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Groups = NDArray[np.int64]
Variance = tuple[float, float]  # a part of a mean's variance, and its degrees of freedom

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % Student-t interval."""

    mean: float
    low: float
    high: float
    standard_error: float
    degrees: float  # of freedom
    per_controller: tuple[float, ...] = ()  # each controller's mean, if there are several

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        """In percentage points, such as "+3.7 [+3.2, +4.3]"."""
        mean, low, high = (f"{100 * value:+.1f}" for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"

    def p_value(self, margin: float) -> float:
        """Two-sided p-value for H0: true mean == margin."""
        from scipy.special import stdtr

        if self.standard_error == 0:
            return 0.0  # nothing varies: the difference is certain
        return float(2 * stdtr(self.degrees, -abs(self.mean - margin) / self.standard_error))


def estimate(values: Array, other_variances: Sequence[Variance] = ()) -> Estimate:
    """The mean of `[H]` or `[K, H]`; both hosts and controllers are samples of a population.

    Hosts and controllers are crossed. The variances of the means over each are added and the
    variance that both contain is subtracted once (Cameron, Gelbach and Miller 2011).
    `other_variances` are added, such as those of a frontier that was subtracted from the values.
    """
    values = np.atleast_2d(values)
    found = _interval(float(values.mean()), [*_variances(values), *other_variances])
    if len(values) == 1:
        return found
    return replace(found, per_controller=tuple(values.mean(1).tolist()))


def estimate_over_groups(values: Array) -> Estimate:
    """The mean of `[G, repeats]`; groups are fixed and repeats are samples."""
    return _interval(float(values.mean()), [_variance(row) for row in values / len(values)])


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for multiple comparisons by Holm's method (1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


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
        return estimate(accuracy - self.at(size, group), [_variance(part) for part in parts])

    def covers(self, size: Array, group: Groups) -> float:
        """Share of the sizes `[..., H]` within the size range of their groups `[H]`."""
        first, last = self.sizes[0, group], self.sizes[-1, group]
        return float(((size >= first) & (size <= last)).mean())

    def _weights(self, size: Array, group: Groups) -> Array:
        """Interpolation weights of a group's n networks at `size [..., H]`, `[n, ..., H]`."""
        logs = np.log(self.sizes)[:, np.broadcast_to(group, size.shape)]
        passed = np.clip((np.log(size) - logs[:-1]) / np.diff(logs, axis=0), 0.0, 1.0)
        return -np.diff(passed, axis=0, prepend=1.0, append=0.0)


def _variance(values: Array) -> Variance:
    """Of the mean of `[n]`."""
    return float(values.var(ddof=1)) / len(values), len(values) - 1.0


def _variances(values: Array) -> list[Variance]:
    """Of the mean of `[K, H]`."""
    if values.shape[1] < 2:
        raise ValueError("an interval needs two hosts or more")
    of_hosts, host_degrees = _variance(values.mean(0))
    if len(values) == 1:
        return [(of_hosts, host_degrees)]
    of_controllers, controller_degrees = _variance(values.mean(1))
    of_cells, _ = _variance(values.ravel())
    total = max(of_controllers + of_hosts - of_cells, of_controllers, of_hosts)
    share = of_controllers / max(of_controllers + of_hosts, 1e-300)
    return [(total * share, controller_degrees), (total * (1 - share), host_degrees)]


def _interval(mean: float, variances: Sequence[Variance]) -> Estimate:
    """Student's t interval; degrees of freedom by Satterthwaite's formula."""
    from scipy.special import stdtrit

    variance = sum(part for part, _ in variances)
    if variance == 0:
        return Estimate(mean, mean, mean, 0.0, 0.0)
    degrees = variance**2 / sum(part**2 / df for part, df in variances)
    error = math.sqrt(variance)
    half = float(stdtrit(degrees, (1 + LEVEL) / 2)) * error
    return Estimate(mean, mean - half, mean + half, error, degrees)
