"""Recurrent PPO as a careful engineer writes it in plain torch: a rival for `throughput.py`.

One LSTM of 128 for actor and critic. In the update the LSTM of `torch.nn` runs from one row in which
any env of the minibatch starts an episode to the next, and the state of those envs is zeroed there.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Network(nn.Module):
    def __init__(self, num_features: int, num_actions: int, width: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(num_features, width), nn.Tanh())
        self.lstm = nn.LSTM(width, width)
        self.readout = nn.Linear(width, num_actions + 1)

    def forward(self, features: Tensor, starts: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Logits and values `[T, B, actions + 1]`, and the state after the last row."""
        encoded = self.encoder(features)
        any_start = starts.any(dim=1)
        any_start[0] = True
        edges = [*any_start.nonzero()[:, 0].tolist(), len(features)]
        outputs = []
        for first, end in pairwise(edges):
            keep = (~starts[first]).float()[None, :, None]
            state = (state[0] * keep, state[1] * keep)
            output, state = self.lstm(encoded[first:end], state)
            outputs.append(output)
        return self.readout(encoded + torch.cat(outputs)), state


class PlainRecurrentPPO:
    def __init__(
        self,
        makers: Sequence[Callable[[], Any]],
        horizon: int,
        *,
        passes: int,
        minibatches: int = 4,
    ) -> None:
        self.envs = [make() for make in makers]
        self.horizon, self.passes, self.minibatches = horizon, passes, minibatches
        num_features = int(np.prod(self.envs[0].observation_space.shape))
        self.network = Network(num_features, int(self.envs[0].action_space.n))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3, eps=1e-5)
        observations = [env.reset(seed=i)[0] for i, env in enumerate(self.envs)]
        self.observation = torch.from_numpy(np.stack(observations).astype(np.float32))
        self.starts = torch.ones(len(makers), dtype=torch.bool)
        zeros = torch.zeros(1, len(makers), 128)
        self.state = (zeros, zeros)

    def round(self) -> None:
        size = (self.horizon, len(self.envs))
        features = torch.zeros(*size, self.observation.shape[1])
        starts = torch.zeros(size, dtype=torch.bool)
        actions = torch.zeros(size, dtype=torch.int64)
        log_probs, values, rewards, ends = torch.zeros(4, *size)
        initial = self.state
        for t in range(self.horizon):
            features[t], starts[t] = self.observation, self.starts
            with torch.no_grad():
                read, self.state = self.network(features[t : t + 1], starts[t : t + 1], self.state)
            policy = torch.distributions.Categorical(logits=read[0, :, :-1])
            actions[t] = policy.sample()
            log_probs[t], values[t] = policy.log_prob(actions[t]), read[0, :, -1]
            for n, env in enumerate(self.envs):
                observation, reward, terminated, truncated, _ = env.step(int(actions[t, n]))
                rewards[t, n], ends[t, n] = float(reward), float(terminated or truncated)
                if terminated or truncated:
                    observation, _ = env.reset()
                self.observation[n] = torch.from_numpy(observation)
            self.starts = ends[t].bool()
        with torch.no_grad():
            read, _ = self.network(self.observation[None], self.starts[None], self.state)
        advantages, later = torch.zeros(size), torch.zeros(size[1])
        following = read[0, :, -1]
        for t in reversed(range(self.horizon)):
            keep = 1 - ends[t]
            delta = rewards[t] + 0.99 * following * keep - values[t]
            later = delta + 0.99 * 0.95 * keep * later
            advantages[t], following = later, values[t]
        self._learn(features, starts, actions, log_probs, advantages, advantages + values, initial)

    def _learn(self, *rollout: Any) -> None:
        features, starts, actions, old_log_probs, advantages, returns, initial = rollout
        for _ in range(self.passes):
            for envs in torch.randperm(features.shape[1]).chunk(self.minibatches):
                state = tuple(part[:, envs] for part in initial)
                read, _ = self.network(features[:, envs], starts[:, envs], state)
                policy = torch.distributions.Categorical(logits=read[..., :-1])
                ratio = (policy.log_prob(actions[:, envs]) - old_log_probs[:, envs]).exp()
                advantage = advantages[:, envs]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                clipped = ratio.clamp(0.8, 1.2)
                policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
                value_loss = (read[..., -1] - returns[:, envs]).square().mean()
                self.optimizer.zero_grad()
                (policy_loss + 0.5 * value_loss).backward()
                nn.utils.clip_grad_norm_(self.network.parameters(), 0.5)
                self.optimizer.step()
