"""Conversion between Gymnasium spaces and the policy: observations to features, choices to actions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class GymSpaces:
    """Observation and action space of one environment, as the policy needs them."""

    num_features: int
    first_observation: int | None  # lowest value of a Discrete observation; None for a Box
    action_space: FactoredActionSpace
    first_actions: tuple[int, ...]  # lowest value of each head
    is_scalar_action: bool  # Discrete: a number, not an array

    @classmethod
    def of(
        cls, envs: "VectorEnv[Any, Any, Any]", heads: Iterable[Head] | None = None
    ) -> "GymSpaces":
        """The spaces of each environment; `heads` declares which choices depend on which."""
        from gymnasium.vector import VectorEnv

        if not isinstance(envs, VectorEnv):
            raise ValueError(
                f"{envs} is not a vector environment; use gymnasium.make_vec(ENV_ID, num_envs=8) or "
                "gymnasium.vector.SyncVectorEnv([make_env] * 8)"
            )
        num_features, first_observation = _read_observation_space(envs.single_observation_space)
        sizes, firsts, is_scalar = _read_action_space(envs.single_action_space)
        if heads is None:
            names = ["action"] if is_scalar else [f"action_{i}" for i in range(len(sizes))]
            heads = map(Head, names, sizes)
        action_space = FactoredActionSpace(tuple(heads))
        if action_space.sizes != sizes:
            raise ValueError(
                f"the heads have sizes {action_space.sizes}, but the environment's "
                f"{envs.single_action_space} needs {sizes}"
            )
        return cls(
            num_features=num_features,
            first_observation=first_observation,
            action_space=action_space,
            first_actions=firsts,
            is_scalar_action=is_scalar,
        )

    def features(self, observations: Any) -> Tensor:
        """Observations of N envs as float32 `[N, F]`; a copy, because envs reuse their arrays."""
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
        """Choices `[N, H]` as actions for the vector environment's `step`."""
        actions: Array = choices.cpu().numpy()
        if any(self.first_actions):
            actions = actions + np.array(self.first_actions)
        return actions[:, 0] if self.is_scalar_action else actions

    def mask_groups(self, masks: Any) -> list[Array]:
        """Masks of N envs: one bool array `[N, *given sizes, choices]` per head group.

        `masks` maps each head to `[N, *given sizes, size]`. If no head depends on another, it may
        also be the concatenated masks of all heads, `[N, choices]`.
        """
        space = self.action_space
        if isinstance(masks, Mapping):
            space.check_names(masks)
            arrays = {
                name: _mask_array(f"mask of head {name!r}", masks[name], space.mask_shape(name))
                for name in space.names
            }
            return [
                np.concatenate([arrays[space.names[i]] for i in group], -1)
                for group in space.head_groups
            ]
        if len(space.head_groups) > 1:
            raise ValueError(
                f"heads {list(space.names)} depend on each other, so masks must be a mapping from "
                f"head to array; got {type(masks).__name__}"
            )
        heads = space.sizes_by_name
        return [_mask_array(f"action mask of heads {heads}", masks, (space.num_choices,))]

    def masks(self, masks: Any) -> ActionMasks:
        groups = [torch.from_numpy(group) for group in self.mask_groups(masks)]
        return ActionMasks.from_groups(self.action_space, groups)

    def require_same(self, envs: "VectorEnv[Any, Any, Any]") -> None:
        """Raise if the environments' spaces are not those that the policy was made for."""
        found = GymSpaces.of(envs)._layout()
        different = [
            f"{name} is {found[name]}, expected {mine}"
            for name, mine in self._layout().items()
            if found[name] != mine
        ]
        if different:
            raise ValueError(
                "the environment's spaces are not those of the policy: " + "; ".join(different)
            )

    def _layout(self) -> dict[str, Any]:
        return vars(self) | {"action_space": None, "head sizes": self.action_space.sizes}


def _mask_array(what: str, masks: Any, expected: tuple[int, ...]) -> Array:
    """The masks of all envs as a bool array; a copy, because environments reuse theirs."""
    shape = f"(envs, {', '.join(map(str, expected))})"
    try:
        array = np.array(list(masks), dtype=bool)  # a list: unpacks an object array of lists
    except ValueError as error:
        raise ValueError(f"{what}: {error}; expected one array {shape}") from error
    if array.shape[1:] != expected:
        raise ValueError(f"{what}: got shape {array.shape}, expected {shape}")
    return array


def _read_observation_space(space: "gymnasium.Space[Any]") -> tuple[int, int | None]:
    """Number of features, and the lowest value of a Discrete space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return int(space.n), int(space.start)
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return space.shape[0], None
    raise ValueError(
        f"observation space {space} is not supported: use a Box of one dimension or a Discrete "
        "(gymnasium.wrappers.FlattenObservation turns most spaces into a flat Box)"
    )


def _read_action_space(
    space: "gymnasium.Space[Any]",
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Head sizes, their lowest values, and whether an action is a plain number."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return (int(space.n),), (int(space.start),), True
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return tuple(space.nvec.tolist()), tuple(space.start.tolist()), False
    raise ValueError(
        f"action space {space} is not supported: use a Discrete, or a MultiDiscrete of one "
        "dimension"
    )
