"""The usual arms: learned controllers and the rivals that `esper evaluate` knows, too."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esper.simic.growth import comparison
from esper.tamiyo.heuristic import HeuristicController
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.scripted import ConstantPlan, FixedSchedule, RandomController
from growth_evaluation.estimates import Array
from growth_evaluation.paired_experiment import Arm, ArmOutcome, PairedExperiment
from growth_evaluation.plan_search import PlanSearch, plan_arm

HOST_ALONE = comparison.HOST_ALONE
LEARNED = comparison.LEARNED
RANDOM = "random controller"
SCHEDULE = "fixed schedule"
HEURISTIC = "heuristic"
CONSTANT = "best constant"


@dataclass(frozen=True, eq=False)
class ArmResult:
    """An arm's networks: K controllers (1 for arms without), R rents, H hosts."""

    name: str
    rents: tuple[float, ...]
    outcome: ArmOutcome  # [K, R, H]
    search_networks: int  # trained before, to learn or to search

    @classmethod
    def of(
        cls, name: str, rents: Sequence[float], outcomes: Sequence[ArmOutcome], search_networks: int
    ) -> "ArmResult":
        """From one outcome per controller, with a lane per rent or one lane for all rents."""
        per_rent = [o.map(lambda v: v.expand(1, len(rents), *v.shape[1:])) for o in outcomes]
        stacked = ArmOutcome.cat(per_rent)
        return cls(name, tuple(rents), stacked, search_networks)

    def array(self, field: str) -> Array:
        """A field of the outcome, `[K, R, H]`."""
        array: Array = getattr(self.outcome, field).numpy()
        return array

    @property
    def scores(self) -> Array:
        """Test scores, `[K, R, H]`."""
        return self.outcome.scores(self.rents).numpy()


def standard_arms(
    controllers: Sequence[LearnedController],
    plan: PlanSearch,
    num_hosts: int,
    rents: Sequence[float],
    controller_networks: int,
) -> list[Arm]:
    """The controllers and their rivals; `controller_networks` trained each controller."""
    rents = tuple(rents)
    for_all = plan.best.expand(-1, num_hosts)
    return [
        Arm(HOST_ALONE, ConstantPlan()),
        Arm(RANDOM, RandomController(torch.Generator().manual_seed(0))),
        Arm(SCHEDULE, FixedSchedule()),
        Arm(HEURISTIC, HeuristicController(), rents),
        plan_arm(CONSTANT, plan.plans, for_all, rents, plan.num_networks),
        *(
            Arm(LEARNED, LearnedController(c.policy), rents, controller_networks)
            for c in controllers
        ),
    ]


def run_arms(
    experiment: PairedExperiment, arms: Sequence[Arm], rents: Sequence[float]
) -> dict[str, ArmResult]:
    """The results by name; arms of one name are several controllers of one result."""
    outcomes = dict[str, list[ArmOutcome]]()
    for arm, outcome in zip(arms, experiment.run(arms), strict=True):
        outcomes.setdefault(arm.name, []).append(outcome)
    searched = {arm.name: arm.search_networks for arm in arms}
    return {n: ArmResult.of(n, rents, found, searched[n]) for n, found in outcomes.items()}
