"""Conversion between Gymnasium spaces and the policy: observations to features, choices to actions.

    spaces = GymSpaces.of(vector_env)
    spaces.read(observations)                # features [N, F], and pictures [N, P] as bytes
    spaces.actions(choices)                  # of N envs, as `vector_env.step` takes them

Dict and Tuple spaces are flattened to their entries, as `gymnasium.spaces.utils.flatten` does.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head
from esper.tamiyo.policy.plain_heads import ImageShape

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

Array = NDArray[Any]
Path = tuple[str | int, ...]  # keys of Dicts and positions in Tuples


@dataclass(frozen=True)
class Entry:
    """An array of an observation or an action; Dict and Tuple spaces have several."""

    path: Path
    kind: Literal["numbers", "choices", "image"]
    shape: tuple[int, ...]
    dtype: str  # of an action
    sizes: tuple[int, ...] = ()  # of choices: how many values each element has
    low: tuple[float, ...] = ()  # lowest value of each element; not of observed numbers
    high: tuple[float, ...] = ()  # highest value of each element of an action in numbers

    @property
    def width(self) -> int:
        """Columns of an observation's entry: choices are one-hot."""
        return sum(self.sizes) if self.kind == "choices" else math.prod(self.shape)

    @property
    def is_channels_first(self) -> bool:
        """The channels are the axis that differs from two equal ones, or else the smaller end."""
        *_, first, middle, last = self.shape
        return first != middle and (middle == last or first < last)

    def __str__(self) -> str:
        parts = (_name(self.path), self.kind, self.shape, self.sizes, self.low, self.high)
        return " ".join(str(part) for part in parts if part not in ("", ()))


class PolicyInput(NamedTuple):
    """Observations of N envs as a policy reads them."""

    features: Tensor  # [N, F] float32: previous step, flat entries
    frames: Tensor  # [N, P] uint8: all images, each flattened with its channels first


@dataclass(frozen=True, kw_only=True)
class GymSpaces:
    """Observation and action space of one environment, as the policy needs them."""

    observation: tuple[Entry, ...]  # images last
    mask_entry: str | None  # the entry of a Dict observation that holds the action mask
    action_space: FactoredActionSpace
    action: tuple[Entry, ...]
    head_of: tuple[int, ...]  # the head of each element of the action
    previous_action: bool = False  # whether features hold the choices of the step before
    previous_reward: bool = False  # and its reward

    @classmethod
    def of(
        cls,
        envs: "VectorEnv[Any, Any, Any]",
        heads: Iterable[Head] | None = None,
        mask_entry: str | None = "action_mask",
    ) -> "GymSpaces":
        """The spaces of each environment; `heads` declares which choices depend on which."""
        from gymnasium import spaces

        space = envs.single_observation_space
        if not isinstance(space, spaces.Dict) or mask_entry not in space.spaces:
            mask_entry = None
        parts = [part for part in _parts(space) if mask_entry is None or part[0][0] != mask_entry]
        entries = sorted((_observed(*part) for part in parts), key=lambda e: e.kind == "image")
        if not sum(entry.width for entry in entries):
            raise ValueError(f"observation space {space} holds no numbers; add an entry that does")
        action = tuple(_acted(*part) for part in _parts(envs.single_action_space))
        action_space, head_of = _match_heads(action, heads, envs.single_action_space)
        return cls(
            observation=tuple(entries),
            mask_entry=mask_entry,
            action_space=action_space,
            action=action,
            head_of=head_of,
        )

    @property
    def num_features(self) -> int:
        flat = sum(entry.width for entry in self.observation if entry.kind != "image")
        return self.num_previous + flat

    @property
    def frame_size(self) -> int:
        """Bytes of an observation's images."""
        return sum(entry.width for entry in self.observation if entry.kind == "image")

    @property
    def num_previous(self) -> int:
        """Features of the step before: its choices, one-hot, then its reward."""
        return self.previous_action * self.action_space.num_choices + self.previous_reward

    @property
    def images(self) -> tuple[ImageShape, ...]:
        """Channels, height and width of each; a stack of images is one with all their channels."""
        shapes = [
            e.shape if e.is_channels_first else (*e.shape[:-3], e.shape[-1], *e.shape[-3:-1])
            for e in self.observation
            if e.kind == "image"
        ]
        return tuple((math.prod(channels), h, w) for *channels, h, w in shapes)

    # -- observations -------------------------------------------------------------------------

    def num_rows(self, observations: Any) -> int | None:
        """N of the observations of N envs; None if this is the observation of one env."""
        first = self.observation[0]
        array = _at(observations, first.path)
        return None if np.ndim(array) == len(first.shape) else len(array)

    def empty_input(self, num_envs: int) -> PolicyInput:
        """Zeros for N envs, such as an `out` of `read`."""
        return PolicyInput(
            torch.zeros(num_envs, self.num_features),
            torch.zeros(num_envs, self.frame_size, dtype=torch.uint8),
        )

    def read(
        self,
        observations: Any,
        previous: Array | None = None,
        *,
        one_by_one: bool = False,
        out: PolicyInput | None = None,
    ) -> PolicyInput:
        """Observations of N envs as a policy reads them; a copy, because envs reuse their arrays.

        They are batched, or `one_by_one`: a sequence with one for each env. `previous` is what the
        method `previous` returned for the step before; None in a first step. Written to `out` if
        given.
        """
        arrays = [
            np.array([_at(observation, e.path) for observation in observations])
            if one_by_one
            else np.asarray(_at(observations, e.path))
            for e in self.observation
        ]
        read = self.empty_input(len(arrays[0])) if out is None else out
        features: Array = read.features.numpy()
        features[:] = 0.0
        start = self.num_previous
        features[:, :start] = 0.0 if previous is None else previous
        first_byte = 0
        for entry, array in zip(self.observation, arrays, strict=True):
            if array.shape != (len(features), *entry.shape):
                raise ValueError(
                    f"observations{_name(entry.path)}: got shape {array.shape}, expected "
                    f"(envs, {', '.join(map(str, entry.shape))})"
                )
            if entry.kind == "image":
                frames = read.frames[:, first_byte : first_byte + entry.width]
                _write_image(frames.numpy(), entry, array)
                first_byte += entry.width
            else:
                _write(features[:, start : start + entry.width], entry, array)
                start += entry.width
        return read

    def previous(self, choices: Array, rewards: Array) -> Array:
        """The choices `[N, H]` and rewards `[N]` of a step as features of the next one, `[N, num_previous]`."""
        columns = np.zeros((len(rewards), self.num_previous), dtype=np.float32)
        start, heads = 0, self.action_space.heads if self.previous_action else ()
        for head, choice in zip(heads, choices.T, strict=False):
            if head.continuous:
                columns[:, start] = np.tanh(choice)
            else:
                columns[np.arange(len(choice)), start + choice.astype(np.int64)] = 1.0
            start += head.size
        if self.previous_reward:
            columns[:, -1] = rewards
        return columns

    def require_finite(self, features: Tensor, where: str = "") -> None:
        """Raise for an observation that is NaN or infinite; names the env and the entry."""
        if np.isfinite(features.numpy()).all():
            return
        env, column = (~features.isfinite()).nonzero()[0].tolist()
        value = features[env, column].item()
        if column < self.num_previous:
            raise ValueError(f"env {env}{where}: the reward is {value}; give finite numbers")
        places = [(_name(e.path), i) for e in self.observation for i in range(e.width)]
        entry, position = places[column - self.num_previous]
        raise ValueError(
            f"env {env}{where}: the observation{entry} holds {value} at position {position}; the "
            "environment must give finite float32 numbers"
        )

    # -- actions ------------------------------------------------------------------------------

    def actions(self, choices: Tensor) -> Any:
        """Choices `[N, H]` as actions of a vector environment, or `[H]` as that of one."""
        flat: Array = choices.cpu().numpy()
        if len(self.head_of) > 1:
            flat = flat[..., self.head_of]
        parts, start = {}, 0
        for entry in self.action:
            end = start + len(entry.low)
            part = flat[..., start:end]
            if entry.kind == "numbers":
                low, high = np.array(entry.low), np.array(entry.high)
                part = np.clip(low + (high - low) * (np.tanh(part) + 1.0) / 2.0, low, high)
            elif any(entry.low):
                part = part + np.array(entry.low)
            shape = (*flat.shape[:-1], *entry.shape)
            # a copy: an environment may keep or change its action, and rows are written again
            part = part.astype(entry.dtype).reshape(shape)
            parts[entry.path] = part[()]  # a scalar, where it has no axes
            start = end
        return _nest(parts)

    # -- masks --------------------------------------------------------------------------------

    def masks(self, masks: Any) -> ActionMasks:
        """Masks of N envs, from a mapping of each head to `[N, *given sizes, size]`.

        If no head depends on another, `masks` may also be the concatenated masks of all heads with
        choices, `[N, choices]`. Continuous heads have masks `[N, *given sizes]`, and may be left
        out: their numbers are always used. Both may be a list with one for each env.
        """
        space = self.action_space
        if isinstance(masks, list) and masks and isinstance(masks[0], Mapping):
            masks = {name: [mask[name] for mask in masks] for name in masks[0]}
        if not isinstance(masks, Mapping):
            if len(space.head_groups) > 1:
                raise ValueError(
                    f"heads {list(space.names)} depend on each other, so masks must be a mapping "
                    f"from head to array; got {type(masks).__name__}"
                )
            sizes = {h.name: h.size for h in space if not h.continuous}
            array = _mask_array(f"action mask of heads {sizes}", masks, (sum(sizes.values()),))
            if not space.continuous:
                return ActionMasks(space, [torch.from_numpy(array)])
            ends = np.cumsum([*sizes.values()])[:-1]
            masks = dict(zip(sizes, np.split(array, ends, axis=-1), strict=True))
        num_envs = len(next(iter(masks.values()), ()))
        numbers = [space.names[i] for i in space.continuous]
        masks = {n: np.ones((num_envs, *space.mask_shape(n))) for n in numbers} | dict(masks)
        space.check_names(masks)
        arrays = {
            name: _mask_array(f"mask of head {name!r}", masks[name], space.mask_shape(name))
            for name in space.names
        }
        self._require_choices(arrays)
        return ActionMasks(space, {name: torch.from_numpy(a) for name, a in arrays.items()})

    def _require_choices(self, arrays: dict[str, Array]) -> None:
        """Raise where legal earlier choices leave a head nothing to choose, unless it is optional."""
        legal = dict(arrays)  # after legal earlier choices
        axes = {head.name: [*head.given, head.name] for head in self.action_space}
        for head in self.action_space:
            if not head.given:
                continue
            earlier = dict.fromkeys(axis for name in head.given for axis in axes[name])
            letters = dict(zip(earlier, ascii_lowercase, strict=False))
            *named, given = (
                "N" + "".join(letters[axis] for axis in part)
                for part in (*(axes[name] for name in head.given), head.given)
            )
            # [N, *given sizes]: what legal choices lead to; sums of bools are "or"
            masks = (legal[name] for name in head.given)
            is_reached = np.einsum(f"{','.join(named)}->{given}", *masks)
            legal[head.name] = arrays[head.name] & is_reached[..., None]
            if head.continuous or head.optional:
                continue
            is_stuck = is_reached & ~arrays[head.name].any(-1)
            if is_stuck.any():
                env, *choices = np.argwhere(is_stuck)[0].tolist()
                where = ", ".join(f"{g}={c}" for g, c in zip(head.given, choices, strict=True))
                raise ValueError(
                    f"env {env}: {where} is legal, but then head {head.name!r} has no legal choice; "
                    f"mask {where} too, or declare Head({head.name!r}, ..., optional=True): its "
                    "choice 0 is then taken and not scored"
                )

    def require_same(self, envs: "VectorEnv[Any, Any, Any]") -> None:
        """Raise if the environments' spaces are not those that the policy was made for."""
        found = GymSpaces.of(envs, mask_entry=self.mask_entry)
        for name in ("action", "observation"):
            mine, others = (s.describe()[name] for s in (self, found))
            if mine != others:
                raise ValueError(
                    "the environment's spaces are not those of the policy: "
                    f"the {name} is {others}, expected {mine}"
                )

    def describe(self) -> dict[str, str]:
        """The heads and the entries of actions and observations, to compare and to print."""
        mask = [] if self.mask_entry is None else [f"mask {self.mask_entry!r}"]
        return {
            "heads": ", ".join(map(str, self.action_space)),
            "action": ", ".join(map(str, self.action)),
            "observation": ", ".join([*map(str, self.observation), *mask]),
        }


def _parts(space: "gymnasium.Space[Any]", path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The spaces inside Dict and Tuple spaces, with their paths."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _parts(part, (*path, str(key)))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _parts(part, (*path, index))
    else:
        yield path, space


def _name(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _at(value: Any, path: Path) -> Any:
    """The entry at `path`."""
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the entry {_name(path)} is missing") from error
    return value


def _nest(parts: dict[Path, Any]) -> Any:
    """Entries by path as the dict or tuple that they are parts of."""
    if () in parts:
        return parts[()]
    keys = dict.fromkeys(path[0] for path in parts)
    inner = {k: _nest({p[1:]: part for p, part in parts.items() if p[0] == k}) for k in keys}
    return tuple(inner.values()) if isinstance(next(iter(keys)), int) else inner


def _observed(path: Path, space: "gymnasium.Space[Any]") -> Entry:
    """An entry of the observation."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return _acted(path, space)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        is_image = space.dtype == np.uint8 and len(space.shape) in (3, 4)  # 4: a stack of them
        return Entry(path, "image" if is_image else "numbers", space.shape, "")
    keep = "leave it out with gymnasium.wrappers.FilterObservation(env, [the other keys]), or "
    raise ValueError(
        f"the observation{_name(path)} is a {space}, which has no fixed number of features; "
        f"{keep if path else ''}turn it into a Box with "
        "gymnasium.wrappers.TransformObservation(env, function, space)"
    )


def _acted(path: Path, space: "gymnasium.Space[Any]") -> Entry:
    """An entry of the action."""
    from gymnasium import spaces

    shape, dtype = space.shape or (), str(space.dtype)
    where = f"the action{_name(path)} is a {space}"
    if isinstance(space, spaces.Discrete):
        return Entry(path, "choices", shape, dtype, (int(space.n),), (float(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        sizes, starts = (array.flatten().tolist() for array in (space.nvec, space.start))
        return Entry(path, "choices", shape, dtype, tuple(sizes), tuple(map(float, starts)))
    if isinstance(space, spaces.MultiBinary):
        size = math.prod(shape)
        return Entry(path, "choices", shape, dtype, (2,) * size, (0.0,) * size)
    if not isinstance(space, spaces.Box):
        raise ValueError(f"{where}; use Discrete, MultiDiscrete, MultiBinary, Box, Dict or Tuple")
    if not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"{where} of whole numbers; use MultiDiscrete(high - low + 1, start=low)")
    if not space.is_bounded():
        raise ValueError(
            f"{where} without bounds; wrap the env in gymnasium.wrappers.TransformAction(env, "
            f"lambda action: action, Box(low, high, {shape})) with finite bounds"
        )
    low, high = (tuple(map(float, bound.flatten())) for bound in (space.low, space.high))
    return Entry(path, "numbers", shape, dtype, (), low, high)


def _match_heads(
    action: tuple[Entry, ...], heads: Iterable[Head] | None, space: "gymnasium.Space[Any]"
) -> tuple[FactoredActionSpace, tuple[int, ...]]:
    """The heads, and the head of each element of the action: by name, or else by order."""
    defaults = [(head, entry.path) for entry in action for head in _default_heads(entry)]
    if not defaults:
        raise ValueError(f"the action space {space} holds no choices and no numbers; add some")
    places: dict[str, Path] = {}
    for head, path in defaults:
        if (other := places.setdefault(head.name, path)) != path:
            raise ValueError(
                f"the entries {_name(other)} and {_name(path)} of the action {space} both give a "
                f"head {head.name!r}; rename one of them"
            )
    expected = FactoredActionSpace(tuple(head for head, _ in defaults))
    if heads is None:
        return expected, tuple(range(expected.num_heads))
    heads = tuple(heads) if isinstance(heads, Iterable) else (heads,)
    if wrong := [type(head).__name__ for head in heads if not isinstance(head, Head)]:
        raise ValueError(f"heads holds a {wrong[0]}; use esper.Head, and config= for settings")
    given = FactoredActionSpace(heads)
    head_of = tuple(range(given.num_heads))
    if set(given.names) == set(expected.names):
        head_of = tuple(map(given.index, expected.names))
    found, needed = (
        tuple("continuous" if h.continuous else h.size for h in heads)
        for heads in (given, expected)
    )
    if tuple(found[i] for i in head_of) != needed:
        raise ValueError(
            f"the heads have sizes {found}, but the environment's {space} needs {needed}; its heads "
            f"are {list(expected.names)}"
        )
    return given, head_of


def _default_heads(entry: Entry) -> Iterator[Head]:
    """A head for each element; named after its place in the action."""
    keys = entry.path if isinstance((*entry.path, 0)[0], str) else ("action", *entry.path)
    name, is_number = "_".join(map(str, keys)), entry.kind == "numbers"
    for index in range(len(entry.low)):
        size = 1 if is_number else entry.sizes[index]
        yield Head(f"{name}_{index}" if entry.shape else name, size, continuous=is_number)


def _write(features: Array, entry: Entry, array: Array) -> None:
    """Write an entry's observations `[N, ...]` to its columns `[N, width]`, which are 0."""
    if entry.kind != "choices":
        features[:] = array.reshape(features.shape)
        return
    sizes, first = np.array(entry.sizes), np.array(entry.low, dtype=np.int64)
    index = array.reshape(len(array), -1).astype(np.int64) - first
    if (index < 0).any() or (index >= sizes).any():
        raise ValueError(
            f"observations{_name(entry.path)} {array.tolist()} are not all within "
            f"{', '.join(map(str, first))} to {', '.join(map(str, first + sizes - 1))}"
        )
    features[np.arange(len(array))[:, None], np.cumsum(sizes) - sizes + index] = 1.0


def _write_image(frames: Array, entry: Entry, array: Array) -> None:
    """Write images `[N, ...]` to their columns `[N, width]`, channels first."""
    if array.dtype != np.uint8:
        with np.errstate(invalid="ignore"):  # NaN
            pixels = array.astype(np.uint8)
        if (pixels != array).any():
            value = array[pixels != array].flat[0]
            raise ValueError(
                f"observations{_name(entry.path)} holds {value}; the pixels of an image are whole "
                "numbers from 0 to 255 (uint8)"
            )
        array = pixels
    if not entry.is_channels_first:
        array = np.moveaxis(array, -1, -3)
    frames[:] = array.reshape(frames.shape)


def _mask_array(what: str, masks: Any, expected: tuple[int, ...]) -> Array:
    """The masks of all envs as a bool array; a copy, because environments reuse theirs."""
    shape = f"(envs, {', '.join(map(str, expected))})"
    try:
        if not isinstance(masks, np.ndarray) or masks.dtype == object:
            masks = list(masks)  # unpacks an object array of lists
        array = np.array(masks)
        is_legal = array.astype(bool)
    except ValueError as error:
        raise ValueError(f"{what}: {error}; expected one array {shape}") from error
    if (*array.shape[1:], 1) == expected:  # a number, without the axis of choices
        array, is_legal = array[..., None], is_legal[..., None]
    if array.shape[1:] != expected:
        raise ValueError(f"{what}: got shape {array.shape}, expected {shape}")
    if array.dtype != bool and (is_legal != array).any():
        value = array[is_legal != array].flat[0]
        raise ValueError(f"{what} holds {value}; use 1 for legal and 0 for illegal choices")
    return is_legal
