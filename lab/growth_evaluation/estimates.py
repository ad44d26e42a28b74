"""Means with 95 % intervals, over hosts and over controllers, and Holm's correction.

Arrays are float64 numpy, `[H]` or `[K, H]`: K controllers on the same H hosts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from esper.simic.growth import comparison

Array = NDArray[np.float64]
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
        return str(comparison.Estimate(self.mean, self.half_width))

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
    mean = float(values.mean())
    if values.shape[1] < 2:
        raise ValueError("an interval needs two hosts or more")
    of_hosts, host_degrees = variance_of_mean(values.mean(0))
    if len(values) == 1:
        return interval(mean, [(of_hosts, host_degrees), *other_variances])
    of_controllers, controller_degrees = variance_of_mean(values.mean(1))
    of_cells, _ = variance_of_mean(values.ravel())
    total = max(of_controllers + of_hosts - of_cells, of_controllers, of_hosts)
    share = of_controllers / max(of_controllers + of_hosts, 1e-300)
    variances = [(total * share, controller_degrees), (total * (1 - share), host_degrees)]
    found = interval(mean, [*variances, *other_variances])
    return replace(found, per_controller=tuple(values.mean(1).tolist()))


def estimate_over_groups(values: Array) -> Estimate:
    """The mean of `[G, repeats]`; groups are fixed and repeats are samples."""
    return interval(float(values.mean()), [variance_of_mean(row) for row in values / len(values)])


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for multiple comparisons by Holm's method (1979)."""
    values, remaining = np.asarray(p_values), np.arange(len(p_values), 0, -1)
    order = values.argsort()
    adjusted = np.maximum.accumulate(remaining * values[order]).clip(max=1.0)
    result: list[float] = adjusted[order.argsort()].tolist()
    return result


def variance_of_mean(values: Array) -> Variance:
    """Variance of the mean of `[n]`."""
    return float(values.var(ddof=1)) / len(values), len(values) - 1.0


def interval(mean: float, variances: Sequence[Variance]) -> Estimate:
    """Student's t interval; degrees of freedom by Satterthwaite's formula."""
    from scipy.special import stdtrit

    variance = sum(part for part, _ in variances)
    if variance == 0:
        return Estimate(mean, mean, mean, 0.0, 0.0)
    degrees = variance**2 / sum(part**2 / df for part, df in variances)
    error = math.sqrt(variance)
    half = float(stdtrit(degrees, (1 + LEVEL) / 2)) * error
    return Estimate(mean, mean - half, mean + half, error, degrees)
