"""The two gates as a readable loop over time, for any floating dtype and any device."""

import torch
from torch import Tensor

from esper.kernels.gae import check_step_counts, step_counts_on


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap_values: Tensor,
    step_counts: Tensor | None,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    num_envs, num_steps = rewards.shape
    counts = _counts_column(step_counts, num_envs, num_steps, rewards.device)
    steps = torch.arange(num_steps, device=rewards.device)
    stored = steps < counts
    ended = terminated | truncated | (steps == counts - 1)

    next_values = torch.where(ended, bootstrap_values, values.roll(-1, dims=1))
    next_values = next_values.masked_fill_(terminated, 0.0)
    deltas = (rewards + gamma * next_values - values).masked_fill_(~stored, 0.0)

    advantages = deltas.new_empty(num_envs, num_steps)
    running = deltas.new_zeros(num_envs)  # stays 0 until the first stored row, as the deltas do
    for t in reversed(range(num_steps)):
        running.masked_fill_(ended[:, t], 0.0)
        running.mul_(gamma * gae_lambda).add_(deltas[:, t])
        advantages[:, t] = running
    returns = (advantages + values).masked_fill_(~stored, 0.0)
    return advantages, returns


def _counts_column(
    step_counts: Tensor | None, num_envs: int, num_steps: int, device: torch.device
) -> Tensor:
    """The stored steps of every env on the data's device, `[N, 1]`."""
    if step_counts is None:
        return torch.full((num_envs, 1), num_steps, device=device)
    check_step_counts(step_counts, num_steps)
    return step_counts_on(device, step_counts)[:, None].clamp(0, num_steps)
