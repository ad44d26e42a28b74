"""Training on CUDA as captured graphs, for layers that the fused kernel does not know.

A graph has fixed shapes and reads everything else from tensors: group members, alphas, styles,
learning rates, data rows. Controllers change the groups nearly every step. So group sizes are
rounded up, and a graph with room to spare is reused if its waste costs less than a new capture.

Parity test: `tests/tolaria/test_steps.py`, against `tolaria/batched.py` (needs a GPU).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina.lifecycle import SlotStates
from esper.tolaria.batched import (
    Grouping,
    Minibatch,
    SeedGroup,
    Signature,
    TrainingSetup,
    run_in_order,
)

MAX_WASTE = 2.0  # arithmetic of the graph in use over that of the tightest one
MAX_GRAPHS = 64


class GraphedSteps:
    """Minibatches as CUDA graphs, captured when first needed and chosen by what they cost."""

    def __init__(self, setup: TrainingSetup):
        self._setup = setup
        self._graphs: OrderedDict[Signature, _Graph] = OrderedDict()
        # graphs run one after the other and keep no results in their memory, so they share it
        self._pool = torch.cuda.graph_pool_handle()
        self.num_captures = 0

    def prepare(self, states: SlotStates) -> None:
        grouping = Grouping.of(states)
        tight = round_up(grouping.signature)
        signature = choose_signature(tight, tuple(self._graphs), self._arithmetic)
        if signature in self._graphs:
            self._minibatch = self._graphs[signature].minibatch
        else:
            self._minibatch = Minibatch(self._setup, signature, run_in_parallel)
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
        return self._minibatch.logits(x, ablate), self._minibatch.active_slots

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The graph of one minibatch; the parameters are restored after the capture."""
        self.num_captures += 1
        parameter_table, feed = self._setup.parameter_table, self._setup.feed
        before = parameter_table.save()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._minibatch.train()  # warm up outside the capture, for library setup
            torch.cuda.empty_cache()  # a graph has its own memory pool
            graph.capture_begin(pool=self._pool)
            self._minibatch.train()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        parameter_table.restore(*before, torch.arange(parameter_table.num_hosts))
        feed.rewind()
        return graph

    def _arithmetic(self, signature: Signature) -> int:
        """Multiply-adds of one example's forward pass through all hosts and groups."""
        setup = self._setup
        seeds = (size * setup.seed_program(key).macs for key, size in signature.capacities)
        return setup.parameter_table.num_hosts * setup.host.macs + sum(seeds)


def run_in_parallel(groups: Sequence[SeedGroup], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of the groups; a capture puts each group on its own stream.

    The groups are independent, and a single one leaves most of a GPU idle. The backward pass uses
    the same streams.
    """
    if not torch.cuda.is_current_stream_capturing():
        return run_in_order(groups, inputs)
    main = torch.cuda.current_stream()
    outputs = []
    streams = _side_streams(len(groups))
    for group, x, stream in zip(groups, inputs, streams, strict=True):
        stream.wait_stream(main)
        x.record_stream(stream)  # keep its memory until the group is done
        with torch.cuda.stream(stream):
            outputs.append(group.program.forward(group.rows, x))
    for output, stream in zip(outputs, streams, strict=True):
        main.wait_stream(stream)
        output.record_stream(main)
    return outputs


def _side_streams(count: int) -> list[torch.cuda.Stream]:
    """The same streams every time, so that the memory that they freed is reused."""
    while len(_SIDE_STREAMS) < count:
        _SIDE_STREAMS.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    return _SIDE_STREAMS[:count]


_SIDE_STREAMS: list[torch.cuda.Stream] = []


def choose_signature(
    tight: Signature, captured: Sequence[Signature], arithmetic: Callable[[Signature], float]
) -> Signature:
    """A captured signature with enough room and not too much, or a new one.

    The last of `captured` was used last. A new signature keeps its room, and doubles it where it
    has become too small, unless that wastes too much: groups that shrink and grow again then fit.
    """
    limit = MAX_WASTE * arithmetic(tight)
    fitting = [s for s in captured if covers(s, tight) and arithmetic(s) <= limit]
    if fitting:
        return min(fitting, key=arithmetic)
    if not captured:
        return tight
    last = dict(captured[-1].capacities)
    doubled = tuple((k, 2 * n if n > last.get(k, 0) else n) for k, n in tight.capacities)
    for roomy in (replace(tight, capacities=doubled), tight):
        joined = join(roomy, captured[-1])
        if arithmetic(joined) <= limit:
            return joined
    return tight


def round_up(signature: Signature) -> Signature:
    """The signature with powers of two as capacities."""
    rounded = tuple((key, 1 << (size - 1).bit_length()) for key, size in signature.capacities)
    return replace(signature, capacities=rounded)


def covers(signature: Signature, other: Signature) -> bool:
    """Whether a program of the signature can run the groups of the other one."""
    room = dict(signature.capacities)
    return all(room.get(key, 0) >= size for key, size in other.capacities) and all(
        theirs or not ours
        for ours, theirs in zip(signature.plain_slots, other.plain_slots, strict=True)
    )


def join(signature: Signature, other: Signature) -> Signature:
    """The smallest signature that covers both."""
    room = dict(signature.capacities)
    for key, size in other.capacities:
        room[key] = max(size, room.get(key, 0))
    plain = (a and b for a, b in zip(signature.plain_slots, other.plain_slots, strict=True))
    return Signature(tuple(sorted(room.items())), tuple(plain))


class _Graph(NamedTuple):
    minibatch: Minibatch
    graph: torch.cuda.CUDAGraph
