"""A strong scripted controller for populations: grows on a prior, prunes on measurements.

A user's model grows by `evidence.py` instead: its data may be unlike those of the prior.

1. *Grow* early, in every slot where a seed is likely to pay, the likeliest first. The expected gain
   is a prior, fitted to measured growth: `HeuristicConfig` lists what it depends on. Its m is
   log(1 + seed / host) in multiply-adds; given m, parameters and site depth predict nothing more.
2. *Prune* a seed that does not pay its rent, once it was measured at full weight. A contribution is
   the accuracy that a host trained with its seed loses without it. That is more than the host would
   lack had it trained without. So contributions give each seed's share of the gain, and the prior
   gives its size. The less time is left to train without a seed, the more its contribution counts.
   A seed whose contribution is below its rent is pruned whatever the prior says. The slot may try
   another blueprint; after a failure, less than half of its gain is expected.
3. *Commit* before the end: only committed seeds count. No time is left to train without a seed, so
   the contribution alone decides, and a seed that does not pay is not committed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.constants import SiteKind
from esper.leyline.factored_actions import ActionMasks
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tamiyo.scripted import RAMP_STEPS, Wish, is_in, log_growth, may_be_kept, take_first


@dataclass(frozen=True, kw_only=True)
class HeuristicConfig:
    """The prior and the rules of the heuristic. Gains are fractions of accuracy."""

    headroom: float = 0.23  # most accuracy that a host can gain, before a measurement shows less
    gain_scale: float = 0.35  # share of the headroom that a seed of several layers gains at m = 1
    gain_exponent: float = 0.8  # how gain rises with m
    single_layer: float = 0.8  # gain of a seed with one layer, as a share of that
    reach_loss: float = 0.5  # share lost by a seed that sees every position of a series or an image
    late_start_loss: float = 0.8  # share lost by a seed that grows at the very end
    after_failure: float = 0.4  # share still expected in a slot, for each seed that failed there
    crowding: float = 5.2  # a gain shrinks to 1 / (1 + crowding * share that other seeds gain)
    probe_crowding: float = 0.25  # part of the crowding that counts before seeds are measured
    evidence_weight: float = 0.7  # weight of contributions in sharing out the gain
    optimism: float = 1.0  # standard errors added to a contribution for its upper bound
    patience: int = 3  # steps at full weight before a seed is judged
    max_evidence_age: int = 3  # steps after which a contribution is too old to judge by
    last_start: float = 0.7  # progress after which nothing is grown
    shadow_steps: int = 2  # steps of shadow training before a seed blends
    spare_steps: int = 1  # steps kept free before the end beyond those that committing takes


class HeuristicController:
    """Acts for a whole batch; remembers per env which blueprints failed in which slot."""

    def __init__(self, config: HeuristicConfig | None = None):
        self.config = config or HeuristicConfig()
        self._failed: Tensor | None = None  # [N, S, B]
        self._seen: Tensor | None = None  # the blueprint last seen in each slot [N, S], or -1

    def begin(self, env_ids: Tensor) -> None:
        if self._failed is not None and self._seen is not None:
            self._failed[env_ids] = False
            self._seen[env_ids] = -1

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        config = self.config
        failed = self._update_failures(reports)
        seeds = judge_seeds(reports, config)
        growth, blueprint = value_of_growing(reports, masks, seeds, failed, config)
        # a seed grown now must be able to ramp up, be judged and be committed, like every live one
        trial_steps = RAMP_STEPS + config.patience + config.spare_steps
        is_in_time = reports.steps_left >= trial_steps + seeds.is_live.sum(dim=-1) + 1
        is_in_time = is_in_time & (reports.progress <= config.last_start)
        worth_growing = (growth > 0) & is_in_time.unsqueeze(-1)
        in_shadow = is_in(reports.stage, SeedStage.TRAINING)
        is_ready = in_shadow & (reports.stage_age >= config.shadow_steps)
        # commit seeds that pay once it is due; first bring those below full weight there
        pays = seeds.is_live & (seeds.commit_net > 0)
        is_due = reports.steps_left <= pays.sum(dim=-1) + config.spare_steps
        commits = pays & is_due.unsqueeze(-1)
        is_held = is_in(reports.stage, SeedStage.HOLDING)
        has_time = (reports.steps_left > 1).unsqueeze(-1)  # one step to advance, one to commit
        wishes = (
            Wish(LifecycleOp.FOSSILIZE, commits & is_held, seeds.commit_net),
            Wish(LifecycleOp.ADVANCE, commits & ~is_held & has_time, seeds.commit_net),
            Wish(LifecycleOp.PRUNE, seeds.is_judged & (seeds.net < 0), -seeds.net),
            Wish(LifecycleOp.ADVANCE, is_ready, -reports.site_depth),
            Wish(LifecycleOp.GERMINATE, worth_growing, growth),
        )
        return take_first(masks, wishes, blueprint)

    def _update_failures(self, reports: Reports) -> Tensor:
        """Which blueprints have failed in which slot so far, `[N, S, B]`."""
        if self._failed is None or self._seen is None:
            self._failed = torch.zeros_like(reports.fits)
            self._seen = torch.full_like(reports.blueprint, -1)
        if self._failed.shape != reports.fits.shape:  # one row would be broadcast in silence
            raise ValueError(
                f"reports of {tuple(reports.fits.shape)} envs, slots and blueprints; this "
                f"controller has seen {tuple(self._failed.shape)}. Use one per environment"
            )
        rests = is_in(reports.stage, SeedStage.EMBARGOED)
        every = torch.arange(reports.num_blueprints, device=reports.device)
        self._failed |= rests.unsqueeze(-1) & (self._seen.unsqueeze(-1) == every)
        has_seed = reports.blueprint >= 0
        self._seen = torch.where(has_seed, reports.blueprint, self._seen.masked_fill(rests, -1))
        return self._failed


class SeedJudgement(NamedTuple):
    """Estimates for the seed of each slot, `[N, S]`; the gain is 0 without a seed."""

    is_live: Tensor  # in the network, prunable, and not being pruned already
    is_judged: Tensor  # live, with a measurement good enough to prune on
    gain: Tensor  # accuracy gained if it were the only seed
    net: Tensor  # value of keeping it, less rent and remaining compute
    commit_net: Tensor  # value of committing it now, less rent


def judge_seeds(reports: Reports, config: HeuristicConfig) -> SeedJudgement:
    """Prior gains combined with measured contributions."""
    is_live = may_be_kept(reports)
    is_active = is_live | is_in(reports.stage, SeedStage.FOSSILIZED)
    prior = torch.where(is_active, _prior_of_seeds(reports, config), 0.0)
    is_fresh = reports.contribution_known & (reports.contribution_age <= config.max_evidence_age)
    has_held = is_in(reports.stage, SeedStage.HOLDING) & (reports.stage_age >= config.patience)
    # the priors, shared out among the measured seeds in proportion to contributions
    known = is_fresh & is_active
    measured = torch.where(known, reports.contribution.clamp(min=0), 0.0)
    share = measured / measured.sum(dim=-1, keepdim=True).clamp(min=1e-6)
    total_prior = torch.where(known, prior, 0.0).sum(dim=-1, keepdim=True)
    gain = torch.where(known, prior.lerp(share * total_prior, config.evidence_weight), prior)

    sizes = (reports.seed_params, reports.host_params, reports.params)
    rent = reports.rent.unsqueeze(-1) * log_growth(*sizes, is_present=True)
    # the price of a seed's multiply-adds from now to the end
    macs = reports.seed_macs / reports.host_macs.clamp(min=1).unsqueeze(-1)
    compute = (reports.compute_price * (1 - reports.progress)).unsqueeze(-1) * macs
    others = gain.sum(dim=-1, keepdim=True) - gain
    marginal = gain / (1 + config.crowding * others / config.headroom)
    upper = reports.contribution + config.optimism * reports.contribution_error
    largest = torch.where(is_fresh, torch.maximum(reports.contribution, marginal), marginal)
    lacking = marginal.lerp(largest, reports.progress.unsqueeze(-1))  # at the end, if pruned now
    net = torch.where(is_fresh & (upper < rent), upper, lacking) - rent - compute
    commit_net = torch.where(is_fresh, reports.contribution, marginal) - rent
    return SeedJudgement(is_live, is_live & is_fresh & has_held, gain, net, commit_net)


def value_of_growing(
    reports: Reports,
    masks: ActionMasks,
    seeds: SeedJudgement,
    failed: Tensor,
    config: HeuristicConfig,
) -> tuple[Tensor, Tensor]:
    """Expected net gain of the best blueprint of each slot, and that blueprint; both `[N, S]`.

    A blueprint that has failed in a slot is not tried there again.
    """
    start = reports.progress.view(-1, 1, 1)
    quality = _quality(reports, config)
    gain = _prior_gain(reports, reports.cost_macs, quality, start, config)
    gain = gain * config.after_failure ** failed.sum(dim=-1, keepdim=True)
    taken = seeds.gain.sum(dim=-1).view(-1, 1, 1) / config.headroom
    gain = gain / (1 + config.probe_crowding * config.crowding * taken)
    extra = log_growth(reports.cost_params, reports.host_params, reports.params)
    macs = reports.cost_macs / reports.host_macs.clamp(min=1).view(-1, 1, 1)
    charge = reports.rent.view(-1, 1, 1) * extra
    charge = charge + reports.compute_price.view(-1, 1, 1) * macs * (1 - start)
    legal = masks["blueprint"][:, int(LifecycleOp.GERMINATE)] & ~failed
    value, blueprint = torch.where(legal, gain - charge, -torch.inf).max(dim=-1)
    return value, blueprint


def _prior_of_seeds(reports: Reports, config: HeuristicConfig) -> Tensor:
    """The prior gain of the seed in each slot, `[N, S]`; undefined without a seed."""
    chosen = reports.blueprint.clamp(min=0).unsqueeze(-1)
    quality = _quality(reports, config).gather(-1, chosen).squeeze(-1)
    episode_steps = reports.step + reports.steps_left
    age = reports.total_age / episode_steps.clamp(min=1).unsqueeze(-1)
    start = (reports.progress.unsqueeze(-1) - age).clamp(min=0)
    return _prior_gain(reports, reports.seed_macs, quality, start, config)


def _prior_gain(
    reports: Reports, macs: Tensor, quality: Tensor, start: Tensor, config: HeuristicConfig
) -> Tensor:
    """Accuracy that a seed gains alone, by multiply-adds, blueprint and progress at its start."""
    per_env = (-1, *([1] * (macs.dim() - 1)))
    size = torch.log1p(macs / reports.host_macs.clamp(min=1).view(per_env))
    share = config.gain_scale * size.pow(config.gain_exponent) * quality
    # accuracy left to gain: what the host lacks plus what its seeds contribute
    contribution = torch.where(reports.contribution_known, reports.contribution.clamp(min=0), 0.0)
    lacking = 1 - reports.accuracy_history[:, 0] + contribution.sum(dim=-1)
    headroom = torch.where(reports.validation_known, lacking, torch.inf).clamp(max=config.headroom)
    return headroom.view(per_env) * share.clamp(max=1) * (1 - config.late_start_loss * start)


def _quality(reports: Reports, config: HeuristicConfig) -> Tensor:
    """Gain per multiply-add, `[N, S, B]`: 1 for several layers with a narrow receptive field."""
    has_positions = (reports.site_kind != int(SiteKind.VECTOR)).unsqueeze(-1)
    layers = torch.where(reports.depth > 1, 1.0, config.single_layer)
    return layers * (1 - config.reach_loss * reports.reach * has_positions)
