"""The two gates as a readable loop over time, for any floating dtype and any device."""

import torch
from torch import Tensor

from esper.kernels.gae import GaeInputs, counts_on_device


@torch.no_grad()
def gae(inputs: GaeInputs, advantages: Tensor, returns: Tensor) -> None:
    rewards, values, terminated, truncated, bootstrap_values, _, gamma, gae_lambda = inputs
    num_envs, num_steps = rewards.shape
    step_counts = counts_on_device(inputs)
    if step_counts is None:
        step_counts = torch.full((num_envs,), num_steps, device=rewards.device)
    counts = step_counts[:, None].clamp(0, num_steps)
    steps = torch.arange(num_steps, device=rewards.device)
    stored = steps < counts
    ended = terminated | truncated | (steps == counts - 1)

    next_values = torch.where(ended, bootstrap_values, values.roll(-1, dims=1))
    next_values = next_values.masked_fill_(terminated, 0.0)
    deltas = (rewards + gamma * next_values - values).masked_fill_(~stored, 0.0)

    running = deltas.new_zeros(num_envs)  # stays 0 until the first stored row, as the deltas do
    for t in reversed(range(num_steps)):
        running.masked_fill_(ended[:, t], 0.0)
        running.mul_(gamma * gae_lambda).add_(deltas[:, t])
        advantages[:, t] = running
    returns.copy_((advantages + values).masked_fill_(~stored, 0.0))
