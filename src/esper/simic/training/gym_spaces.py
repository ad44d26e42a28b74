"""How an environment's observations become features, and how choices become its actions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head

if TYPE_CHECKING:
    import gymnasium

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class GymSpaces:
    """The spaces of one environment, in the policy's terms."""

    num_features: int
    first_observation: int | None  # the lowest value of a Discrete observation; None: a Box
    action_space: FactoredActionSpace
    first_actions: tuple[int, ...]  # the lowest value of each head
    is_scalar_action: bool  # Discrete: one number, not an array of one

    @classmethod
    def of(
        cls,
        observation_space: "gymnasium.Space[Any]",
        action_space: "gymnasium.Space[Any]",
        heads: FactoredActionSpace | None = None,
    ) -> "GymSpaces":
        """The spaces of a single environment; `heads` says which choices depend on which."""
        num_features, first_observation = _read_observation_space(observation_space)
        sizes, firsts, is_scalar = _read_action_space(action_space)
        if heads is None:
            names = ["action"] if is_scalar else [f"action_{i}" for i in range(len(sizes))]
            heads = FactoredActionSpace(tuple(map(Head, names, sizes)))
        if heads.sizes != sizes:
            raise ValueError(
                f"action_space has heads of sizes {heads.sizes}, but the environment's "
                f"{action_space} needs {sizes}"
            )
        return cls(
            num_features=num_features,
            first_observation=first_observation,
            action_space=heads,
            first_actions=firsts,
            is_scalar_action=is_scalar,
        )

    def features(self, observations: Any) -> Tensor:
        """Observations of N envs as float32 `[N, F]`: always a copy, envs reuse their arrays."""
        if self.first_observation is None:
            features = torch.tensor(observations, dtype=torch.float32)
            if features.shape[1:] != (self.num_features,):
                raise ValueError(
                    f"observations: got shape {tuple(features.shape)}, expected (envs, "
                    f"{self.num_features})"
                )
            return features
        index = np.asarray(observations, dtype=np.int64) - self.first_observation
        if index.min() < 0 or index.max() >= self.num_features:
            last = self.first_observation + self.num_features - 1
            raise ValueError(
                f"observations {np.asarray(observations).tolist()} are not all within "
                f"{self.first_observation} to {last}"
            )
        one_hot = np.zeros((len(index), self.num_features), dtype=np.float32)
        one_hot[np.arange(len(index)), index] = 1.0
        return torch.from_numpy(one_hot)

    def actions(self, choices: Tensor) -> Array:
        """Choices `[N, H]` as what the vector environment's `step` takes."""
        actions: Array = choices.cpu().numpy()
        if any(self.first_actions):
            actions = actions + np.array(self.first_actions)
        return actions[:, 0] if self.is_scalar_action else actions

    def mask_groups(self, masks: Any) -> list[Array]:
        """Masks of N envs, one bool array `[N, *given sizes, choices]` for each run of heads.

        `masks` is a mapping from head to `[N, *given sizes, size]`, or, where no head is given
        another, the heads' masks side by side `[N, choices]`.
        """
        space = self.action_space
        if isinstance(masks, Mapping):
            space.check_names(masks)
            arrays = {
                name: _mask_array(f"mask of head {name!r}", masks[name], space.mask_shape(name))
                for name in space.names
            }
            return [
                np.concatenate([arrays[space.names[i]] for i in r], -1) for r in space.head_groups
            ]
        if len(space.head_groups) > 1:
            raise ValueError(
                f"heads {list(space.names)} depend on each other, so their masks are a mapping "
                f"from head to array; got {type(masks).__name__}"
            )
        heads = dict(zip(space.names, space.sizes, strict=True))
        return [_mask_array(f"action mask of heads {heads}", masks, (space.num_choices,))]

    def masks(self, masks: Any) -> ActionMasks:
        runs = [torch.from_numpy(run) for run in self.mask_groups(masks)]
        return ActionMasks.from_groups(self.action_space, runs)

    def require_same(
        self, observation_space: "gymnasium.Space[Any]", action_space: "gymnasium.Space[Any]"
    ) -> None:
        """Refuse an environment with other spaces than those the policy was made for."""
        others = GymSpaces.of(observation_space, action_space)
        pairs = {
            "num_features": (others.num_features, self.num_features),
            "first_observation": (others.first_observation, self.first_observation),
            "head sizes": (others.action_space.sizes, self.action_space.sizes),
            "first_actions": (others.first_actions, self.first_actions),
            "is_scalar_action": (others.is_scalar_action, self.is_scalar_action),
        }
        different = [
            f"{n} is {found}, expected {mine}"
            for n, (found, mine) in pairs.items()
            if found != mine
        ]
        if different:
            raise ValueError(
                "the environment's spaces are not those of the policy: " + "; ".join(different)
            )

    def to_plain(self) -> dict[str, Any]:
        """Plain containers, for a checkpoint."""
        heads = [[head.name, head.size, list(head.given)] for head in self.action_space]
        return {
            "num_features": self.num_features,
            "first_observation": self.first_observation,
            "heads": heads,
            "first_actions": list(self.first_actions),
            "is_scalar_action": self.is_scalar_action,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "GymSpaces":
        heads = tuple(Head(name, size, tuple(given)) for name, size, given in plain["heads"])
        return cls(
            num_features=plain["num_features"],
            first_observation=plain["first_observation"],
            action_space=FactoredActionSpace(heads),
            first_actions=tuple(plain["first_actions"]),
            is_scalar_action=plain["is_scalar_action"],
        )


def _mask_array(what: str, masks: Any, expected: tuple[int, ...]) -> Array:
    """The masks of all envs as a bool array of its own: environments reuse theirs."""
    shape = f"(envs, {', '.join(map(str, expected))})"
    try:
        array = np.array(list(masks), dtype=bool)  # a list: an object array of lists becomes plain
    except ValueError as error:
        raise ValueError(f"{what}: {error}; expected one array {shape}") from error
    if array.shape[1:] != expected:
        raise ValueError(f"{what}: got shape {array.shape}, expected {shape}")
    return array


def _read_observation_space(space: "gymnasium.Space[Any]") -> tuple[int, int | None]:
    """How many features there are, and the first value of a Discrete space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return int(space.n), int(space.start)
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return space.shape[0], None
    raise ValueError(
        f"observation space {space} is not supported: use a Box of one dimension or a Discrete "
        "(gymnasium.wrappers.FlattenObservation makes a flat Box of most spaces)"
    )


def _read_action_space(
    space: "gymnasium.Space[Any]",
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """The heads' sizes, their first values, and whether an action is a plain number."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return (int(space.n),), (int(space.start),), True
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return tuple(space.nvec.tolist()), tuple(space.start.tolist()), False
    raise ValueError(
        f"action space {space} is not supported: use a Discrete, or a MultiDiscrete of one "
        "dimension"
    )
