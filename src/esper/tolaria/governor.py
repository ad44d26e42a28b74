"""The governor rolls back hosts that break, without any effect on the others.

A host is broken if its loss or a weight is not finite, if its loss is far above its own recent
history, or if it had learned and falls back to guessing. It is restored from its last snapshot,
without the seeds that were live then.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from esper.kasmina import lifecycle
from esper.tolaria.population import Population, Snapshot

# A host has collapsed if its mean loss was below `LEARNED` times the loss of guessing, ln(classes),
# for `LEARNED_STEPS` in a row, and later at `GUESSING` times it or above for `COLLAPSED_STEPS` in a
# row. Single bad steps and hosts that hardly learned raise no alarm.
LEARNED, LEARNED_STEPS = 0.7, 3
GUESSING, COLLAPSED_STEPS = 0.95, 3
SNAPSHOT_STEPS = 3  # between snapshots
HISTORY = 8  # steps whose mean loss is kept
MAX_LOSS_RATIO = 3.0  # to the median of the history; a host above it has diverged


class Breakage(Enum):
    LOSS_NOT_FINITE = "loss not finite"
    WEIGHTS_NOT_FINITE = "weights not finite"
    DIVERGED = "diverged"
    COLLAPSED = "collapsed to guessing"


@dataclass(frozen=True)
class Rollback:
    """One host was restored from its snapshot."""

    host: int
    breakage: Breakage
    reason: str  # in words, with the numbers


class Governor:
    """Checks a population after every step; the first snapshot is taken at construction."""

    def __init__(self, population: Population):
        self._population = population
        # a host that does better than guessing has not diverged
        self._guessing_loss = math.log(population.host.num_classes)
        self.reset()

    def reset(self) -> None:
        """Start again with a new snapshot, after the population was reset."""
        self._snapshot: Snapshot = self._population.save()
        self._num_steps = 0
        self._history: deque[Tensor] = deque(maxlen=HISTORY)
        # of each host, [P]: steps in a row with a low or a guessing loss
        per_host = torch.zeros(3, self._population.num_hosts, dtype=torch.int64)
        self._low_steps, self._guessing_steps, has_learned = per_host.unbind()
        self._has_learned = has_learned.bool()
        self._best_loss = torch.full((self._population.num_hosts,), math.inf)

    def check(self, losses: Tensor) -> tuple[Rollback, ...]:
        """Roll back hosts that broke in a step with losses `[M, P]`; call it once per step."""
        self._num_steps += 1
        weights = self._population.parameter_table.storage  # and moments
        weights_finite = weights.isfinite().all(2).all(0)
        loss, finite = torch.stack((losses.mean(0), weights_finite.to(losses))).cpu()
        # the median of each host's history; NaN without one: then nothing has diverged
        history = torch.stack([torch.full_like(loss, math.nan), *self._history])
        usual = history.nanmedian(0).values
        broken = self._find_broken(loss, usual, finite.bool())
        events = tuple(
            Rollback(host, breakage, self._reason(host, breakage, loss, usual))
            for host, breakage in broken.items()
        )
        hosts = torch.tensor(list(broken), dtype=torch.int64)
        if len(hosts):
            population = self._population
            population.restore(self._snapshot, hosts)
            population.adopt(lifecycle.remove_live_seeds(population.states, hosts))
            for counter in (self._low_steps, self._guessing_steps, self._has_learned):
                counter[hosts] = 0
            self._best_loss[hosts] = math.inf
        loss[hosts] = math.nan
        self._history.append(loss)
        if self._num_steps % SNAPSHOT_STEPS == 0:
            # hosts that may be about to collapse keep their earlier snapshot
            is_suspect = self._guessing_steps > 0
            self._snapshot = self._population.save(self._snapshot, is_suspect.nonzero().flatten())
        return events

    def _find_broken(
        self, loss: Tensor, usual: Tensor, weights_finite: Tensor
    ) -> dict[int, Breakage]:
        # the worst cause comes last and overwrites the others
        causes = (
            (Breakage.COLLAPSED, self._has_collapsed(loss)),
            (Breakage.DIVERGED, (loss > MAX_LOSS_RATIO * usual) & (loss > self._guessing_loss)),
            (Breakage.WEIGHTS_NOT_FINITE, ~weights_finite),
            (Breakage.LOSS_NOT_FINITE, ~loss.isfinite()),
        )
        broken: dict[int, Breakage] = {}
        for breakage, hosts in causes:
            broken.update(dict.fromkeys(hosts.nonzero().flatten().tolist(), breakage))
        return broken

    def _reason(self, host: int, breakage: Breakage, losses: Tensor, usual: Tensor) -> str:
        was, classes = "the training loss was", self._population.host.num_classes
        usually = f"more than {MAX_LOSS_RATIO:g} times its usual {usual[host]:.3g}"
        guessing = f"about ln({classes}) = {self._guessing_loss:.3g} for {COLLAPSED_STEPS} steps"
        return {
            Breakage.LOSS_NOT_FINITE: f"{was} {losses[host]:.3g}",
            Breakage.WEIGHTS_NOT_FINITE: "a weight or an optimiser moment was not finite",
            Breakage.DIVERGED: f"{was} {losses[host]:.3g}, {usually}",
            Breakage.COLLAPSED: f"{was} {guessing}, after a best of {self._best_loss[host]:.3g}",
        }[breakage]

    def _has_collapsed(self, loss: Tensor) -> Tensor:
        is_low = loss < LEARNED * self._guessing_loss
        is_guessing = self._has_learned & (loss >= GUESSING * self._guessing_loss)
        self._low_steps = (self._low_steps + 1) * is_low
        self._guessing_steps = (self._guessing_steps + 1) * is_guessing
        self._has_learned = self._has_learned | (self._low_steps >= LEARNED_STEPS)
        self._best_loss = self._best_loss.fmin(loss)
        return self._guessing_steps >= COLLAPSED_STEPS
