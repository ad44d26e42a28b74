"""Kernels behind `compute_gae`, one file each, all with the signature of `GaeKernel`.

A kernel is handed tensors whose shapes, dtypes and devices have been checked. It returns
contiguous `[N, T]` advantages and returns, writes exact zeros past `step_counts`, and leaves by
selection, never by multiplication, what must not matter: that may be NaN.
"""

from typing import Protocol

import torch
from torch import Tensor


class GaeKernel(Protocol):
    """Advantages and returns of a rollout; `step_counts` None means that every row is stored."""

    def __call__(
        self,
        rewards: Tensor,
        values: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        bootstrap_values: Tensor,
        step_counts: Tensor | None,
        gamma: float,
        gae_lambda: float,
        /,
    ) -> tuple[Tensor, Tensor]: ...


def check_step_counts(step_counts: Tensor, num_steps: int) -> None:
    """Raise for the first count outside [0, T]; counts on a GPU are not looked at, only clamped."""
    if step_counts.device.type != "cpu":
        return
    wrong = (step_counts < 0) | (step_counts > num_steps)
    if wrong.any():
        env = int(wrong.to(torch.int8).argmax())
        raise ValueError(
            f"step_counts[{env}] is {int(step_counts[env])}; "
            f"expected 0 to {num_steps}, the stored steps of a row"
        )


def step_counts_on(device: torch.device, step_counts: Tensor) -> Tensor:
    """The counts on the data's device, without making the host wait for a GPU.

    They are copied from a pinned snapshot: a copy from pageable memory may wait, and the caller
    may change its counts before the copy has run.
    """
    if step_counts.device == device:
        return step_counts
    snapshot = torch.empty(step_counts.shape, dtype=step_counts.dtype, pin_memory=True)
    return snapshot.copy_(step_counts).to(device, non_blocking=True)
