"""Where packages meet: what a controller, an environment and a sink promise."""

from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.leyline.reports import Reports


@runtime_checkable
class Controller(Protocol):
    """Reports in, factored actions out. Whatever it remembers, it remembers per env."""

    def begin(self, env_ids: Tensor) -> None:
        """Forget these envs: a new episode starts in each of them."""
        ...

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        """Actions `[N, H]`, each legal under `masks`."""
        ...


class StepOutcome(NamedTuple):
    """What came of one step, each `[N]`: what there is to score, and whether the episode is over.

    On an episode's last step accuracy and parameters are those of the committed network.
    """

    accuracy: Tensor  # validation, after the step's training
    added_params: Tensor
    added_compute: Tensor  # mean over the episode of the seeds' share of the host's multiply-adds
    terminated: Tensor
    truncated: Tensor
    rolled_back: Tensor  # the governor took the host back; its episode is over


class Environment(Protocol):
    """N growing hosts that take one factored action each per step."""

    num_envs: int
    siblings: int  # envs in a row that differ in nothing but what is done to them
    action_space: FactoredActionSpace
    generator: torch.Generator  # of everything that an episode samples

    def reset(self) -> None:
        """Start a new episode in every env."""
        ...

    def observe(self) -> Reports: ...

    def step(self, actions: Tensor) -> StepOutcome:
        """Act, then train. What an env that is over is told to do is ignored."""
        ...


class EventSink(Protocol):
    """Where a run's metrics go; open for the length of a `with`."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """What was measured up to this step, by the names in docs/metrics.md."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...
