"""A trained policy as a frozen controller, for any number of slots and any menu.

controller = LearnedController.load("controller.pt")
controller.begin(torch.arange(num_envs))
actions = controller.decide(reports, masks)
"""

from dataclasses import asdict
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks
from esper.leyline.reports import Reports
from esper.runtime.files import read_file, write_file
from esper.tamiyo.policy.features import FeatureLayout, feature_list
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic, PolicyConfig, RecurrentState
from esper.tamiyo.policy.slot_heads import SlotHeads, tamiyo_policy

_KIND, _VERSION = "controller", 6


class LearnedController:
    """Tamiyo's policy and its recurrent state for each env.

    It takes the likeliest choice of every head, or samples with `generator` if not `deterministic`.
    """

    def __init__(
        self,
        policy: FactoredRecurrentActorCritic,
        menu: tuple[str, ...] = (),
        *,
        deterministic: bool = True,
        generator: torch.Generator | None = None,
    ):
        if not isinstance(policy.heads, SlotHeads):
            raise ValueError("this policy has no slot heads; build one with tamiyo_policy")
        self.policy = policy
        self.menu = menu  # names of the blueprints it was trained with; empty: not known
        self.deterministic, self.generator = deterministic, generator
        self._state: RecurrentState | None = None

    def begin(self, env_ids: Tensor) -> None:
        if self._state is not None and len(env_ids) == len(self._state.h):
            self._state = None  # all envs start from zeros
        for part in self._state or ():
            part[env_ids.to(part.device)] = 0.0

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        layout = FeatureLayout(reports.num_slots, reports.num_blueprints)
        policy = self.policy
        assert isinstance(policy.heads, SlotHeads)
        if layout != policy.heads.layout:  # other shapes, the same weights
            weights, device = policy.state_dict(), policy.device
            policy = self.policy = _with_weights(layout, policy.config, weights).to(device)
        if self._state is None:
            self._state = policy.initial_state(reports.num_envs)
        if len(self._state.h) != reports.num_envs:
            raise ValueError(
                f"reports of {reports.num_envs} envs; this controller has seen "
                f"{len(self._state.h)}. Use one controller per environment"
            )
        decision = policy.act(
            layout.features(reports.to(policy.device)),
            masks.to(policy.device),
            self._state,
            generator=self.generator,
            deterministic=self.deterministic,
        )
        policy.check(decision)
        self._state = decision.state
        return decision.actions.to(reports.device)

    def memory(self) -> dict[str, Tensor]:
        """The state that a checkpoint keeps: the recurrent state of each env."""
        return {} if self._state is None else dict(self._state._asdict())

    def recall(self, memory: dict[str, Tensor]) -> None:
        self._state = RecurrentState(**memory) if memory else None

    def save(self, path: str | Path) -> None:
        """Write the policy's features, sizes and weights to one file, atomically."""
        contents = {
            "features": feature_list(),
            "menu": list(self.menu),
            "policy": asdict(self.policy.config),
            "weights": {name: weight.cpu() for name, weight in self.policy.state_dict().items()},
        }
        write_file(path, _KIND, contents, version=_VERSION)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Self:
        contents = read_file(path, _KIND, version=_VERSION)
        if contents["features"] != feature_list():
            differ = ", ".join(sorted(set(contents["features"]) ^ set(feature_list())))
            raise ValueError(
                f"{path} was trained with a different feature set ({differ or 'another order'}). "
                "Retrain it"
            )
        config = PolicyConfig(**contents["policy"])
        policy = _with_weights(FeatureLayout(1, 1), config, contents["weights"])
        return cls(policy.to(device), tuple(contents["menu"]))


def _with_weights(
    layout: FeatureLayout, config: PolicyConfig, weights: dict[str, Tensor]
) -> FactoredRecurrentActorCritic:
    """A policy with these weights; the global random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        policy = tamiyo_policy(layout, config)
    policy.load_state_dict(weights)
    return policy
