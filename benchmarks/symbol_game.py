"""A game in torch for the speed of environments on a GPU: name the symbol of some steps ago.

It speaks as Gymnasium's vector environments do: reset and step give tensors on the device. A time
limit cuts episodes; the mask allows the right symbol and about half of the others.
"""

from typing import ClassVar

import gymnasium
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

NUM_SYMBOLS = 8
EPISODE_STEPS = 52


class SymbolGame(VectorEnv):
    """N games, whose episodes start at different times."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}
    single_observation_space = spaces.Box(0.0, 1.0, (NUM_SYMBOLS,))

    def __init__(self, num_envs: int, device: str, lag: int = 4, num_heads: int = 1):
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.lag = lag
        self.num_heads = num_heads
        self.single_action_space: gymnasium.Space = spaces.Discrete(NUM_SYMBOLS)
        if num_heads > 1:
            self.single_action_space = spaces.MultiDiscrete([NUM_SYMBOLS] * num_heads)
        self.num_correct = torch.zeros((), device=self.device)
        self._symbols = torch.eye(NUM_SYMBOLS, device=self.device)
        self._never = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self._rng = torch.Generator(self.device).manual_seed(seed or 0)
        self._age = self._draw(EPISODE_STEPS, self.num_envs)
        self._past = self._draw(NUM_SYMBOLS, self.num_envs, self.lag + 1)  # the newest last
        return self._symbols[self._past[:, -1]], self._info()

    def step(self, actions: Tensor):
        first = actions if self.num_heads == 1 else actions[:, 0]
        is_correct = first == self._past[:, 0]
        rewards = (2.0 * is_correct - 1.0) * (self._age >= self.lag)
        self.num_correct += is_correct.sum()
        newest = self._draw(NUM_SYMBOLS, self.num_envs, 1)
        self._past = torch.cat([self._past[:, 1:], newest], dim=1)
        observation = self._symbols[newest[:, 0]]
        truncated = self._age == EPISODE_STEPS - 1
        self._age = torch.where(truncated, 0, self._age + 1)
        info = {"final_obs": observation, **self._info()}
        return observation, rewards, self._never, truncated, info

    def _info(self) -> dict[str, Tensor | dict[str, Tensor]]:
        size = (self.num_envs, NUM_SYMBOLS)
        legal = torch.rand(size, device=self.device, generator=self._rng) < 0.5
        legal.scatter_(1, self._past[:, :1], True)
        if self.num_heads == 1:
            return {"action_mask": legal}
        # the second head names the symbol again, among those that are legal after the first
        after = legal.unsqueeze(1).expand(-1, NUM_SYMBOLS, -1)
        return {"action_mask": {"action_0": legal, "action_1": after}}

    def _draw(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, device=self.device, generator=self._rng)
