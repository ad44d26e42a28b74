"""The environments of a `SyncVectorEnv`, stepped one by one and reset when their episode ends.

What `SyncVectorEnv` does besides is not needed here: it checks, copies and batches observations, and
spends a step on every reset. The episodes are the same.
"""

import copy
from typing import Any

import numpy as np

from esper.simic.gym.entries import Array


class DirectEnvs:
    """The environments of a `SyncVectorEnv`, as a vector environment in SAME_STEP mode.

    Observations are lists with one for each env. Of the infos of a step, only `mask_key` is kept.
    """

    def __init__(self, vector_env: Any, mask_key: str):
        self._envs = vector_env.envs
        self._action_space = vector_env.action_space
        self._mask_key = mask_key

    def reset(self, seed: int) -> tuple[list[Any], dict[str, Any]]:
        """Start a new episode in every env; env i gets the seed plus i."""
        started = [env.reset(seed=seed + place) for place, env in enumerate(self._envs)]
        infos = [info for _, info in started]
        names = dict.fromkeys(name for info in infos for name in info)  # for errors
        return [observation for observation, _ in started], names | self._masks(infos)

    def step(self, actions: Any) -> tuple[list[Any], Array, Array, Array, dict[str, Any]]:
        """Take an action in every env; envs whose episode ended return the next one's start."""
        from gymnasium.vector.utils import iterate

        num_envs = len(self._envs)
        rewards = np.zeros(num_envs, dtype=np.float64)
        terminated = np.zeros(num_envs, dtype=bool)
        truncated = np.zeros(num_envs, dtype=bool)
        final = np.full(num_envs, None, dtype=object)
        observations = []
        infos = []
        for place, action in enumerate(iterate(self._action_space, actions)):
            env = self._envs[place]
            observation, rewards[place], is_terminated, is_truncated, info = env.step(action)
            terminated[place] = is_terminated
            truncated[place] = is_truncated
            if is_terminated or is_truncated:
                final[place] = copy.deepcopy(observation)  # environments reuse their arrays
                observation, info = env.reset()
            observations.append(observation)
            infos.append(info)
        return (
            observations,
            rewards,
            terminated,
            truncated,
            {"final_obs": final} | self._masks(infos),
        )

    def _masks(self, infos: list[dict[str, Any]]) -> dict[str, Any]:
        """The masks among the infos, and which envs gave one, as a vector environment gives them."""
        key = self._mask_key
        is_given = np.array([key in info for info in infos])
        if not is_given.any():
            return {}
        return {key: [info.get(key) for info in infos], f"_{key}": is_given}
