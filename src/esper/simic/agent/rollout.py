"""A rollout as it is written, row by row, and as it is learned from: dense and time-major.

`RolloutRow` is one row of all envs, views that policy and environments write into. `Rollout` is what
PPO reads, whole or a minibatch. `Arena` is the memory of all fields.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, of each field in an arena

# the fields of the storage that are fields of a `Rollout`
LEARNED_FROM = (
    *("states", "frames", "actions", "log_probs", "masks", "starts"),
    *("advantages", "returns", "targets", "values", "valid"),
)


class RolloutRow(NamedTuple):
    """One row of a rollout, `[N, ...]`: views that policy and environments write into."""

    states: Tensor  # [N, F]
    actions: Tensor  # [N, H]
    log_probs: Tensor  # [N, H]
    masks: Tensor  # [N, C]
    values: Tensor  # [N], like the fields below
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    bootstrap_values: Tensor
    frames: Tensor  # [N, P] uint8: pictures


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """What PPO learns from, on one device: T rows of N envs, or of the envs of a minibatch.

    Rows that hold no step have features, pictures, actions and masks of 0, and may be read but not
    counted.
    """

    states: Tensor  # [T, N, F]
    frames: Tensor  # [T, N, P] uint8: pictures; P is 0 without
    actions: Tensor  # [T, N, H]
    log_probs: Tensor  # [T, N, H]
    masks: Tensor  # [T, N, C]
    advantages: Tensor  # [T, N]
    returns: Tensor  # [T, N]
    targets: Tensor  # [T, N]: the returns as the critic learns them, of mean 0 and variance 1
    values: Tensor  # [T, N]
    starts: Tensor  # [T, N] bool: the row begins an episode, so the state before it is zero
    valid: Tensor  # [T, N] bool: the row holds a step
    initial_h: Tensor  # [N, L, hidden]: the recurrent state before the first row
    initial_c: Tensor
    is_full: bool = False  # known to hold a step in every row

    def of_envs(self, env_ids: Tensor) -> "Rollout":
        """All rows of some envs: a minibatch."""
        return Rollout(
            **{name: getattr(self, name).index_select(1, env_ids) for name in LEARNED_FROM},
            initial_h=self.initial_h.index_select(0, env_ids),
            initial_c=self.initial_c.index_select(0, env_ids),
        )

    def stored(self, field: Tensor) -> Tensor:
        """The entries `[R, ...]` of a field `[T, N, ...]` in rows that hold a step."""
        if self.is_full:
            return field.flatten(0, 1)
        return field[self.valid]


class Arena:
    """Several tensors in one block of memory, so that all move to a device in one copy."""

    def __init__(self, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]], memory: Tensor):
        self.layout = layout
        self.memory = memory
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for name, (dtype, shape) in layout.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            self.tensors[name] = memory[start : start + num_bytes].view(dtype).view(shape)
            start += _aligned(num_bytes)

    @classmethod
    def zeros(
        cls, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> "Arena":
        sizes = (math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
        total = sum(map(_aligned, sizes))
        return cls(layout, torch.zeros(total, dtype=torch.uint8, device=device))

    def to(self, device: torch.device) -> "Arena":
        if self.memory.device == device:
            return self
        to_gpu = device.type == "cuda" and self.memory.device.type == "cpu"
        memory = self.memory.pin_memory() if to_gpu else self.memory
        return Arena(self.layout, memory.to(device, non_blocking=to_gpu))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
