"""Factored actions: one decision made of several choices, each of which may depend on earlier ones.

    space = FactoredActionSpace((Head("row", 3), Head("column", 4, given=("row",))))

An unconditional head has a mask `[N, size]`; a head given `("op", "slot")` has one
`[N, |op|, |slot|, size]`: a row of legal choices for each combination of the earlier choices.
A row with no legal choice means "nothing to choose here": the head takes action 0 and adds
nothing to log-prob, entropy or gradient.

The choices of all heads lie side by side on one axis of length C, so that logits, and the mask
rows that applied, are single tensors `[..., C]`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from esper.leyline.constants import (
    ALPHA_SPEED_STEPS,
    ALPHA_TARGETS,
    TEMPO_STEPS,
    AlphaCurve,
    BlendStyle,
)
from esper.leyline.stages import LifecycleOp


@dataclass(frozen=True)
class Head:
    """One choice among `size`, whose legal values may depend on the earlier heads in `given`."""

    name: str
    size: int
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class FactoredActionSpace:
    """The heads of a factored action, in the order in which they are decided."""

    heads: tuple[Head, ...]

    def __post_init__(self) -> None:
        if not self.heads:
            raise ValueError("a FactoredActionSpace needs at least one head")
        earlier: set[str] = set()
        for head in self.heads:
            if head.name in earlier:
                raise ValueError(f"head {head.name!r} appears twice; head names must differ")
            if head.size < 1:
                raise ValueError(f"head {head.name!r} has size {head.size}; use 1 or more")
            if unknown := [name for name in head.given if name not in earlier]:
                raise ValueError(
                    f"head {head.name!r} is given {unknown}, not among the heads before it "
                    f"({[h.name for h in self.heads if h.name in earlier]})"
                )
            if len(set(head.given)) != len(head.given):
                raise ValueError(f"head {head.name!r} names a head twice in given={head.given}")
            earlier.add(head.name)

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(head.name for head in self.heads)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(head.size for head in self.heads)

    @property
    def num_heads(self) -> int:
        """H."""
        return len(self.heads)

    @cached_property
    def num_choices(self) -> int:
        """C: the choices of all heads together."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where each head's choices lie on the axis of length C."""
        ends = tuple(accumulate(self.sizes))
        return tuple(slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True))

    @cached_property
    def given_indices(self) -> tuple[tuple[int, ...], ...]:
        """For each head, the indices of the heads it is given."""
        return tuple(tuple(self.names.index(name) for name in h.given) for h in self.heads)

    @cached_property
    def unconditional(self) -> tuple[int, ...]:
        """Indices of the heads that always have something to choose."""
        return tuple(i for i, head in enumerate(self.heads) if not head.given)

    def index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"no head {name!r}; this action space has {list(self.names)}")
        return self.names.index(name)

    def mask_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a head's mask for one env: the sizes of the heads it is given, then its own."""
        index = self.index(name)
        return (*(self.sizes[g] for g in self.given_indices[index]), self.sizes[index])

    def view(self, packed: Tensor, name: str) -> Tensor:
        """One head's part of a packed tensor `[..., C]`, without a copy."""
        self._check_packed(packed)
        return packed[..., self.slices[self.index(name)]]

    def split(self, packed: Tensor) -> dict[str, Tensor]:
        """Every head's part of a packed tensor `[..., C]`, by name, without a copy."""
        self._check_packed(packed)
        return {h.name: packed[..., part] for h, part in zip(self.heads, self.slices, strict=True)}

    def pack(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Per-head tensors `[..., size]` side by side as one `[..., C]`."""
        self.check_names(parts)
        batch_shape = parts[self.names[0]].shape[:-1]
        for head in self.heads:
            expected = (*batch_shape, head.size)
            if tuple(parts[head.name].shape) != expected:
                raise ValueError(
                    f"head {head.name!r}: got shape {tuple(parts[head.name].shape)}, "
                    f"expected {expected}"
                )
        return torch.cat([parts[name] for name in self.names], dim=-1)

    def check_names(self, parts: Mapping[str, object]) -> None:
        if missing := [name for name in self.names if name not in parts]:
            raise ValueError(f"heads {missing} are missing; expected all of {list(self.names)}")
        if unknown := [name for name in parts if name not in self.names]:
            raise ValueError(f"no heads {unknown}; this action space has {list(self.names)}")

    def _check_packed(self, packed: Tensor) -> None:
        if packed.shape[-1:] != (self.num_choices,):
            raise ValueError(
                f"got shape {tuple(packed.shape)}, expected [..., {self.num_choices}] "
                f"for heads {dict(zip(self.names, self.sizes, strict=True))}"
            )


class ActionMasks:
    """What N envs may choose: for each head a bool tensor `[N, *given sizes, size]`.

    Shapes and dtypes are checked here, values are not: they may lie on a GPU.
    """

    def __init__(self, action_space: FactoredActionSpace, masks: Mapping[str, Tensor]):
        action_space.check_names(masks)
        self.action_space = action_space
        self.num_envs = masks[action_space.names[0]].shape[0]
        self._masks = tuple(masks[name] for name in action_space.names)
        for head, mask in zip(action_space, self._masks, strict=True):
            expected = (self.num_envs, *action_space.mask_shape(head.name))
            if tuple(mask.shape) != expected or mask.dtype != torch.bool:
                raise ValueError(
                    f"mask of head {head.name!r}: got {mask.dtype} {tuple(mask.shape)}, "
                    f"expected {torch.bool} {expected}"
                    + (f" (envs, {', '.join(head.given)}, choices)" if head.given else "")
                )

    @classmethod
    def all_legal(
        cls,
        action_space: FactoredActionSpace,
        num_envs: int,
        device: torch.device | str | None = None,
    ) -> "ActionMasks":
        return cls(
            action_space,
            {
                name: torch.ones(
                    num_envs, *action_space.mask_shape(name), dtype=torch.bool, device=device
                )
                for name in action_space.names
            },
        )

    def __getitem__(self, name: str) -> Tensor:
        """The whole mask of a head, `[N, *given sizes, size]`."""
        return self._masks[self.action_space.index(name)]

    @property
    def device(self) -> torch.device:
        return self._masks[0].device

    def to(self, device: torch.device | str) -> "ActionMasks":
        moved = {name: self[name].to(device) for name in self.action_space.names}
        return ActionMasks(self.action_space, moved)

    def row(self, head_index: int, actions: Tensor | Sequence[Tensor]) -> Tensor:
        """A head's legal choices `[N, size]` given the earlier heads' actions.

        `actions` holds at least the heads before `head_index`: a tensor `[N, H]` or one `[N]`
        per head. It may be read while it is being filled, head by head.
        """
        mask = self._masks[head_index]
        given = self.action_space.given_indices[head_index]
        if not given:
            return mask
        chosen = [actions[:, g] if isinstance(actions, Tensor) else actions[g] for g in given]
        sizes = [self.action_space.sizes[g] for g in given]
        flat = chosen[0]
        for size, choice in zip(sizes[1:], chosen[1:], strict=True):
            flat = flat * size + choice
        rows = mask.reshape(self.num_envs, math.prod(sizes), -1)
        index = flat.long().view(-1, 1, 1).expand(-1, 1, rows.shape[-1])
        return rows.gather(1, index).squeeze(1)

    def applied(self, actions: Tensor) -> Tensor:
        """The mask rows that applied to a finished action, packed `[N, C]`: what a rollout stores."""
        rows = [self.row(i, actions) for i in range(self.action_space.num_heads)]
        return torch.cat(rows, dim=-1)


def tamiyo_action_space(num_slots: int, num_blueprints: int) -> FactoredActionSpace:
    """Tamiyo's eight heads for a host with this many slots and a menu of this many blueprints."""
    where = ("op", "slot")
    return FactoredActionSpace(
        (
            Head("op", len(LifecycleOp)),
            Head("slot", num_slots, given=("op",)),
            Head("blueprint", num_blueprints, given=where),
            Head("style", len(BlendStyle), given=where),
            Head("tempo", len(TEMPO_STEPS), given=where),
            Head("alpha_target", len(ALPHA_TARGETS), given=where),
            Head("alpha_speed", len(ALPHA_SPEED_STEPS), given=where),
            Head("alpha_curve", len(AlphaCurve), given=where),
        )
    )


def audit_action_space(
    num_slots: int = 3, num_blueprints: int = 5, num_blends: int = 3, num_ops: int = 4
) -> FactoredActionSpace:
    """The audit's four independent heads."""
    return FactoredActionSpace(
        (
            Head("slot", num_slots),
            Head("blueprint", num_blueprints),
            Head("blend", num_blends),
            Head("op", num_ops),
        )
    )
