"""The governor rolls back hosts that break, without any effect on the others.

A host is broken if its loss or a weight is not finite, or if its loss is far above its own recent
history. It is restored from its last snapshot, without the seeds that were live then.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from esper.kasmina import lifecycle
from esper.leyline.checks import require_at_least
from esper.tolaria.population import Population, Snapshot


@dataclass(frozen=True, kw_only=True)
class GovernorConfig:
    snapshot_every: int = 3  # steps
    history: int = 8  # steps whose mean loss is kept
    max_loss_ratio: float = 3.0  # to the median of the history; a host above it has diverged

    def __post_init__(self) -> None:
        require_at_least(self, 1, "snapshot_every", "history")
        if not self.max_loss_ratio > 1:
            raise ValueError(f"max_loss_ratio={self.max_loss_ratio}; use a number above 1")


class Breakage(Enum):
    LOSS_NOT_FINITE = "loss not finite"
    WEIGHTS_NOT_FINITE = "weights not finite"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Rollback:
    """One host was restored from its snapshot."""

    host: int
    breakage: Breakage
    loss: float  # mean over the step in which the host broke
    usual_loss: float  # median of the host's history; nan without history
    steps_lost: int  # steps since the snapshot


class Governor:
    """Checks a population after every step; the first snapshot is taken at construction."""

    def __init__(self, population: Population, config: GovernorConfig | None = None):
        self._population = population
        self._config = config or GovernorConfig()
        # a host that does better than guessing has not diverged
        self._guessing_loss = math.log(population.host.num_classes)
        self.reset()

    def reset(self) -> None:
        """Start again with a new snapshot, after the population was reset."""
        self._snapshot: Snapshot = self._population.save()
        self._age = 0
        self._history: deque[Tensor] = deque(maxlen=self._config.history)

    def check(self, losses: Tensor) -> tuple[Rollback, ...]:
        """Roll back hosts that broke in a step with losses `[M, P]`; call it once per step."""
        if len(losses) == 0:
            raise ValueError("losses is empty; a step needs one minibatch or more")
        self._age += 1
        weights_finite = self._population.parameter_table.finite_rows()
        loss, finite = torch.stack((losses.mean(0), weights_finite.to(losses))).cpu()
        usual = self._usual_loss(loss)
        broken = self._find_broken(loss, usual, finite.bool())
        events = tuple(
            Rollback(host, breakage, float(loss[host]), float(usual[host]), self._age)
            for host, breakage in broken.items()
        )
        hosts = torch.tensor(list(broken), dtype=torch.int64)
        if len(hosts):
            self._roll_back(hosts)
        self._remember(loss, hosts)
        if self._age == self._config.snapshot_every:
            self._snapshot, self._age = self._population.save(), 0
        return events

    def _find_broken(
        self, loss: Tensor, usual: Tensor, weights_finite: Tensor
    ) -> dict[int, Breakage]:
        # the worst cause comes last and overwrites the others
        causes = (
            (Breakage.DIVERGED, self._has_diverged(loss, usual)),
            (Breakage.WEIGHTS_NOT_FINITE, ~weights_finite),
            (Breakage.LOSS_NOT_FINITE, ~loss.isfinite()),
        )
        broken: dict[int, Breakage] = {}
        for breakage, hosts in causes:
            broken.update(dict.fromkeys(hosts.nonzero().flatten().tolist(), breakage))
        return broken

    def _has_diverged(self, loss: Tensor, usual: Tensor) -> Tensor:
        runaway = loss > self._config.max_loss_ratio * usual  # False without history
        return runaway & (loss > self._guessing_loss)

    def _usual_loss(self, loss: Tensor) -> Tensor:
        """The median of each host's history `[P]`, nan without history."""
        if not self._history:
            return torch.full_like(loss, math.nan)
        return torch.stack(tuple(self._history)).nanmedian(0).values

    def _roll_back(self, hosts: Tensor) -> None:
        population = self._population
        population.restore(self._snapshot, hosts)
        population.adopt(lifecycle.remove_live_seeds(population.states, hosts))

    def _remember(self, loss: Tensor, rolled_back: Tensor) -> None:
        remembered = loss.clone()
        remembered[rolled_back] = math.nan
        self._history.append(remembered)
