"""Training on CUDA as captured graphs.

A graph is fixed in its shapes and reads everything else from tensors: who is in which group,
alphas, styles, learning rates, data rows. Controllers change the groups nearly every step, so a
graph that has more room than needed is used again if the room it wastes costs less than a new
capture would.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina.lifecycle import SlotStates
from esper.tolaria.batched import Minibatch, TrainingSetup
from esper.tolaria.groups import Grouping, Signature

MAX_WASTE = 2.0  # arithmetic of the graph in use over that of the tightest one
MAX_GRAPHS = 64


class GraphedSteps:
    """Minibatches as CUDA graphs, captured when first needed and chosen by what they cost."""

    def __init__(self, setup: TrainingSetup):
        self._setup = setup
        self._graphs: OrderedDict[Signature, _Graph] = OrderedDict()
        # graphs run one after the other and leave nothing behind in their memory: they share it
        self._pool = torch.cuda.graph_pool_handle()
        self.num_captures = 0

    def prepare(self, states: SlotStates) -> None:
        grouping = Grouping.of(states)
        signature = choose_signature(
            grouping.signature, tuple(self._graphs), self._setup.arithmetic
        )
        if signature in self._graphs:
            self._minibatch = self._graphs[signature].minibatch
        else:
            self._minibatch = Minibatch(self._setup, signature)
        self._minibatch.members.fill(grouping.members)

    def run(self, count: int) -> None:
        signature = self._minibatch.signature
        if signature not in self._graphs:
            self._graphs[signature] = _Graph(self._minibatch, self._capture())
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(signature)
        for _ in range(count):
            self._graphs[signature].graph.replay()

    def logits(self, x: Tensor, ablate: bool) -> tuple[Tensor, tuple[int, ...]]:
        return self._minibatch.logits(x, ablate), self._minibatch.felt_slots

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The graph of one minibatch; nothing that lasts is changed by making it."""
        self.num_captures += 1
        parameter_table, feed = self._setup.parameter_table, self._setup.feed
        before = parameter_table.save()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._minibatch.train()  # once outside a capture: libraries set themselves up
            torch.cuda.empty_cache()  # a graph has memory of its own
            graph.capture_begin(pool=self._pool)
            self._minibatch.train()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        parameter_table.restore(before, torch.arange(parameter_table.num_hosts))
        feed.rewind()
        return graph


def choose_signature(
    tight: Signature, captured: Sequence[Signature], arithmetic: Callable[[Signature], float]
) -> Signature:
    """A captured signature with room enough and not too much of it, or a new one.

    `captured` ends with the one used last. A new one keeps the room of that and doubles it where
    it has become too small, as far as it is not a waste: groups that shrink and grow again, or
    grow further, then find room.
    """
    limit = MAX_WASTE * arithmetic(tight)
    fitting = [s for s in captured if s.covers(tight) and arithmetic(s) <= limit]
    if fitting:
        return min(fitting, key=arithmetic)
    if not captured:
        return tight
    last = dict(captured[-1].capacities)
    doubled = tuple((k, 2 * n if n > last.get(k, 0) else n) for k, n in tight.capacities)
    for roomy in (replace(tight, capacities=doubled), tight):
        joined = roomy.join(captured[-1])
        if arithmetic(joined) <= limit:
            return joined
    return tight


class _Graph(NamedTuple):
    minibatch: Minibatch
    graph: torch.cuda.CUDAGraph
