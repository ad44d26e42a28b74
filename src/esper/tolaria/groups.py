"""Groups of seeds that run together: seeds of one blueprint in one slot.

A group's capacity is fixed in its program and its members are an index, so that one program can
serve changing hosts. Padding reads host 0 and writes to the scratch row after the last host.
"""

from dataclasses import dataclass
from itertools import accumulate
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
    shadow_training: bool  # trained in the shadow pass; not part of the host's own pass


@dataclass(frozen=True)
class Signature:
    """All that the shapes of a minibatch's program depend on."""

    capacities: tuple[tuple[GroupKey, int], ...]
    plain_slots: tuple[bool, ...]  # every seed in the slot has style ADD


@dataclass(frozen=True)
class Grouping:
    """The hosts in each group, on the CPU, and the signature without any padding."""

    signature: Signature
    members: dict[GroupKey, Tensor]

    @classmethod
    def of(cls, states: SlotStates) -> "Grouping":
        shadow = states.stage == SeedStage.TRAINING
        hosts, slots = states.has_seed.nonzero(as_tuple=True)
        keys = torch.stack((slots, states.blueprint[hosts, slots], shadow[hosts, slots].long()), 1)
        kinds, group_of = torch.unique(keys, dim=0, return_inverse=True)
        members = {
            GroupKey(slot, blueprint, bool(in_shadow)): hosts[group_of == group]
            for group, (slot, blueprint, in_shadow) in enumerate(kinds.tolist())
        }
        styled = (states.style != BlendStyle.ADD) & states.has_seed
        sizes = tuple((key, len(ids)) for key, ids in members.items())
        return cls(Signature(sizes, tuple((~styled.any(0)).tolist())), members)


class Membership:
    """The members of each group of a signature, as index tensors that a program reads."""

    def __init__(self, signature: Signature, num_hosts: int, device: torch.device):
        self._num_hosts = num_hosts
        capacities = dict(signature.capacities)
        ends = dict(zip(capacities, accumulate(capacities.values()), strict=True))
        self._places = {key: slice(end - capacities[key], end) for key, end in ends.items()}
        self._index = torch.zeros(2, sum(capacities.values()), dtype=torch.int64, device=device)
        self.source = self._views(self._index[0])  # padding reads host 0
        self.destination = self._views(self._index[1])  # padding writes to the scratch row

    def fill(self, members: dict[GroupKey, Tensor]) -> None:
        """Set the members of a grouping that the signature has room for; one copy to the device."""
        index = torch.zeros_like(self._index, device="cpu")
        index[1] = self._num_hosts
        for key, place in self._places.items():
            if key in members:
                ids = members[key]
                index[:, place.start : place.start + len(ids)] = ids
        self._index.copy_(index, non_blocking=True)

    def _views(self, index: Tensor) -> dict[GroupKey, Tensor]:
        return {key: index[place] for key, place in self._places.items()}
