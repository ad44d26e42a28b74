"""Gradients of a minibatch as a CUDA graph: one launch instead of hundreds.

    gradients = Captured(compute, parameters)    # compute(inputs, layout): a backward pass
    outputs = gradients(inputs, layout)          # and the parameters have gradients

A graph repeats the kernels of one layout (the lengths of the packed episodes) at fixed addresses.
So inputs are copied to where it reads them; all else that it reads (weights, statistics of
features) may change in place only.

A capture takes as long as several minibatches, so it pays only for a layout that comes up again in
later updates. Growth training has full rows of one length: one layout for all minibatches. Layouts
that have not come up often run without a graph; episodes of random lengths hardly ever repeat one.
Parity tests: tests/simic/test_captured.py.
"""

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from esper.leyline.sequences import SequenceLayout

OFTEN = 16  # minibatches of a layout before it is captured
MOST_GRAPHS = 4  # each holds the memory of a forward and backward pass
_MOST_COUNTED = 1024

Inputs = tuple[Any, ...]  # tensors, and tuples of tensors
Compute = Callable[[Any, SequenceLayout], Sequence[Tensor]]


class Captured:
    """`compute`, as a graph for each layout that comes up often.

    `compute` adds to the gradients of the parameters, which are None before, and returns tensors
    that need none. It must not wait for the GPU.
    """

    def __init__(self, compute: Compute, parameters: Sequence[nn.Parameter]):
        self._compute, self._parameters = compute, parameters
        self._device = parameters[0].device
        self._counts: Counter[bytes] = Counter()
        self.graphs: dict[bytes, _Graph] = {}  # by the layout's batch sizes

    def __call__(self, inputs: Inputs, layout: SequenceLayout) -> Sequence[Tensor]:
        key = layout.batch_sizes.numpy().tobytes()
        if key not in self.graphs:
            self._counts[key] += 1
            if self._counts[key] <= OFTEN:
                if len(self._counts) > _MOST_COUNTED:
                    self._counts.clear()
                return self._compute(inputs, layout)
            if len(self.graphs) == MOST_GRAPHS:
                oldest = next(iter(self.graphs))
                del self.graphs[oldest], self._counts[oldest]
            self.graphs[key] = self._capture(inputs, layout)
        graph = self.graphs[key]
        for fixed, current in zip(graph.inputs, tree_leaves(inputs), strict=True):
            fixed.copy_(current)
        with torch.cuda.device(self._device):
            graph.graph.replay()
        for parameter, gradient in zip(self._parameters, graph.gradients, strict=True):
            parameter.grad = gradient
        return [output.clone() for output in graph.outputs]

    def _capture(self, inputs: Inputs, layout: SequenceLayout) -> "_Graph":
        graph, fixed = torch.cuda.CUDAGraph(), tree_map(Tensor.clone, inputs)
        mode = "thread_local"  # another thread may use the GPU meanwhile
        gc.collect()  # an old graph that is freed during the capture would end it
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self._device), torch.cuda.graph(graph, capture_error_mode=mode):
                outputs = self._compute(fixed, layout)
        finally:
            if collects:
                gc.enable()
        gradients = [parameter.grad for parameter in self._parameters]
        steps = layout.steps_on(self._device)
        return _Graph(graph, tree_leaves(fixed), outputs, gradients, steps)


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Sequence[Tensor]
    gradients: list[Tensor | None]
    steps: tuple[Tensor, Tensor]  # of the layout; held because the graph reads them
