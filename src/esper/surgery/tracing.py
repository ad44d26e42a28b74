"""Trace a forward pass: which modules are called, and how their outputs depend on each other.

Forward hooks record the calls; dependencies are read from the autograd graph of the output. A
function mode records the torch functions between the modules.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from esper.surgery.eval_mode import eval_mode
from esper.surgery.inputs import forward, tensors

# a node of the autograd graph and the index of its output: recurrent layers have several
Edge = tuple[Any, int]


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    order: int
    module: nn.Module
    output: Any  # its shape; or the type name, if it is not a float tensor
    dtype: torch.dtype  # of the weights before it; under autocast the output may have another
    device: torch.device
    node: Edge | None  # in the autograd graph
    is_learning: bool  # called with gradients enabled
    channels_last: bool
    weights: str  # name of the last layer with weights so far
    num_weight_calls: int  # layers with weights so far


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


class Run(TorchFunctionMode):
    """One forward pass; while it is active, it records calls of torch functions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.calls: dict[str, list[Call]] = {}  # in the order of the first calls' ends
        self.readers: dict[int, list[Op]] = {}  # by the id of a tensor they read
        self.tensors: dict[str, Tensor] = {}  # the output of each module
        self.makers: dict[int, str] = {}  # the innermost module, by id of its output
        self.running: list[str] = []  # modules whose forward has not returned yet
        self.outputs: list[Tensor] = []
        # the last layer with weights: name, whether its channels come last, sizes of its weights
        self.weights, self.prefers_last, self.sizes = "", True, frozenset[int]()
        self.dtype: torch.dtype | None = None  # None: not a float dtype
        self.num_weight_calls = 0

    def record(self, name: str, module: nn.Module, output: Any) -> None:
        self.running.pop()
        if own := _weights(module):
            self.weights, self.prefers_last = name, not isinstance(module, _ConvNd)
            self.sizes = frozenset(size for p in own for size in p.shape)
            self.dtype = own[0].dtype if own[0].is_floating_point() else None
            self.num_weight_calls += 1
        tensor = output[0] if isinstance(output, tuple) and output else output
        is_tensor = isinstance(tensor, Tensor) and tensor.is_floating_point()
        if is_tensor:
            self.tensors[name] = tensor
            self.makers.setdefault(id(tensor), name)
        channels_last = False
        if is_tensor and tensor.dim() > 2:
            # as the last layer has them, unless only the other axis matches the size of its weights
            first, last = tensor.shape[1] in self.sizes, tensor.shape[-1] in self.sizes
            channels_last = last if first != last else self.prefers_last
        call = Call(
            order=sum(map(len, self.calls.values())),
            module=module,
            output=tuple(tensor.shape) if is_tensor else type(output).__name__,
            dtype=self.dtype or (tensor.dtype if is_tensor else torch.float32),
            device=tensor.device if is_tensor else torch.device("cpu"),
            node=edge_of(tensor) if is_tensor else None,
            is_learning=torch.is_grad_enabled(),
            channels_last=channels_last,
            weights=self.weights,
            num_weight_calls=self.num_weight_calls,
        )
        self.calls.setdefault(name, []).append(call)

    def used(self, avoiding: Edge | None = None) -> set[Edge]:
        """What the outputs depend on, by paths that do not go through `avoiding`."""
        return _reachable(filter(None, map(edge_of, self.outputs)), avoiding)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if tensors(output):
            op = Op(func, tuple(args), kwargs or {}, output, (self.running or [""])[-1])
            for tensor in {id(x): x for x in tensors((args, op.kwargs))}.values():
                self.readers.setdefault(id(tensor), []).append(op)
        return output


def trace(model: nn.Module, inputs: Any) -> Run:
    """Record a forward pass in eval mode."""
    run = Run(model)
    with ExitStack() as hooks, eval_mode(model, with_grad=True), run:
        for name, module in run.modules.items():
            # torch's parametrizations compute weights instead of activations
            if name and "parametrizations" not in name.split("."):
                before = lambda *_, name=name: run.running.append(name)  # noqa: E731
                after = lambda module, _, output, name=name: run.record(name, module, output)  # noqa: E731
                hooks.enter_context(module.register_forward_pre_hook(before))
                hooks.enter_context(module.register_forward_hook(after))
        # float inputs become nodes of the autograd graph
        node = lambda x: x.detach().requires_grad_().clone() if x.is_floating_point() else x  # noqa: E731
        inputs = pytree.tree_map_only(Tensor, node, inputs)
        output = forward(model, inputs)
    run.outputs = tensors(output)
    if not run.outputs:
        raise ValueError(
            f"the model returns {type(output).__name__} without a tensor in it; return a tensor, or "
            "a tuple, dict or dataclass of tensors"
        )
    return run


def is_cut(node: Edge | None, run: Run) -> bool:
    """Whether every path from the inputs of `node` to the outputs goes through it."""
    if node is None:
        return False
    around = {n for n, _ in run.used(avoiding=node)}
    before = {n for n, _ in _reachable(node[0].next_functions)}
    calls = (call for calls in run.calls.values() for call in calls)
    # the output of an embedding does not depend on float inputs
    embeddings = (c for c in calls if isinstance(c.module, nn.Embedding | nn.EmbeddingBag))
    sources = [call.node[0] for call in embeddings if call.node]
    # weights may be used elsewhere too, but nothing computed from the inputs may bypass the node
    computed = {n for n in before if n.name() != "torch::autograd::AccumulateGrad"}
    return not any(n in around for n in (*computed, *sources))


def _weights(module: nn.Module) -> list[Tensor]:
    """The matrices of a layer itself; vectors only scale or shift."""
    if isinstance(module, nn.Linear | _ConvNd):
        return [module.weight]  # a matrix even where it has one output
    return [p for p in module.parameters(recurse=False) if sum(n > 1 for n in p.shape) > 1]


def edge_of(tensor: Tensor) -> Edge | None:
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def is_composed(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _reachable(edges: Iterable[Edge], avoiding: Edge | None = None) -> set[Edge]:
    seen: set[Edge] = set()
    stack = list(edges)
    while stack:
        edge = stack.pop()
        if edge[0] is not None and edge not in seen and edge != avoiding:
            seen.add(edge)
            stack.extend(edge[0].next_functions)
    return seen


def without_graphs(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy` with detached copies of the tensors a model computed and kept.

    Examples: the weight that spectral norm computes in every pass, or stored attention maps. Torch
    refuses to deepcopy a tensor that has a graph.
    """
    kept = pytree.tree_leaves([vars(module) for module in model.modules()])
    return {id(x): x.detach().clone() for x in kept if isinstance(x, Tensor) and not x.is_leaf}
