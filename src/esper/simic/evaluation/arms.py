"""The arms of an evaluation: the learned controller and its rivals, on the same hosts.

One rival is the best of many constant plans: fixed seeds in fixed slots at fixed steps. Plans are
chosen by validation rows, on types that the controller trained on. The networks of a plan do not
depend on the rent, so each candidate is trained once and scored at every rent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.simic.evaluation.experiment import Arm, ArmOutcome, EvaluationConfig, PairedExperiment
from esper.tamiyo.heuristic import HeuristicController
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.scripted import NEVER, ConstantPlan, FixedSchedule, RandomController

Array = NDArray[np.float64]

HOST_ALONE = "host alone"
RANDOM = "random controller"
SCHEDULE = "fixed schedule"
HEURISTIC = "heuristic"
CONSTANT = "best constant"
LEARNED = "learned"

LATEST_START = 3  # a plan starts within the first third of training
UNIFORM_SHARE = 0.25  # of the plans, at most: one blueprint in every slot
FIRST_RNG_SEED, FINAL_RNG_SEED = 1, 4  # hosts of a search are not those that arms are compared on


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
    plan: "PlanSearch",
    num_hosts: int,
    rents: Sequence[float],
    controller_networks: int,
) -> list[Arm]:
    """The controllers and their rivals; `controller_networks` trained each controller."""
    rents, for_all = tuple(rents), plan.best.expand(-1, num_hosts)
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


def candidate_plans(
    count: int, num_slots: int, num_blueprints: int, num_steps: int, generator: torch.Generator
) -> ConstantPlan:
    """`count` plans: one without seeds, some with one blueprint in every slot, and random ones.

    Random plans have one or more seeds; three in four of them start at step 0.
    """
    shape = (count, num_slots)

    def sample(below: int, *size: int) -> Tensor:
        return torch.randint(below, size, generator=generator)

    rank = torch.rand(shape, generator=generator).argsort(dim=1)
    is_grown = rank < 1 + sample(num_slots, count, 1)
    is_grown[0] = False
    is_late = torch.rand(count, 1, generator=generator) < 0.25
    start = torch.where(is_late, sample(max(1, num_steps // LATEST_START), count, 1), 0)
    step = torch.where(is_grown, start.expand(shape), NEVER)
    blueprint = sample(num_blueprints, *shape)
    num_uniform = min(num_blueprints, int(UNIFORM_SHARE * count))
    uniform = slice(1, 1 + num_uniform)
    step[uniform], blueprint[uniform] = 0, torch.arange(num_uniform).unsqueeze(1)
    return ConstantPlan(step, blueprint)


def plans_for(experiment: PairedExperiment, settings: EvaluationConfig) -> ConstantPlan:
    """The candidates of an evaluation, for the slots and the menu of an experiment."""
    sizes = experiment.hosts[0].num_slots, len(experiment.menu), experiment.growth.num_steps
    generator = torch.Generator().manual_seed(settings.rng_seed)
    return candidate_plans(settings.num_plans, *sizes, generator)


def plan_arm(
    name: str, plans: ConstantPlan, choice: Tensor, rents: Sequence[float], search_networks: int = 0
) -> Arm:
    """An arm that follows plan `choice [lanes, H]` in each host."""
    chosen = choice.flatten()
    controller = ConstantPlan(plans.step[chosen], plans.blueprint[chosen])
    return Arm(name, controller, tuple(rents), search_networks)


def run_plans(experiment: PairedExperiment, plans: ConstantPlan, *, rng_seed: int) -> ArmOutcome:
    """Every plan on every host, `[M, H]`."""
    hosts = experiment.num_hosts
    arms = [
        plan_arm("plans", plans, part.unsqueeze(1).expand(-1, hosts), [0.1] * len(part))
        for part in torch.split(torch.arange(len(plans.step)), experiment.max_lanes)
    ]
    return ArmOutcome.cat(experiment.run(arms, rng_seed=rng_seed))


@dataclass(frozen=True, eq=False)
class PlanSearch:
    """The best of some plans, and how all of them did."""

    plans: ConstantPlan
    best: Tensor  # index of the best plan, [R, types]
    trained: tuple[ArmOutcome, ...]  # every plan on every host, [M, H]; the best few on others

    @property
    def num_networks(self) -> int:
        return sum(outcome.validation.numel() for outcome in self.trained)


def search_plans(
    experiment: PairedExperiment,
    plans: ConstantPlan,
    rents: Sequence[float],
    *,
    num_types: int,
    finalists: int,
) -> PlanSearch:
    """The plan with the best mean validation score for each rent and type, in two rounds.

    Consecutive hosts form a type; `num_types=1` pools all hosts. In the second round the
    `finalists` run on other hosts, because the first round favours the plans it selected.
    """
    pool = run_plans(experiment, plans, rng_seed=FIRST_RNG_SEED)
    per_plan = (len(plans.step), num_types, -1)
    by_rent = [pool.scores([rent], "validation").view(per_plan) for rent in rents]
    scores = torch.stack([scores.mean(dim=2) for scores in by_rent])  # [R, M, types]
    if finalists == 1:
        return PlanSearch(plans, scores.argmax(dim=1), (pool,))
    first, top = scores.topk(finalists, dim=1)
    choice = top.repeat_interleave(experiment.num_hosts // num_types, dim=2).flatten(0, 1)
    lane_rents = [rent for rent in rents for _ in range(finalists)]
    arm = plan_arm("finals", plans, choice, lane_rents)
    (finals,) = experiment.run([arm], rng_seed=FINAL_RNG_SEED)
    again = finals.scores(lane_rents, "validation").view(len(rents), finalists, num_types, -1)
    winner = (first + again.mean(dim=3)).argmax(dim=1, keepdim=True)
    return PlanSearch(plans, top.gather(1, winner).squeeze(1), (pool, finals))
