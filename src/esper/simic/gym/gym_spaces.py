"""Conversion between Gymnasium spaces and the policy: observations to features, choices to actions.

    spaces = GymSpaces.of(vector_env)
    spaces.read(observations)                # features [N, F], and pictures [N, P] as bytes
    spaces.actions(choices)                  # of N envs, as `vector_env.step` takes them

Dict and Tuple spaces are flattened to their entries, as `gymnasium.spaces.utils.flatten` does.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline.factored_actions import FactoredActionSpace, Head
from esper.runtime.devices import constant
from esper.simic.gym.entries import (
    Entry,
    Path,
    acted_entry,
    at,
    name_of,
    nested,
    observed_entry,
    parts_of,
)
from esper.tamiyo.policy.plain_heads import ImageShape

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

CPU = torch.device("cpu")


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
    action_bound: float | None = None  # of numbers of the action that have no bounds

    @classmethod
    def of(
        cls,
        envs: "VectorEnv[Any, Any, Any]",
        heads: Iterable[Head] | None = None,
        mask_entry: str | None = "action_mask",
        action_bound: float | None = None,
    ) -> "GymSpaces":
        """The spaces of each environment; `heads` declares which choices depend on which.

        Numbers of an action that have no bounds go from -`action_bound` to it.
        """
        from gymnasium import spaces

        space = envs.single_observation_space
        if not isinstance(space, spaces.Dict) or mask_entry not in space.spaces:
            mask_entry = None
        parts = [part for part in parts_of(space) if mask_entry is None or part[0][0] != mask_entry]
        entries = sorted((observed_entry(*part) for part in parts), key=lambda e: e.kind == "image")
        if not sum(entry.width for entry in entries):
            raise ValueError(f"observation space {space} holds no numbers; add an entry that does")
        action = tuple(
            acted_entry(*part, action_bound) for part in parts_of(envs.single_action_space)
        )
        action_space, head_of = _match_heads(action, heads, envs.single_action_space)
        return cls(
            observation=tuple(entries),
            mask_entry=mask_entry,
            action_space=action_space,
            action=action,
            head_of=head_of,
            action_bound=action_bound,
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

    @cached_property
    def _first_columns(self) -> tuple[int, ...]:
        """Of each head's choices, among those of all heads."""
        return tuple(part.start for part in self.action_space.slices)

    # -- observations -------------------------------------------------------------------------

    def num_rows(self, observations: Any) -> int | None:
        """N of the observations of N envs; None if this is the observation of one env."""
        first = self.observation[0]
        array = at(observations, first.path)
        return None if np.ndim(array) == len(first.shape) else len(array)

    def empty_input(self, num_envs: int, device: torch.device = CPU) -> PolicyInput:
        """Zeros for N envs, such as an `out` of `read`."""
        return PolicyInput(
            torch.zeros(num_envs, self.num_features, device=device),
            torch.zeros(num_envs, self.frame_size, dtype=torch.uint8, device=device),
        )

    def read(
        self,
        observations: Any,
        previous: Tensor | None = None,
        *,
        one_by_one: bool = False,
        out: PolicyInput | None = None,
    ) -> PolicyInput:
        """Observations of N envs as a policy reads them; a copy, because envs reuse their arrays.

        They are batched, or `one_by_one`: a sequence with one for each env. `previous` is what the
        method `previous` returned for the step before; None in a first step. Written to `out` if
        given.
        """
        entries = [entry.read(observations, one_by_one=one_by_one) for entry in self.observation]
        if out is None:
            out = self.empty_input(len(entries[0]), entries[0].device)
        first_column = self.num_previous
        first_byte = 0
        if first_column:
            before = out.features[:, :first_column]
            before.zero_() if previous is None else before.copy_(previous)
        for entry, values in zip(self.observation, entries, strict=True):
            if len(values) != len(out.features):
                raise ValueError(
                    f"observations{entry.name} are of {len(values)} envs, expected "
                    f"{len(out.features)}"
                )
            if entry.kind == "image":
                entry.write(values, out.frames[:, first_byte : first_byte + entry.width])
                first_byte += entry.width
            else:
                entry.write(values, out.features[:, first_column : first_column + entry.width])
                first_column += entry.width
        return out

    def previous(self, choices: Tensor, rewards: Tensor) -> Tensor:
        """The choices `[N, H]` and rewards `[N]` of a step as features of the next one."""
        columns = torch.zeros(len(rewards), self.num_previous, device=choices.device)
        if self.previous_action:
            space = self.action_space
            firsts = constant(self._first_columns, choices.device)
            if not space.continuous:
                columns.scatter_(1, choices + firsts, 1.0)
            else:
                numbers = space.continuous_on(choices.device)
                columns.scatter_(1, space.choices(choices) + firsts, 1.0)
                columns[:, firsts[numbers]] = choices[:, numbers].tanh()
        if self.previous_reward:
            columns[:, -1] = rewards
        return columns

    def require_finite(self, features: Tensor, where: str = "") -> None:
        """Raise for features `[..., N, F]` that are NaN or infinite; names the env and the entry."""
        total = float(features.sum())
        if total - total == 0.0:  # neither NaN nor infinite, so no feature is
            return
        is_finite = features.isfinite()
        if is_finite.all():  # only their sum is too large
            return
        *step, env, column = (~is_finite).nonzero()[0].tolist()
        value = features[(*step, env, column)].item()
        where = f"env {env}" + "".join(f", step {t}" for t in step) + where
        if column < self.num_previous:
            raise ValueError(f"{where}: the reward is {value}; give finite numbers")
        places = [
            (entry, position)
            for entry in self.observation
            if entry.kind != "image"
            for position in range(entry.width)
        ]
        entry, position = places[column - self.num_previous]
        raise ValueError(f"{where}: {entry.problem(value, position)}")

    # -- actions ------------------------------------------------------------------------------

    def actions(self, choices: Tensor, *, as_tensors: bool = False) -> Any:
        """Choices `[N, H]` as actions of a vector environment, or `[H]` as that of one.

        They are NumPy arrays, or tensors on the choices' device.
        """
        flat = choices if as_tensors else choices.cpu()
        if self.head_of != tuple(range(len(self.head_of))):  # heads in another order
            flat = flat.index_select(-1, constant(self.head_of, flat.device))
        parts: dict[Path, Any] = {}
        start = 0
        for entry in self.action:
            end = start + len(entry.low)
            action = entry.action(flat[..., start:end])
            # of NumPy, a scalar where it has no axes
            parts[entry.path] = action if as_tensors else action.numpy()[()]
            start = end
        return nested(parts)

    def require_same(self, envs: "VectorEnv[Any, Any, Any]") -> None:
        """Raise if the environments' spaces are not those that the policy was made for."""
        found = GymSpaces.of(envs, mask_entry=self.mask_entry, action_bound=self.action_bound)
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
                f"the entries {name_of(other)} and {name_of(path)} of the action {space} both give a "
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
