"""Trace a forward pass: which modules are called, and how their outputs depend on each other.

Forward hooks record the calls; dependencies are read from the autograd graph of the output. A
function mode records the torch functions between the modules.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from esper.growing.eval_mode import eval_mode
from esper.growing.inputs import forward, tensors

# a node of the autograd graph and the index of its output: recurrent layers have several
Edge = tuple[Any, int]


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    order: int
    module_class: str
    output: Any  # its shape; or the type name, if it is not a float tensor
    dtype: torch.dtype  # of the weights before it; under autocast the output may have another
    device: torch.device
    node: Edge | None  # in the autograd graph
    is_learning: bool  # called with gradients enabled
    channels_last: bool
    weights: str  # name of the last layer with weights so far
    num_weight_calls: int  # layers with weights so far
    is_source: bool  # an embedding: its output does not depend on float inputs
    is_block: bool  # an element of a stack of composed modules


@dataclass(frozen=True, eq=False)
class Op:
    """One call of a torch function that returned a tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    module: str = ""  # the innermost module that called it

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


@dataclass
class Run:
    """One forward pass."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    readers: dict[int, list[Op]] = field(default_factory=dict)  # by the id of a tensor they read
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the output of each module
    makers: dict[int, str] = field(
        default_factory=dict
    )  # the innermost module, by id of its output
    running: list[str] = field(default_factory=list)  # modules whose forward has not returned yet
    outputs: list[Tensor] = field(default_factory=list)
    output_nodes: list[Edge] = field(default_factory=list)
    output_shapes: list[tuple[int, ...]] = field(default_factory=list)
    # the last layer with weights: name, dtype, whether its channels come last, sizes of its weights
    weights: str = ""
    dtype: torch.dtype | None = None  # None: not a float dtype
    prefers_last: bool = True
    sizes: frozenset[int] = frozenset()
    num_weight_calls: int = 0

    def record(self, name: str, module: nn.Module, output: Any) -> None:
        self.running.pop()
        own = _weights(module)
        if own:
            self.weights, self.prefers_last = name, not isinstance(module, _ConvNd)
            self.sizes = frozenset(size for p in own for size in p.shape)
            self.dtype = own[0].dtype if own[0].is_floating_point() else None
            self.num_weight_calls += 1
        tensor = output[0] if isinstance(output, tuple) and output else output
        is_tensor = isinstance(tensor, Tensor) and tensor.is_floating_point()
        if is_tensor:
            self.tensors[name] = tensor
            self.makers.setdefault(id(tensor), name)
        self.calls.setdefault(name, []).append(
            Call(
                order=sum(map(len, self.calls.values())),
                module_class=type(module).__name__,
                output=tuple(tensor.shape) if is_tensor else type(output).__name__,
                dtype=self.dtype or (tensor.dtype if is_tensor else torch.float32),
                device=tensor.device if is_tensor else torch.device("cpu"),
                node=edge_of(tensor) if is_tensor else None,
                is_learning=torch.is_grad_enabled(),
                channels_last=is_tensor and self._puts_channels_last(tensor.shape),
                weights=self.weights,
                num_weight_calls=self.num_weight_calls,
                is_source=isinstance(module, nn.Embedding | nn.EmbeddingBag),
                is_block=_is_block(name, module),
            )
        )

    def _puts_channels_last(self, shape: torch.Size) -> bool:
        """As the last layer does, unless only the other axis matches the size of its weights."""
        if len(shape) < 3:
            return False
        first, last = shape[1] in self.sizes, shape[-1] in self.sizes
        return last if first != last else self.prefers_last


def trace(model: nn.Module, inputs: Any) -> Run:
    """Record a forward pass in eval mode."""
    run = Run()
    handles = []
    for name, module in model.named_modules():
        if name and not _makes_weights(name):
            after = lambda module, _args, output, name=name: run.record(name, module, output)  # noqa: E731
            before = lambda _module, _args, name=name: run.running.append(name)  # noqa: E731
            handles += [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after),
            ]
    try:
        with eval_mode(model, with_grad=True), _Recording(run):
            run.outputs = outputs = tensors(forward(model, _with_graph(inputs)))
    finally:
        for handle in handles:
            handle.remove()
    run.output_nodes = [edge for edge in map(edge_of, outputs) if edge is not None]
    run.output_shapes = [tuple(output.shape) for output in outputs]
    return run


class _Recording(TorchFunctionMode):
    def __init__(self, run: Run):
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if tensors(output):
            op = Op(func, tuple(args), kwargs or {}, output, (self._run.running or [""])[-1])
            for tensor in {id(x): x for x in tensors((args, op.kwargs))}.values():
                self._run.readers.setdefault(id(tensor), []).append(op)
        return output


def _with_graph(inputs: Any) -> Any:
    """Inputs whose float tensors are nodes of the autograd graph."""
    return pytree.tree_map_only(
        Tensor,
        lambda x: x.detach().requires_grad_().clone() if x.is_floating_point() else x,
        inputs,
    )


def is_cut(node: Edge | None, run: Run) -> bool:
    """Whether every path from the inputs of `node` to the outputs goes through it."""
    if node is None:
        return False
    around = _reachable(run.output_nodes, avoiding=node)
    before = _reachable(node[0].next_functions)
    sources = [c.node[0] for calls in run.calls.values() for c in calls if c.is_source and c.node]
    # weights may be used elsewhere too, but nothing computed from the inputs may bypass the node
    computed = {n for n in before if n.name() != _LEAF}
    return not any(n in around for n in (*computed, *sources))


def _weights(module: nn.Module) -> list[Tensor]:
    """The matrices of a layer itself; vectors only scale or shift."""
    if isinstance(module, nn.Linear | _ConvNd):
        return [module.weight]  # a matrix even where it has one output
    return [p for p in module.parameters(recurse=False) if sum(n > 1 for n in p.shape) > 1]


def _makes_weights(name: str) -> bool:
    """Whether a module computes weights (torch's parametrizations) instead of activations."""
    return "parametrizations" in name.split(".")


def edge_of(tensor: Tensor) -> Edge | None:
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def _is_block(name: str, module: nn.Module) -> bool:
    is_composed = not isinstance(module, nn.Sequential) and any(True for _ in module.children())
    return is_composed and name.rpartition(".")[2].isdigit()


_LEAF = "torch::autograd::AccumulateGrad"


def _reachable(edges: Iterable[Edge], avoiding: Edge | None = None) -> set[Any]:
    seen: set[Any] = set()
    stack = list(edges)
    while stack:
        edge = stack.pop()
        if edge[0] is not None and edge[0] not in seen and edge != avoiding:
            seen.add(edge[0])
            stack.extend(edge[0].next_functions)
    return seen


def without_graphs(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy` with detached copies of the tensors a model computed and kept.

    Examples: the weight that spectral norm computes in every pass, or stored attention maps. Torch
    refuses to deepcopy a tensor that has a graph.
    """
    kept = pytree.tree_leaves([vars(module) for module in model.modules()])
    return {id(x): x.detach().clone() for x in kept if isinstance(x, Tensor) and not x.is_leaf}
