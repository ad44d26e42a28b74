"""What is claimed of the learned controller, written down before anything is measured.

A claim names a rival, a measure and the margin that the learned controller's lead over it must
exceed. It holds where the whole 95 % interval lies above the margin, fails where it lies below,
and is undecided otherwise. Many claims are judged at once: each verdict says whether it stands
when all of them are counted.

Two frontiers of static networks answer two questions. "Would a network of a plain shape, chosen for
this size, be as good?" is that of hosts of one width: a host of an odd shape starts below it.
"I have this host: should I grow it, or make it wider?" is that of the host itself, every layer
widened by the same factor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from esper.simic.evaluation import arms
from esper.simic.evaluation.arms import ArmResult
from esper.simic.evaluation.statistics import LEVEL, Estimate, RunsToMatch, estimate, holm
from esper.simic.evaluation.widened import FrontierKind

Decision = Literal["holds", "fails", "undecided"]


@dataclass(frozen=True)
class Claim:
    """A lead over a rival arm, at every rent; `says` and `denies` are its verdict in words."""

    letter: str
    rival: str
    says: str
    denies: str
    margin: float = 0.0  # of score or accuracy, both 0 to 1
    measure: Literal["score", "accuracy"] = "score"


@dataclass(frozen=True)
class FrontierClaim:
    """Networks lie above a static frontier at equal size by more than a margin of accuracy."""

    letter: str
    kind: FrontierKind
    norm: bool
    size: Literal["params", "macs"]
    margin: float

    @property
    def rival(self) -> str:
        hosts = {"uniform": "static hosts of one width", "own": "their own hosts widened"}
        size = {"params": "parameters", "macs": "multiply-adds"}[self.size]
        norm = "with" if self.norm else "without"
        return f"{hosts[self.kind]}, {norm} norm, at equal {size}"

    def words(self, negation: str) -> str:
        by = f"{100 * self.margin:g} points " if self.margin else ""
        return f"grown networks {negation} {by}above {self.rival}"


@dataclass(frozen=True)
class SearchClaim:
    """A random search needs more than `runs` full runs to match a single one."""

    letter: str
    runs: int


def _beats(letter: str, rival: str) -> Claim:
    return Claim(
        letter,
        rival,
        says=f"the learned controller beats the {rival}",
        denies=f"the learned controller does not beat the {rival}",
    )


CLAIMS: tuple[Claim, ...] = (
    _beats("a", arms.RANDOM),
    _beats("a", arms.SCHEDULE),
    _beats("a", arms.CONSTANT),
    _beats("a", arms.HEURISTIC),
    Claim(
        "b",
        arms.CONSTANT_PER_TYPE,
        says="the learned controller is within half a point of the best constant plan per type",
        denies="the learned controller is more than half a point below the best constant plan "
        "per type",
        margin=-0.005,
    ),
    Claim(
        "d",
        arms.FROM_SCRATCH,
        says="growing is better than training the grown graph from scratch",
        denies="growing is no better than training the grown graph from scratch",
        measure="accuracy",
    ),
    Claim("e", arms.HOST_ALONE, says="growing helped", denies="growing did not help here"),
    Claim(
        "e",
        arms.ALL_SEEDS,
        says="the learned controller beats all seeds from the start",
        denies="the learned controller does not beat all seeds from the start",
    ),
    _beats("e", arms.WIDTH_SEARCH),
)
SEARCH_CLAIM = SearchClaim("c", runs=1)
FRONTIER_CLAIMS: tuple[FrontierClaim, ...] = (
    FrontierClaim("d", "uniform", norm=False, size="params", margin=0.03),
    FrontierClaim("d", "uniform", norm=True, size="params", margin=0.03),
    FrontierClaim("d", "uniform", norm=False, size="macs", margin=0.0),
    FrontierClaim("d", "uniform", norm=True, size="macs", margin=0.0),
    FrontierClaim("d", "own", norm=False, size="params", margin=0.03),
    FrontierClaim("d", "own", norm=True, size="params", margin=0.03),
    FrontierClaim("d", "own", norm=False, size="macs", margin=0.0),
    FrontierClaim("d", "own", norm=True, size="macs", margin=0.0),
)


@dataclass(frozen=True)
class Verdict:
    """One claim at one rent."""

    letter: str
    rival: str
    rent: float
    margin: float  # what the lead, or the number of runs, had to exceed
    decision: Decision
    sentence: str
    lead: Estimate
    p_value: float  # of the lead, two-sided, against what it had to exceed
    corrected_p: float | None = None  # by Holm, for all verdicts of an evaluation
    runs: RunsToMatch | None = None

    @property
    def stands(self) -> bool:
        """It is decided, and would be with all verdicts of the evaluation counted."""
        is_sure = self.corrected_p is not None and self.corrected_p < 1 - LEVEL
        return self.decision != "undecided" and is_sure


def judge_claims(results: Mapping[str, ArmResult], rents: Sequence[float]) -> list[Verdict]:
    """Every claim about a rival arm, at every rent, hosts paired."""
    return [
        judge(claim, rent, _lead(claim, results, index))
        for claim in CLAIMS
        for index, rent in enumerate(rents)
    ]


def judge(claim: Claim, rent: float, lead: Estimate) -> Verdict:
    decision = decide(lead, claim.margin)
    sentence = _sentence(rent, decision, claim.says, claim.denies, lead, claim.measure)
    p = lead.p_value(claim.margin)
    return Verdict(claim.letter, claim.rival, rent, claim.margin, decision, sentence, lead, p)


def judge_frontier(claim: FrontierClaim, rent: float, excess: Estimate, covered: float) -> Verdict:
    """`covered`: the share of the networks whose size the frontier reaches."""
    decision = decide(excess, claim.margin)
    says, denies = claim.words("lie"), claim.words("do not lie")
    sentence = _sentence(rent, decision, says, denies, excess, "accuracy")
    if covered < 1.0:
        sentence += f" {1 - covered:.0%} of the networks lie beyond the frontier's ends."
    p = excess.p_value(claim.margin)
    return Verdict(claim.letter, claim.rival, rent, claim.margin, decision, sentence, excess, p)


def judge_search(claim: SearchClaim, rent: float, needed: RunsToMatch, lead: Estimate) -> Verdict:
    """`lead`: over the best of the claim's number of runs."""
    decision: Decision = "undecided"
    if needed.low is None or needed.low > claim.runs:
        decision = "holds"
    elif needed.high is not None and needed.high <= claim.runs:
        decision = "fails"
    k, low, high = (
        f"more than {needed.tried}" if count is None else str(count)
        for count in (needed.k, needed.low, needed.high)
    )
    sentence = (
        f"At rent {rent:g} a random search over plans needs {k} full runs to match the learned "
        f"controller's one [{low} to {high}]."
    )
    p = lead.p_value(0.0)
    return Verdict(
        claim.letter, "random search", rent, claim.runs, decision, sentence, lead, p, runs=needed
    )


def correct_for_number(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of one evaluation, each told whether it stands with all of them counted."""
    corrected = holm([verdict.p_value for verdict in verdicts])
    return [
        _with_note(replace(verdict, corrected_p=p), len(verdicts))
        for verdict, p in zip(verdicts, corrected, strict=True)
    ]


def _with_note(verdict: Verdict, count: int) -> Verdict:
    if verdict.decision == "undecided":
        return verdict
    note = f"It stands with all {count} verdicts counted."
    if not verdict.stands:
        note = f"With all {count} verdicts counted it is undecided."
    return replace(verdict, sentence=f"{verdict.sentence} {note}")


def decide(lead: Estimate, margin: float) -> Decision:
    if lead.low > margin:
        return "holds"
    is_certain = lead.low == lead.high  # such as a controller that never grew anything
    return "fails" if lead.high < margin or is_certain else "undecided"


def _lead(claim: Claim, results: Mapping[str, ArmResult], rent_index: int) -> Estimate:
    """Of the learned controller over the claim's rival, on the same hosts."""
    ours, theirs = (
        arm.scores if claim.measure == "score" else arm.array("test")
        for arm in (results[arms.LEARNED], results[claim.rival])
    )
    return estimate(ours[:, rent_index] - theirs[:, rent_index])


def _sentence(
    rent: float, decision: Decision, says: str, denies: str, lead: Estimate, measure: str
) -> str:
    words = {"holds": says, "fails": denies, "undecided": f"it is undecided whether {says}"}
    sentence = (
        f"At rent {rent:g} {words[decision]}: {100 * lead.mean:+.1f} points of {measure} "
        f"[{100 * lead.low:+.1f}, {100 * lead.high:+.1f}]"
    )
    return f"{sentence}{_controllers(lead)}."


def _controllers(lead: Estimate) -> str:
    """What each of several controllers leads by, and how sure that is of these very ones."""
    if lead.same_controllers is None:
        return ""
    low, high = lead.same_controllers
    each = ", ".join(f"{100 * mean:+.1f}" for mean in lead.per_controller)
    return f"; of these controllers [{100 * low:+.1f}, {100 * high:+.1f}], each {each}"
