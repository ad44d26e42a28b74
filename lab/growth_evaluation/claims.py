"""The published claims about the learned controller, fixed before any result.

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
from numpy.typing import NDArray

from growth_evaluation import arms
from growth_evaluation.arms import ArmResult
from growth_evaluation.estimates import LEVEL, Estimate, estimate, holm
from growth_evaluation.frontier import Frontier, Groups
from growth_evaluation.paired_experiment import PairedExperiment
from growth_evaluation.random_search import RandomSearch
from growth_evaluation.static_hosts import FrontierKind, Size, StaticPool

Decision = Literal["holds", "fails", "undecided"]

ALL_SEEDS = "all seeds from the start"
FROM_SCRATCH = "grown graph from scratch"
CONSTANT_PER_TYPE = "best constant per type"
WIDTH_SEARCH = "width search"
SAMPLED = "learned, sampled"
RANDOM_SEARCH = "random search"
FrontierName = tuple[FrontierKind, bool, Size]  # the bool is True for hosts with norm
FRONTIERS: dict[str, FrontierName] = {}  # by the rival that a claim names


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
    ) -> Estimate:
        """The learned controller's lead at the rent of index `rent`, paired by host."""
        ours, theirs = (
            (arm.scores if self.measure == "score" else arm.array("test"))[:, rent]
            for arm in (results[arms.LEARNED], results[self.rival])
        )
        return estimate((ours - theirs)[:, hosts])


HELPS = Claim("e", arms.HOST_ALONE, "beats the host alone")


def _above_frontier(kind: FrontierKind, norm: bool, by: Size, margin: float) -> Claim:
    hosts = {"uniform": "static hosts of one width", "own": "their own hosts widened"}[kind]
    size = {"params": "parameters", "macs": "multiply-adds"}[by]
    rival = f"{hosts}, {'with' if norm else 'without'} norm, at equal {size}"
    text = f"is {f'{100 * margin:g} points ' if margin else ''}above {rival}"
    FRONTIERS[rival] = (kind, norm, by)
    return Claim("d", rival, text, margin, "accuracy")


PUBLISHED: tuple[Claim, ...] = (
    Claim("a", arms.RANDOM, "beats the random controller"),
    Claim("a", arms.SCHEDULE, "beats the fixed schedule"),
    Claim("a", arms.CONSTANT, "beats the best constant plan"),
    Claim("a", arms.HEURISTIC, "beats the heuristic"),
    Claim(
        "b",
        CONSTANT_PER_TYPE,
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
    Claim("d", FROM_SCRATCH, "is above the grown graphs trained from scratch", measure="accuracy"),
    Claim("e", ALL_SEEDS, "beats all seeds from the start"),
    Claim("e", WIDTH_SEARCH, "beats the width search"),
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


def judge(claim: Claim, rent: float, lead: Estimate, note: str = "") -> Verdict:
    decision = decide(lead, claim.margin)
    return Verdict(claim, rent, decision, lead, lead.p_value(claim.margin), note=note)


def decide(lead: Estimate, margin: float) -> Decision:
    if lead.low > margin:
        return "holds"
    is_certain = lead.low == lead.high  # such as a controller that never grew anything
    return "fails" if lead.high < margin or is_certain else "undecided"


def correct_for_number(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of one evaluation with Holm's correction."""
    corrected = holm([verdict.p_value for verdict in verdicts])
    return [replace(v, corrected_p=p) for v, p in zip(verdicts, corrected, strict=True)]


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
        if claim.rival in FRONTIERS:
            frontier, groups = self.frontier(FRONTIERS[claim.rival])
            test, size = (
                learned.array(name)[:, rent] for name in ("test", FRONTIERS[claim.rival][2])
            )
            return frontier.excess(test[:, hosts], size[:, hosts], groups[hosts])
        if claim.rival == RANDOM_SEARCH:
            theirs = self.searches[rent].best_of(1)
            return estimate((learned.scores[:, rent] - theirs)[:, hosts])
        return claim.lead(self.arms, rent, hosts)

    def frontier(self, name: FrontierName) -> tuple[Frontier, Groups]:
        """A frontier, and the group in it that each host is compared with, `[H]`."""
        experiment = self.experiment
        groups = experiment.type_of_host if name[0] == "own" else experiment.view_of_host
        return self.statics.frontier(*name), groups.numpy()

    def note(self, claim: Claim, rent: int) -> str:
        """Runs that a random search needs, or the share of networks outside a frontier's sizes."""
        learned = self.arms[arms.LEARNED]
        if claim.rival == RANDOM_SEARCH:
            return f"; k = {self.searches[rent].runs_to_match(learned.scores[:, rent])}"
        if claim.rival in FRONTIERS:
            frontier, groups = self.frontier(FRONTIERS[claim.rival])
            covered = frontier.covers(learned.array(FRONTIERS[claim.rival][2])[:, rent], groups)
            return f"; {1 - covered:.0%} outside" if covered < 1 else ""
        return ""


def judge_published(results: Results, rents: Sequence[float]) -> list[Verdict]:
    """Every claim at every rent, with Holm's correction."""
    return correct_for_number(
        [
            judge(claim, rent, results.lead(claim, index), results.note(claim, index))
            for claim in PUBLISHED
            for index, rent in enumerate(rents)
        ]
    )


@dataclass(frozen=True)
class VariantLeads:
    """The learned controller's leads on one variant of the data, by rival."""

    variant: str
    rent: float
    leads: dict[str, Estimate]


def leads_by_variant(results: Results, rents: Sequence[float]) -> list[VariantLeads]:
    """Leads over the host alone, the best constant and the frontiers, on each variant."""
    rivals = (arms.HOST_ALONE, arms.CONSTANT, *FRONTIERS)
    claims = [claim for claim in PUBLISHED if claim.rival in rivals]
    experiment, found = results.experiment, []
    for number, view in enumerate(experiment.hosts.view_ids):
        hosts = np.flatnonzero(experiment.view_of_host.numpy() == number)
        for index, rent in enumerate(rents):
            leads = {claim.rival: results.lead(claim, index, hosts) for claim in claims}
            found.append(VariantLeads(experiment.hosts.task.names[view], rent, leads))
    return found
