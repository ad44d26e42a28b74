"""Controllers without judgement: random, a fixed schedule, a constant plan.

Scripted controllers list wishes in order of priority; the first that is legal in some slot becomes
the action (`take_first`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.constants import ALPHA_TARGETS, TEMPO_STEPS, AlphaCurve, BlendStyle
from esper.leyline.factored_actions import ActionMasks
from esper.leyline.protocols import Controller
from esper.leyline.reports import Reports
from esper.leyline.stages import LIVE_STAGES, LifecycleOp, SeedStage
from esper.runtime.checks import require_at_least
from esper.tamiyo.policy.distributions import choose_actions, draw_noise

RAMP_STEPS = 2  # of a seed's alpha; one of TEMPO_STEPS


class RandomController(Controller):
    """Samples uniformly: a legal op, then a legal slot, then legal details."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        space = masks.action_space

        def uniform(group: int, _: Tensor) -> Tensor:
            num_choices = space.group_spaces[group].num_choices
            return torch.zeros(masks.num_envs, num_choices, device=masks.device)

        noise = draw_noise(space, (masks.num_envs,), masks.device, self.generator)
        return choose_actions(space, masks, uniform, noise=noise).actions


NEVER = 1 << 30


class ConstantPlan(Controller):
    """Germinates a blueprint in each slot at its step, and commits it once it is HOLDING.

    `step` and `blueprint` are `[N, S]`, or broadcast to it; a slot with step `NEVER` stays empty.
    By default nothing grows. A step has one action; others move to the next free step.
    Germinations come first, unless all remaining steps are needed to commit.
    """

    def __init__(self, step: Tensor | int = NEVER, blueprint: Tensor | int = 0):
        self.step, self.blueprint = torch.as_tensor(step), torch.as_tensor(blueprint)

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        step, blueprint = (
            plan.to(reports.device).expand_as(reports.stage) for plan in (self.step, self.blueprint)
        )
        legal = masks["blueprint"][:, int(LifecycleOp.GERMINATE)]
        is_affordable = legal.gather(-1, blueprint.unsqueeze(-1)).squeeze(-1)
        is_time = is_affordable & (reports.step.unsqueeze(-1) >= step)
        return germinate_and_commit(reports, masks, is_time, -step, blueprint)


@dataclass(frozen=True, kw_only=True)
class FixedSchedule(Controller):
    """Grows one seed after another at fixed steps, first slot first, and commits them all.

    It ignores the rent. Of the blueprints within the budget it takes the one nearest to `size`.
    Unlike a constant plan, it runs on any host and any menu.
    """

    first_step: int = 0
    every: int = 3  # steps between germinations
    size: float = 0.25  # parameters of a seed, as a share of the host's
    max_seeds: int = 3

    def __post_init__(self) -> None:
        require_at_least(self, 1, "every")

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        legal = masks["blueprint"][:, int(LifecycleOp.GERMINATE)]
        share = reports.cost_params / reports.host_params.clamp(min=1).view(-1, 1, 1)
        distance = torch.where(legal, (share - self.size).abs(), torch.inf)
        blueprint = distance.argmin(dim=-1)
        order = torch.arange(reports.num_slots, device=reports.device).expand_as(reports.stage)
        is_time = reports.step.unsqueeze(-1) >= self.first_step + self.every * order
        is_time = is_time & (order < self.max_seeds)
        return germinate_and_commit(reports, masks, is_time, -order, blueprint)


def germinate_and_commit(
    reports: Reports, masks: ActionMasks, is_time: Tensor, urgency: Tensor, blueprint: Tensor
) -> Tensor:
    """Germinate where `is_time`, the most urgent first, and commit seeds that are HOLDING."""
    is_live = is_in(reports.stage, *LIVE_STAGES)
    must_commit = (reports.steps_left <= is_live.sum(dim=-1)).unsqueeze(-1)
    age = reports.total_age.float()
    anywhere = torch.ones_like(is_time)
    wishes = (
        Wish(LifecycleOp.FOSSILIZE, must_commit & anywhere, age),
        Wish(LifecycleOp.GERMINATE, is_time, urgency.float()),
        Wish(LifecycleOp.FOSSILIZE, anywhere, age),
        Wish(LifecycleOp.ADVANCE, reports.stage == int(SeedStage.TRAINING), age),
    )
    return take_first(masks, wishes, blueprint)


class Wish(NamedTuple):
    """An op, the slots where it is wanted, and the urgency there, both `[N, S]`."""

    op: LifecycleOp
    wanted: Tensor
    urgency: Tensor


def take_first(masks: ActionMasks, wishes: Sequence[Wish], blueprint: Tensor) -> Tensor:
    """Actions `[N, H]`: each env's first wish that is legal in a slot that wants it, else WAIT.

    A germination takes the slot's `blueprint` `[N, S]`, blended in by a linear ramp to 1. A prune
    takes effect at once.
    """
    space = masks.action_space
    actions = torch.zeros(masks.num_envs, space.num_heads, dtype=torch.int64, device=masks.device)
    for wish in reversed(wishes):
        possible = wish.wanted & masks["slot"][:, int(wish.op)]
        slot = torch.where(possible, wish.urgency, -torch.inf).argmax(dim=-1)
        action = torch.zeros_like(actions)
        action[:, 0], action[:, 1] = int(wish.op), slot
        if wish.op == LifecycleOp.GERMINATE:
            chosen = blueprint.gather(-1, slot.unsqueeze(-1)).squeeze(-1)
            details: dict[str, Tensor | int] = {"blueprint": chosen, **_SEED_DETAILS}
            for name, choice in details.items():
                action[:, space.index(name)] = choice
        actions = torch.where(possible.any(dim=-1, keepdim=True), action, actions)
    return actions


_SEED_DETAILS = {
    "style": int(BlendStyle.ADD),
    "tempo": TEMPO_STEPS.index(RAMP_STEPS),
    "alpha_target": ALPHA_TARGETS.index(1.0),
    "alpha_curve": int(AlphaCurve.LINEAR),
}


def is_in(stage: Tensor, *stages: SeedStage) -> Tensor:
    """Which of these stages are one of `stages`."""
    return torch.stack([stage == int(one) for one in stages]).any(dim=0)


def may_be_kept(reports: Reports) -> Tensor:
    """Slots `[N, S]` with a seed that can be pruned or committed and is not being pruned."""
    is_leaving = is_in(reports.stage, SeedStage.BLENDING) & (reports.alpha_target == 0)
    return is_in(reports.stage, *LIVE_STAGES) & ~is_leaving


def log_growth(size: Tensor, own: Tensor, now: Tensor, *, is_present: bool = False) -> Tensor:
    """What seeds of this `size` add to log(1 + added / own): rent is charged on it.

    `own` and `now` `[N]` are the sizes of the host without seeds and with its present ones; with
    `is_present`, the seeds are among them.
    """
    per_env = (-1, *([1] * (size.dim() - 1)))
    own, added = own.clamp(min=1).view(per_env), (now - own).view(per_env)
    without = (added - size).clamp(min=0) if is_present else added
    return torch.log1p((without + size) / own) - torch.log1p(without / own)
