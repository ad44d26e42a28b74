"""A policy for a Gymnasium environment: predict, save, load."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from esper.leyline.devices import usable_device
from esper.leyline.factored_actions import ActionMasks
from esper.leyline.files import read_file, require_same_layout, write_file
from esper.leyline.plain_config import from_plain, to_plain
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.training.gym_spaces import GymSpaces
from esper.tamiyo.policy.network import (
    FactoredRecurrentActorCritic,
    PolicyConfig,
    RecurrentState,
)


@dataclass(frozen=True, kw_only=True)
class GymConfig:
    """A run on a Gymnasium environment."""

    horizon: int = 128
    """Steps per env between two updates."""
    rng_seed: int = 0
    """Seeds the weights, the sampling, the shuffling and the environments."""
    device: str = "cpu"
    """Where the policy acts and learns."""
    masks: Literal["auto", "info", "method", "none"] = "auto"
    """Legal actions: from info["action_mask"], from the environments' action_masks(), or all.
    "auto" takes the first of these that the environment offers at its first reset."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)

    def __post_init__(self) -> None:
        if self.horizon < 2:  # of two steps in a row, one at most is a filler
            raise ValueError(f"horizon={self.horizon}; use 2 or more")
        if self.masks not in ("auto", "info", "method", "none"):
            raise ValueError(f"masks={self.masks!r}; use 'auto', 'info', 'method' or 'none'")


class GymAgent:
    """A policy and all that is needed to use it on an environment with the same spaces."""

    def __init__(self, spaces: GymSpaces, config: GymConfig):
        self.spaces = spaces
        self.config = config
        with torch.random.fork_rng(devices=[]):  # weights depend on rng_seed alone
            torch.manual_seed(config.rng_seed)
            policy = FactoredRecurrentActorCritic(
                spaces.action_space, spaces.num_features, config.policy
            )
        self.ppo = PPOAgent(policy.to(usable_device(config.device)), config.ppo)

    def predict(
        self,
        observation: Any,
        state: RecurrentState | None = None,
        mask: Any = None,
        *,
        deterministic: bool = True,
    ) -> tuple[Any, RecurrentState]:
        """The action for one observation, and the recurrent state for the next.

        `state` None begins an episode; `mask` None allows everything. Observations of N envs
        `[N, ...]` give N actions: masks then are `[N, ...]` too.
        """
        expected_dim = 0 if self.spaces.first_observation is not None else 1
        is_single = np.ndim(observation) == expected_dim
        features = self.spaces.features(np.asarray(observation)[None] if is_single else observation)
        masks = self._masks(mask, len(features), is_single)
        decision = self.ppo.act(
            features.to(self.ppo.device),
            masks.to(self.ppo.device),
            state or self.ppo.policy.initial_state(len(features)),
            deterministic=deterministic,
        )
        actions = self.spaces.actions(decision.actions)
        return (actions[0] if is_single else actions), decision.state

    def _masks(self, mask: Any, num_envs: int, is_single: bool) -> ActionMasks:
        if mask is None:
            return ActionMasks.all_legal(self.spaces.action_space, num_envs)
        if is_single and isinstance(mask, Mapping):
            mask = {name: np.asarray(part)[None] for name, part in mask.items()}
        elif is_single:
            mask = np.asarray(mask)[None]
        return self.spaces.masks(mask)

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        contents = {
            "config": to_plain(self.config),
            "spaces": self.spaces.to_plain(),
            "weights": self._weights(),
        }
        write_file(path, "gymnasium agent", contents)

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu") -> "GymAgent":
        contents = read_file(path, "gymnasium agent")
        config = from_plain(GymConfig, contents["config"] | {"device": device})
        agent = cls(GymSpaces.from_plain(contents["spaces"]), config)
        weights = contents["weights"]
        require_same_layout(weights, agent._weights(), path)
        agent.ppo.policy.load_state_dict(weights["policy"])
        agent.ppo.feature_normalizer.load_state_dict(weights["feature_normalizer"])
        agent.ppo.value_normalizer.load_state_dict(weights["value_normalizer"])
        return agent

    def _weights(self) -> dict[str, Any]:
        """What acting needs; the optimiser stays behind."""
        return {k: v for k, v in self.ppo.state_dict().items() if k in _WEIGHTS}


_WEIGHTS = ("policy", "feature_normalizer", "value_normalizer")
