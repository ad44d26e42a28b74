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
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from esper.leyline.sequences import SequenceLayout

OFTEN = 16  # minibatches of a layout before it is captured
MOST_GRAPHS = 4  # each holds the memory of a forward and backward pass
_MOST_COUNTED = 1024

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])  # tensors, and tuples of tensors
Compute = Callable[[Inputs, SequenceLayout], Sequence[Tensor]]


class Captured(Generic[Inputs]):
    """`compute`, as a graph for each layout that comes up often.

    `compute` adds to the gradients of the parameters, which are None before, and returns tensors
    that need none. It must not wait for the GPU.
    """

    def __init__(self, compute: Compute[Inputs], parameters: Sequence[nn.Parameter]):
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
        for fixed, current in zip(_tensors(graph.inputs), _tensors(inputs), strict=True):
            fixed.copy_(current)
        with torch.cuda.device(self._device):
            graph.graph.replay()
        for parameter, gradient in zip(self._parameters, graph.gradients, strict=True):
            parameter.grad = gradient
        return [output.clone() for output in graph.outputs]

    def _capture(self, inputs: Inputs, layout: SequenceLayout) -> "_Graph":
        graph, fixed = torch.cuda.CUDAGraph(), _cloned(inputs)
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
        return _Graph(graph, fixed, outputs, gradients, layout.steps_on(self._device))


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Any, ...]
    outputs: Sequence[Tensor]
    gradients: list[Tensor | None]
    steps: tuple[Tensor, Tensor]  # of the layout; held because the graph reads them


def _tensors(inputs: tuple[Any, ...]) -> list[Tensor]:
    """All tensors in nested tuples."""
    found: list[Tensor] = []
    for part in inputs:
        found += [part] if isinstance(part, Tensor) else _tensors(part)
    return found


def _cloned(inputs: Any) -> Any:
    """The same nested tuples with copies of the tensors."""
    if isinstance(inputs, Tensor):
        return inputs.clone()
    parts = map(_cloned, inputs)
    return tuple(parts) if type(inputs) is tuple else type(inputs)(*parts)
