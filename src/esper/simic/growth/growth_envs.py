"""Growing hosts as environments of the training loop: a round is one episode in every env."""

import math
from typing import Any

import torch
from torch import Tensor

from esper.leyline.protocols import StepOutcome
from esper.leyline.records import Episodes
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleOp
from esper.simic.agent.rollout import RolloutRow
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.growth.rewards import ROLLBACK_PENALTY, growth_score, siblings_mean
from esper.simic.trainer import EnvSpec, Observed, PhaseClock, Stepped
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import FeatureLayout
from esper.tolaria.environment import GrowthEnvironment


class GrowthEnvs:
    """Reports become features and masks; scores become rewards, relative to the siblings' mean.

    A step's reward is its change of score, measured after the action took effect and the host
    trained. No sequence of actions can farm it: undoing an action loses what the action gained.
    The first step is rewarded like any other: `start_score` is that of an untrained network.

    An env whose episode has ended, because its host was rolled back, sits out the rest of the
    round: its steps are not real and are not stored.
    """

    episodes: Episodes  # of the last round

    def __init__(
        self,
        environment: GrowthEnvironment,
        device: torch.device | str,
        *,
        start_score: float = 0.0,
        controls: int = 0,
        clock: PhaseClock | None = None,
    ):
        """`controls` envs of each group of siblings only wait: the others are compared with them."""
        space = environment.action_space
        self.environment = environment
        self.device = device
        self.layout = FeatureLayout(space.heads[1].size, space.heads[2].size)
        self.num_envs = environment.num_envs
        self.spec = EnvSpec(environment.num_envs, self.layout.width, space)
        if controls >= environment.siblings:
            raise ValueError(f"controls={controls}, but only {environment.siblings} siblings")
        self._num_learners = environment.siblings - controls  # of a group
        place = torch.arange(self.num_envs) % environment.siblings
        self._control_envs = (place >= self._num_learners).nonzero().flatten().to(device)
        self._start_score = start_score
        self.clock = clock or PhaseClock()

    def begin_round(self) -> None:
        self.environment.reset()
        self.scores = torch.full((self.num_envs,), self._start_score)
        self.clock.lap("hosts")
        self._starts = torch.ones(self.num_envs, dtype=torch.bool)
        self._is_running = torch.ones(self.num_envs, dtype=torch.bool)
        self._lengths = torch.zeros(self.num_envs, dtype=torch.int64)
        # siblings' rewards after the governor ended an episode: the env is compared with them too
        self._sibling_correction = torch.zeros(self.num_envs)
        # of each step: rolled back, accuracy, added parameters and those of a new seed, each [N]
        self._trace: list[tuple[Tensor, ...]] = []
        self.rollback_reasons: list[str | None] = [None] * self.num_envs

    def observe(self, row: RolloutRow) -> Observed:
        self.reports = self.environment.observe()
        self.clock.lap("observe")
        reports = self.reports.to(self.device)
        row.states.copy_(self.layout.features(reports))
        self.clock.lap("features")
        masks = compute_batch_masks(reports, self.spec.action_space)
        if len(self._control_envs):
            masks["op"][self._control_envs, LifecycleOp.WAIT + 1 :] = False
        self.clock.lap("masks")
        return Observed(masks, self._starts)

    def step(self, row: RolloutRow) -> Stepped:
        actions = row.actions.cpu()
        is_real = self._is_running
        result = self.environment.step(actions)
        self.clock.lap("hosts")
        reasons = self.environment.rollback_reasons
        for env in (is_real & result.rolled_back).nonzero().flatten().tolist():
            self.rollback_reasons[env] = reasons.get(env, "rolled back")
        rewards = self._rewards(self.reports, result)
        sibling_mean = siblings_mean(rewards, self.environment.siblings)
        continues = is_real & ~result.rolled_back
        self._sibling_correction += torch.where(continues, 0.0, sibling_mean)
        row.rewards.copy_(rewards - sibling_mean)
        row.terminated.copy_(result.terminated)
        row.truncated.fill_(False)  # the horizon is the task: it terminates
        self.clock.lap("buffer")
        self._starts = torch.zeros_like(is_real)
        self._is_running = is_real & ~result.terminated
        self._lengths += is_real
        op, slot, blueprint = actions[:, :3].unbind(dim=-1)
        price = self.reports.cost_params[torch.arange(self.num_envs), slot, blueprint]
        cost = torch.where(op == LifecycleOp.GERMINATE, price, 0.0)
        self._trace.append((result.rolled_back, result.accuracy, result.added_params, cost))
        self.clock.lap("telemetry")
        return Stepped(is_real, None, round_over=not bool(self._is_running.any()))

    def _rewards(self, reports: Reports, result: StepOutcome) -> Tensor:
        """Changes of score `[N]`; a rollback gets the penalty."""
        charge = reports.compute_price * result.added_compute
        sizes = result.added_params, reports.host_params
        scores = growth_score(result.accuracy, *sizes, reports.rent, charge)
        rewards = torch.where(result.rolled_back, ROLLBACK_PENALTY, scores - self.scores)
        self.scores = torch.where(result.rolled_back, self.scores, scores)
        return rewards

    def end_round(self, buffer: TamiyoRolloutBuffer) -> dict[str, float]:
        """Give the rolled back their penalty, relative to the whole episode of their siblings."""
        rollbacks, *rows = (torch.stack(field, 1) for field in zip(*self._trace, strict=True))
        rolled_back = rollbacks.any(dim=1)
        for env in rolled_back.nonzero().flatten().tolist():
            penalty = ROLLBACK_PENALTY - float(self._sibling_correction[env])
            buffer.mark_terminal_with_penalty(env, penalty)
        scores = torch.where(rolled_back, torch.nan, self.scores)
        reports = self.reports
        facts = (scores, reports.rent, reports.host_params, self._lengths, rolled_back)
        self.episodes = Episodes(*facts, *rows)
        return self._metrics()

    def _metrics(self) -> dict[str, float]:
        episodes = self.episodes
        finished = ~episodes.rolled_back
        last = (torch.arange(self.num_envs), episodes.lengths - 1)
        growth = episodes.added_params[last] / episodes.host_params
        lead = {"episode/lead": self._lead(episodes)} if self.environment.siblings > 1 else {}
        return {
            "episode/score": _mean(episodes.scores[finished]),
            **lead,
            "episode/accuracy": _mean(episodes.accuracy[last][finished]),
            "episode/added_params": _mean(episodes.added_params[last][finished]),
            "episode/growth": _mean(growth[finished]),
            "episode/germinations": _mean((episodes.cost_params > 0).float().sum(dim=1)),
            "episode/rolled_back": _mean(episodes.rolled_back.float()),
        }

    def _lead(self, episodes: Episodes) -> float:
        """Mean score less that of siblings in which nothing germinated, where there are any."""
        groups = -1, self.environment.siblings
        scores = episodes.scores.view(groups)
        is_ungrown = (episodes.cost_params == 0).all(dim=1).view(groups)
        ungrown = torch.where(is_ungrown, scores, torch.nan).nanmean(dim=1)
        leads = scores[:, : self._num_learners].nanmean(dim=1) - ungrown
        return _mean(leads[leads.isfinite()])

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.environment.generator.get_state()}  # determines all of a round

    def load_state_dict(self, state: dict[str, Any], generator: torch.Generator) -> None:
        self.environment.generator.set_state(state["generator"])


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else math.nan
