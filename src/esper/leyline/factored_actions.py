"""Factored actions: one decision made of several choices, which may depend on earlier ones.

    space = FactoredActionSpace((Head("row", 3), Head("column", 4, given=("row",))))

An unconditional head has a mask `[N, size]`; a head given `("op", "slot")` has one
`[N, |op|, |slot|, size]`: a row of legal choices for each combination of the earlier choices.
A row with no legal choice means "nothing to choose here": the head takes action 0 and adds
nothing to log-prob, entropy or gradient.

A continuous head is a number in (-1, 1): the tanh of a Gaussian sample (`SquashedGaussians`). It
has one column, the Gaussian's mean; its mask says whether the number is used. In a space with
continuous heads, actions are float32 `[..., H]`: choices as whole numbers, and the Gaussian sample
before tanh, so that scoring needs no inverse.

The choices of all heads are concatenated on one axis of length C, so that logits and the mask
rows that applied are single tensors `[..., C]`.
"""

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
from esper.leyline.stages import LifecycleOp
from esper.runtime.devices import constant, same_device

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
    sizes_by_name: dict[str, int] = _derived()
    num_heads: int = _derived()  # H
    num_choices: int = _derived()  # C: the choices of all heads together
    slices: tuple[slice, ...] = _derived()  # each head's part of the axis of length C
    given_indices: tuple[tuple[int, ...], ...] = _derived()  # of the heads it depends on
    unconditional: tuple[int, ...] = _derived()  # heads that depend on no other head
    continuous: tuple[int, ...] = _derived()  # heads that are numbers
    action_dtype: torch.dtype = _derived()  # float32 with continuous heads, else int64
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
            sizes_by_name=dict(zip(names, sizes, strict=True)),
            num_heads=len(names),
            num_choices=ends[-1],
            slices=tuple(slice(e - size, e) for e, size in zip(ends, sizes, strict=True)),
            given_indices=given,
            unconditional=tuple(i for i, earlier in enumerate(given) if not earlier),
            continuous=(numbers := tuple(i for i, h in enumerate(self.heads) if h.continuous)),
            action_dtype=torch.float32 if numbers else torch.int64,
            head_groups=groups,
            group_of=tuple(index for index, group in enumerate(groups) for _ in group),
            group_spaces=(self,)
            if self.heads == free
            else tuple(FactoredActionSpace(free[g.start : g.stop]) for g in groups),
        )

    def _check_heads(self) -> None:
        if not self.heads:
            raise ValueError("a FactoredActionSpace needs at least one head")
        for number, head in enumerate(self.heads):
            earlier = self.heads[:number]
            choices = [other.name for other in earlier if not other.continuous]
            others = [name for name in head.given if name not in choices]
            problem = ""
            if head.name in [other.name for other in earlier]:
                problem = "appears twice; head names must differ"
            elif type(head.size) is not int or not 1 <= head.size <= MOST_CHOICES:
                problem = f"has size {head.size}; use an int from 1 to {MOST_CHOICES}"
            elif head.continuous and head.size != 1:
                problem = f"is continuous; leave out size={head.size}"
            elif others:
                problem = f"is given {others}; the choices before it are {choices}"
            if problem:
                raise ValueError(f"head {head.name!r} {problem}")

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"no head {name!r}; this action space has {list(self.names)}")
        return self.names.index(name)

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
        return self.group_shape(range(index, index + 1))

    def group_shape(self, heads: range) -> tuple[int, ...]:
        """As `mask_shape`, for the concatenated mask of heads given the same earlier heads."""
        given = self.given_indices[heads.start]
        return (*(self.sizes[g] for g in given), sum(self.sizes[i] for i in heads))

    def view(self, packed: Tensor, name: str) -> Tensor:
        """One head's part of a packed tensor `[..., C]`, without a copy."""
        return packed[..., self.slices[self.index(name)]]

    def split(self, packed: Tensor) -> dict[str, Tensor]:
        """Every head's part of a packed tensor `[..., C]`, by name, without a copy."""
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
    heads. Pass the masks by head name, or those of each group, concatenated already. Shapes and
    dtypes are checked here; values are not, because they may be on a GPU.
    """

    def __init__(
        self, action_space: FactoredActionSpace, masks: Mapping[str, Tensor] | Sequence[Tensor]
    ):
        self.action_space = action_space
        groups = action_space.head_groups
        if isinstance(masks, Mapping):
            action_space.check_names(masks)
            by_head = [masks[name] for name in action_space.names]
            for index, mask in enumerate(by_head):
                self._check(mask, range(index, index + 1), len(by_head[0]))
            masks = [torch.cat(by_head[group.start : group.stop], dim=-1) for group in groups]
        else:
            for group, mask in zip(groups, masks, strict=True):
                self._check(mask, group, len(masks[0]))
        self.groups = tuple(masks)
        self.num_envs = len(self.groups[0])

    @classmethod
    def all_legal(
        cls,
        action_space: FactoredActionSpace,
        num_envs: int,
        device: torch.device | str | None = None,
    ) -> "ActionMasks":
        shapes = [(num_envs, *action_space.group_shape(g)) for g in action_space.head_groups]
        return cls(action_space, [torch.ones(s, dtype=torch.bool, device=device) for s in shapes])

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
        return ActionMasks(self.action_space, [mask.to(device) for mask in self.groups])

    def row(self, head_index: int, actions: Tensor) -> Tensor:
        """A head's legal choices `[N, size]`, given actions `[N, the heads before it or more]`."""
        space, group = self.action_space, self.action_space.group_of[head_index]
        rows = self.rows(space.head_groups[group], actions)
        return space.group_spaces[group].view(rows, space.names[head_index])

    def rows(self, group: range, actions: Tensor) -> Tensor:
        """As `row`, for all heads of a group: `[N, their choices]`.

        On a CPU, an earlier choice out of range raises. On a GPU it is not checked, because that
        would synchronise: pass choices that were sampled from these masks.
        """
        given = self.action_space.given_indices[group.start]
        mask = self.groups[self.action_space.group_of[group.start]]
        if not given:
            return mask
        row = torch.arange(self.num_envs, device=self.device)
        for head in given:
            choice, size = actions[:, head].long(), self.action_space.sizes[head]
            if self.device.type == "cpu":
                _check_range(self.action_space.names[head], size, choice)
            row = torch.add(choice, row, alpha=size)
        return mask.reshape(-1, mask.shape[-1]).index_select(0, row)

    def _check(self, mask: Tensor, heads: range, num_envs: int) -> None:
        """Check the concatenated mask of heads that depend on the same earlier heads."""
        expected = (num_envs, *self.action_space.group_shape(heads))
        if tuple(mask.shape) != expected or mask.dtype != torch.bool:
            names = ", ".join(repr(self.action_space.names[i]) for i in heads)
            axes = ", ".join(("envs", *self.action_space.heads[heads.start].given, "choices"))
            raise ValueError(
                f"mask of head {names}: got {mask.dtype} {tuple(mask.shape)}, "
                f"expected {torch.bool} {expected} ({axes})"
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


def choice_names(
    blueprints: Sequence[Any], slots: Sequence[Any]
) -> dict[str, tuple[str | int | float, ...]]:
    """The name of each choice of Tamiyo's heads; a number where the choice is one (int: steps)."""
    return {
        "op": tuple(op.name for op in LifecycleOp),
        "slot": tuple(slots),
        "blueprint": tuple(blueprints),
        "style": tuple(style.name for style in BlendStyle),
        "tempo": TEMPO_STEPS,
        "alpha_target": ALPHA_TARGETS,
        "alpha_speed": ALPHA_SPEED_STEPS,
        "alpha_curve": tuple(curve.name for curve in AlphaCurve),
    }


def tamiyo_action_space(num_slots: int, num_blueprints: int) -> FactoredActionSpace:
    """Tamiyo's eight heads for a host with this many slots and a menu of this many blueprints."""
    given = {"op": (), "slot": ("op",)}
    choices = choice_names(range(num_blueprints), range(num_slots))
    return FactoredActionSpace(
        tuple(Head(name, len(c), given.get(name, ("op", "slot"))) for name, c in choices.items())
    )


def audit_action_space() -> FactoredActionSpace:
    """Four independent heads, for tests and benchmarks of unconditional spaces."""
    sizes = {"slot": NUM_SLOTS, "blueprint": NUM_BLUEPRINTS, "blend": NUM_BLENDS, "op": NUM_OPS}
    return FactoredActionSpace(tuple(Head(name, size) for name, size in sizes.items()))
