"""The claims about the learned controller, fixed before any result, and their verdicts.

A claim names a rival and the margin by which the learned controller must lead it. It *holds* if the
whole 95 % interval of the lead is above the margin, *fails* if it is below, and is *undecided*
otherwise. All p-values of an evaluation are corrected together by Holm's method.

Two frontiers of static networks answer two questions. Uniform hosts: is a plain shape of the same
size as good? Own hosts: should this host be grown, or widened?
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from esper.simic.evaluation import arms
from esper.simic.evaluation.arms import ArmResult
from esper.simic.evaluation.experiment import PairedExperiment
from esper.simic.evaluation.searches import FrontierKind, Size, StaticPool
from esper.simic.evaluation.statistics import (
    LEVEL,
    Estimate,
    Frontier,
    Groups,
    RandomSearch,
    RunsToMatch,
    estimate,
    holm,
)

Decision = Literal["holds", "fails", "undecided"]
FrontierName = tuple[FrontierKind, bool, Size]  # the bool is True for hosts with norm
RANDOM_SEARCH = "random search"


@dataclass(frozen=True)
class Claim:
    """The learned controller leads a rival by more than `margin`."""

    letter: str
    rival: str
    text: str  # follows "the learned controller"
    margin: float = 0.0  # of score or accuracy, both 0 to 1
    measure: Literal["score", "accuracy"] = "score"
    frontier: FrontierName | None = None  # the rival is a static frontier


def _above_frontier(kind: FrontierKind, norm: bool, by: Size, margin: float) -> Claim:
    hosts = {"uniform": "static hosts of one width", "own": "their own hosts widened"}[kind]
    size = {"params": "parameters", "macs": "multiply-adds"}[by]
    rival = f"{hosts}, {'with' if norm else 'without'} norm, at equal {size}"
    text = f"is {f'{100 * margin:g} points ' if margin else ''}above {rival}"
    return Claim("d", rival, text, margin, "accuracy", (kind, norm, by))


CLAIMS: tuple[Claim, ...] = (
    Claim("a", arms.RANDOM, "beats the random controller"),
    Claim("a", arms.SCHEDULE, "beats the fixed schedule"),
    Claim("a", arms.CONSTANT, "beats the best constant plan"),
    Claim("a", arms.HEURISTIC, "beats the heuristic"),
    Claim(
        "b",
        arms.CONSTANT_PER_TYPE,
        "is at most half a point below the best constant plan per type",
        margin=-0.005,
    ),
    Claim("c", RANDOM_SEARCH, "beats one run of a random search over plans"),
    _above_frontier("uniform", False, "params", 0.03),
    _above_frontier("uniform", True, "params", 0.03),
    _above_frontier("uniform", False, "macs", 0.0),
    _above_frontier("uniform", True, "macs", 0.0),
    _above_frontier("own", False, "params", 0.03),
    _above_frontier("own", True, "params", 0.03),
    _above_frontier("own", False, "macs", 0.0),
    _above_frontier("own", True, "macs", 0.0),
    Claim(
        "d",
        arms.FROM_SCRATCH,
        "is above the grown graphs trained from scratch",
        measure="accuracy",
    ),
    Claim("e", arms.ALL_SEEDS, "beats all seeds from the start"),
    Claim("e", arms.WIDTH_SEARCH, "beats the width search"),
    Claim("e", arms.HOST_ALONE, "beats the host alone"),
)


@dataclass(frozen=True, eq=False)
class Results:
    """Everything that was measured on the held-out hosts."""

    experiment: PairedExperiment
    arms: Mapping[str, ArmResult]
    searches: Sequence[RandomSearch]  # one per rent
    statics: StaticPool

    def lead(self, claim: Claim, rent: int, hosts: Groups | slice = slice(None)) -> Estimate:
        """The learned controller's lead at the rent of index `rent`, over some or all hosts."""
        learned = self.arms[arms.LEARNED]
        if claim.frontier:
            frontier, groups = self.frontier(claim.frontier)
            test, size = (learned.array(name)[:, rent] for name in ("test", claim.frontier[2]))
            return frontier.excess(test[:, hosts], size[:, hosts], groups[hosts])
        if claim.rival == RANDOM_SEARCH:
            ours, theirs = learned.scores[:, rent], self.searches[rent].best_of(1)[None]
        else:
            ours, theirs = (
                (arm.scores if claim.measure == "score" else arm.array("test"))[:, rent]
                for arm in (learned, self.arms[claim.rival])
            )
        return estimate((ours - theirs)[:, hosts])

    def frontier(self, name: FrontierName) -> tuple[Frontier, Groups]:
        """A frontier, and the group in it that each host is compared with, `[H]`."""
        is_own = name[0] == "own"
        groups = self.experiment.type_of_host if is_own else self.experiment.view_of_host
        return self.statics.frontier(*name), groups.numpy()


@dataclass(frozen=True)
class Verdict:
    """One claim at one rent."""

    letter: str
    rival: str
    rent: float
    margin: float  # that the lead has to exceed
    decision: Decision
    lead: Estimate
    p_value: float  # two-sided, for H0: lead == margin
    corrected_p: float | None = None  # by Holm, over all verdicts of the evaluation
    runs: RunsToMatch | None = None  # that a random search needs
    covered: float = 1.0  # share of the networks within a frontier's range of sizes

    @property
    def is_significant(self) -> bool:
        """Decided, also after Holm's correction."""
        is_small = self.corrected_p is not None and self.corrected_p < 1 - LEVEL
        return self.decision != "undecided" and is_small

    def __str__(self) -> str:
        """Such as "holds +3.7 [+3.2, +4.3]"; a star marks what Holm's correction undoes."""
        text = f"{self.decision} {self.lead}"
        if self.decision != "undecided" and not self.is_significant:
            text += " *"
        if self.runs:
            text += f"; k = {self.runs}"
        if self.covered < 1.0:
            text += f"; {1 - self.covered:.0%} outside"
        return text


def judge_claims(results: Results, rents: Sequence[float]) -> list[Verdict]:
    """Every claim at every rent, with Holm's correction."""
    verdicts, learned = [], results.arms[arms.LEARNED]
    for claim in CLAIMS:
        for index, rent in enumerate(rents):
            verdict = judge(claim, rent, results.lead(claim, index))
            if claim.frontier:
                frontier, groups = results.frontier(claim.frontier)
                size = learned.array(claim.frontier[2])[:, index]
                verdict = replace(verdict, covered=frontier.covers(size, groups))
            if claim.rival == RANDOM_SEARCH:
                runs = results.searches[index].runs_to_match(learned.scores[:, index])
                verdict = replace(verdict, runs=runs)
            verdicts.append(verdict)
    return correct_for_number(verdicts)


def judge(claim: Claim, rent: float, lead: Estimate) -> Verdict:
    decision, p = decide(lead, claim.margin), lead.p_value(claim.margin)
    return Verdict(claim.letter, claim.rival, rent, claim.margin, decision, lead, p)


def decide(lead: Estimate, margin: float) -> Decision:
    if lead.low > margin:
        return "holds"
    is_certain = lead.low == lead.high  # such as a controller that never grew anything
    return "fails" if lead.high < margin or is_certain else "undecided"


def correct_for_number(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of one evaluation with Holm's correction."""
    corrected = holm([verdict.p_value for verdict in verdicts])
    return [replace(v, corrected_p=p) for v, p in zip(verdicts, corrected, strict=True)]


@dataclass(frozen=True)
class VariantLeads:
    """The learned controller's leads on one variant of the data, by rival."""

    variant: str
    rent: float
    leads: dict[str, Estimate]


def leads_by_variant(results: Results, rents: Sequence[float]) -> list[VariantLeads]:
    """Leads over the host alone, the best constant and the frontiers, on each variant."""
    claims = [c for c in CLAIMS if c.frontier or c.rival in (arms.HOST_ALONE, arms.CONSTANT)]
    experiment, found = results.experiment, []
    for number, view in enumerate(experiment.view_ids):
        hosts = np.flatnonzero(experiment.view_of_host.numpy() == number)
        for index, rent in enumerate(rents):
            leads = {claim.rival: results.lead(claim, index, hosts) for claim in claims}
            found.append(VariantLeads(experiment.task.names[view], rent, leads))
    return found
