"""Decides when a network is broken, and keeps the networks to restore.

Three networks are kept:

- *last*: the last healthy one.
- *best_stable*: the best one with the current seeds, all of them at full weight.
- *best*: the best one whose seeds are all committed.

A broken network is restored to *last*. If that one breaks again before it was healthy once, to
*best_stable*, then to *best*. A stable network becomes a committed one once its seeds are
committed, so committing late loses nothing.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from esper.growing.checkpoint import network_from_dict, network_to_dict
from esper.growing.network import GrowingNetwork, NetworkState
from esper.growing.validation import Measurement
from esper.kasmina.lifecycle import SlotStates, Transition, remove_live_seeds
from esper.leyline.stages import SeedStage

COLLAPSE = 0.5  # a network is broken below this share of a safe point's metric


@dataclass(frozen=True)
class SafePoint:
    """A healthy network with its metric."""

    state: NetworkState
    metric: float
    step: int
    seed_ids: dict[int, str]  # by slot; ids are unique in a run


class SafePoints:
    """The networks of a run that can be restored."""

    def __init__(self, network: GrowingNetwork, seed_ids: dict[int, str]):
        """`seed_ids` are the seeds now in the network, by slot; the caller keeps it current."""
        self._network, self._seed_ids = network, seed_ids
        self.last: SafePoint | None = None
        self.best_stable: SafePoint | None = None
        self.best: SafePoint | None = None
        self._already_restored: list[tuple[int, tuple[str, ...]]] = []  # since a healthy step

    def why_broken(self, measured: Measurement, *, has_grown: bool) -> str:
        """What is wrong with the network; empty if it is healthy."""
        if math.isnan(measured.metric):
            return "the validation metric is not a number from 0 to 1"
        if not self._network.is_finite():
            if self.best is None:
                raise ValueError("the model's weights or buffers are not finite before growth")
            return "weights or buffers are not finite"
        # the best metric so far, or the last one if the run has settled lower
        best, last = (0.0 if p is None else p.metric for p in (self.best, self.last))
        has_settled = self.last is not None and last < COLLAPSE * best
        reference = last if has_settled else max(best, last)
        # before anything has grown, a dip is the model's own and not rolled back
        if has_grown and measured.metric < COLLAPSE * reference:
            return f"the metric fell from {reference:.4g} to {measured.metric:.4g}"
        return ""

    def update(self, step: int, measured: Measurement) -> None:
        """Keep a healthy network: as a stable one, unless a better one has the same seeds."""
        self.last = point = self._point(step, measured.metric)
        self._already_restored = []
        committed = measured.committed_metric
        if committed is not None and (self.best is None or committed >= self.best.metric):
            self.best = self._point(step, committed, committed_only=True)
        slots, known = point.state.slots, self.best_stable
        is_committed = slots.stage == SeedStage.FOSSILIZED
        if bool((slots.has_seed & ~is_committed & (slots.stage != SeedStage.HOLDING)).any()):
            return
        if known is None or known.seed_ids != point.seed_ids or point.metric >= known.metric:
            self.best_stable = known = point
        has_best = self.best is not None and self.best.metric >= known.metric
        if not has_best and torch.equal(slots.has_seed, is_committed):
            self.best = known

    def _point(self, step: int, metric: float, *, committed_only: bool = False) -> SafePoint:
        state = self._network.capture(committed_only=committed_only)
        return SafePoint(state, metric, step, {slot: self._seed_ids[slot] for slot in state.seeds})

    def recover(self) -> SafePoint:
        """Restore the first of last, best_stable and best that was not restored already."""
        assert self.best is not None, "no network to restore"
        stable, point = self.best_stable, self.best
        for known in (stable if stable and self.has_all_seeds(stable) else None, self.last):
            if known and (known.step, (*known.seed_ids.values(),)) not in self._already_restored:
                point = known
        self.last = None
        self._already_restored.append((point.step, (*point.seed_ids.values(),)))
        self.restore(point)
        return point

    def commit_best_seen(self, now: SafePoint | None) -> None:
        """Restore the best measured network and commit its seeds, if it beats the committed best.

        `now` is the current network if it was measured as it is.
        """
        assert self.best is not None
        whole = [p for p in (self.best_stable, now) if p is not None and self.has_all_seeds(p)]
        point = max((self.best, *whole), key=lambda p: p.metric)  # the first of equals
        if point is self.best:
            return
        self.restore(point)
        stage = self._network.states.stage.clone()
        stage[0, self._network.uncommitted] = SeedStage.FOSSILIZED
        self._network.adopt(Transition.of(replace(self._network.states, stage=stage)))
        self.best = self._point(point.step, point.metric, committed_only=True)

    def restore(self, point: SafePoint) -> None:
        """Restore a network. Seeds pruned since stay pruned; slots of newer seeds are embargoed."""
        seeds = {s: seed for s, seed in point.state.seeds.items() if self._is_present(point, s)}
        slots = _merged_slots(list(seeds), then=point.state.slots, now=self._network.states)
        self._network.restore(replace(point.state, seeds=seeds, slots=slots))

    def has_all_seeds(self, point: SafePoint) -> bool:
        """Whether all seeds of a safe point are still in the network."""
        return all(self._is_present(point, slot) for slot in point.seed_ids)

    def _is_present(self, point: SafePoint, slot: int) -> bool:
        return self._seed_ids.get(slot) == point.seed_ids[slot]

    def to_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"already_restored": list(self._already_restored)}
        for name in _POINTS:
            point = getattr(self, name)
            saved[name] = point and {**vars(point), "state": network_to_dict(point.state)}
        return saved

    def load(self, saved: dict[str, Any]) -> None:
        for name in _POINTS:
            data = saved[name]
            point = data and SafePoint(**{**data, "state": network_from_dict(data["state"])})
            setattr(self, name, point)
        self._already_restored = list(saved["already_restored"])


_POINTS = ("last", "best_stable", "best")


def _merged_slots(seeds: list[int], *, then: SlotStates, now: SlotStates) -> SlotStates:
    """The states of the slots `seeds` as they were then; all other seeds are removed.

    A seed that was committed since stays committed.
    """
    one_host, index = torch.zeros(1, dtype=torch.int64), torch.tensor(seeds, dtype=torch.int64)
    places = (one_host.expand_as(index), index)
    stays = torch.zeros_like(now.has_seed).index_put(places, torch.tensor(True))
    is_committed = now.stage == SeedStage.FOSSILIZED
    revoked = torch.where(is_committed & ~stays, SeedStage.HOLDING, now.stage)
    removed = remove_live_seeds(replace(now, stage=revoked), one_host).states
    then = replace(then, stage=torch.where(is_committed, SeedStage.FOSSILIZED, then.stage))
    return removed.put(then.at(*places), *places)
