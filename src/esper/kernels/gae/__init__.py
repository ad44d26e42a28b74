"""Kernels behind `compute_gae`, one file each: `gae(inputs, advantages, returns)`.

The shapes, dtypes and devices of the inputs have been checked, and all `[N, T]` tensors have the
same strides, whatever they are. A kernel writes exact zeros past `step_counts`. It masks padding
with `where`: padding may contain NaN, so it must never be multiplied by 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class GaeInputs(NamedTuple):
    """The arguments of `compute_gae`; without `step_counts` every row is stored."""

    rewards: Tensor  # [N, T]
    values: Tensor  # [N, T]
    terminated: Tensor  # [N, T] bool
    truncated: Tensor  # [N, T] bool
    bootstrap_values: Tensor  # [N, T]
    step_counts: Tensor | None  # [N] int64
    gamma: float
    gae_lambda: float


GaeKernel = Callable[[GaeInputs, Tensor, Tensor], None]


def check_step_counts(step_counts: Tensor, num_steps: int) -> None:
    """Raise for the first count outside [0, T]. Counts on a GPU are not read, only clamped."""
    if step_counts.device.type != "cpu":
        return
    wrong = (step_counts < 0) | (step_counts > num_steps)
    if wrong.any():
        env = int(wrong.to(torch.int8).argmax())
        raise ValueError(
            f"step_counts[{env}] is {int(step_counts[env])}; "
            f"expected 0 to {num_steps}, the stored steps of a row"
        )


def counts_on_device(inputs: GaeInputs) -> Tensor | None:
    """The checked `step_counts` on the device of the rewards, without a synchronisation.

    They are copied from a pinned snapshot: a copy from pageable memory may block, and the caller
    may change its counts before a non-blocking copy has run.
    """
    counts, device = inputs.step_counts, inputs.rewards.device
    if counts is None:
        return None
    check_step_counts(counts, inputs.rewards.shape[1])
    if counts.device == device:
        return counts
    snapshot = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    return snapshot.copy_(counts).to(device, non_blocking=True)
