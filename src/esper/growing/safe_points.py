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
from dataclasses import replace
from typing import TypedDict

import torch

from esper.growing.growing_network import GrowingNetwork, NetworkState
from esper.growing.recorder import Recorder
from esper.growing.validation import Measurement
from esper.kasmina.lifecycle import SlotStates, Transition, remove_live_seeds
from esper.leyline.stages import SeedStage

COLLAPSE = 0.5  # a network is broken below this share of a safe point's metric


class SafePoint(TypedDict):
    """A healthy network with its metric, as plain containers for a file."""

    state: NetworkState
    metric: float
    step: int
    seed_ids: dict[int, str]  # by slot


class SafePoints:
    """The networks of a run that can be restored."""

    def __init__(self, network: GrowingNetwork, recorder: Recorder):
        self._network, self._recorder = network, recorder
        self.last: SafePoint | None = None
        self.best_stable: SafePoint | None = None
        self.best: SafePoint | None = None
        self.already_restored: list[tuple[int, tuple[str, ...]]] = []  # since a healthy step

    def why_broken(self, measured: Measurement, *, has_grown: bool) -> str:
        """What is wrong with the network; empty if it is healthy."""
        if math.isnan(measured.metric):
            return "the validation metric is not a number from 0 to 1"
        if not self._network.is_finite():
            if self.best is None:
                raise ValueError("the model's weights or buffers are not finite before growth")
            return "weights or buffers are not finite"
        # the best metric so far, or the last one if the run has settled lower
        best, last = (0.0 if p is None else p["metric"] for p in (self.best, self.last))
        has_settled = self.last is not None and last < COLLAPSE * best
        reference = last if has_settled else max(best, last)
        # before anything has grown, a dip is the model's own and not rolled back
        if has_grown and measured.metric < COLLAPSE * reference:
            return f"the metric fell from {reference:.4g} to {measured.metric:.4g}"
        return ""

    def update(self, step: int, measured: Measurement) -> None:
        """Keep a healthy network: as a stable one, unless a better one has the same seeds."""
        self.last = point = self._point(step, measured.metric)
        self.already_restored = []
        committed = measured.committed_metric
        if committed is not None and (self.best is None or committed >= self.best["metric"]):
            self.best = self._point(step, committed, committed_only=True)
        slots, known = self._network.states, self.best_stable
        is_committed = slots.stage == SeedStage.FOSSILIZED
        if bool((slots.has_seed & ~is_committed & (slots.stage != SeedStage.HOLDING)).any()):
            return
        is_other = known is None or known["seed_ids"] != point["seed_ids"]
        if known is None or is_other or point["metric"] >= known["metric"]:
            self.best_stable = known = point
        has_best = self.best is not None and self.best["metric"] >= known["metric"]
        if not has_best and torch.equal(slots.has_seed, is_committed):
            self.best = known

    def _point(self, step: int, metric: float, *, committed_only: bool = False) -> SafePoint:
        state = self._network.capture(committed_only=committed_only)
        ids = self._recorder.seed_ids
        ids = {slot: ids[slot] for slot in state["seeds"]}
        return SafePoint(state=state, metric=metric, step=step, seed_ids=ids)

    def recover(self) -> SafePoint:
        """Restore the first of last, best_stable and best that was not restored already."""
        assert self.best is not None, "no network to restore"
        stable, point = self.best_stable, self.best
        for known in (stable if stable and self.has_all_seeds(stable) else None, self.last):
            if known and _name(known) not in self.already_restored:
                point = known
        self.last = None
        self.already_restored.append(_name(point))
        self.restore(point)
        return point

    def commit_best_seen(self, now: SafePoint | None) -> None:
        """Restore the best measured network and commit its seeds, if it beats the committed best.

        `now` is the current network if it was measured as it is.
        """
        assert self.best is not None
        whole = [p for p in (self.best_stable, now) if p is not None and self.has_all_seeds(p)]
        point = max((self.best, *whole), key=lambda p: p["metric"])  # the first of equals
        if point is self.best:
            return
        self.restore(point)
        stage = self._network.states.stage.clone()
        stage[0, self._network.uncommitted] = SeedStage.FOSSILIZED
        self._network.adopt(Transition.of(replace(self._network.states, stage=stage)))
        self.best = self._point(point["step"], point["metric"], committed_only=True)

    def restore(self, point: SafePoint) -> None:
        """Restore a network. Seeds pruned since stay pruned; slots of newer seeds are embargoed."""
        ids, then = self._recorder.seed_ids, point["state"]
        stays = [slot for slot, seed in point["seed_ids"].items() if ids.get(slot) == seed]
        slots = _merged_slots(stays, then=SlotStates(**then["slots"]), now=self._network.states)
        seeds = {slot: then["seeds"][slot] for slot in stays}
        self._network.restore({**then, "seeds": seeds, "slots": slots.tensors()})

    def has_all_seeds(self, point: SafePoint) -> bool:
        """Whether all seeds of a safe point are still in the network."""
        return point["seed_ids"].items() <= self._recorder.seed_ids.items()


def _name(point: SafePoint) -> tuple[int, tuple[str, ...]]:
    return point["step"], (*point["seed_ids"].values(),)


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
