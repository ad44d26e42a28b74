"""Arrays of observations and actions: what each space allows, and how it meets the policy.

An observation's entry becomes columns of the features, or bytes of pictures. An action's entry is made
from the choices of its heads. Tensors stay on their device; NumPy arrays are read without a copy.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.runtime.devices import constant

if TYPE_CHECKING:
    import gymnasium

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

    @property
    def name(self) -> str:
        """The path as code that reads the entry."""
        return name_of(self.path)

    def __str__(self) -> str:
        parts = (self.name, self.kind, self.shape, self.sizes, self.low, self.high)
        return " ".join(str(part) for part in parts if part not in ("", ()))

    # -- observations -------------------------------------------------------------------------

    def read(self, observations: Any, *, one_by_one: bool) -> Tensor:
        """The entry `[N, *shape]` of observations, batched or one for each env."""
        if one_by_one:
            values = [at(observation, self.path) for observation in observations]
            entries = to_tensor(f"observations{self.name}", values)
        else:
            entries = to_tensor(f"observations{self.name}", at(observations, self.path))
        if entries.shape[1:] != self.shape or not entries.ndim:
            raise ValueError(
                f"observations{self.name}: got shape {tuple(entries.shape)}, expected "
                f"(envs, {', '.join(map(str, self.shape))})"
            )
        return entries

    def write(self, entries: Tensor, out: Tensor) -> None:
        """Write the entry `[N, *shape]` to its columns `[N, width]`, or to its bytes.

        A value that is none of the choices becomes NaN: on a GPU, looking would wait for it.
        """
        if self.kind == "numbers":
            out.copy_(entries.reshape(out.shape))
        elif self.kind == "image":
            self._write_image(entries, out)
        else:
            self._write_choices(entries, out)

    def _write_choices(self, entries: Tensor, out: Tensor) -> None:
        device = entries.device
        lowest = constant(tuple(map(int, self.low)), device)
        sizes = constant(self.sizes, device)
        ends = np.cumsum(self.sizes)
        starts = constant(tuple((ends - self.sizes).tolist()), device)
        given = entries.reshape(len(out), -1)
        choices = given.long() - lowest
        is_choice = (choices >= 0) & (choices < sizes) & (choices + lowest == given)
        columns = starts + choices.where(is_choice, 0)
        one_hot = torch.zeros(out.shape, device=device).scatter_(1, columns, 1.0)
        is_right = is_choice.all(dim=1, keepdim=True)
        out.copy_(one_hot.masked_fill_(~is_right, torch.nan))

    def _write_image(self, entries: Tensor, out: Tensor) -> None:
        pixels = entries
        if entries.dtype != torch.uint8:
            pixels = entries.to(torch.uint8)
            if (pixels != entries).any():
                value = entries[pixels != entries][0].item()
                raise ValueError(
                    f"observations{self.name} holds {value}; the pixels of an image are whole "
                    "numbers from 0 to 255 (uint8)"
                )
        if not self.is_channels_first:
            pixels = pixels.movedim(-1, -3)
        out.copy_(pixels.reshape(out.shape))

    def problem(self, value: float, position: int) -> str:
        """What is wrong with a column that is not finite."""
        if self.kind == "choices":
            return f"the observation{self.name} is not within {self._range(0)} to {self._range(1)}"
        return (
            f"the observation{self.name} holds {value} at position {position}; the environment must "
            "give finite float32 numbers"
        )

    def _range(self, end: int) -> str:
        """The lowest or the highest value of each element of choices."""
        ends = [
            (int(low), int(low) + size - 1) for low, size in zip(self.low, self.sizes, strict=True)
        ]
        return ", ".join(str(pair[end]) for pair in ends)

    # -- actions ------------------------------------------------------------------------------

    def action(self, choices: Tensor) -> Tensor:
        """The action `[..., *shape]` of choices `[..., elements]`: a copy, because rows are reused."""
        if self.kind == "numbers":
            low = constant(self.low, choices.device, torch.float64)
            high = constant(self.high, choices.device, torch.float64)
            share = (choices.tanh().double() + 1.0) / 2.0
            choices = (low + (high - low) * share).clamp(low, high)
        elif any(self.low):
            choices = choices + constant(tuple(map(int, self.low)), choices.device)
        action = choices.to(getattr(torch, self.dtype), copy=True)
        return action.reshape((*choices.shape[:-1], *self.shape))


def observed_entry(path: Path, space: "gymnasium.Space[Any]") -> Entry:
    """The entry of an observation."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return acted_entry(path, space)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        is_image = space.dtype == np.uint8 and len(space.shape) in (3, 4)  # 4: a stack of them
        return Entry(path, "image" if is_image else "numbers", space.shape, "")
    keep = "leave it out with gymnasium.wrappers.FilterObservation(env, [the other keys]), or "
    raise ValueError(
        f"the observation{name_of(path)} is a {space}, which has no fixed number of features; "
        f"{keep if path else ''}turn it into a Box with "
        "gymnasium.wrappers.TransformObservation(env, function, space)"
    )


def acted_entry(
    path: Path, space: "gymnasium.Space[Any]", action_bound: float | None = None
) -> Entry:
    """The entry of an action; numbers without bounds get `action_bound`, if it is given."""
    from gymnasium import spaces

    shape = space.shape or ()
    dtype = str(space.dtype)
    where = f"the action{name_of(path)} is a {space}"
    if isinstance(space, spaces.Discrete):
        return Entry(path, "choices", shape, dtype, (int(space.n),), (float(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        sizes = tuple(space.nvec.flatten().tolist())
        starts = tuple(map(float, space.start.flatten().tolist()))
        return Entry(path, "choices", shape, dtype, sizes, starts)
    if isinstance(space, spaces.MultiBinary):
        size = math.prod(shape)
        return Entry(path, "choices", shape, dtype, (2,) * size, (0.0,) * size)
    if not isinstance(space, spaces.Box):
        raise ValueError(f"{where}; use Discrete, MultiDiscrete, MultiBinary, Box, Dict or Tuple")
    if not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"{where} of whole numbers; use MultiDiscrete(high - low + 1, start=low)")
    low = space.low.flatten()
    high = space.high.flatten()
    if not space.is_bounded():
        if action_bound is None:
            raise ValueError(
                f"{where} without bounds; set GymConfig(action_bound=1.0), or wrap the env in "
                f"gymnasium.wrappers.TransformAction(env, lambda action: action, Box(low, high, {shape})) "
                "with finite bounds"
            )
        low = np.where(np.isfinite(low), low, -action_bound)
        high = np.where(np.isfinite(high), high, action_bound)
        if (low >= high).any():
            raise ValueError(
                f"{where}: action_bound={action_bound} leaves no numbers between its bounds; use "
                "more"
            )
    return Entry(path, "numbers", shape, dtype, (), tuple(map(float, low)), tuple(map(float, high)))


def parts_of(space: "gymnasium.Space[Any]", path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The spaces inside Dict and Tuple spaces, with their paths."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from parts_of(part, (*path, str(key)))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from parts_of(part, (*path, index))
    else:
        yield path, space


def to_tensor(name: str, value: Any) -> Tensor:
    """Numbers as a tensor: a tensor itself, an array's memory, or a copy of nested lists."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return torch.stack(tuple(value)).detach()
    try:
        array = np.asarray(value)
        if not array.flags.writeable or not array.flags.c_contiguous:
            array = array.copy()  # torch reads no negative strides, and warns of what is read-only
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: got {type(value).__name__}, expected an array of numbers ({error})"
        ) from error


def at(value: Any, path: Path) -> Any:
    """The entry at `path`."""
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the entry {name_of(path)} is missing") from error
    return value


def nested(parts: dict[Path, Any]) -> Any:
    """Entries by path as the dict or tuple that they are parts of."""
    if () in parts:
        return parts[()]
    keys = dict.fromkeys(path[0] for path in parts)
    inner = {
        key: nested({path[1:]: part for path, part in parts.items() if path[0] == key})
        for key in keys
    }
    return tuple(inner.values()) if isinstance(next(iter(keys)), int) else inner


def name_of(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)
