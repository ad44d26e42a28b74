"""Interfaces between packages: controllers, and the result of a step of growth."""

from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from esper.leyline.factored_actions import ActionMasks
from esper.leyline.reports import Reports


@runtime_checkable
class Controller(Protocol):
    """Maps reports to factored actions. It may keep state per env; by default it has none."""

    def begin(self, env_ids: Tensor) -> None:
        """Drop the state of these envs: a new episode starts in each of them."""
        return None

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        """Actions `[N, H]`, each legal under `masks`."""
        ...


def controller_name(controller: object) -> str:
    """What a ledger calls a controller: its path, its name or its class."""
    if isinstance(controller, str | Path):
        return str(controller)
    return type(controller).__name__


class StepOutcome(NamedTuple):
    """The result of one step, each `[N]`.

    On the last step of an episode, accuracy and parameters are those of the committed network.
    """

    accuracy: Tensor  # validation, after the step's training
    added_params: Tensor
    added_compute: Tensor  # mean over the episode of the seeds' share of the host's multiply-adds
    terminated: Tensor
    truncated: Tensor
    rolled_back: Tensor  # the governor rolled the host back; its episode is over
