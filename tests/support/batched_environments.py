"""Environments that compute all their episodes at once: as NumPy arrays, or as tensors on a device.

`Counters` is a vector environment of Gymnasium; `PointMasses` only speaks like one, as Isaac Lab's
environments do. Neither draws a random number within an episode, so every rollout can be computed.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from esper.leyline.factored_actions import Head

ROW_THEN_COLUMN = (Head("row", 2), Head("column", 3, given=("row",)))


class Counters(VectorEnv):
    """Each env counts its steps, and ends itself or is cut off at a length of its own.

    `show` is what an observation is: an array of "numbers", a "dict" of several entries, or a
    "picture". `masks` come with "info", "observation" (a dict), or as a "method". A step pays its
    count and a part of the action. `xp` is numpy, torch or jax.numpy.
    """

    lengths = (3, 4, 1, 6)
    terminates = (False, True, False, True)

    def __init__(
        self,
        mode: AutoresetMode,
        show: str = "numbers",
        masks: str | None = None,
        *,
        xp: Any = np,
        device: str | None = None,
        dependent: bool = False,
    ):
        self.metadata = {"autoreset_mode": mode}
        self.mode, self.show, self.masks = mode, show, masks
        self.xp, self.device, self.dependent = xp, device, dependent
        self.num_envs = len(self.lengths)
        self.single_action_space = (
            spaces.MultiDiscrete([2, 3]) if dependent else spaces.Discrete(3, start=1)
        )
        self.single_observation_space = self.observation_space_of_one()
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.env_ids = xp.arange(self.num_envs, device=device)
        self.limits = xp.asarray(self.lengths, device=device)
        self.ends_itself = xp.asarray(self.terminates, device=device)
        self.num_illegal = xp.asarray(0, device=device)
        if masks == "method":
            self.action_masks = self.legal

    def observation_space_of_one(self) -> spaces.Space:
        if self.show == "picture":
            return spaces.Box(0, 255, (5, 4, 3), np.uint8)
        numbers = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        if self.show == "numbers":
            return numbers
        entries = {"numbers": numbers, "step": spaces.Discrete(8), "bits": spaces.MultiBinary(3)}
        if self.masks == "observation":
            row, column = spaces.MultiBinary(2), spaces.MultiBinary((2, 3))
            of_heads = spaces.Dict({"row": row, "column": column})
            entries["action_mask"] = of_heads if self.dependent else spaces.MultiBinary(3)
        return spaces.Dict(entries)

    def reset(self, *, seed: int | None = None, options: Any = None):
        xp = self.xp
        everywhere = xp.ones(self.num_envs, dtype=xp.bool, device=self.device)
        chosen = everywhere if options is None else options["reset_mask"]
        if options is None:
            self.counts = xp.zeros(self.num_envs, dtype=xp.int64, device=self.device)
            self.episodes = self.counts
            self.ended = ~everywhere
        self.begin_episodes(chosen)
        return self.observe(), self.infos()

    def begin_episodes(self, chosen: Any) -> None:
        self.counts = self.xp.where(chosen, 0, self.counts)
        self.episodes = self.episodes + self.as_type(chosen, "int64")
        self.ended = self.ended & ~chosen

    def step(self, actions: Any):
        xp = self.xp
        fillers = self.ended  # none, but with NEXT_STEP
        self.count_illegal(actions, fillers)
        self.begin_episodes(fillers)
        self.counts = xp.where(fillers, self.counts, self.counts + 1)
        choice = actions[:, -1] if self.dependent else actions
        reward = self.as_type(self.counts, "float32") + 0.25 * self.as_type(choice, "float32")
        over = (self.counts == self.limits) & ~fillers
        self.ended = over
        terminated, truncated = over & self.ends_itself, over & ~self.ends_itself
        final = {}
        if self.mode == AutoresetMode.SAME_STEP:
            final = {"final_obs": self.observe(), "_final_obs": over}
            self.begin_episodes(over)
        reward = xp.where(fillers, 0.0, reward)
        return self.observe(), reward, terminated, truncated, final | self.infos()

    def observe(self) -> Any:
        xp = self.xp
        count = self.counts + 1
        if self.show == "picture":
            pixels = xp.arange(60, device=self.device).reshape((1, 5, 4, 3))
            brightness = (7 * count + 31 * self.env_ids + self.episodes).reshape((-1, 1, 1, 1))
            return self.as_type((pixels * brightness) % 251, "uint8")
        parts = [count / 4, self.env_ids + 0.125 * self.episodes]
        numbers = xp.stack([self.as_type(part, "float32") for part in parts], -1)
        if self.show == "numbers":
            return numbers
        step = self.counts % 8
        bits = xp.stack([self.as_type((count >> place) % 2, "int8") for place in range(3)], -1)
        observation = {"numbers": numbers, "step": step, "bits": bits}
        if self.masks == "observation":
            observation["action_mask"] = self.legal_as_numbers()
        return observation

    def infos(self) -> dict[str, Any]:
        return {"action_mask": self.legal()} if self.masks == "info" else {}

    def legal(self) -> Any:
        """Two of three choices; of dependent heads, one column in each legal row."""
        xp = self.xp
        turn = (self.counts + self.env_ids + self.episodes)[:, None]
        choices = xp.arange(3, device=self.device)[None]
        if not self.dependent:
            return (choices + turn) % 3 != 0
        rows = xp.arange(2, device=self.device)[None]
        row = (rows + turn) % 4 != 0
        column = (choices[:, None] + rows[..., None] + turn[..., None]) % 3 == 0
        return {"row": row, "column": column & row[..., None]}

    def legal_as_numbers(self) -> Any:
        legal = self.legal()
        if not self.dependent:
            return self.as_type(legal, "int8")
        return {head: self.as_type(mask, "int8") for head, mask in legal.items()}

    def count_illegal(self, actions: Any, fillers: Any) -> None:
        """Looking at every step whether there is one would wait for a GPU."""
        if self.masks is None:
            return
        legal = self.legal()
        if self.dependent:
            row, column = actions[:, 0], actions[:, 1]
            is_legal = legal["row"][self.env_ids, row] & legal["column"][self.env_ids, row, column]
        else:
            is_legal = legal[self.env_ids, actions - 1]
        self.num_illegal = self.num_illegal + (~is_legal & ~fillers).sum()

    def as_type(self, array: Any, name: str) -> Any:
        return self.xp.asarray(array, dtype=getattr(self.xp, name))


class PointMasses(gymnasium.Env):
    """Speaks like an environment of Isaac Lab: tensors, unbounded actions, resets within a step.

    A mass is pushed along a line and should stay at 0; an episode ends where it is far away, or is
    cut off after some steps.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_observation_space = spaces.Dict({"policy": spaces.Box(-np.inf, np.inf, (2,))})
    single_action_space = spaces.Box(-np.inf, np.inf, (1,))

    def __init__(self, num_envs: int, device: str = "cpu", *, compute_final_obs: bool = True):
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.compute_final_obs = compute_final_obs
        self.extras: dict[str, Any] = {}  # kept from step to step, as in Isaac Lab
        self.limits = 4 + torch.arange(num_envs, device=device) % 3

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        shift = 0.0 if seed is None else (seed % 10) / 100
        self.places = torch.linspace(-0.5, 0.5, self.num_envs, device=self.device) + shift
        self.speeds = torch.zeros(self.num_envs, device=self.device)
        self.elapsed = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return self.observe(), self.extras

    def observe(self) -> dict[str, torch.Tensor]:
        return {"policy": torch.stack([self.places, self.speeds], dim=-1)}

    def step(self, actions: torch.Tensor):
        self.speeds = self.speeds + 0.3 * actions[:, 0]
        self.places = self.places + 0.3 * self.speeds
        self.elapsed = self.elapsed + 1
        terminated = self.places.abs() > 1.0
        truncated = (self.elapsed >= self.limits) & ~terminated
        rewards = 1.0 - self.places.abs()
        if self.compute_final_obs:
            self.extras["final_obs"] = self.observe()
        ended = terminated | truncated
        self.places = torch.where(ended, -0.5 * self.places, self.places)
        self.speeds = torch.where(ended, 0.0, self.speeds)
        self.elapsed = torch.where(ended, 0, self.elapsed)
        return self.observe(), rewards, terminated, truncated, self.extras
