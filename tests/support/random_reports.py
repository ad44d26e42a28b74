"""Random reports that a real run could make: every value is legal, and all envs differ."""

from dataclasses import fields

import torch
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline.constants import ALPHA_TARGETS, DEFAULT_EPISODE_LENGTH, SiteKind
from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.reports import ACCURACY_HISTORY, Reports
from esper.leyline.stages import LIVE_STAGES, LifecycleOp, SeedStage


def random_reports(
    num_envs: int, num_slots: int = 3, num_blueprints: int = 8, rng_seed: int = 0
) -> Reports:
    """Reports of envs at random moments of random episodes: some limits are infinite,
    some evidence is missing, and values next to a False flag are NaN."""
    draw = _Draw(rng_seed)
    per_env, per_slot = (num_envs,), (num_envs, num_slots)
    per_choice = (num_envs, num_slots, num_blueprints)

    host_params, host_macs = (
        draw.log_uniform(per_env, 1e2, 1e7),
        draw.log_uniform(per_env, 1e3, 1e9),
    )
    cost_params = (host_params.view(-1, 1, 1) * draw.log_uniform(per_choice, 1e-3, 2.0)).round()
    cost_macs = (host_macs.view(-1, 1, 1) * draw.log_uniform(per_choice, 1e-3, 2.0)).round()
    fits = draw.flag(per_choice, 0.8)

    stage = draw.integer(per_slot, 0, len(SeedStage))
    has_seed = (stage != SeedStage.DORMANT) & (stage != SeedStage.EMBARGOED)
    is_live = has_seed & (stage != SeedStage.FOSSILIZED)
    assert set(stage[is_live].tolist()) <= set(LIVE_STAGES)
    blueprint = torch.where(has_seed, draw.integer(per_slot, 0, num_blueprints), -1)
    chosen = blueprint.clamp(min=0).unsqueeze(-1)
    fits |= has_seed.unsqueeze(-1) & (torch.arange(num_blueprints) == chosen)
    seed_params = cost_params.gather(-1, chosen).squeeze(-1) * has_seed
    seed_macs = cost_macs.gather(-1, chosen).squeeze(-1) * has_seed

    episode_length = DEFAULT_EPISODE_LENGTH
    step = draw.integer(per_env, 0, episode_length)
    total_age = torch.where(has_seed, draw.integer(per_slot, 0, 12), 0)
    alpha_target = torch.tensor(ALPHA_TARGETS)[draw.integer(per_slot, 0, len(ALPHA_TARGETS))]
    alpha_target = torch.where(has_seed, alpha_target, 0.0)
    # a ramped prune is a seed that blends towards 0
    alpha_target[(stage == SeedStage.BLENDING) & draw.flag(per_slot, 0.2)] = 0.0
    alpha = torch.where(stage == SeedStage.BLENDING, draw.uniform(per_slot, 0, 1), alpha_target)

    validated = step > 0
    history = draw.uniform((num_envs, ACCURACY_HISTORY), 0, 1)
    history_known = torch.arange(ACCURACY_HISTORY) < step.unsqueeze(-1)
    gradient_known = is_live & (total_age > 0)
    contribution_known = gradient_known & draw.flag(per_slot, 0.7)
    known_action = step > 0

    def maybe(value: Tensor, known: Tensor) -> Tensor:
        return torch.where(known, value, torch.nan)

    def limit(used: Tensor) -> Tensor:
        return torch.where(
            draw.flag(per_env, 0.3), torch.inf, used * draw.log_uniform(per_env, 1e-4, 3)
        )

    return Reports(
        step=step,
        steps_left=episode_length - step,
        validation_loss=maybe(draw.log_uniform(per_env, 1e-3, 10), validated),
        accuracy_history=maybe(history, history_known),
        accuracy_history_known=history_known,
        host_params=host_params,
        host_macs=host_macs,
        params=host_params + seed_params.sum(-1),
        macs=host_macs + seed_macs.sum(-1),
        params_left=limit(host_params),
        macs_left=limit(host_macs),
        seeds_left=draw.integer(per_env, 0, 4),
        train_rows=draw.log_uniform(per_env, 1, 1e7).long(),
        locality=draw.uniform(per_env, -1, 1),
        rent=draw.log_uniform(per_env, 0.02, 0.30) * draw.flag(per_env, 0.9),
        compute_price=draw.uniform(per_env, 0, 0.1) * draw.flag(per_env, 0.5),
        last_action=_random_actions(draw, num_envs, num_slots, num_blueprints),
        last_action_known=known_action,
        stage=stage,
        stage_age=torch.minimum(total_age, draw.integer(per_slot, 0, 12)),
        total_age=total_age,
        alpha=alpha,
        alpha_target=alpha_target,
        blueprint=blueprint,
        seed_params=seed_params,
        seed_macs=seed_macs,
        site_kind=draw.integer(per_slot, 0, len(SiteKind)),
        site_width=draw.log_uniform(per_slot, 1, 512).round(),
        site_depth=torch.linspace(0, 1, num_slots).expand(per_slot).clone(),
        gradient_norm=maybe(draw.log_uniform(per_slot, 1e-9, 1e3), gradient_known),
        gradient_known=gradient_known,
        contribution=maybe(draw.uniform(per_slot, -0.1, 0.3), contribution_known),
        contribution_error=maybe(draw.uniform(per_slot, 0, 0.05), contribution_known),
        contribution_known=contribution_known,
        contribution_age=torch.where(contribution_known, draw.integer(per_slot, 0, 5), 0),
        fits=fits,
        cost_params=torch.where(fits, cost_params, torch.nan),
        cost_macs=torch.where(fits, cost_macs, torch.nan),
        reach=draw.uniform(per_choice, 0, 1),
        depth=draw.integer(per_choice, 1, 5).float(),
    )


@st.composite
def report_batches(draw: st.DrawFn, max_envs: int = 9, max_slots: int = 5) -> Reports:
    """A Hypothesis strategy: random reports for a random number of envs, slots and blueprints."""
    return random_reports(
        draw(st.integers(1, max_envs)),
        draw(st.integers(1, max_slots)),
        draw(st.integers(1, 9)),
        rng_seed=draw(st.integers(0, 2**31)),
    )


def _random_actions(draw: "_Draw", num_envs: int, num_slots: int, num_blueprints: int) -> Tensor:
    """Some earlier action; WAIT chose nothing and has the canonical 0 everywhere."""
    sizes = tamiyo_action_space(num_slots, num_blueprints).sizes
    actions = torch.stack([draw.integer((num_envs,), 0, size) for size in sizes], dim=-1)
    return actions * (actions[:, :1] != LifecycleOp.WAIT)


class _Draw:
    """Random tensors of a shape, from one generator."""

    def __init__(self, rng_seed: int):
        self.generator = torch.Generator().manual_seed(rng_seed)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def log_uniform(self, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return low * (high / low) ** torch.rand(shape, generator=self.generator)

    def flag(self, shape: tuple[int, ...], probability: float) -> Tensor:
        return torch.rand(shape, generator=self.generator) < probability

    def integer(self, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)


def report_shapes() -> dict[str, str]:
    """The axes of each field of `Reports`, such as "NS"."""
    return {entry.name: entry.metadata["shape"] for entry in fields(Reports)}
