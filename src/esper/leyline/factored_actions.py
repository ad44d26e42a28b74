"""Factored actions: one decision made of several choices, which may depend on earlier ones.

    space = FactoredActionSpace((Head("row", 3), Head("column", 4, given=("row",))))

An unconditional head has a mask `[N, size]`; a head given `("op", "slot")` has one
`[N, |op|, |slot|, size]`: a row of legal choices for each combination of the earlier choices.
A row with no legal choice means "nothing to choose here": the head takes action 0 and adds
nothing to log-prob, entropy or gradient.

A continuous head is a number in (-1, 1): the tanh of a Gaussian sample (`tamiyo.policy.gaussians`).
It has one column, the Gaussian's mean; its mask says whether the number is used. In a space with
continuous heads, actions are float32 `[..., H]`: choices as whole numbers, and the Gaussian sample
before tanh, so that scoring needs no inverse.

The choices of all heads are concatenated on one axis of length C, so that logits and the mask
rows that applied are single tensors `[..., C]`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from esper.leyline.constants import (
    ALPHA_SPEED_STEPS,
    ALPHA_TARGETS,
    TEMPO_STEPS,
    AlphaCurve,
    BlendStyle,
)
from esper.leyline.devices import block_starts, constant, same_device
from esper.leyline.stages import LifecycleOp

# Sizes of the four independent heads of `audit_action_space`.
NUM_SLOTS, NUM_BLUEPRINTS, NUM_BLENDS, NUM_OPS = 3, 5, 3, 4

MOST_CHOICES = 2**20  # of one head: each choice is a column of logits and masks


@dataclass(frozen=True)
class Head:
    """One choice among `size`, whose legal values may depend on the earlier heads in `given`."""

    name: str
    size: int = 1
    given: tuple[str, ...] = ()
    continuous: bool = False  # a number of a Box action instead of a choice; its size is 1
    optional: bool = False  # a legal earlier choice may leave it nothing to choose

    def __str__(self) -> str:
        size = "continuous" if self.continuous else self.size
        given = f" given {' and '.join(self.given)}" if self.given else ""
        return f"{self.name}[{size}]{given}{' (optional)' * self.optional}"


def _derived() -> Any:
    """A field computed from the heads. torch.compile does not support cached_property."""
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True)
class FactoredActionSpace:
    """The heads of a factored action, in the order in which they are sampled."""

    heads: tuple[Head, ...]

    names: tuple[str, ...] = _derived()
    sizes: tuple[int, ...] = _derived()
    num_choices: int = _derived()  # C: the choices of all heads together
    slices: tuple[slice, ...] = _derived()  # each head's part of the axis of length C
    given_indices: tuple[tuple[int, ...], ...] = _derived()  # of the heads it depends on
    unconditional: tuple[int, ...] = _derived()  # heads that depend on no other head
    continuous: tuple[int, ...] = _derived()  # heads that are numbers
    # Consecutive heads that depend on the same earlier heads form a group and are sampled together.
    head_groups: tuple[range, ...] = _derived()
    group_of: tuple[int, ...] = _derived()  # the group of each head
    group_spaces: tuple["FactoredActionSpace", ...] = _derived()  # each group as its own space

    def __post_init__(self) -> None:
        vars(self)["heads"] = tuple(self.heads)
        self._check_heads()
        sizes = tuple(head.size for head in self.heads)
        names = tuple(head.name for head in self.heads)
        ends = tuple(accumulate(sizes))
        given = tuple(tuple(names.index(name) for name in head.given) for head in self.heads)
        same_given = [tuple(g) for _, g in groupby(range(len(names)), key=given.__getitem__)]
        groups = tuple(range(group[0], group[-1] + 1) for group in same_given)
        free = tuple(replace(head, given=()) for head in self.heads)
        vars(self).update(  # frozen: not by assignment
            names=names,
            sizes=sizes,
            num_choices=ends[-1],
            slices=tuple(slice(e - size, e) for e, size in zip(ends, sizes, strict=True)),
            given_indices=given,
            unconditional=tuple(i for i, earlier in enumerate(given) if not earlier),
            continuous=tuple(i for i, head in enumerate(self.heads) if head.continuous),
            head_groups=groups,
            group_of=tuple(index for index, group in enumerate(groups) for _ in group),
            group_spaces=(self,)
            if self.heads == free
            else tuple(FactoredActionSpace(free[g.start : g.stop]) for g in groups),
        )

    def _check_heads(self) -> None:
        if not self.heads:
            raise ValueError("a FactoredActionSpace needs at least one head")
        earlier: set[str] = set()
        numbers = {head.name for head in self.heads if head.continuous}
        for head in self.heads:
            if not isinstance(head.name, str) or not head.name:
                raise ValueError(f"a head has the name {head.name!r}; use a non-empty string")
            if head.name in earlier:
                raise ValueError(f"head {head.name!r} appears twice; head names must differ")
            if type(head.size) is not int or not 1 <= head.size <= MOST_CHOICES:
                raise ValueError(
                    f"head {head.name!r} has size {head.size}; use an int from 1 to {MOST_CHOICES}"
                )
            if unknown := [name for name in head.given if name not in earlier]:
                raise ValueError(
                    f"head {head.name!r} is given {unknown}, not among the heads before it "
                    f"({[h.name for h in self.heads if h.name in earlier]})"
                )
            if head.continuous and head.size != 1:
                raise ValueError(f"head {head.name!r} is continuous; leave out size={head.size}")
            if named := numbers & set(head.given):
                raise ValueError(
                    f"head {head.name!r} is given {sorted(named)}, continuous; only choices can be"
                )
            if len(set(head.given)) != len(head.given):
                raise ValueError(f"head {head.name!r} names a head twice in given={head.given}")
            earlier.add(head.name)

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    @property
    def sizes_by_name(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def num_heads(self) -> int:
        """H."""
        return len(self.heads)

    def index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"no head {name!r}; this action space has {list(self.names)}")
        return self.names.index(name)

    @property
    def action_dtype(self) -> torch.dtype:
        """float32 if a head is continuous, else int64."""
        return torch.float32 if self.continuous else torch.int64

    def choices(self, actions: Tensor) -> Tensor:
        """Actions `[..., H]` as int64 choices; 0 for continuous heads."""
        if not self.continuous:
            return actions
        return actions.index_fill(-1, self.continuous_on(actions.device), 0.0).long()

    def continuous_on(self, device: torch.device) -> Tensor:
        """The positions of the continuous heads."""
        return constant(self.continuous, device)

    def mask_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a head's mask for one env: the sizes of the heads it is given, then its own."""
        index = self.index(name)
        return (*(self.sizes[g] for g in self.given_indices[index]), self.sizes[index])

    def view(self, packed: Tensor, name: str) -> Tensor:
        """One head's part of a packed tensor `[..., C]`, without a copy."""
        self.check_packed(packed)
        return packed[..., self.slices[self.index(name)]]

    def split(self, packed: Tensor) -> dict[str, Tensor]:
        """Every head's part of a packed tensor `[..., C]`, by name, without a copy."""
        self.check_packed(packed)
        return {h.name: packed[..., part] for h, part in zip(self.heads, self.slices, strict=True)}

    def check_names(self, parts: Mapping[str, object]) -> None:
        if missing := [name for name in self.names if name not in parts]:
            raise ValueError(f"heads {missing} are missing; expected all of {list(self.names)}")
        if unknown := [name for name in parts if name not in self.names]:
            raise ValueError(f"no heads {unknown}; this action space has {list(self.names)}")

    def check_packed(self, packed: Tensor) -> None:
        """Raise unless the last axis holds the choices of all heads."""
        if packed.shape[-1:] != (self.num_choices,):
            raise ValueError(
                f"got shape {tuple(packed.shape)}, expected [..., {self.num_choices}] "
                f"for heads {self.sizes_by_name}"
            )


class ActionMasks:
    """Legal choices of N envs: for each head a bool tensor `[N, *given sizes, size]`.

    The masks of a head group are concatenated in one tensor, so one lookup finds the rows of all its
    heads. Shapes and dtypes are checked here; values are not, because they may be on a GPU.
    """

    def __init__(self, action_space: FactoredActionSpace, masks: Mapping[str, Tensor]):
        action_space.check_names(masks)
        self.action_space = action_space
        self.num_envs = masks[action_space.names[0]].shape[0]
        for index, name in enumerate(action_space.names):
            self._check(masks[name], range(index, index + 1))
        self.groups = tuple(
            torch.cat([masks[action_space.names[i]] for i in group], dim=-1)
            for group in action_space.head_groups
        )

    @classmethod
    def from_groups(
        cls, action_space: FactoredActionSpace, groups: Sequence[Tensor]
    ) -> "ActionMasks":
        """Masks already concatenated per head group, each `[N, *given sizes, choices]`."""
        masks = cls.__new__(cls)
        masks.action_space = action_space
        masks.num_envs = groups[0].shape[0]
        masks.groups = tuple(groups)
        for group, mask in zip(action_space.head_groups, groups, strict=True):
            masks._check(mask, group)
        return masks

    @classmethod
    def all_legal(
        cls,
        action_space: FactoredActionSpace,
        num_envs: int,
        device: torch.device | str | None = None,
    ) -> "ActionMasks":
        masks = cls.__new__(cls)
        masks.action_space, masks.num_envs = action_space, num_envs
        shapes = [masks._expected_shape(group) for group in action_space.head_groups]
        masks.groups = tuple(torch.ones(s, dtype=torch.bool, device=device) for s in shapes)
        return masks

    def __getitem__(self, name: str) -> Tensor:
        """The mask of a head, `[N, *given sizes, size]`, without a copy."""
        index = self.action_space.index(name)
        group = self.action_space.group_of[index]
        return self.action_space.group_spaces[group].view(self.groups[group], name)

    @property
    def device(self) -> torch.device:
        return self.groups[0].device

    def to(self, device: torch.device | str) -> "ActionMasks":
        """The masks on a device: these masks themselves if they are on it already."""
        if same_device(torch.device(device), self.device):
            return self
        return self.from_groups(self.action_space, [mask.to(device) for mask in self.groups])

    def row(self, head_index: int, actions: Tensor | Sequence[Tensor]) -> Tensor:
        """A head's legal choices `[N, size]` given the earlier heads' actions.

        `actions` holds at least the heads before `head_index`, as a tensor `[N, H]` or one `[N]`
        per head; later heads may still be empty.
        """
        space, group = self.action_space, self.action_space.group_of[head_index]
        rows = self.rows(space.head_groups[group], actions)
        return space.group_spaces[group].view(rows, space.names[head_index])

    def rows(self, group: range, actions: Tensor | Sequence[Tensor]) -> Tensor:
        """As `row`, for all heads of a group: `[N, their choices]`.

        On a CPU, an earlier choice out of range raises. On a GPU it is not checked, because that
        would synchronise: pass choices that were sampled from these masks.
        """
        given = self.action_space.given_indices[group.start]
        mask = self.groups[self.action_space.group_of[group.start]]
        if not given:
            return mask
        chosen = [
            (actions[:, g] if isinstance(actions, Tensor) else actions[g]).long() for g in given
        ]
        sizes = [self.action_space.sizes[g] for g in given]
        if self.device.type == "cpu":
            for index, size, choice in zip(given, sizes, chosen, strict=True):
                _check_range(self.action_space.names[index], size, choice)
        combination = chosen[0]
        for size, choice in zip(sizes[1:], chosen[1:], strict=True):
            combination = torch.add(choice, combination, alpha=size)
        first = block_starts(self.num_envs, math.prod(sizes), self.device)
        return mask.reshape(-1, mask.shape[-1]).index_select(0, first + combination)

    def _expected_shape(self, heads: range) -> tuple[int, ...]:
        given = self.action_space.given_indices[heads.start]
        sizes = self.action_space.sizes
        return (self.num_envs, *(sizes[g] for g in given), sum(sizes[i] for i in heads))

    def _check(self, mask: Tensor, heads: range) -> None:
        """Check the concatenated mask of heads that depend on the same earlier heads."""
        expected = self._expected_shape(heads)
        if tuple(mask.shape) != expected or mask.dtype != torch.bool:
            names = ", ".join(repr(self.action_space.names[i]) for i in heads)
            given = self.action_space.heads[heads.start].given
            raise ValueError(
                f"mask of head {names}: got {mask.dtype} {tuple(mask.shape)}, "
                f"expected {torch.bool} {expected}"
                + (f" (envs, {', '.join(given)}, choices)" if given else "")
            )


def _check_range(name: str, size: int, choice: Tensor) -> None:
    """Raise for a choice outside 0 to size - 1: it would find the row of another env."""
    is_outside = (choice < 0) | (choice >= size)
    if bool(is_outside.any()):
        env = int(is_outside.nonzero()[0])
        raise ValueError(f"env {env}, head {name!r}: choice {int(choice[env])}; there are {size}")


# The heads that each op uses; the others have nothing to choose. For an op that uses a head, all
# its values are legal except blueprints that do not fit the site or the budget, and the alpha
# target that a seed already has.
OP_HEADS: dict[LifecycleOp, tuple[str, ...]] = {
    LifecycleOp.WAIT: (),
    LifecycleOp.GERMINATE: ("slot", "blueprint", "style", "tempo", "alpha_target", "alpha_curve"),
    LifecycleOp.SET_ALPHA_TARGET: ("slot", "alpha_target", "alpha_speed", "alpha_curve"),
    LifecycleOp.PRUNE: ("slot", "alpha_speed"),
    LifecycleOp.FOSSILIZE: ("slot",),
    LifecycleOp.ADVANCE: ("slot",),
}


def tamiyo_action_space(num_slots: int, num_blueprints: int) -> FactoredActionSpace:
    """Tamiyo's eight heads for a host with this many slots and a menu of this many blueprints."""
    where = ("op", "slot")
    heads = (
        Head("op", len(LifecycleOp)),
        Head("slot", num_slots, given=("op",)),
        Head("blueprint", num_blueprints, given=where),
        Head("style", len(BlendStyle), given=where),
        Head("tempo", len(TEMPO_STEPS), given=where),
        Head("alpha_target", len(ALPHA_TARGETS), given=where),
        Head("alpha_speed", len(ALPHA_SPEED_STEPS), given=where),
        Head("alpha_curve", len(AlphaCurve), given=where),
    )
    return FactoredActionSpace(heads)


def choice_names(
    action_space: FactoredActionSpace, blueprints: Sequence[str], slots: Sequence[str]
) -> dict[str, tuple[str | int | float, ...]]:
    """The name of each choice of Tamiyo's heads; a number where the choice is one (int: steps)."""
    names: dict[str, tuple[str | int | float, ...]] = {
        "op": tuple(op.name for op in LifecycleOp),
        "slot": tuple(slots),
        "blueprint": tuple(blueprints),
        "style": tuple(style.name for style in BlendStyle),
        "tempo": TEMPO_STEPS,
        "alpha_target": ALPHA_TARGETS,
        "alpha_speed": ALPHA_SPEED_STEPS,
        "alpha_curve": tuple(curve.name for curve in AlphaCurve),
    }
    assert tuple(map(len, names.values())) == action_space.sizes
    return names


def audit_action_space() -> FactoredActionSpace:
    """Four independent heads, for tests and benchmarks of unconditional spaces."""
    sizes = {"slot": NUM_SLOTS, "blueprint": NUM_BLUEPRINTS, "blend": NUM_BLENDS, "op": NUM_OPS}
    return FactoredActionSpace(tuple(Head(name, size) for name, size in sizes.items()))
