"""Where packages meet: what a controller and an environment promise each other."""

from typing import NamedTuple, Protocol

from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.leyline.reports import Reports


class Controller(Protocol):
    """Reports in, factored actions out. Whatever it remembers, it remembers per env."""

    def begin(self, env_ids: Tensor) -> None:
        """Forget these envs: a new episode starts in each of them."""
        ...

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        """Actions `[N, H]`, each legal under `masks`."""
        ...


class StepOutcome(NamedTuple):
    """What came of one step, each `[N]`."""

    reward: Tensor
    terminated: Tensor
    truncated: Tensor


class Environment(Protocol):
    """N growing hosts that take one factored action each per step."""

    num_envs: int
    action_space: FactoredActionSpace

    def reset(self) -> None:
        """Start a new episode in every env."""
        ...

    def observe(self) -> Reports: ...

    def step(self, actions: Tensor) -> StepOutcome: ...
