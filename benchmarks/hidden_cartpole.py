"""Environments that several benchmarks use."""

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class HiddenVelocities(gymnasium.ObservationWrapper):
    """CartPole that shows positions only: the policy must remember to see motion."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        limits = env.observation_space
        self.observation_space = spaces.Box(limits.low[[0, 2]], limits.high[[0, 2]])

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


def hidden_cartpole() -> gymnasium.Env:
    return HiddenVelocities(gymnasium.make("CartPole-v1"))


def hidden_cartpole_envs(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([hidden_cartpole] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
