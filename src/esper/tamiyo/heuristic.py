"""A strong scripted controller: priors to grow on, evidence to prune on, and an eye on the clock.

1. *Grow* early, in every slot where a seed is likely to pay, the likeliest first. How much a seed
   should gain is a prior, fitted to measured growth: it rises with the arithmetic that the seed
   adds, m = log(1 + seed / host) in multiply-adds, as m^0.8; one layer gains less than several,
   far sight less than near, a late seed less than an early one; and a second seed finds part of
   the first one's gain already taken. (Once m is known, parameters and the depth of the site tell
   no more of the gain; parameters are what the rent is for.)
2. *Prune* what does not pay its rent, once it has been measured at full weight. A counterfactual
   contribution says what a host that has grown used to its seed loses without it, which is more
   than the host would lack had it trained without: contributions therefore say how the gain is
   shared out among the seeds, and the prior says how large it is. The less time is left to train
   without a seed, the more its contribution is what would be lacking. A seed whose contribution
   itself is below its rent is pruned whatever the prior says. The slot may try again, with
   another blueprint: where one failed, less than half of their gain is expected of the others.
3. *Commit* before the end: only committed seeds count. There is no time left to train without a
   seed, so now the contribution is the whole truth, and what does not pay is left uncommitted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.constants import SiteKind
from esper.leyline.factored_actions import ActionMasks
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tamiyo.scripted import Wish, check_ramp_steps, seed_details, take_first


@dataclass(frozen=True, kw_only=True)
class HeuristicConfig:
    """What the heuristic believes and how it acts. Gains are fractions of accuracy."""

    headroom: float = 0.23  # accuracy a host lacks at the end of training, if it does not yet show
    gain_scale: float = 0.35  # share of the headroom that a seed of several layers gains at m = 1
    gain_exponent: float = 0.8  # how gain rises with m
    single_layer: float = 0.8  # what a seed of one layer gains, as a share of that
    reach_loss: float = 0.5  # share lost by a seed that sees every position of a series or an image
    late_start_loss: float = 0.8  # share lost by a seed that grows at the very end
    after_failure: float = 0.4  # share still expected in a slot, for each seed that failed there
    crowding: float = 5.2  # a gain shrinks to 1 / (1 + crowding * share that other seeds gain)
    probe_crowding: float = 0.25  # part of the crowding that counts before seeds are measured
    evidence_weight: float = 0.7  # how far contributions decide who gains what
    optimism: float = 1.0  # standard errors that a contribution gets as the benefit of the doubt
    patience: int = 3  # steps at full weight before a seed is judged
    max_evidence_age: int = 3  # steps after which a contribution is too old to judge by
    last_start: float = 0.7  # progress after which nothing is grown
    behind_host_steps: int = 2  # steps that a seed trains behind its host before it blends
    spare_steps: int = 1  # steps kept free before the end beyond those that committing takes
    ramp_steps: int = 2  # length of the alpha ramp: one of TEMPO_STEPS

    def __post_init__(self) -> None:
        check_ramp_steps(self.ramp_steps)

    @property
    def trial_steps(self) -> int:
        """Steps from a seed's growth until it is judged, and those kept free."""
        return self.ramp_steps + self.patience + self.spare_steps


class HeuristicController:
    """Decides for a whole batch; remembers per env which blueprints have failed in which slot."""

    def __init__(self, config: HeuristicConfig | None = None):
        self.config = config or HeuristicConfig()
        self._failed: Tensor | None = None  # [N, S, B]
        self._seen: Tensor | None = None  # the blueprint last seen in each slot [N, S], or -1
        # of the last decision: its reports, its judgement, the value of growing, failures per slot
        self._last: tuple[Reports, SeedJudgement, Tensor, Tensor] | None = None

    @property
    def least_steps(self) -> int:
        """Steps that a run must have for a first seed to grow."""
        return self.config.trial_steps + 1  # to commit it

    def begin(self, env_ids: Tensor) -> None:
        if self._failed is not None and self._seen is not None:
            self._failed[env_ids] = False
            self._seen[env_ids] = -1

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        config, failed = self.config, self._take_in(reports)
        seeds = judge_seeds(reports, config)
        growth, blueprint = value_of_growing(reports, masks, seeds, failed, config)
        self._last = reports, seeds, growth, failed.sum(dim=-1)
        worth_growing = (growth > 0) & _in_time(reports, seeds, config)
        wishes = (
            *_commit(reports, seeds, config),
            Wish(LifecycleOp.PRUNE, seeds.is_judged & (seeds.net < 0), -seeds.net),
            Wish(LifecycleOp.ADVANCE, _is_ready_to_blend(reports, config), -reports.site_depth),
            Wish(LifecycleOp.GERMINATE, worth_growing, growth),
        )
        return take_first(masks, wishes, seed_details(blueprint, config.ramp_steps))

    def reasons(self, reports: Reports, masks: ActionMasks, actions: Tensor) -> list[str]:
        """Why it decided on `actions`, a text per env, empty where it waits.

        Gains and rent are in points, hundredths of the accuracy.
        """
        if self._last is None or self._last[0] is not reports:
            self.decide(reports, masks)
        assert self._last is not None
        _, seeds, growth, failures = self._last
        names = masks.action_space.names
        ops, slots = (actions[:, names.index(head)].tolist() for head in ("op", "slot"))
        return [
            _reason(LifecycleOp(op), (env, slot), reports, seeds, growth, failures, self.config)
            for env, (op, slot) in enumerate(zip(ops, slots, strict=True))
        ]

    def memory(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: what failed where, and what was seen last."""
        if self._failed is None or self._seen is None:
            return {}
        return {"failed": self._failed, "seen": self._seen}

    def recall(self, memory: dict[str, Tensor]) -> None:
        self._failed, self._seen = memory.get("failed"), memory.get("seen")

    def _take_in(self, reports: Reports) -> Tensor:
        """Which blueprints have failed in which slot by now, `[N, S, B]`."""
        if self._failed is None or self._seen is None:
            self._failed = torch.zeros_like(reports.fits)
            self._seen = torch.full_like(reports.blueprint, -1)
        if self._failed.shape != reports.fits.shape:
            raise ValueError(
                f"reports of {tuple(reports.fits.shape)} envs, slots and blueprints, but this "
                f"controller remembers {tuple(self._failed.shape)}; use one per environment"
            )
        rests = _is(reports.stage, SeedStage.EMBARGOED)
        every = torch.arange(reports.num_blueprints, device=reports.device)
        self._failed |= rests.unsqueeze(-1) & (self._seen.unsqueeze(-1) == every)
        has_seed = reports.blueprint >= 0
        self._seen = torch.where(has_seed, reports.blueprint, self._seen.masked_fill(rests, -1))
        return self._failed


@dataclass(frozen=True)
class SeedJudgement:
    """What is thought of the seeds, each `[N, S]`; a slot without a seed gains nothing."""

    is_live: Tensor  # takes part, can still be pruned, and is not being pruned already
    is_judged: Tensor  # live, and measured well enough to decide on
    is_fresh: Tensor  # its contribution is known and not too old to judge by
    gain: Tensor  # accuracy it would gain as the host's only seed
    marginal: Tensor  # what it adds beside the other seeds
    lacking: Tensor  # what the network would lack at the end, if it went now
    upper: Tensor  # its contribution with the benefit of the doubt
    rent: Tensor
    is_useless: Tensor  # does not bring its rent even so
    net: Tensor  # what keeping it is worth, less its rent and the compute it will use
    commit_net: Tensor  # what committing it now is worth, less its rent


def judge_seeds(reports: Reports, config: HeuristicConfig) -> SeedJudgement:
    """Prior and evidence together."""
    is_leaving = _is(reports.stage, SeedStage.BLENDING) & (reports.alpha_target == 0)
    is_live = (
        reports.slot_exists
        & ~is_leaving
        & _is(reports.stage, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
    )
    takes_part = is_live | _is(reports.stage, SeedStage.FOSSILIZED)
    prior = torch.where(takes_part, _prior_of_seeds(reports, config), 0.0)
    is_fresh = reports.contribution_known & (reports.contribution_age <= config.max_evidence_age)
    has_held = _is(reports.stage, SeedStage.HOLDING) & (reports.stage_age >= config.patience)
    gain = _share_out(prior, reports.contribution, is_fresh & takes_part, config)

    rent, compute = _seed_rent(reports), _seed_compute(reports)
    others = gain.sum(dim=-1, keepdim=True) - gain
    marginal = gain / (1 + config.crowding * others / config.headroom)
    upper = reports.contribution + config.optimism * reports.contribution_error
    is_useless = is_fresh & (upper < rent)
    felt = torch.where(is_fresh, torch.maximum(reports.contribution, marginal), marginal)
    lacking = marginal.lerp(felt, reports.progress.unsqueeze(-1))
    net = torch.where(is_useless, upper, lacking) - rent - compute
    commit_gain = torch.where(is_fresh, reports.contribution, marginal)
    return SeedJudgement(
        is_live=is_live,
        is_judged=is_live & is_fresh & has_held,
        is_fresh=is_fresh,
        gain=gain,
        marginal=marginal,
        lacking=lacking,
        upper=upper,
        rent=rent,
        is_useless=is_useless,
        net=net,
        commit_net=commit_gain - rent,
    )


def value_of_growing(
    reports: Reports,
    masks: ActionMasks,
    seeds: SeedJudgement,
    failed: Tensor,
    config: HeuristicConfig,
) -> tuple[Tensor, Tensor]:
    """The best blueprint of each slot by the prior, and what it should be worth; both `[N, S]`.

    A blueprint that has failed in a slot is not tried there again.
    """
    born = reports.progress.view(-1, 1, 1)
    quality = _quality(reports, config)
    gain = _prior_gain(reports, reports.cost_macs, quality, born, config)
    gain = gain * config.after_failure ** failed.sum(dim=-1, keepdim=True)
    taken = seeds.gain.sum(dim=-1).view(-1, 1, 1) / config.headroom
    gain = gain / (1 + config.probe_crowding * config.crowding * taken)
    host = reports.host_params.clamp(min=1).view(-1, 1, 1)
    added = (reports.params - reports.host_params).view(-1, 1, 1)
    extra = torch.log1p((added + reports.cost_params) / host) - torch.log1p(added / host)
    macs = reports.cost_macs / reports.host_macs.clamp(min=1).view(-1, 1, 1)
    charge = reports.rent.view(-1, 1, 1) * extra
    charge = charge + reports.compute_price.view(-1, 1, 1) * macs * (1 - born)
    legal = masks["blueprint"][:, int(LifecycleOp.GERMINATE)] & ~failed
    value, blueprint = torch.where(legal, gain - charge, -torch.inf).max(dim=-1)
    return value, blueprint


def _commit(reports: Reports, seeds: SeedJudgement, config: HeuristicConfig) -> tuple[Wish, Wish]:
    """Commit what pays while there are still steps enough; hurry what is not at full weight."""
    pays = seeds.is_live & (seeds.commit_net > 0)
    is_due = (reports.steps_left <= pays.sum(dim=-1) + config.spare_steps).unsqueeze(-1)
    is_held = _is(reports.stage, SeedStage.HOLDING)
    has_time = (reports.steps_left > 1).unsqueeze(-1)  # one step to hurry, one to commit
    return (
        Wish(LifecycleOp.FOSSILIZE, pays & is_due & is_held, seeds.commit_net),
        Wish(LifecycleOp.ADVANCE, pays & is_due & ~is_held & has_time, seeds.commit_net),
    )


def _reason(
    op: LifecycleOp,
    at: tuple[int, int],
    reports: Reports,
    seeds: SeedJudgement,
    growth: Tensor,
    failures: Tensor,
    config: HeuristicConfig,
) -> str:
    """The rule that led to an op at an env and slot, with its numbers."""
    steps = int(reports.steps_left[at[0]])
    left = f"{steps} step{'' if steps == 1 else 's'} left"
    rent, marginal = _points(seeds.rent[at]), _points(seeds.marginal[at])
    error = _points(reports.contribution_error[at], ".1f")
    worth = f"worth {_points(reports.contribution[at], '+.1f')} +- {error} points"
    if op == LifecycleOp.GERMINATE:
        tries = int(failures[at])
        though = f", though {tries} other{'' if tries == 1 else 's'} failed here" if tries else ""
        return f"expected to bring {_points(growth[at])} points more than it costs{though}; {left}"
    if op == LifecycleOp.PRUNE and bool(seeds.is_useless[at]):
        return f"{worth}: {_points(seeds.upper[at])} at best, below its rent of {rent}; {left}"
    if op == LifecycleOp.PRUNE:
        return (
            f"{worth} to a model used to it; without it, and with {left} to catch up, it is "
            f"expected to lack only {_points(seeds.lacking[at])}, below its rent of {rent}"
        )
    if op == LifecycleOp.FOSSILIZE:
        known = worth if bool(seeds.is_fresh[at]) else f"expected to gain {marginal} points"
        return f"{known}, above its rent of {rent}; {left}, time to commit"
    if op == LifecycleOp.ADVANCE:
        if bool(_commit(reports, seeds, config)[1].wanted[at]):
            return f"{left}: brought to full weight at once, to be committed in time"
        return f"trained behind the model for {int(reports.stage_age[at])} steps, time to blend in"
    return ""


def _points(share: Tensor, digits: str = ".2f") -> str:
    return f"{100 * float(share):{digits}}"


def _in_time(reports: Reports, seeds: SeedJudgement, config: HeuristicConfig) -> Tensor:
    """Whether a seed grown now can still ramp up, be judged and be committed, `[N, 1]`."""
    needed = config.trial_steps + seeds.is_live.sum(dim=-1) + 1  # one to commit each
    return ((reports.steps_left >= needed) & (reports.progress <= config.last_start)).unsqueeze(-1)


def _is_ready_to_blend(reports: Reports, config: HeuristicConfig) -> Tensor:
    is_behind_host = _is(reports.stage, SeedStage.TRAINING)
    return is_behind_host & (reports.stage_age >= config.behind_host_steps)


def _prior_of_seeds(reports: Reports, config: HeuristicConfig) -> Tensor:
    """The prior gain of the seed in each slot, `[N, S]`; meaningless where there is none."""
    chosen = reports.blueprint.clamp(min=0).unsqueeze(-1)
    quality = _quality(reports, config).gather(-1, chosen).squeeze(-1)
    episode_steps = reports.step + reports.steps_left
    age = reports.total_age / episode_steps.clamp(min=1).unsqueeze(-1)
    born = (reports.progress.unsqueeze(-1) - age).clamp(min=0)
    return _prior_gain(reports, reports.seed_macs, quality, born, config)


def _prior_gain(
    reports: Reports, macs: Tensor, quality: Tensor, born: Tensor, config: HeuristicConfig
) -> Tensor:
    """Accuracy that a seed gains alone, by its arithmetic, its build and the time it came."""
    per_env = (-1, *([1] * (macs.dim() - 1)))
    size = torch.log1p(macs / reports.host_macs.clamp(min=1).view(per_env))
    share = config.gain_scale * size.pow(config.gain_exponent) * quality
    headroom = _headroom(reports, config).view(per_env)
    return headroom * share.clamp(max=1) * (1 - config.late_start_loss * born)


def _quality(reports: Reports, config: HeuristicConfig) -> Tensor:
    """What a blueprint makes of its arithmetic, `[N, S, B]`: 1 for several layers that look near."""
    has_positions = (reports.site_kind != int(SiteKind.VECTOR)).unsqueeze(-1)
    layers = torch.where(reports.depth > 1, 1.0, config.single_layer)
    return layers * (1 - config.reach_loss * reports.reach * has_positions)


def _headroom(reports: Reports, config: HeuristicConfig) -> Tensor:
    """Accuracy that there is to gain, `[N]`: what the host lacks and what its seeds brought."""
    known = reports.contribution_known & reports.slot_exists
    brought = torch.where(known, reports.contribution.clamp(min=0), 0.0).sum(dim=-1)
    lacking = 1 - reports.validation_accuracy + brought
    return torch.where(reports.validation_known, lacking, torch.inf).clamp(max=config.headroom)


def _share_out(
    prior: Tensor, contribution: Tensor, known: Tensor, config: HeuristicConfig
) -> Tensor:
    """The prior gains of the seeds that were measured, shared out again by what they contribute."""
    measured = torch.where(known, contribution.clamp(min=0), 0.0)
    total_prior = torch.where(known, prior, 0.0).sum(dim=-1, keepdim=True)
    total = measured.sum(dim=-1, keepdim=True).clamp(min=1e-6)
    return torch.where(
        known, prior.lerp(measured / total * total_prior, config.evidence_weight), prior
    )


def _seed_rent(reports: Reports) -> Tensor:
    """The rent that would be saved without each seed, `[N, S]`."""
    host = reports.host_params.clamp(min=1).unsqueeze(-1)
    added = (reports.params - reports.host_params).unsqueeze(-1)
    without = (added - reports.seed_params).clamp(min=0)
    return reports.rent.unsqueeze(-1) * (torch.log1p(added / host) - torch.log1p(without / host))


def _seed_compute(reports: Reports) -> Tensor:
    """The charge for a seed's multiply-adds from now to the end, `[N, S]`."""
    macs = reports.seed_macs / reports.host_macs.clamp(min=1).unsqueeze(-1)
    return (reports.compute_price * (1 - reports.progress)).unsqueeze(-1) * macs


def _is(stage: Tensor, *stages: SeedStage) -> Tensor:
    matches = stage == int(stages[0])
    for other in stages[1:]:
        matches = matches | (stage == int(other))
    return matches
