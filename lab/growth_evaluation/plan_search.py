"""The best of many constant plans: fixed seeds in fixed slots at fixed steps.

Plans are chosen by validation rows. The networks of a plan do not depend on the rent, so each
candidate is trained once and scored at every rent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.tamiyo.scripted import NEVER, ConstantPlan
from growth_evaluation.paired_experiment import Arm, ArmOutcome, PairedExperiment
from growth_evaluation.settings import EvaluationConfig

LATEST_START = 3  # a plan starts within the first third of training
UNIFORM_SHARE = 0.25  # of the plans, at most: one blueprint in every slot
FIRST_RNG_SEED, FINAL_RNG_SEED = 1, 4  # hosts of a search are not those that arms are compared on


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


def run_plans(experiment: PairedExperiment, plans: ConstantPlan, *, rng_seed: int) -> ArmOutcome:
    """Every plan on every host, `[M, H]`."""
    hosts = experiment.num_hosts
    arms = [
        plan_arm("plans", plans, part.unsqueeze(1).expand(-1, hosts), [0.1] * len(part))
        for part in torch.split(torch.arange(len(plans.step)), experiment.max_lanes)
    ]
    return ArmOutcome.cat(experiment.run(arms, rng_seed=rng_seed))


def plan_arm(
    name: str, plans: ConstantPlan, choice: Tensor, rents: Sequence[float], search_networks: int = 0
) -> Arm:
    """An arm that follows plan `choice [lanes, H]` in each host."""
    chosen = choice.flatten()
    controller = ConstantPlan(plans.step[chosen], plans.blueprint[chosen])
    return Arm(name, controller, tuple(rents), search_networks)


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
    step[uniform] = 0
    blueprint[uniform] = torch.arange(num_uniform).unsqueeze(1)
    return ConstantPlan(step, blueprint)


def plans_for(experiment: PairedExperiment, settings: EvaluationConfig) -> ConstantPlan:
    """The candidates of an evaluation, for the slots and the menu of an experiment."""
    num_slots = experiment.architectures[0].num_slots
    num_steps = experiment.hosts.config.growth.num_steps
    generator = torch.Generator().manual_seed(settings.rng_seed)
    sizes = num_slots, len(experiment.menu), num_steps
    return candidate_plans(settings.num_plans, *sizes, generator)
