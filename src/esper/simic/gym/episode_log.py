"""Returns and lengths of the episodes of a run, from the rewards and flags of its rollouts."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer

RECENT_EPISODES = 100  # that the reported means are over


class Episode(NamedTuple):
    """An episode that has ended."""

    env: int
    total_reward: float
    length: int


class EpisodeLog:
    """The last episodes that ended, and how far the unfinished ones have come."""

    def __init__(self, num_envs: int, recent: Iterable[Episode] = ()):
        self.recent = deque(recent, maxlen=RECENT_EPISODES)
        self._unfinished_rewards = torch.zeros(num_envs, dtype=torch.float64)
        self._unfinished_lengths = torch.zeros(num_envs, dtype=torch.float64)

    def add_round(self, buffer: TamiyoRolloutBuffer) -> None:
        """Add the rows of a rollout, which continue those of the one before."""
        valid = buffer.valid_mask.t()  # [T, N], like all below
        rewards = buffer.rewards.t().double()
        ended = (buffer.terminated | buffer.truncated).t() & valid
        device = valid.device
        reward_sums = torch.where(valid, rewards, 0.0).cumsum(dim=0)
        step_sums = valid.double().cumsum(dim=0)
        steps = torch.arange(len(valid), device=device).unsqueeze(1)
        last_end = torch.where(ended, steps, -1).cummax(dim=0).values  # -1: none yet

        end_steps, env_ids = ended.nonzero(as_tuple=True)  # by step
        newest = slice(-RECENT_EPISODES, None)
        end_steps, env_ids = end_steps[newest], env_ids[newest]
        end_before = last_end[(end_steps - 1).clamp(min=0), env_ids]
        end_before = torch.where(end_steps > 0, end_before, -1)
        returns, self._unfinished_rewards = _per_episode(
            reward_sums, self._unfinished_rewards, (end_steps, end_before, env_ids), last_end[-1]
        )
        lengths, self._unfinished_lengths = _per_episode(
            step_sums, self._unfinished_lengths, (end_steps, end_before, env_ids), last_end[-1]
        )
        found = zip(env_ids.tolist(), returns.tolist(), lengths.tolist(), strict=True)
        for env, total_reward, length in found:
            self.recent.append(Episode(env, total_reward, int(length)))

    def means(self) -> dict[str, float]:
        """The mean return and length of the last episodes; nothing before the first has ended."""
        if not self.recent:
            return {}
        count = len(self.recent)
        return {
            "episode/return": sum(episode.total_reward for episode in self.recent) / count,
            "episode/length": sum(episode.length for episode in self.recent) / count,
        }


def _per_episode(
    sums: Tensor, carried: Tensor, episodes: tuple[Tensor, Tensor, Tensor], last_ends: Tensor
) -> tuple[Tensor, Tensor]:
    """What `sums` `[T, N]` grew by in each episode, and in the unfinished ones since their start.

    Episodes are given by their last step, the last step of the one before (-1: before the round) and
    their env. `carried` `[N]` is what unfinished ones had before the round.
    """
    carried = carried.to(sums.device)
    end_steps, end_before, env_ids = episodes

    def sums_at(steps: Tensor, envs: Tensor) -> Tensor:
        return torch.where(steps >= 0, sums[steps.clamp(min=0), envs], -carried[envs])

    grown = sums[end_steps, env_ids] - sums_at(end_before, env_ids)
    all_envs = torch.arange(len(last_ends), device=sums.device)
    return grown, sums[-1] - sums_at(last_ends, all_envs)
