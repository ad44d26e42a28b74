"""The controller for a user's model: grows on measured evidence, keeps on measured gain.

1. *Grow* where the gradient of a possible seed shows the largest expected fall of the loss for its
   cost in parameters and multiply-adds. Nothing grows before the model has trained for a while, nor
   so late that a seed could not learn.
2. *Prune* a seed that has not paid its rent once it was at full weight. With measured contributions:
   one whose upper bound is below the rent. Without: one since whose growth the metric has not
   clearly risen.
3. *Commit* before the end, by the same numbers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tamiyo.scripted import RAMP_STEPS, Wish, is_in, log_growth, may_be_kept, take_first


@dataclass(frozen=True, kw_only=True)
class EvidenceConfig:
    first_start: float = 0.03  # progress before which nothing is grown
    last_start: float = 0.4  # progress after which nothing is grown
    cost_power: float = 0.25  # 0: the largest gain first; 1: the largest gain for its cost
    macs_weight: float = 0.25  # of multiply-adds in that cost; of parameters 1
    macs_ratio: float = 1.5  # most growth of multiply-adds, by that of the parameter budget
    optimism: float = 1.0  # standard errors added to a contribution for its upper bound
    least_rise: float = 3.0  # standard errors by which the metric must rise without contributions
    patience: int = 3  # steps at full weight before a seed is judged
    shadow_steps: int = 2  # steps of shadow training before a seed blends
    spare_steps: int = 1  # steps kept free before the end beyond those that committing takes


class EvidenceController:
    """Needs `see` before `decide`; remembers failures and the metric at each germination."""

    def __init__(self, config: EvidenceConfig | None = None):
        self.config = config or EvidenceConfig()
        self._gain = torch.zeros(0)  # [S, B]
        # "born", the metric before the seed grew, and "failed", both [1, S]; empty at first
        self._memory: dict[str, Tensor] = {}

    @property
    def least_steps(self) -> int:
        """Fewest steps of a run in which a seed can be grown and committed."""
        config = self.config
        return RAMP_STEPS + config.patience + config.spare_steps + 1  # to commit it

    def wants_evidence(self, progress: float) -> bool:
        """Whether it may grow a seed at this progress."""
        return self.config.first_start <= progress <= self.config.last_start

    def see(self, gain: Tensor) -> None:
        """Expected gain of each slot and blueprint `[S, B]`, measured since the last decision."""
        self._gain = gain

    def judges(self, stage: Tensor, stage_age: Tensor) -> Tensor:
        """Whose contribution it needs at the next decision, `[N, S]`: every other one is enough."""
        overdue = stage_age + 1 - self.config.patience
        return is_in(stage, SeedStage.HOLDING) & (overdue >= 0) & (overdue % 2 == 0)

    def begin(self, env_ids: Tensor) -> None:
        self._memory = {}

    def memory(self) -> dict[str, Tensor]:
        return self._memory

    def recall(self, memory: dict[str, Tensor]) -> None:
        self._memory = memory

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        judged = self._judge(reports, masks)
        config, live = self.config, judged.is_live
        is_held = is_in(reports.stage, SeedStage.HOLDING)
        pays = live & judged.is_known & (judged.lower > judged.rent)
        is_due = (reports.steps_left <= pays.sum(dim=-1) + config.spare_steps).unsqueeze(-1)
        in_shadow = is_in(reports.stage, SeedStage.TRAINING)
        is_ready = in_shadow & (reports.stage_age >= config.shadow_steps)
        has_held = is_held & (reports.stage_age >= config.patience)
        fails = has_held & live & judged.is_known & (judged.upper < judged.rent)
        wishes = (
            Wish(LifecycleOp.FOSSILIZE, pays & is_due & is_held, judged.lower),
            Wish(LifecycleOp.PRUNE, fails, -judged.upper),
            Wish(LifecycleOp.ADVANCE, is_ready, -reports.site_depth),
            Wish(LifecycleOp.GERMINATE, judged.value > 0, judged.value),
        )
        actions = take_first(masks, wishes, judged.blueprint)
        op, slot = actions[0, :2].tolist()
        if op == LifecycleOp.GERMINATE:
            self._memory["born"][0, slot] = judged.level[0, 0]
        if op == LifecycleOp.PRUNE:
            self._memory["failed"][0, slot] = True
        return actions

    def reasons(self, reports: Reports, masks: ActionMasks, actions: Tensor) -> list[str]:
        """The reason for the action; gains and rent are in points, hundredths of the metric."""
        op, slot = actions[0, :2].tolist()
        judged, at = self._judge(reports, masks), (0, slot)
        rent = f"its rent of {_points(judged.rent[at])}"
        low, high = (_points(x[at], "+.1f") for x in (judged.lower, judged.upper))
        of_what = (
            f"worth {low} to {high} points"
            if bool(reports.contribution_known[at])
            else f"the metric has risen by {low} points or more since it grew"
            if op == LifecycleOp.FOSSILIZE
            else f"the metric has not clearly risen since it grew, {high} points"
        )
        if op == LifecycleOp.GERMINATE:
            next_best = float(judged.value[0].topk(min(2, judged.value.shape[1])).values[-1])
            ahead = float(judged.value[at]) / max(next_best, 1e-9)
            than = f", {ahead:.1f} times that of the next site" if 1 < ahead < 1e3 else ""
            return [f"the largest expected fall of the loss for its cost{than}"]
        if op == LifecycleOp.PRUNE:
            return [f"{of_what}, below {rent}"]
        if op == LifecycleOp.FOSSILIZE:
            return [f"{of_what}, above {rent}; time to commit"]
        return ["trained in shadow, time to blend in" if op == LifecycleOp.ADVANCE else ""]

    def _judge(self, reports: Reports, masks: ActionMasks) -> "_Judgement":
        config, nowhere = self.config, torch.zeros_like(reports.contribution)
        self._memory = self._memory or {"born": nowhere, "failed": nowhere.bool()}
        is_live = may_be_kept(reports)
        level, noise = _level(reports)
        shown = level - self._memory["born"] - config.least_rise * noise  # a rise beyond the noise
        has_history = reports.accuracy_history_known[:, 2:3]
        known, error = reports.contribution_known, reports.contribution_error
        value, blueprint = self._value(reports, masks, is_live)
        return _Judgement(
            is_live=is_live,
            is_known=known | has_history,
            lower=torch.where(known, reports.contribution, shown),
            # without contributions a rise must be shown, so there is no benefit of the doubt
            upper=torch.where(known, reports.contribution + config.optimism * error, shown),
            rent=reports.rent.view(-1, 1)
            * _growth(reports, reports.seed_params, reports.seed_macs, is_present=True),
            value=value,
            blueprint=blueprint,
            level=level,
        )

    def _value(
        self, reports: Reports, masks: ActionMasks, is_live: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The best blueprint of each slot by expected gain for its cost, both `[1, S]`."""
        config = self.config
        has_failed = self._memory["failed"].unsqueeze(-1)
        legal = masks["blueprint"][:, int(LifecycleOp.GERMINATE)] & ~has_failed
        is_seen = self._gain.shape == reports.fits.shape[1:]
        gain = self._gain if is_seen else torch.zeros_like(reports.cost_params)
        needed = self.least_steps - 1 + is_live.sum(dim=-1)
        in_time = (reports.progress >= config.first_start) & (reports.progress <= config.last_start)
        in_time = (in_time & (reports.steps_left >= needed)).view(-1, 1, 1)
        in_time = in_time & self._is_in_step(reports)
        cost = _growth(reports, reports.cost_params, reports.cost_macs, config.macs_weight)
        cost = cost.clamp(min=1e-6)
        value = torch.where(legal & in_time, gain / cost**config.cost_power, 0.0)
        best, blueprint = value.max(dim=-1)
        return best, blueprint

    def _is_in_step(self, reports: Reports) -> Tensor:
        """Whether multiply-adds would grow about as much as parameters may, `[1, S, B]`.

        A budget of multiply-adds replaces this rule; without any budget there is no limit.
        """
        limit = (reports.params + reports.params_left) / reports.host_params.clamp(min=1)
        limit = torch.where(reports.macs_left.isinf(), self.config.macs_ratio * limit, torch.inf)
        macs = reports.macs.view(-1, 1, 1) + reports.cost_macs
        return macs <= (limit * reports.host_macs).view(-1, 1, 1)


class _Judgement(NamedTuple):
    """Each `[1, S]`, except the level."""

    is_live: Tensor
    is_known: Tensor  # there is a measurement to judge by
    lower: Tensor  # what the seed is worth, in the metric
    upper: Tensor
    rent: Tensor
    value: Tensor  # of growing the best blueprint
    blueprint: Tensor
    level: Tensor  # [1, 1]: the metric now


def _level(reports: Reports) -> tuple[Tensor, Tensor]:
    """The mean of the last three metrics, and the standard error of a difference of two, `[1, 1]`.

    The noise of one metric is estimated from second differences, which a steady rise leaves at 0.
    """
    known, metric = reports.accuracy_history_known, reports.accuracy_history
    recent = torch.where(known[:, :3], metric[:, :3], 0.0).sum(1) / known[:, :3].sum(1).clamp(min=1)
    bends = metric[:, :-2] - 2 * metric[:, 1:-1] + metric[:, 2:]
    has_bend = known[:, 2:]
    mean = torch.where(has_bend, bends.square(), 0.0).sum(1) / has_bend.sum(1).clamp(min=1)
    noise = (mean / 6 * 2 / 3).sqrt()
    return recent.unsqueeze(1), noise.unsqueeze(1)


def _growth(
    reports: Reports,
    params: Tensor,
    macs: Tensor,
    macs_weight: float = 1.0,
    *,
    is_present: bool = False,
) -> Tensor:
    """How much seeds enlarge the network, in both costs."""
    of_params = log_growth(params, reports.host_params, reports.params, is_present=is_present)
    of_macs = log_growth(macs, reports.host_macs, reports.macs, is_present=is_present)
    return of_params + macs_weight * of_macs


def _points(share: Tensor, digits: str = ".2f") -> str:
    return f"{100 * float(share):{digits}}"
