"""Differences with intervals: pairs of hosts, several controllers, a frontier with its own noise.

Arrays are float64 numpy, `[H]` or `[K, H]`: K controllers that met the same H hosts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEVEL = 0.95
BOOTSTRAP_DRAWS = 4000
MOST_DEGREES = 1e4  # of freedom: beyond, Student's t is as good as normal


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % intervals: by Student's t, and by the bootstrap."""

    mean: float
    low: float
    high: float
    bootstrap_low: float
    bootstrap_high: float
    standard_error: float
    degrees: float  # of freedom
    per_controller: tuple[float, ...] = ()  # the mean of each, where there are several
    same_controllers: tuple[float, float] | None = None
    """The interval for these very controllers on other hosts; the others cover controllers too."""

    def p_value(self, margin: float) -> float:
        """How probable a mean this far from `margin`, on either side, is where it is the truth."""
        if self.standard_error == 0:
            return 0.0  # nothing varies: it is certain
        return 2 * t_tail(abs(self.mean - margin) / self.standard_error, self.degrees)


def estimate(values: Array) -> Estimate:
    """The mean of `[H]` or `[K, H]` over hosts and controllers, both taken as samples of more.

    Controllers and hosts are crossed, so a mean over all cells varies with either: variances of
    the means over each are added, and what both contain is taken off once (Cameron, Gelbach and
    Miller 2011). The bootstrap draws rows and columns apart (Owen 2007).
    """
    values = np.atleast_2d(values)
    found = _interval(float(values.mean()), _spreads(values), _draw_means(values))
    return _with_controllers(found, values, ())


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for being many: with those below 0.05 all true, one is wrong in 20 sets.

    The smallest of m is multiplied by m, the next by m - 1, and so on; none falls below one that
    was smaller (Holm 1979).
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def estimate_over_groups(values: Array) -> Estimate:
    """The mean of `[G, repeats]`, where the groups are all there are and the repeats a sample."""
    num_groups, repeats = values.shape
    parts = values / num_groups
    spreads = [(float(row.var(ddof=1)) / repeats, repeats - 1.0) for row in parts]
    draws = [_draw_shares(repeats, rng_seed) @ row for rng_seed, row in enumerate(parts)]
    return _interval(float(values.mean()), spreads, np.sum(draws, axis=0))


@dataclass(frozen=True)
class RunsToMatch:
    """Runs that a search needs to do as well as a rival; None: more than there were."""

    k: int | None
    low: int | None  # fewer are worse for sure, as far as 95 % go
    high: int | None  # as many are as good for sure
    tried: int


@dataclass(frozen=True, eq=False)
class RandomSearch:
    """M runs on each of H hosts: the score that runs are chosen by, and the one that counts."""

    validation_scores: Array  # [M, H], as the other
    test_scores: Array

    def best_of(self, k: int) -> Array:
        """The test score of the best of k runs by validation: its exact mean over all subsets.

        The run of rank i (from 0, the worst) is the best of k in C(i, k - 1) of the C(M, k)
        subsets of a host's M runs.
        """
        num_runs = len(self.test_scores)
        if not 1 <= k <= num_runs:
            raise ValueError(f"the best of k={k} runs; there are {num_runs}: use 1 to {num_runs}")
        subsets = [math.comb(i, k - 1) / math.comb(num_runs, k) for i in range(num_runs)]
        order = np.argsort(self.validation_scores, axis=0, kind="stable")
        mean: Array = np.asarray(subsets) @ np.take_along_axis(self.test_scores, order, axis=0)
        return mean

    def curve(self) -> dict[int, Estimate]:
        """The best of k = 1, 2, 4, ... runs."""
        doublings = len(self.test_scores).bit_length()
        return {2**power: estimate(self.best_of(2**power)) for power in range(doublings)}

    def runs_to_match(self, rival: Array) -> RunsToMatch:
        """How many runs the best of which is as good as a rival's scores, `[H]` or `[K, H]`."""
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
    """Accuracy of networks by their size, in each of G groups; straight lines over log size.

    A network names the group that it is compared with: its data, or its data and its host.
    """

    def __init__(self, sizes: Array, accuracies: Array):
        """`sizes [n, G]`, rising along n, and `accuracies [n, G, repeats]`."""
        if len(sizes) < 2 or bool((np.diff(sizes, axis=0) <= 0).any()) or accuracies.shape[2] < 2:
            raise ValueError(
                f"a frontier needs two sizes or more, rising, with two networks each; got sizes "
                f"{sizes.tolist()} and accuracies {accuracies.shape}"
            )
        self.sizes, self.accuracies = sizes, accuracies

    def at(self, size: Array, group: NDArray[np.int64]) -> Array:
        """Accuracy at each size `[..., H]` in its group `[H]`; clamped at both ends."""
        means = self.accuracies.mean(-1)[:, group]
        found: Array = np.einsum("n...h,nh->...h", self._weights(size, group), means)
        return found

    def excess(self, accuracy: Array, size: Array, group: NDArray[np.int64]) -> Estimate:
        """How far networks `[H]` or `[K, H]` lie above it, at their sizes in their groups `[H]`.

        Noise of the frontier counts with the share of the networks that meet it. Where groups are
        small it also shows as a spread between hosts: the interval is then rather too wide.
        """
        accuracy, size = np.atleast_2d(accuracy), np.atleast_2d(size)
        excess = accuracy - self.at(size, group)
        own = self._mean_on_frontier(size, group)  # [G, repeats]
        repeats = own.shape[1]
        of_frontier = [(float(row.var(ddof=1)) / repeats, repeats - 1.0) for row in own]
        shift = sum(
            (_draw_shares(repeats, rng_seed) - 1 / repeats) @ row
            for rng_seed, row in enumerate(own, start=2)
        )
        spreads = [*_spreads(excess), *of_frontier]
        found = _interval(float(excess.mean()), spreads, _draw_means(excess) - shift)
        return _with_controllers(found, excess, of_frontier)

    def covers(self, size: Array, group: NDArray[np.int64]) -> float:
        """Share of the sizes `[..., H]` that lie between the ends of their groups `[H]`."""
        first, last = self.sizes[0, group], self.sizes[-1, group]
        return float(((size >= first) & (size <= last)).mean())

    def _mean_on_frontier(self, size: Array, group: NDArray[np.int64]) -> Array:
        """What each repeat of the frontier adds to the mean over all networks, `[G, repeats]`."""
        is_in = np.eye(self.sizes.shape[1])[group]  # [H, G]
        shares = np.einsum("nkh,hg->ng", self._weights(size, group), is_in) / size.size
        parts: Array = np.einsum("ng,ngr->gr", shares, self.accuracies)
        return parts

    def _weights(self, size: Array, group: NDArray[np.int64]) -> Array:
        """Of each of a group's n networks in the interpolation at `size [..., H]`, `[n, ..., H]`."""
        logs = np.log(self.sizes)[:, np.broadcast_to(group, size.shape)]
        passed = np.clip((np.log(size) - logs[:-1]) / np.diff(logs, axis=0), 0.0, 1.0)
        return -np.diff(passed, axis=0, prepend=1.0, append=0.0)  # of each stretch between two


def t_quantile(probability: float, degrees: float) -> float:
    """Of Student's t."""
    degrees = min(degrees, MOST_DEGREES)
    angles, below = _angles(degrees)
    return math.sqrt(degrees) * math.tan(float(np.interp(probability, below, angles)))


def t_tail(t: float, degrees: float) -> float:
    """The probability that Student's t lies above `t`, which is 0 or more."""
    degrees = min(degrees, MOST_DEGREES)
    angles, below = _angles(degrees)
    return float(np.interp(-math.atan(t / math.sqrt(degrees)), angles, below))


def _angles(degrees: float) -> tuple[Array, Array]:
    """With t = sqrt(degrees) tan(angle): angles, and the probability of a smaller one.

    The angle's density is cos^(degrees - 1).
    """
    angles = np.linspace(-np.pi / 2, np.pi / 2, 40_001)
    density = np.cos(angles) ** (degrees - 1)
    below = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    return angles, below / below[-1]


def _with_controllers(
    found: Estimate, values: Array, of_others: Sequence[tuple[float, float]]
) -> Estimate:
    """With each controller's mean of `[K, H]`, and the interval where only hosts are a sample."""
    if len(values) == 1:
        return found
    half, *_ = _half_interval([*_spreads(values.mean(0, keepdims=True)), *of_others])
    return replace(
        found,
        per_controller=tuple(values.mean(1).tolist()),
        same_controllers=(found.mean - half, found.mean + half),
    )


def _spreads(values: Array) -> list[tuple[float, float]]:
    """Parts of the variance of the mean of `[K, H]`, each with its degrees of freedom."""
    num_rows, num_columns = values.shape
    if num_columns < 2:
        raise ValueError("an interval needs two hosts or more")
    of_columns = float(values.mean(0).var(ddof=1)) / num_columns
    if num_rows == 1:
        return [(of_columns, num_columns - 1.0)]
    of_rows = float(values.mean(1).var(ddof=1)) / num_rows
    of_cells = float(values.var(ddof=1)) / values.size
    both = max(of_rows + of_columns - of_cells, of_rows, of_columns)
    rows_share = of_rows / max(of_rows + of_columns, 1e-300)
    return [
        (both * rows_share, num_rows - 1.0),
        (both * (1 - rows_share), num_columns - 1.0),
    ]


def _draw_means(values: Array) -> Array:
    """Bootstrap means of `[K, H]`, rows and columns drawn apart."""
    rows, columns = (_draw_shares(count, rng_seed) for rng_seed, count in enumerate(values.shape))
    means: Array = np.einsum("bk,kh,bh->b", rows, values, columns, optimize=True)
    return means


@cache
def _draw_shares(count: int, rng_seed: int) -> Array:
    """How much each of `count` things weighs in each bootstrap sample of them, `[draws, count]`."""
    rng = np.random.default_rng((rng_seed, count))
    drawn = rng.multinomial(count, np.full(count, 1 / count), BOOTSTRAP_DRAWS)
    return drawn / count


def _interval(mean: float, spreads: Sequence[tuple[float, float]], draws: Array) -> Estimate:
    half, error, degrees = _half_interval(spreads)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Estimate(mean, mean - half, mean + half, float(low), float(high), error, degrees)


def _half_interval(spreads: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Half an interval, the standard error and its degrees of freedom, by Satterthwaite's rule."""
    variance = sum(part for part, _ in spreads)
    if variance == 0:
        return 0.0, 0.0, MOST_DEGREES
    degrees = variance**2 / sum(part**2 / df for part, df in spreads)
    error = math.sqrt(variance)
    return t_quantile((1 + LEVEL) / 2, degrees) * error, error, degrees
