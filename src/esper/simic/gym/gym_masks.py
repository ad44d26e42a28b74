"""Action masks as environments give them: where they come from, and what they must look like.

    masks = read_masks(action_space, given, checks)          # of N envs
    reader = MaskReader(envs, spaces, "auto", "action_mask", infos, device)

A mask comes with the observation, in info, or from a method `action_masks()`. It is one array
`[N, choices]`, or a mapping from each head to `[N, *given sizes, size]`; or a list with one for each
env. Arrays may be tensors on a GPU.
"""

from collections.abc import Iterator, Mapping
from itertools import compress
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head
from esper.simic.gym.entries import to_tensor
from esper.simic.gym.round_checks import RoundChecks

if TYPE_CHECKING:
    from esper.simic.gym.gym_spaces import GymSpaces

MaskOption = Literal["auto", "observation", "info", "method", "none"]
DEFAULT_KEY = "action_mask"


class MaskReader:
    """The masks of one vector environment, from the source that it offers."""

    def __init__(
        self,
        vector_env: Any,
        spaces: "GymSpaces",
        asked: MaskOption,
        key: str,
        infos: Any,
        device: torch.device,
    ):
        self._vector_env = vector_env
        self._spaces = spaces
        self._key = key
        self.source = self._find_source(infos, asked)
        self.is_unmasked_by_chance = self.source == "none" != asked
        all_legal = ActionMasks.all_legal(spaces.action_space, vector_env.num_envs)
        self.all_legal = all_legal.to(device)

    def _find_source(self, infos: Mapping[str, Any], asked: MaskOption) -> MaskOption:
        """Where masks come from: as asked, or the first source that the environment offers."""
        if asked in ("info", "none"):
            return asked
        if self._spaces.mask_entry is not None and asked != "method":
            return "observation"
        if asked == "observation":
            raise ValueError(
                f"the observation has no entry {self._key!r} with the mask; use a Dict "
                "observation that has it, or set mask_key"
            )
        if asked == "auto" and self._key in infos:
            return "info"
        if asked == "method" or self._key == DEFAULT_KEY:
            has_method = self._envs_with_the_method()
            if any(has_method):
                if without := [env for env, has in enumerate(has_method) if not has]:
                    raise ValueError(
                        f"envs {without} have no action_masks() method, but the others do; add it "
                        "to all, or set masks='none' to learn without masks"
                    )
                return "method"
        if asked == "method":
            raise ValueError(
                f"{self._vector_env} has no sub-environments with an action_masks() method; give "
                f"masks as info[{self._key!r}] (masks='info')"
            )
        return "none"

    def _envs_with_the_method(self) -> list[bool]:
        """Of each sub-environment; or of the vector environment, if it computes all of them."""
        inner = self._vector_env.unwrapped
        if _has_sub_environments(inner):
            return list(inner.call("has_wrapper_attr", "action_masks"))
        return [callable(getattr(inner, "action_masks", None))]

    def infos_to_read(self, infos: Mapping[str, Any]) -> dict[str, Any]:
        """The infos that `read` needs, with what the method answers."""
        if self.source == "method":
            inner = self._vector_env.unwrapped
            has_many = _has_sub_environments(inner)
            return {self._key: inner.call("action_masks") if has_many else inner.action_masks()}
        return {name: infos[name] for name in (self._key, f"_{self._key}") if name in infos}

    def read(
        self,
        observations: Any,
        infos: Mapping[str, Any],
        needed: Tensor | None,
        checks: RoundChecks,
    ) -> ActionMasks:
        """The masks of all envs; those not in `needed` `[N]` are all legal. None: all are needed."""
        if self.source == "none":
            if self.is_unmasked_by_chance and self._key in infos:
                raise ValueError(
                    f"info has {self._key!r}, but the first reset gave none: give it at every "
                    "reset and step, or set masks='none' to learn without masks"
                )
            return self.all_legal
        if needed is not None and needed.device.type == "cpu" and not needed.any():
            return self.all_legal
        given = self._given(observations, infos, needed, checks)
        space = self._spaces.action_space
        if needed is None:
            return read_masks(space, given, checks)
        if needed.device.type != "cpu":
            return merged_masks(read_masks(space, given, checks, needed), needed, self.all_legal)
        of_needed = checks.of_envs(needed.nonzero()[:, 0])
        found = read_masks(space, _of_envs(given, needed.numpy()), of_needed)
        groups = [group.clone() for group in self.all_legal.groups]
        for group, part in zip(groups, found.groups, strict=True):
            group[needed] = part
        return ActionMasks(space, groups)

    def _given(
        self,
        observations: Any,
        infos: Mapping[str, Any],
        needed: Tensor | None,
        checks: RoundChecks,
    ) -> Any:
        """The masks as the environment gives them; raises if a needed one is missing."""
        key = self._key
        if self.source == "observation":
            if isinstance(observations, list):
                return [observation[key] for observation in observations]
            return observations[key]
        if self.source == "method":
            return infos[key]
        num_envs = self._vector_env.num_envs
        missing = f"no info[{key!r}]; with masks from info, every reset and step must give one"
        if key not in infos:
            envs = list(range(num_envs)) if needed is None else needed.nonzero()[:, 0].tolist()
            raise ValueError(f"envs {envs} gave {missing}")
        if f"_{key}" in infos:
            is_given = to_tensor(f"_{key}", infos[f"_{key}"]).bool()
            if needed is not None:
                is_given = is_given.to(needed.device) | ~needed
            if is_given.device.type == "cpu" and not is_given.all():
                raise ValueError(f"envs {(~is_given).nonzero()[:, 0].tolist()} gave {missing}")
            checks.require(missing, is_given)
        return infos[key]


def _has_sub_environments(inner: Any) -> bool:
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    return isinstance(inner, SyncVectorEnv | AsyncVectorEnv)


def merged_masks(masks: ActionMasks, chosen: Tensor, others: ActionMasks) -> ActionMasks:
    """The masks where `chosen` `[N]`, else the others."""
    groups = [
        torch.where(chosen.view(-1, *[1] * (group.ndim - 1)), group, other)
        for group, other in zip(masks.groups, others.groups, strict=True)
    ]
    return ActionMasks(masks.action_space, groups)


def _of_envs(masks: Any, envs: "np.ndarray[Any, Any]") -> Any:
    """The masks of some envs out of those of all."""
    if isinstance(masks, Mapping):  # for each head, gymnasium adds which envs gave it as "_head"
        return {
            name: _of_envs(mask, envs) for name, mask in masks.items() if not name.startswith("_")
        }
    if isinstance(masks, tuple | list):
        return [*compress(masks, envs)]
    if isinstance(masks, Tensor):
        return masks[torch.from_numpy(envs)]
    return np.asarray(masks)[envs]


def read_masks(
    space: FactoredActionSpace,
    masks: Any,
    checks: RoundChecks,
    needed: Tensor | None = None,
) -> ActionMasks:
    """Masks of N envs, from a mapping of each head to `[N, *given sizes, size]`.

    If no head depends on another, `masks` may also be the concatenated masks of all heads with
    choices, `[N, choices]`. Continuous heads have masks `[N, *given sizes]`, and may be left out:
    their numbers are always used. Both may be a list with one for each env. Envs that are not
    `needed` `[N]` are not checked.
    """
    if isinstance(masks, list) and masks and isinstance(masks[0], Mapping):
        masks = {name: [mask[name] for mask in masks] for name in masks[0]}
    sizes = {head.name: head.size for head in space if not head.continuous}
    if not isinstance(masks, Mapping):
        if len(space.head_groups) > 1:
            raise ValueError(
                f"heads {list(space.names)} depend on each other, so masks must be a mapping "
                f"from head to array; got {type(masks).__name__}"
            )
        what = f"action mask of heads {sizes}"
        together = _mask(what, masks, (sum(sizes.values()),), checks, needed)
        if not space.continuous:
            return ActionMasks(space, [together])
        by_size = torch.split(together, list(sizes.values()), dim=-1)
        masks = dict(zip(sizes, by_size, strict=True))
    by_head = {name: mask for name, mask in masks.items() if not name.startswith("_")}
    read = {
        name: _mask(f"mask of head {name!r}", by_head[name], space.mask_shape(name), checks, needed)
        for name in space.names
        if name in by_head
    }
    for place in space.continuous:
        name = space.names[place]
        if name not in read and read:
            some = next(iter(read.values()))
            shape = (len(some), *space.mask_shape(name))
            read[name] = torch.ones(shape, dtype=torch.bool, device=some.device)
    space.check_names(read | {name: mask for name, mask in by_head.items() if name not in read})
    read = {name: read[name] for name in space.names}
    for head, is_stuck in _dead_ends(space, read):
        _refuse_dead_ends(head, is_stuck, checks, needed)
    return ActionMasks(space, read)


def _mask(
    what: str, mask: Any, expected: tuple[int, ...], checks: RoundChecks, needed: Tensor | None
) -> Tensor:
    """The masks of all envs as bools; a copy, because environments reuse theirs."""
    shape = f"(envs, {', '.join(map(str, expected))})"
    if isinstance(mask, np.ndarray) and mask.dtype == object:
        mask = list(mask)
    try:
        given = to_tensor(what, mask)
    except ValueError as error:
        raise ValueError(f"{error}; expected one array {shape}") from error
    if needed is not None:  # a method may give arrays where observations are on a GPU
        given = given.to(needed.device)
    if (*given.shape[1:], 1) == expected:  # a number, without the axis of choices
        given = given.unsqueeze(-1)
    if given.shape[1:] != expected:
        raise ValueError(f"{what}: got shape {tuple(given.shape)}, expected {shape}")
    if given.dtype == torch.bool:
        return given.clone()
    is_legal = given.bool()
    is_right = (is_legal == given).flatten(1).all(dim=1)
    if needed is not None:
        is_right |= ~needed

    def details() -> str:
        value = given[is_legal != given][0].item()
        return f"{what} holds {value}; use 1 for legal and 0 for illegal choices"

    advice = f"{what} holds other values than 0 and 1; use 1 for legal and 0 for illegal choices"
    checks.require(advice, is_right, details)
    return is_legal


def _dead_ends(
    space: FactoredActionSpace, masks: dict[str, Tensor]
) -> Iterator[tuple[Head, Tensor]]:
    """Heads that must choose, and where legal earlier choices leave nothing, `[N, *given sizes]`."""
    legal = dict(masks)  # after legal earlier choices
    axes = {head.name: [*head.given, head.name] for head in space}
    for head in space:
        if not head.given:
            continue
        earlier = dict.fromkeys(axis for name in head.given for axis in axes[name])
        letters = dict(zip(earlier, ascii_lowercase, strict=False))
        *named, given = (
            "Z" + "".join(letters[axis] for axis in part)
            for part in (*(axes[name] for name in head.given), head.given)
        )
        # [N, *given sizes]: how many legal choices lead there
        ways = torch.einsum(
            f"{','.join(named)}->{given}", *(legal[name].float() for name in head.given)
        )
        is_reached = ways > 0
        legal[head.name] = masks[head.name] & is_reached.unsqueeze(-1)
        if not head.continuous and not head.optional:
            yield head, is_reached & ~masks[head.name].any(dim=-1)


def _refuse_dead_ends(
    head: Head, is_stuck: Tensor, checks: RoundChecks, needed: Tensor | None
) -> None:
    is_right = ~is_stuck.flatten(1).any(dim=1)
    if needed is not None:
        is_right |= ~needed

    def message(where: str) -> str:
        return (
            f"{where} is legal, but then head {head.name!r} has no legal choice; mask {where} too, "
            f"or declare Head({head.name!r}, ..., optional=True): its choice 0 is then taken and "
            "not scored"
        )

    def details() -> str:
        _, *choices = is_stuck.nonzero()[0].tolist()
        return message(", ".join(f"{g}={c}" for g, c in zip(head.given, choices, strict=True)))

    checks.require(message(f"a choice of {' and '.join(head.given)}"), is_right, details)
