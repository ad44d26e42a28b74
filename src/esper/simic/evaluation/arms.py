"""The arms of an evaluation: the learned controller and its rivals, on the same hosts.

What was searched or tuned was chosen on validation rows, on types that the controller trained on;
plans per type were chosen on other hosts of the same type. Each arm carries the cost of its search.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.simic.evaluation.experiment import (
    TRAINING_FLOPS,
    Arm,
    ArmOutcome,
    Cost,
    PairedExperiment,
    Seeds,
    combine,
)
from esper.simic.evaluation.searches import PlanSearch, Sweep, plan_arm
from esper.simic.evaluation.statistics import Array
from esper.tamiyo.heuristic import HeuristicConfig, HeuristicController
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.scripted import ConstantPlan, FixedSchedule, RandomController

HOST_ALONE = "host alone"
ALL_SEEDS = "all seeds from the start"
FROM_SCRATCH = "grown graph from scratch"
RANDOM = "random controller"
SCHEDULE = "fixed schedule"
HEURISTIC = "heuristic"
CONSTANT = "best constant"
CONSTANT_PER_TYPE = "best constant per type"
WIDTH_SEARCH = "width search"
LEARNED = "learned"
SAMPLED = "learned, sampled"


@dataclass(frozen=True, eq=False)
class ArmResult:
    """An arm's networks: K controllers (1 for arms without), R rents, H hosts."""

    name: str
    rents: tuple[float, ...]
    outcome: ArmOutcome  # [K, R, H]
    search: Cost  # of training a controller, searching or tuning

    @classmethod
    def of(
        cls, name: str, rents: tuple[float, ...], outcomes: Sequence[ArmOutcome], search: Cost
    ) -> "ArmResult":
        """From one outcome per controller, with a lane per rent or one lane for all rents."""

        def stack(values: list[Tensor]) -> Tensor:
            return torch.stack([v.expand(len(rents), *v.shape[1:]) for v in values])

        return cls(name, rents, combine(stack, outcomes), search)

    def array(self, field: str) -> Array:
        """A field of the outcome, `[K, R, H]`."""
        array: Array = getattr(self.outcome, field).numpy()
        return array

    @property
    def scores(self) -> Array:
        """Test scores, `[K, R, H]`."""
        return self.outcome.scores(self.rents).numpy()


def run_arms(
    experiment: PairedExperiment,
    controllers: Sequence[LearnedController],
    plan_for_all: PlanSearch,
    plan_per_type: PlanSearch,
    heuristic: Sweep,
    rents: Sequence[float],
    *,
    reference_seed: int,
    controller_cost: Cost,
) -> list[ArmResult]:
    """All arms that grow, and the host alone.

    `controller_cost` is the cost of a controller's training without seeds and validation.
    """
    rents = tuple(rents)
    tuned = replace(HeuristicConfig(), **heuristic.best)  # type: ignore[arg-type]
    wait = ConstantPlan(())
    for_all = plan_for_all.best.expand(-1, experiment.num_hosts)
    per_type = plan_per_type.best[:, experiment.type_of_host]
    scripted = [
        (Arm(HOST_ALONE, wait), Cost()),
        (Arm(ALL_SEEDS, wait, preset=_in_every_slot(experiment, reference_seed)), Cost()),
        (Arm(RANDOM, RandomController(torch.Generator().manual_seed(0))), Cost()),
        (Arm(SCHEDULE, FixedSchedule()), Cost()),
        (Arm(HEURISTIC, HeuristicController(tuned), rents), heuristic.cost),
        (plan_arm(CONSTANT, plan_for_all.plans, for_all, rents), plan_for_all.cost),
        (plan_arm(CONSTANT_PER_TYPE, plan_per_type.plans, per_type, rents), plan_per_type.cost),
    ]
    greedy = [Arm(LEARNED, LearnedController(c.policy), rents) for c in controllers]
    sampled = [
        Arm(SAMPLED, _sampling(c, rng_seed), rents) for rng_seed, c in enumerate(controllers)
    ]
    outcomes = experiment.run([arm for arm, _ in scripted] + greedy + sampled)
    results = [
        ArmResult.of(arm.name, rents, [outcome], cost)
        for (arm, cost), outcome in zip(scripted, outcomes, strict=False)
    ]
    grown = outcomes[len(scripted) :][: len(greedy)]
    by_sampling = outcomes[len(scripted) + len(greedy) :]
    again = experiment.run([Arm(FROM_SCRATCH, wait, rents, preset=o.seeds) for o in grown])
    factor = _relative_flops(by_sampling, experiment)
    spent, growing = Cost(controller_cost.networks, factor * controller_cost.flops), Cost.of(grown)
    total = Cost(spent.networks + growing.networks, spent.flops + growing.flops)
    return [
        *results,
        ArmResult.of(LEARNED, rents, grown, spent),
        ArmResult.of(SAMPLED, rents, by_sampling, spent),
        ArmResult.of(FROM_SCRATCH, rents, again, total),
    ]


def _relative_flops(outcomes: Sequence[ArmOutcome], experiment: PairedExperiment) -> float:
    """Training FLOPs relative to the bare host (seeds and validation included)."""
    macs = torch.tensor([float(host.macs) for host in experiment.hosts]).repeat_interleave(
        experiment.num_hosts // len(experiment.hosts)
    )
    bare = macs * experiment.training_rows * TRAINING_FLOPS
    return float(torch.cat([outcome.training_flops / bare for outcome in outcomes]).mean())


def _sampling(controller: LearnedController, rng_seed: int) -> LearnedController:
    """The same policy, sampling its actions."""
    generator = torch.Generator(controller.policy.device).manual_seed(rng_seed)
    return LearnedController(controller.policy, deterministic=False, generator=generator)


def _in_every_slot(experiment: PairedExperiment, blueprint: int) -> Seeds:
    """One blueprint in every slot of every host."""
    shape = (1, experiment.num_hosts, experiment.hosts[0].num_slots)
    seeds = torch.full(shape, blueprint)
    return Seeds(seeds, torch.zeros_like(seeds), torch.ones(shape))
