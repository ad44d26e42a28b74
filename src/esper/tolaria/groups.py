"""Which hosts run which seed together.

Seeds of one blueprint in one slot form a group. A group's capacity is a power of two and its
members are an index, so that the same program serves while hosts come and go; what pads a group
reads a host that is there and writes to a row that belongs to nobody.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina.lifecycle import SlotStates
from esper.leyline.constants import BlendStyle
from esper.leyline.stages import SeedStage


class GroupKey(NamedTuple):
    """Seeds that can run together."""

    slot: int
    blueprint: int
    shadow_training: bool  # trained in the shadow pass, and not part of the host's own


@dataclass(frozen=True)
class Signature:
    """All that the shape of a minibatch's program depends on."""

    capacities: tuple[tuple[GroupKey, int], ...]
    plain_slots: tuple[bool, ...]  # every seed there is of style ADD

    def covers(self, other: "Signature") -> bool:
        """Whether a program of this signature can do the work of the other."""
        room = dict(self.capacities)
        return all(room.get(key, 0) >= size for key, size in other.capacities) and all(
            theirs or not ours
            for ours, theirs in zip(self.plain_slots, other.plain_slots, strict=True)
        )

    def join(self, other: "Signature") -> "Signature":
        """The least signature that covers both."""
        room = dict(self.capacities)
        for key, size in other.capacities:
            room[key] = max(size, room.get(key, 0))
        plain = (a and b for a, b in zip(self.plain_slots, other.plain_slots, strict=True))
        return Signature(tuple(sorted(room.items())), tuple(plain))


@dataclass(frozen=True)
class Grouping:
    """Who belongs to which group, on the CPU, and the tightest signature that has room."""

    signature: Signature
    members: dict[GroupKey, Tensor]

    @classmethod
    def of(cls, states: SlotStates) -> "Grouping":
        behind = states.stage == SeedStage.TRAINING
        hosts, slots = states.has_seed.nonzero(as_tuple=True)
        keys = torch.stack((slots, states.blueprint[hosts, slots], behind[hosts, slots].long()), 1)
        kinds, group_of = torch.unique(keys, dim=0, return_inverse=True)
        members = {
            GroupKey(slot, blueprint, bool(shadow)): hosts[group_of == group]
            for group, (slot, blueprint, shadow) in enumerate(kinds.tolist())
        }
        styled = (states.style != BlendStyle.ADD) & states.has_seed
        capacities = tuple((key, capacity_for(len(ids))) for key, ids in members.items())
        return cls(Signature(capacities, tuple((~styled.any(0)).tolist())), members)


def capacity_for(size: int) -> int:
    """The least power of two that has room."""
    return 1 << (size - 1).bit_length()


class Membership:
    """The members of each group of a signature, as index tensors that a program reads."""

    def __init__(self, signature: Signature, num_hosts: int, device: torch.device):
        self._num_hosts = num_hosts
        self._bounds = _bounds(size for _, size in signature.capacities)
        self._keys = [key for key, _ in signature.capacities]
        total = sum(size for _, size in signature.capacities)
        self._index = torch.zeros(2, total, dtype=torch.int64, device=device)
        self.source = self._views(self._index[0])  # padding reads host 0, and gives it nothing
        self.destination = self._views(self._index[1])  # padding writes to the row of nobody

    def fill(self, members: dict[GroupKey, Tensor]) -> None:
        """Take in a grouping that the signature covers; one copy to the device."""
        index = torch.zeros_like(self._index, device="cpu")
        index[1] = self._num_hosts
        for key, (start, _) in zip(self._keys, self._bounds, strict=True):
            if key in members:
                ids = members[key]
                index[:, start : start + len(ids)] = ids
        self._index.copy_(index, non_blocking=True)

    def _views(self, index: Tensor) -> dict[GroupKey, Tensor]:
        return {
            key: index[start:end]
            for key, (start, end) in zip(self._keys, self._bounds, strict=True)
        }


def _bounds(sizes: Iterable[int]) -> Sequence[tuple[int, int]]:
    bounds, start = [], 0
    for size in sizes:
        bounds.append((start, start + size))
        start += size
    return bounds
