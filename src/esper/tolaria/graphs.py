"""How minibatches are run: one by one, or on CUDA as captured graphs.

A graph is fixed in its shapes and reads everything else from tensors: who is in which group,
alphas, styles, learning rates, data rows. Controllers change the groups nearly every step, so a
graph that has more room than needed is used again if the room it wastes costs less than a new
capture would.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from esper.tolaria.arena import Arena
from esper.tolaria.batched import Minibatch
from esper.tolaria.feed import Feed
from esper.tolaria.groups import Grouping, Signature

MAX_WASTE = 2.0  # arithmetic of the graph in use over that of the tightest one
MAX_GRAPHS = 64


class Steps(Protocol):
    """Runs minibatches for whatever seeds the hosts have."""

    minibatch: Minibatch  # of the groups as they are now

    def prepare(self, grouping: Grouping) -> None:
        """The groups have changed."""
        ...

    def run(self, count: int) -> None:
        """That many minibatches from the feed."""
        ...


BuildMinibatch = Callable[[Signature], Minibatch]


class EagerSteps:
    """Every operation launched by itself."""

    def __init__(self, build: BuildMinibatch, feed: Feed, learning_rates: Tensor):
        self._build, self._feed, self._learning_rates = build, feed, learning_rates

    def prepare(self, grouping: Grouping) -> None:
        self.minibatch = self._build(grouping.signature)
        self.minibatch.members.fill(grouping.members)

    def run(self, count: int) -> None:
        for _ in range(count):
            x, labels = self._feed.next()
            self._feed.finish(self.minibatch.train(x, labels, self._learning_rates))


class GraphedSteps:
    """Minibatches as CUDA graphs, captured when first needed and chosen by what they cost."""

    def __init__(
        self,
        build: BuildMinibatch,
        feed: Feed,
        learning_rates: Tensor,
        arena: Arena,
        arithmetic: Callable[[Signature], float],
    ):
        self._build, self._feed, self._learning_rates = build, feed, learning_rates
        self._arena, self._arithmetic = arena, arithmetic
        self._graphs: OrderedDict[Signature, _Graph] = OrderedDict()
        # graphs run one after the other and leave nothing behind in their memory: they share it
        self._pool = torch.cuda.graph_pool_handle()
        self.num_captures = 0

    def prepare(self, grouping: Grouping) -> None:
        signature = self._choose(grouping.signature)
        if signature in self._graphs:
            self.minibatch = self._graphs[signature].minibatch
        else:
            self.minibatch = self._build(signature)
        self.minibatch.members.fill(grouping.members)

    def run(self, count: int) -> None:
        signature = self.minibatch.signature
        if signature not in self._graphs:
            self._graphs[signature] = _Graph(self.minibatch, self._capture())
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(signature)
        for _ in range(count):
            self._graphs[signature].graph.replay()

    def _choose(self, tight: Signature) -> Signature:
        """A captured signature with room enough and not too much of it, or a new one.

        A new one keeps the room of the last, as far as that is not a waste: groups that shrink
        and grow again then find room.
        """
        limit = MAX_WASTE * self._arithmetic(tight)
        fitting = [
            signature
            for signature in self._graphs
            if signature.covers(tight) and self._arithmetic(signature) <= limit
        ]
        if fitting:
            return min(fitting, key=self._arithmetic)
        if self._graphs:
            joined = tight.join(next(reversed(self._graphs)))
            if self._arithmetic(joined) <= limit:
                return joined
        return tight

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The graph of one minibatch; nothing that lasts is changed by making it."""
        self.num_captures += 1
        before = self._arena.save()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once outside a capture: libraries set themselves up
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step()
        self._arena.restore(before, torch.arange(self._arena.num_hosts))
        self._feed.rewind()
        return graph

    def _step(self) -> None:
        x, labels = self._feed.next()
        self._feed.finish(self.minibatch.train(x, labels, self._learning_rates))


class _Graph(NamedTuple):
    minibatch: Minibatch
    graph: torch.cuda.CUDAGraph
