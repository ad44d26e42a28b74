"""How Tamiyo learns to grow: N episodes side by side, then one PPO update, round after round.

trainer = VectorizedTrainer(environment, agent, max_steps=25)
for number in range(200):
    episodes = trainer.collect()
    metrics = trainer.learn(progress=number / 200)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.protocols import Environment, StepOutcome
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleOp
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, TamiyoRolloutStep
from esper.simic.rewards import GrowthReward, siblings_mean
from esper.simic.training.phase_clock import PhaseClock
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import FeatureLayout


class Episodes(NamedTuple):
    """What a round's episodes came to; the decisions themselves are in the buffer."""

    scores: Tensor  # [N]: of the committed networks, nan where the governor ended the episode
    rent: Tensor  # [N]
    host_params: Tensor  # [N]
    rolled_back: Tensor  # [N]
    accuracy: Tensor  # [N, T], after each step, as are those below
    added_params: Tensor
    cost_params: Tensor  # of the seed that the step germinated, or 0


class VectorizedTrainer:
    """An environment, an agent and the buffer between them."""

    def __init__(
        self,
        environment: Environment,
        agent: PPOAgent,
        *,
        max_steps: int,
        start_score: float = 0.0,
        rng_seed: int = 0,
    ):
        self.environment, self.agent = environment, agent
        space, config = environment.action_space, agent.policy.config
        self.layout = FeatureLayout(space.heads[1].size, space.heads[2].size)
        self.buffer = TamiyoRolloutBuffer(
            environment.num_envs,
            max_steps,
            self.layout.width,
            space,
            config.lstm_hidden_dim,
            config.lstm_layers,
            agent.device,
        )
        self.reward = GrowthReward(environment.num_envs, start_score=start_score)
        self.clock = PhaseClock()
        self.rng = torch.Generator(agent.device).manual_seed(rng_seed)  # what is sampled
        self.shuffle = torch.Generator().manual_seed(rng_seed)  # how rollouts are cut up

    def collect(
        self, *, deterministic: bool = False, should_stop: Callable[[], bool] = lambda: False
    ) -> Episodes | None:
        """One episode in every env, into the buffer; None if asked to stop before its end."""
        environment, agent, buffer, lap = self.environment, self.agent, self.buffer, self.clock.lap
        environment.reset()
        buffer.reset()
        self.reward.begin()
        lap("hosts")
        state = agent.policy.initial_state(environment.num_envs)
        running = torch.ones(environment.num_envs, dtype=torch.bool)
        owed = torch.zeros(environment.num_envs)  # to siblings, since the governor ended an episode
        trace: list[_TracedStep] = []
        while running.any():
            if should_stop():
                return None
            reports = environment.observe()
            lap("observe")
            seen = reports.to(agent.device)
            features = self.layout.features(seen)
            lap("features")
            masks = compute_batch_masks(seen, environment.action_space)
            lap("masks")
            decision = agent.act(
                features, masks, state, generator=self.rng, deterministic=deterministic
            )
            actions = decision.actions.cpu()
            lap("act")
            outcome = environment.step(actions)
            lap("hosts")
            rewards = self.reward.of(reports, outcome)
            usual = siblings_mean(rewards, environment.siblings)
            step = TamiyoRolloutStep(
                state=features,
                actions=decision.actions,
                log_probs=decision.log_probs,
                masks=decision.masks,
                value=decision.values,
                reward=rewards - usual,
                terminated=outcome.terminated,
                truncated=outcome.truncated,
                bootstrap_value=None,  # an episode is the task: it ends, it is never cut
                hidden_h=state.h,
                hidden_c=state.c,
            )
            if running.all():
                buffer.add_batch(step)
            else:  # envs that are over sit out
                env_ids = running.nonzero().squeeze(1)
                buffer.add_batch(step.select(env_ids), env_ids)
            owed += torch.where(running & ~outcome.rolled_back, 0.0, usual)
            running &= ~(outcome.terminated | outcome.truncated)
            state = decision.state
            lap("buffer")
            trace.append(_traced(reports, actions, outcome))
            lap("telemetry")
        return self._episodes(reports, trace, owed)

    def learn(self, progress: float = 0.0) -> dict[str, float]:
        """One update from what was collected; its metrics."""
        metrics = self.agent.update(self.buffer, progress=progress, generator=self.shuffle)
        self.clock.lap("update")
        return metrics

    def _episodes(self, reports: Reports, trace: list["_TracedStep"], owed: Tensor) -> Episodes:
        breakages, *per_step = (torch.stack(field, 1) for field in zip(*trace, strict=True))
        rolled_back = breakages.any(dim=1)
        for env in rolled_back.nonzero().flatten().tolist():
            self.buffer.mark_terminal_with_penalty(env, self.reward.penalty - float(owed[env]))
        return Episodes(
            torch.where(rolled_back, torch.nan, self.reward.scores),
            reports.rent,
            reports.host_params,
            rolled_back,
            *per_step,
        )


class _TracedStep(NamedTuple):
    """What is kept of a step beside the transition, each `[N]`."""

    rolled_back: Tensor
    accuracy: Tensor
    added_params: Tensor
    cost_params: Tensor


def _traced(reports: Reports, actions: Tensor, outcome: StepOutcome) -> _TracedStep:
    op, slot, blueprint = actions[:, :3].unbind(dim=-1)
    price = reports.cost_params[torch.arange(reports.num_envs), slot, blueprint]
    cost = torch.where(op == LifecycleOp.GERMINATE, price, 0.0)
    return _TracedStep(outcome.rolled_back, outcome.accuracy, outcome.added_params, cost)
