"""The honest arms: everything that a learned controller has to be better than, on the same hosts.

Each arm is told what it may know and no more. What was searched or tuned was searched on types
that the controller trained on (or, for the plans per type, on other hosts of the same type), by
validation rows; its cost is kept beside the arm. Test rows are read once, when a network is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from esper.kasmina.blueprints.registry import Blueprint
from esper.simic.evaluation.plans import Plans, PlanSearch, plan_arm, search_plans
from esper.simic.evaluation.statistics import Array, RandomSearch
from esper.simic.evaluation.trial import TRAINING_FLOPS, Arm, Cost, Harvest, Seeds, Trial
from esper.simic.evaluation.tuning import Sweep
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
    harvests: tuple[Harvest, ...]  # one per controller, with a lane per rent or one for all
    search: Cost = Cost()  # spent before: training a controller, searching, tuning

    def array(self, field: str) -> Array:
        """A field of the harvests, `[K, R, H]`."""
        shape = (len(self.rents), -1)
        return torch.stack([getattr(h, field).expand(shape) for h in self.harvests]).numpy()

    @property
    def scores(self) -> Array:
        """On test rows, `[K, R, H]`."""
        return torch.stack([harvest.scores(self.rents) for harvest in self.harvests]).numpy()


@dataclass(frozen=True, eq=False)
class ConstantPlans:
    """The best constant plans: for all types, from those trained on, and for each type itself."""

    plans: Plans
    for_all: PlanSearch
    per_type: PlanSearch

    @classmethod
    def search(
        cls, training: Trial, judged: Trial, plans: Plans, rents: Sequence[float], finalists: int
    ) -> "ConstantPlans":
        num_types = len(judged.type_names)
        return cls(
            plans,
            search_plans(training, plans, rents, num_types=1, finalists=finalists),
            search_plans(judged, plans, rents, num_types=num_types, finalists=finalists),
        )

    def random_search(self, rents: Sequence[float]) -> list[RandomSearch]:
        """What trying plans at random finds on hosts of the types judged on, at each rent."""
        pool = self.per_type.pool
        return [
            RandomSearch(pool.validation_scores([rent]).numpy(), pool.scores([rent]).numpy())
            for rent in rents
        ]

    def describe(self, menu: Sequence[Blueprint], types: Sequence[str]) -> dict[str, list[str]]:
        """The plans in words, for each rent: for all types, and for each of them."""
        names = [blueprint.name for blueprint in menu]
        chosen = {"all types": self.for_all.best[:, 0].tolist()}
        chosen |= {name: self.per_type.best[:, i].tolist() for i, name in enumerate(types)}
        return {
            name: [self.plans.describe(plan, names) for plan in plans]
            for name, plans in chosen.items()
        }


def run_arms(
    trial: Trial,
    controllers: Sequence[LearnedController],
    constants: ConstantPlans,
    heuristic: Sweep,
    rents: Sequence[float],
    *,
    reference_seed: int,
    host_training: Cost,
) -> list[ArmResult]:
    """All arms that grow, and the host alone, on the hosts of the trial.

    `host_training` is what a controller's training took without seeds and without looking.
    """
    rents = tuple(rents)
    plans = constants.plans
    for_all = constants.for_all.best.expand(-1, trial.num_hosts)
    per_type = constants.per_type.best[:, trial.type_of_host]
    judged = replace(HeuristicConfig(), **heuristic.best)  # type: ignore[arg-type]
    wait = ConstantPlan(())
    scripted = [
        (Arm(HOST_ALONE, wait), Cost()),
        (Arm(ALL_SEEDS, wait, born=_everywhere(trial, reference_seed)), Cost()),
        (Arm(RANDOM, RandomController(torch.Generator().manual_seed(0))), Cost()),
        (Arm(SCHEDULE, FixedSchedule()), Cost()),
        (Arm(HEURISTIC, HeuristicController(judged), rents), heuristic.cost),
        (plan_arm(CONSTANT, plans, for_all, rents), constants.for_all.cost),
        (plan_arm(CONSTANT_PER_TYPE, plans, per_type, rents), constants.per_type.cost),
    ]
    greedy = [Arm(LEARNED, _frozen(c), rents) for c in controllers]
    sampled = [Arm(SAMPLED, _frozen(c, rng_seed=i), rents) for i, c in enumerate(controllers)]
    harvests = trial.run([arm for arm, _ in scripted] + greedy + sampled)
    results = [
        ArmResult(arm.name, rents, (harvest,), cost)
        for (arm, cost), harvest in zip(scripted, harvests, strict=False)
    ]
    grown = tuple(harvests[len(scripted) :][: len(greedy)])
    drawn = tuple(harvests[len(scripted) + len(greedy) :])
    again = trial.run([Arm(FROM_SCRATCH, wait, rents, born=h.seeds) for h in grown])
    spent = host_training.times(_times_bare(drawn, trial))
    return [
        *results,
        ArmResult(LEARNED, rents, grown, spent),
        ArmResult(SAMPLED, rents, drawn, spent),
        ArmResult(FROM_SCRATCH, rents, tuple(again), spent + Cost.of(grown)),
    ]


def _times_bare(harvests: Sequence[Harvest], trial: Trial) -> float:
    """What networks took as a multiple of training their hosts: for seeds, and for watching."""
    macs = torch.tensor([float(host.macs) for host in trial.hosts]).repeat_interleave(
        trial.num_hosts // len(trial.hosts)
    )
    bare = macs * trial.rows_read * TRAINING_FLOPS
    return float(torch.cat([harvest.training_flops / bare for harvest in harvests]).mean())


def _frozen(controller: LearnedController, rng_seed: int | None = None) -> LearnedController:
    """The policy with a memory of its own: its likeliest choices, or draws from a seed."""
    if rng_seed is None:
        return LearnedController(controller.policy)
    generator = torch.Generator(controller.policy.device).manual_seed(rng_seed)
    return LearnedController(controller.policy, deterministic=False, generator=generator)


def _everywhere(trial: Trial, blueprint: int) -> Seeds:
    """One blueprint in every slot of every host."""
    shape = (1, trial.num_hosts, trial.hosts[0].num_slots)
    seeds = torch.full(shape, blueprint)
    return Seeds(seeds, torch.zeros_like(seeds), torch.ones(shape))
