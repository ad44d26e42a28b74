"""The claims about the learned controller, fixed before any result, and their statistics.

A claim names a rival and the margin by which the learned controller must lead it. It *holds* if the
whole 95 % interval of the lead is above the margin, *fails* if it is below, and is *undecided*
otherwise. All p-values of an evaluation are corrected together by Holm's method.

Arrays are float64 numpy, `[H]` or `[K, H]`: K controllers on the same H hosts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from esper.simic.evaluation import arms
from esper.simic.evaluation.arms import ArmResult, Array

Decision = Literal["holds", "fails", "undecided"]
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


@dataclass(frozen=True)
class Claim:
    """The learned controller leads a rival by more than `margin`."""

    letter: str
    rival: str
    text: str  # follows "the learned controller"
    margin: float = 0.0  # of score or accuracy, both 0 to 1
    measure: Literal["score", "accuracy"] = "score"

    def lead(
        self,
        results: Mapping[str, ArmResult],
        rent: int,
        hosts: slice | NDArray[np.int64] = slice(None),
    ) -> "Estimate":
        """The learned controller's lead at the rent of index `rent`, paired by host."""
        ours, theirs = (
            (arm.scores if self.measure == "score" else arm.array("test"))[:, rent]
            for arm in (results[arms.LEARNED], results[self.rival])
        )
        return estimate((ours - theirs)[:, hosts])


HELPS = Claim("e", arms.HOST_ALONE, "beats the host alone")
CLAIMS: tuple[Claim, ...] = (
    Claim("a", arms.RANDOM, "beats the random controller"),
    Claim("a", arms.SCHEDULE, "beats the fixed schedule"),
    Claim("a", arms.CONSTANT, "beats the best constant plan"),
    Claim("a", arms.HEURISTIC, "beats the heuristic"),
    HELPS,
)


@dataclass(frozen=True)
class Verdict:
    """One claim at one rent."""

    claim: Claim
    rent: float
    decision: Decision
    lead: Estimate
    p_value: float  # two-sided, for H0: lead == margin
    corrected_p: float | None = None  # by Holm, over all verdicts of the evaluation
    note: str = ""  # shown after the interval

    def __str__(self) -> str:
        """Such as "holds +3.7 [+3.2, +4.3]"; a star marks what Holm's correction undoes."""
        is_small = self.corrected_p is not None and self.corrected_p < 1 - LEVEL
        star = "" if self.decision == "undecided" or is_small else " *"
        return f"{self.decision} {self.lead}{star}{self.note}"


def judge_claims(results: Mapping[str, ArmResult], rents: Sequence[float]) -> list[Verdict]:
    """Every claim at every rent, paired by host, with Holm's correction."""
    cases = product(CLAIMS, enumerate(rents))
    return correct_for_number([judge(c, rent, c.lead(results, i)) for c, (i, rent) in cases])


def judge(claim: Claim, rent: float, lead: Estimate, note: str = "") -> Verdict:
    decision, p_value = decide(lead, claim.margin), lead.p_value(claim.margin)
    return Verdict(claim, rent, decision, lead, p_value, note=note)


def decide(lead: Estimate, margin: float) -> Decision:
    if lead.low > margin:
        return "holds"
    is_certain = lead.low == lead.high  # such as a controller that never grew anything
    return "fails" if lead.high < margin or is_certain else "undecided"


def correct_for_number(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of one evaluation with Holm's correction."""
    corrected = holm([verdict.p_value for verdict in verdicts])
    return [replace(v, corrected_p=p) for v, p in zip(verdicts, corrected, strict=True)]


# -- means with intervals -------------------------------------------------------------------------


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
