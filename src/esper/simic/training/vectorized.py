"""How Tamiyo learns to grow: N episodes side by side, then one PPO update, round after round.

trainer = VectorizedTrainer(environment, agent)
for summary in trainer.rounds(200):
    print(summary.metrics)
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.protocols import Environment
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, TamiyoRolloutStep
from esper.simic.rewards import GrowthReward
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import FeatureLayout


class RoundSummary(NamedTuple):
    """One round: what the episodes scored, and what the update measured."""

    scores: Tensor  # [N]: of the committed networks
    rent: Tensor  # [N]
    metrics: dict[str, float]


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
        self.rng = torch.Generator(agent.device).manual_seed(rng_seed)  # what is sampled
        self.shuffle = torch.Generator().manual_seed(rng_seed)  # how rollouts are cut up

    def rounds(self, num_rounds: int) -> Iterator[RoundSummary]:
        """Collect and learn, `num_rounds` times."""
        for number in range(num_rounds):
            rent = self.collect()
            metrics = self.agent.update(
                self.buffer, progress=number / num_rounds, generator=self.shuffle
            )
            yield RoundSummary(self.reward.scores, rent, metrics)

    def collect(self, *, deterministic: bool = False) -> Tensor:
        """One episode in every env, into the buffer; the rent of each."""
        environment, agent, buffer = self.environment, self.agent, self.buffer
        environment.reset()
        buffer.reset()
        self.reward.begin()
        state = agent.policy.initial_state(environment.num_envs)
        running = torch.ones(environment.num_envs, dtype=torch.bool)
        while running.any():
            reports = environment.observe()
            features = self.layout.features(reports).to(agent.device)
            masks = compute_batch_masks(reports, environment.action_space).to(agent.device)
            decision = agent.act(
                features, masks, state, generator=self.rng, deterministic=deterministic
            )
            outcome = environment.step(decision.actions)
            step = TamiyoRolloutStep(
                state=features,
                actions=decision.actions,
                log_probs=decision.log_probs,
                masks=decision.masks,
                value=decision.values,
                reward=self.reward.of(reports, outcome),
                terminated=outcome.terminated,
                truncated=outcome.truncated,
                bootstrap_value=None,  # an episode is the task: it ends, it is never cut
                hidden_h=state.h,
                hidden_c=state.c,
            )
            env_ids = running.nonzero().squeeze(1)  # envs that are over sit out
            buffer.add_batch(step.select(env_ids), env_ids)
            running &= ~(outcome.terminated | outcome.truncated)
            state = decision.state
        return reports.rent
