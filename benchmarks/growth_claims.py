"""The published claims about the learned controller, fixed before any result.

`esper.simic.evaluation.claims` has claims (a), about rivals without a search. These add searches and
static networks. Two frontiers of static networks answer two questions. Uniform hosts: is a plain
shape of the same size as good? Own hosts: should this host be grown, or widened?
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from growth_searches import FrontierKind, Size, StaticPool, type_of_host, view_of_host
from growth_statistics import Frontier, Groups, RandomSearch

from esper.simic.evaluation import arms
from esper.simic.evaluation.arms import ArmResult
from esper.simic.evaluation.claims import (
    CLAIMS,
    HELPS,
    Claim,
    Estimate,
    Verdict,
    correct_for_number,
    estimate,
    judge,
)
from esper.simic.evaluation.experiment import PairedExperiment

ALL_SEEDS = "all seeds from the start"
FROM_SCRATCH = "grown graph from scratch"
CONSTANT_PER_TYPE = "best constant per type"
WIDTH_SEARCH = "width search"
SAMPLED = "learned, sampled"
RANDOM_SEARCH = "random search"
FrontierName = tuple[FrontierKind, bool, Size]  # the bool is True for hosts with norm
FRONTIERS: dict[str, FrontierName] = {}  # by the rival that a claim names


def _above_frontier(kind: FrontierKind, norm: bool, by: Size, margin: float) -> Claim:
    hosts = {"uniform": "static hosts of one width", "own": "their own hosts widened"}[kind]
    size = {"params": "parameters", "macs": "multiply-adds"}[by]
    rival = f"{hosts}, {'with' if norm else 'without'} norm, at equal {size}"
    text = f"is {f'{100 * margin:g} points ' if margin else ''}above {rival}"
    FRONTIERS[rival] = (kind, norm, by)
    return Claim("d", rival, text, margin, "accuracy")


PUBLISHED: tuple[Claim, ...] = (
    *(claim for claim in CLAIMS if claim.letter == "a"),
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
        groups = (type_of_host if name[0] == "own" else view_of_host)(self.experiment)
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
    for number, view in enumerate(experiment.view_ids):
        hosts = np.flatnonzero(view_of_host(experiment).numpy() == number)
        for index, rent in enumerate(rents):
            leads = {claim.rival: results.lead(claim, index, hosts) for claim in claims}
            found.append(VariantLeads(experiment.task.names[view], rent, leads))
    return found
