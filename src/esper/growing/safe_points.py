"""When a network counts as broken, and the networks that a run can go back to.

There are three: the *last* healthy one, whole; the best *settled* one, with the seeds of today and
none of them on its way; and the *best* committed one. A broken network goes back to the last; if
that breaks again before it was healthy once, to the settled one, and then to the best. A settled
network is a committed one as soon as its seeds are: who commits late has as many networks to
choose from as who commits early.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from esper.growing.bookkeeping import Bookkeeper
from esper.growing.checkpoint import network_from_dict, network_to_dict
from esper.growing.measuring import Measurement
from esper.growing.network import GrowingNetwork, NetworkState
from esper.kasmina.lifecycle import SlotStates, Transition, remove_live_seeds
from esper.leyline.stages import SeedStage

COLLAPSE = 0.5  # share of the metric of a safe point below which a network counts as broken


@dataclass(frozen=True)
class SafePoint:
    """A network that was measured and found healthy."""

    state: NetworkState
    metric: float
    step: int
    seed_ids: dict[int, str]  # by slot; no two seeds of a run have the same

    @property
    def name(self) -> tuple[int, tuple[str, ...]]:
        """No two networks of a run have the same."""
        return self.step, tuple(self.seed_ids.values())


class SafePoints:
    """The last healthy network, the best of those with its seeds, and the best committed one."""

    def __init__(self, network: GrowingNetwork, books: Bookkeeper):
        self._network, self._books = network, books
        self.last: SafePoint | None = None
        self.settled: SafePoint | None = None
        self.best: SafePoint | None = None
        self._tried: list[tuple[int, tuple[str, ...]]] = []  # gone back to since one was healthy

    def why_broken(self, measured: Measurement) -> str:
        """What is wrong with the network, in words; empty for a healthy one."""
        if math.isnan(measured.metric):
            return "the validation metric is not a number from 0 to 1"
        if not self._network.is_finite():
            if self.best is None:
                raise ValueError(
                    "the model's weights or buffers are not finite before anything has grown"
                )
            return "weights or buffers are not finite"
        healthy = self._healthy_metric()
        if self._books.ledger.seeds and measured.metric < COLLAPSE * healthy:
            return f"the metric fell from {healthy:.4g} to {measured.metric:.4g}"
        return ""

    def _healthy_metric(self) -> float:
        """What a network is measured by: the best of those before, or how they stand after a dip.

        Before anything has grown a dip is the model's own, and no reason to take its training back.
        """
        best, last = (0.0 if p is None else p.metric for p in (self.best, self.last))
        return last if self.last is not None and last < COLLAPSE * best else max(best, last)

    def keep(self, step: int, metric: float, committed_metric: float | None) -> None:
        """The network is healthy; its metric without uncommitted seeds is None if not known."""
        self.last, self._tried = self._point(step, metric), []
        if committed_metric is not None:
            self._keep_if_best(step, committed_metric)
        self._keep_if_settled(self.last)

    def _keep_if_best(self, step: int, committed_metric: float) -> None:
        if self.best is None or committed_metric >= self.best.metric:
            self.best = self._point(step, committed_metric, committed_only=True)

    def _point(self, step: int, metric: float, *, committed_only: bool = False) -> SafePoint:
        state = self._network.capture(committed_only=committed_only)
        seed_ids = {slot: self._books.seed_ids[slot] for slot in state.seeds}
        return SafePoint(state, metric, step, seed_ids)

    def _keep_if_settled(self, point: SafePoint) -> None:
        """Keeps a settled network if none with its seeds was better; they may be committed now."""
        slots, known = point.state.slots, self.settled
        is_committed = slots.stage == SeedStage.FOSSILIZED
        if bool((slots.has_seed & ~is_committed & (slots.stage != SeedStage.HOLDING)).any()):
            return
        has_rival = known is not None and known.seed_ids == point.seed_ids
        if known is None or not has_rival or point.metric >= known.metric:
            self.settled = known = point
        has_best = self.best is not None and self.best.metric >= known.metric
        if not has_best and torch.equal(slots.has_seed, is_committed):
            self.best = known

    def recover(self) -> SafePoint:
        """Back to the last healthy network; if that one broke again at once, to an earlier one."""
        assert self.best is not None, "nothing to go back to"
        settled = self.settled if self.settled and self.is_whole(self.settled) else None
        points = [p for p in (self.last, settled) if p is not None and p.name not in self._tried]
        point = next(iter(points), self.best)
        self.last = None
        self._tried.append(point.name)
        self.go_back(point)
        return point

    def commit_best_seen(self, now: SafePoint | None) -> bool:
        """Commits the seeds of the best network measured, if no committed one is as good.

        `now` is the network as it stands, if it was measured so.
        """
        assert self.best is not None
        whole = [p for p in (self.settled, now) if p is not None and self.is_whole(p)]
        point = max((self.best, *whole), key=lambda p: p.metric)  # of equals the first
        if point is self.best:
            return False
        self.go_back(point)
        stage = self._network.states.stage.clone()
        stage[0, self._network.uncommitted] = SeedStage.FOSSILIZED
        self._network.adopt(Transition.of(replace(self._network.states, stage=stage)))
        self.best = self._point(point.step, point.metric, committed_only=True)
        return True

    def go_back(self, point: SafePoint) -> None:
        """To a safe point. Seeds that were pruned since stay pruned; slots of new ones rest."""
        seeds = {s: seed for s, seed in point.state.seeds.items() if self._is_there(point, s)}
        slots = _slots_of(list(seeds), then=point.state.slots, now=self._network.states)
        self._network.restore(replace(point.state, seeds=seeds, slots=slots))

    def is_whole(self, point: SafePoint) -> bool:
        """Whether all seeds of a safe point are still in the network."""
        return all(self._is_there(point, slot) for slot in point.seed_ids)

    def _is_there(self, point: SafePoint, slot: int) -> bool:
        return self._books.seed_ids.get(slot) == point.seed_ids[slot]

    def to_dict(self) -> dict[str, Any]:
        points = {
            name: point and {**vars(point), "state": network_to_dict(point.state)}
            for name, point in (
                ("last", self.last),
                ("settled", self.settled),
                ("best", self.best),
            )
        }
        return {**points, "tried": list(self._tried)}

    def load(self, saved: dict[str, Any]) -> None:
        self.last, self.settled, self.best = (
            data and SafePoint(**{**data, "state": network_from_dict(data["state"])})
            for data in (saved["last"], saved["settled"], saved["best"])
        )
        self._tried = list(saved["tried"])


def _slots_of(seeds: list[int], *, then: SlotStates, now: SlotStates) -> SlotStates:
    """These slots as they were then, but commitments stand; every other seed is uprooted."""
    stays = torch.zeros_like(now.has_seed)
    stays[0, seeds] = True
    is_committed = now.stage == SeedStage.FOSSILIZED
    revoked = torch.where(is_committed & ~stays, SeedStage.HOLDING, now.stage)
    one_host = torch.zeros(1, dtype=torch.int64)
    uprooted = remove_live_seeds(replace(now, stage=revoked), one_host).states
    then = replace(then, stage=torch.where(is_committed, SeedStage.FOSSILIZED, then.stage))
    return SlotStates(
        **{
            field.name: torch.where(stays, getattr(then, field.name), getattr(uprooted, field.name))
            for field in fields(SlotStates)
        }
    )
