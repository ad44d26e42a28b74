"""Constant plans: which seed grows in which slot at which step, whatever happens.

A plan's networks do not depend on the rent: each candidate is trained once and scored at every
rent. The best of them is what a user finds who searches instead of growing with a controller.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks
from esper.leyline.reports import Reports
from esper.simic.evaluation.trial import Arm, Cost, Harvest, Trial
from esper.tamiyo.scripted import follow_plan

NEVER = 1 << 30
LATEST_START = 3  # a plan starts within the first third of training
UNIFORM_SHARE = 0.25  # at most, of the plans: one blueprint in every slot
RAMP_STEPS = 2
FIRST_RNG_SEED, FINAL_RNG_SEED = 1, 4  # hosts to choose on are not those to judge on


@dataclass(frozen=True, eq=False)
class Plans:
    """M plans, each field `[M, S]`."""

    step: Tensor  # NEVER: nothing grows in this slot
    blueprint: Tensor

    def __len__(self) -> int:
        return len(self.step)

    def describe(self, number: int, names: Sequence[str]) -> str:
        seeds = [
            f"{names[blueprint]} in slot {slot} at step {step}"
            for slot, (step, blueprint) in enumerate(
                zip(self.step[number].tolist(), self.blueprint[number].tolist(), strict=True)
            )
            if step != NEVER
        ]
        return ", ".join(seeds) or "no seeds"


def candidate_plans(
    count: int, num_slots: int, num_blueprints: int, num_steps: int, generator: torch.Generator
) -> Plans:
    """The plan without seeds, some with a blueprint in every slot from the start, and random ones.

    Random plans have one or more seeds, three in four of them from the start.
    """
    shape = (count, num_slots)

    def draw(below: int, *size: int) -> Tensor:
        return torch.randint(below, size, generator=generator)

    rank = torch.rand(shape, generator=generator).argsort(dim=1)
    is_grown = rank < 1 + draw(num_slots, count, 1)
    is_grown[0] = False
    is_late = torch.rand(count, 1, generator=generator) < 0.25
    start = torch.where(is_late, draw(max(1, num_steps // LATEST_START), count, 1), 0)
    step = torch.where(is_grown, start.expand(shape), NEVER)
    blueprint = draw(num_blueprints, *shape)
    num_uniform = min(num_blueprints, int(UNIFORM_SHARE * count))
    uniform = slice(1, 1 + num_uniform)
    step[uniform], blueprint[uniform] = 0, torch.arange(num_uniform).unsqueeze(1)
    return Plans(step, blueprint)


class PlanPerEnv:
    """A controller that follows in each env the plan of its number, `choice [N]`."""

    def __init__(self, plans: Plans, choice: Tensor):
        self._step, self._blueprint = plans.step[choice], plans.blueprint[choice]

    def begin(self, env_ids: Tensor) -> None:
        """Nothing to forget."""

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        return follow_plan(reports, masks, self._step, self._blueprint, RAMP_STEPS)


def plan_arm(name: str, plans: Plans, choice: Tensor, rents: Sequence[float]) -> Arm:
    """An arm that follows plan `choice [lanes, H]` in each host."""
    return Arm(name, PlanPerEnv(plans, choice.flatten()), tuple(rents))


def run_plans(trial: Trial, plans: Plans, *, rng_seed: int) -> Harvest:
    """Every plan on every host, a lane for each plan."""
    arms = [
        plan_arm("plans", plans, part.unsqueeze(1).expand(-1, trial.num_hosts), [0.1] * len(part))
        for part in torch.split(torch.arange(len(plans)), trial.max_lanes)
    ]
    return Harvest.cat(trial.run(arms, rng_seed=rng_seed))


@dataclass(frozen=True, eq=False)
class PlanSearch:
    """The plans found best on the hosts of a trial, and every network that was trained for it."""

    best: Tensor  # [R, types]
    pool: Harvest  # a lane per plan
    finals: Harvest | None  # the best plans once more, on other hosts

    @property
    def cost(self) -> Cost:
        return Cost.of([self.pool] if self.finals is None else [self.pool, self.finals])


def search_plans(
    trial: Trial, plans: Plans, rents: Sequence[float], *, num_types: int, finalists: int
) -> PlanSearch:
    """The plan of the best mean validation score for each rent and type, after two rounds.

    The hosts of a type lie side by side; one type is all of them together. In the second round
    the best of each type meet other hosts: the first is no judge of those that it picked itself.
    """
    pool = run_plans(trial, plans, rng_seed=FIRST_RNG_SEED)
    per_plan = (len(plans), num_types, -1)
    scores = torch.stack(
        [pool.validation_scores([rent]).view(per_plan).mean(dim=2) for rent in rents]
    )  # [R, M, types]
    if finalists == 1:
        return PlanSearch(scores.argmax(dim=1), pool, None)
    first, top = scores.topk(finalists, dim=1)
    choice = top.repeat_interleave(trial.num_hosts // num_types, dim=2).flatten(0, 1)
    of_lanes = [rent for rent in rents for _ in range(finalists)]
    (finals,) = trial.run([plan_arm("finals", plans, choice, of_lanes)], rng_seed=FINAL_RNG_SEED)
    again = finals.validation_scores(of_lanes).view(len(rents), finalists, num_types, -1)
    winner = (first + again.mean(dim=3)).argmax(dim=1, keepdim=True)
    return PlanSearch(top.gather(1, winner).squeeze(1), pool, finals)
