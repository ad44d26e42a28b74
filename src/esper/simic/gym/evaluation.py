"""Whole episodes without learning: what a model earns in environments.

result = esper.evaluate(model, "CartPole-v1", episodes=20)
"""

import warnings
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from esper.runtime.checks import whole_number
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout import RolloutRow
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.gym.entries import Array
from esper.simic.gym.gym_envs import GymEnvs, vector_env
from esper.simic.trainer import zero_rows

if TYPE_CHECKING:
    from esper.simic.gym.gym_envs import AnyEnv
    from esper.simic.gym.ppo_model import PPO

LONG_EPISODE = 100_000  # steps; an evaluation warns
OWN_ENVS = (
    "these are the environments that the model learns in; evaluating there would break off its "
    "episodes. Make others for evaluation, or pass the id of the environment"
)


class EvaluationResult(NamedTuple):
    """One entry per episode."""

    returns: Array
    lengths: Array


def evaluate(
    model: "PPO",
    env: "AnyEnv",
    episodes: int = 20,
    *,
    rng_seed: int = 0,
    deterministic: bool = True,
) -> EvaluationResult:
    """Play whole episodes without learning.

    Every env plays the same number of episodes (to within one). Counting those that end first
    would favour short episodes. After `learn`, `env` may be that which the model learned in: the
    next `learn` then collects its current round again, as after `PPO.load`.

    Args:
        env: the id of an environment, one environment, or a vector environment
        deterministic: take the most likely actions instead of sampling
    """
    whole_number("episodes", episodes, 1)
    envs = vector_env(env, min(episodes, model.config.num_envs))
    if model.learns_in(envs):
        if model.is_learning:
            raise ValueError(OWN_ENVS)
        model.trainer.abandon_round()
    world = GymEnvs(envs, model.spaces, rng_seed, model.mask_source, model.config.mask_key)
    agent = model.agent
    num_envs = world.num_envs
    generator = torch.Generator(agent.device).manual_seed(rng_seed)
    state = agent.policy.initial_state(num_envs)
    row = _row_for(world, agent)
    quota = np.full(num_envs, episodes // num_envs)
    quota[: episodes % num_envs] += 1
    total_rewards = np.zeros(num_envs)
    lengths = np.zeros(num_envs, dtype=np.int64)
    counted: list[tuple[float, int]] = []
    world.begin_round()
    while quota.any():
        observed = world.observe(row)
        if world.device.type != "cpu":  # on a CPU `observe` has looked
            world.spaces.require_finite(row.states)
        state = zero_rows(state, observed.starts)
        decision = agent.act(
            row.states,
            observed.masks,
            state,
            frames=row.frames,
            generator=generator,
            deterministic=deterministic,
            out=row,
        )
        state = decision.state
        stepped = world.step(row)
        is_real = True if stepped.is_real is None else stepped.is_real.cpu().numpy()
        total_rewards += row.rewards.cpu().numpy() * is_real
        lengths += is_real
        if (lengths == LONG_EPISODE).any():
            warnings.warn(
                f"an episode has {LONG_EPISODE:,} steps and may never end; limit episodes with "
                "gymnasium.wrappers.TimeLimit(env, max_episode_steps)",
                stacklevel=2,
            )
        ended = (row.terminated | row.truncated).cpu().numpy()
        for place in np.flatnonzero(ended):
            if quota[place]:
                quota[place] -= 1
                counted.append((total_rewards[place], lengths[place]))
        total_rewards[ended] = 0.0
        lengths[ended] = 0
    world.checks.finish()
    returns, episode_lengths = zip(*counted, strict=True)
    return EvaluationResult(np.array(returns), np.array(episode_lengths))


def _row_for(world: GymEnvs, agent: PPOAgent) -> RolloutRow:
    """A row that is not part of a rollout: to play without learning."""
    spec = world.spec
    buffer = TamiyoRolloutBuffer(
        spec.num_envs,
        1,
        spec.num_features,
        spec.action_space,
        device=agent.device,
        frame_size=spec.frame_size,
    )
    return buffer.spare_row()
