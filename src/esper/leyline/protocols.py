"""Interfaces between packages: controller, environment and event sink."""

from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.leyline.ranks import EnvShare
from esper.leyline.reports import Reports


@runtime_checkable
class Controller(Protocol):
    """Maps reports to factored actions. It may keep state per env."""

    def begin(self, env_ids: Tensor) -> None:
        """Drop the state of these envs: a new episode starts in each of them."""
        ...

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        """Actions `[N, H]`, each legal under `masks`."""
        ...


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


class Environment(Protocol):
    """N growing hosts that take one factored action each per step."""

    num_envs: int
    share: EnvShare  # its envs among those of all ranks
    siblings: int  # consecutive envs with the same start, data and rent; only actions differ
    action_space: FactoredActionSpace

    @property
    def rollback_reasons(self) -> Mapping[int, str]:
        """Why hosts were rolled back in the last step, by env."""
        ...

    generator: torch.Generator  # of everything that an episode samples

    def reset(self) -> None:
        """Start a new episode in every env."""
        ...

    def observe(self) -> Reports: ...

    def step(self, actions: Tensor) -> StepOutcome:
        """Act, then train. Actions of envs whose episode is over are ignored."""
        ...


class EventSink(Protocol):
    """Records the metrics of a run; a context manager."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics at a step, by the names in docs/metrics.md."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...
