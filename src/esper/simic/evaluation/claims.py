"""The claims about the learned controller, fixed before any result, and their verdicts.

A claim names a rival and the margin by which the learned controller must lead it. It *holds* if the
whole 95 % interval of the lead is above the margin, *fails* if it is below, and is *undecided*
otherwise. All p-values of an evaluation are corrected together by Holm's method.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from esper.simic.evaluation import arms
from esper.simic.evaluation.arms import ArmResult
from esper.simic.evaluation.statistics import LEVEL, Estimate, estimate, holm

Decision = Literal["holds", "fails", "undecided"]


@dataclass(frozen=True)
class Claim:
    """The learned controller leads a rival by more than `margin`."""

    letter: str
    rival: str
    text: str  # follows "the learned controller"
    margin: float = 0.0  # of score or accuracy, both 0 to 1
    measure: Literal["score", "accuracy"] = "score"

    def lead(self, results: Mapping[str, ArmResult], rent: int) -> Estimate:
        """The learned controller's lead at the rent of index `rent`, paired by host."""
        ours, theirs = (
            (arm.scores if self.measure == "score" else arm.array("test"))[:, rent]
            for arm in (results[arms.LEARNED], results[self.rival])
        )
        return estimate(ours - theirs)


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
    """Every claim at every rent, with Holm's correction."""
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
