"""Pairs of layers between which a model can get wider, found in a traced forward pass.

A pair is a layer A whose output reaches only one other layer B, through functions that treat every
unit alike: activations, dropout, batch norm, depthwise convolutions, pooling, flatten. Then k more
units of A are a branch from A's input to B's output, and the branch can be merged into A and B.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from esper.growing.inputs import tensors
from esper.growing.tracing import Op, Run
from esper.kasmina.blueprints import Blueprint, Site, Widening

Modules = dict[str, Any]  # by name
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)  # exact classes: a subclass may compute something else


def is_transposed(module: Any) -> bool:
    """Whether it is a linear layer whose weight is [inputs, outputs], as in GPT-2."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_layer(module: Any) -> bool:
    return type(module) in LAYERS or is_transposed(module)


def weight_of(layer: Any) -> Tensor:
    """The weight of a layer, [outputs, inputs, ...]."""
    weight: Tensor = layer.weight
    return weight.t() if is_transposed(layer) else weight


# functions by name: of every element; of every channel, over its positions; of the shape alone
_PER_ELEMENT = re.compile(
    r"relu_?|relu6|leaky_relu|gelu|silu|mish|[cs]?elu|softplus|softsign|sigmoid|tanh|hardswish|"
    r"hardsigmoid|hardtanh|(hard|soft|tanh)shrink|logsigmoid|(alpha_)?dropout|dropout[12]d|"
    r"contiguous|clone"
)
_PER_CHANNEL = re.compile(r"(adaptive_)?(max|avg)_pool[12]d|mean|amax|squeeze")
_RESHAPES = ("flatten", "view", "reshape")


class INPUT:
    """Stands for the activations in the arguments of a recorded function; a class is not copied."""


@dataclass(frozen=True)
class Function:
    """A function between two layers, with its arguments."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...] = (INPUT,)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, x: Tensor, training: bool) -> Tensor:
        given = (self.args, self.kwargs)
        args, kwargs = pytree.tree_map(lambda leaf: x if leaf is INPUT else leaf, given)
        if "training" in kwargs:  # the trace was in eval mode
            kwargs["training"] = training
        return self.function(*args, **kwargs)


Step = str | Function  # between two layers: the name of a module with a weight per unit is a str


class NotAPair(Exception):
    """The reason why a layer cannot get wider, or another part larger."""


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a model that a seed enlarges; costs are of one unit or head, or of a copy."""

    name: str  # of its site
    first: str
    last: str  # the module whose output a seed changes
    params: int
    macs: float  # per example
    inside: frozenset[str]  # modules after which no seed can grow as well
    width: int = field(default=1, kw_only=True)  # units or heads that it has
    is_block = False


@dataclass(frozen=True, eq=False)
class Pair(Part):
    """Two layers and what is between them."""

    layers: tuple[str, ...]  # the first, those with a weight per unit, the last
    steps: tuple[Step, ...]
    features: int  # inputs of the last layer for each unit; more than 1 after a flatten
    cross: int  # weights of the last layer between a unit and one of its outputs
    cross_macs: float
    size = 1  # outputs of the other layers for each unit


@dataclass(frozen=True)
class PartSite(Site):
    """A part of the model as the site of a seed that enlarges it; no other blueprint fits."""

    part: Part
    kind: Any = -1

    def widened(self, share: float) -> Any:
        units = max(1, round(share * self.part.width))
        return None if self.part.is_block else UnitsProgram(self.part, units)


@dataclass(frozen=True)
class UnitsProgram:
    """New units or heads, or a copy, with the costs that a controller sees."""

    part: Part
    units: int = 1
    depth = 2
    reach = 0.0

    @property
    def num_params(self) -> int:
        return self.units * self.part.params

    @property
    def macs(self) -> int:
        return round(self.units * self.part.macs)


def units_of(site: Site, blueprint: Blueprint) -> int:
    """The units that a blueprint adds at a site; 0 unless it is a widening of a pair."""
    is_widening = isinstance(blueprint, Widening) and blueprint.fits(site)
    return blueprint.program(site).units if is_widening else 0  # type: ignore[attr-defined]


def pair_at(name: str, modules: Modules, run: Run, macs: Mapping[str, float]) -> Pair | None:
    """The pair whose first layer has this name; None if it is not a layer."""
    if not is_layer(modules[name]):
        return None
    first = modules[name]
    check_layer(name, modules, run)
    if getattr(first, "groups", 1) > 1:
        raise NotAPair("its groups share no inputs, so units cannot be added one by one")
    start = run.tensors[name]
    channel = start.dim() - 1 if isinstance(first, nn.Linear) or is_transposed(first) else 1
    inside, steps = [start], []
    for op in _chain(start, run, modules):
        source, target = inside[-1], op.output
        is_new = target is not source  # else the function worked in place, or did nothing
        end = run.makers.get(id(target), "") if is_new else ""
        maker = modules[end] if end else None
        if is_layer(maker) and not _is_depthwise(maker):
            break
        step = _step(op, source, target, maker, run, channel)
        if _is_depthwise(maker) and isinstance(step, str):
            check_layer(step, modules, run)
        steps.append(step)
        inside.append(target)
    else:
        raise NotAPair("its output reaches no other layer")
    check_layer(end, modules, run)
    if getattr(modules[end], "groups", 1) > 1:
        raise NotAPair("the next layer is grouped")
    weight, width = weight_of(modules[end]), start.shape[channel]
    features, rest = divmod(weight.shape[1], width)
    if rest:
        raise NotAPair("the next layer has other inputs")
    middle = [step for step in steps if isinstance(step, str)]
    per_unit = (p[0] for module in middle for p in modules[module].parameters())
    params = weight_of(first)[0].numel() + (first.bias is not None)
    wider = {id(tensor) for tensor in inside}
    return Pair(
        name=f"{name}->{end}",
        first=name,
        last=end,
        layers=(name, *middle, end),
        steps=tuple(steps),
        width=width,
        features=features,
        params=params + sum(p.numel() for p in per_unit) + features * weight[:, 0].numel(),
        macs=sum(macs.get(layer, 0.0) for layer in (name, *middle, end)) / width,
        inside=frozenset(n for n, tensor in run.tensors.items() if id(tensor) in wider),
        cross=features * weight[0, 0].numel(),
        cross_macs=macs.get(end, 0.0) / width / len(weight),
    )


def check_layer(name: str, modules: Modules, run: Run) -> None:
    layer = modules[name]
    uses = Counter(id(p) for m in modules.values() for p in m._parameters.values() if p is not None)
    own = list(layer._parameters.values())
    if len(run.calls[name]) > 1:
        raise NotAPair(f"{name!r} is called {len(run.calls[name])} times in a forward pass")
    if layer._parameters.get("weight") is None:
        raise NotAPair(f"the weight of {name!r} is computed from others")
    if any(uses[id(p)] > 1 for p in own):
        raise NotAPair(f"{name!r} shares its weights with another module")
    if any(p is not None and not p.requires_grad for p in own):
        raise NotAPair(f"{name!r} is frozen")


def _chain(tensor: Tensor, run: Run, modules: Modules) -> Iterator[Op]:
    """The operations that follow a tensor; each must be the only one that reads its input.

    Several functions that one module without children calls are one operation.
    """
    while True:
        readers = run.readers.get(id(tensor), [])
        in_place = [op for op in readers if op.output is tensor]
        others = [op for op in readers if op.output is not tensor]
        if any(output is tensor for output in run.outputs):
            raise NotAPair("its units are an output of the model")
        name = others[0].module if len({op.module for op in others}) == 1 else ""
        if name in run.tensors and not any(modules[name].children()):
            output = run.tensors[name]
            if len(others) > 1 or is_transposed(modules[name]):
                others = [Op(modules[name], (tensor,), {}, output)]
        if len(others) != 1 or not isinstance(others[0].output, Tensor):
            names = ", ".join(op.name for op in others) or "nothing"
            raise NotAPair(f"its units are read by {names}; a pair has one reader")
        if in_place and readers[-1] in in_place:
            raise NotAPair(f"its units are changed by {readers[-1].name} after they were read")
        yield from in_place
        yield others[0]
        tensor = others[0].output


def _step(
    op: Op, source: Tensor, target: Tensor, maker: nn.Module | None, run: Run, channel: int
) -> Step:
    if any(x is not source for x in tensors((op.args, op.kwargs))):
        if isinstance(maker, _BatchNorm) or _is_depthwise(maker):
            return run.makers[id(target)]
        if isinstance(maker, nn.LayerNorm | nn.GroupNorm):
            kind = type(maker).__name__
            raise NotAPair(f"{kind} follows it: its statistics mix old and new units")
        raise NotAPair(f"{op.name} follows it, which mixes its units with other tensors")
    if isinstance(op.function, nn.Module):
        half, forward = max(1, source.shape[channel] // 2), op.function.forward  # without its hooks
        some = forward(source.narrow(channel, 0, half))
        if op.function.state_dict() or not torch.equal(some, target.narrow(channel, 0, half)):
            raise NotAPair(f"{op.name} follows it, which may mix its units")
        return Function(forward)
    if op.name in _RESHAPES:
        if target.shape == source.shape:
            return Function(torch.clone)
        if channel == 1 and target.shape == source.flatten(1).shape:
            return Function(torch.flatten, (INPUT, 1))
    is_conv = channel == 1 and source.dim() > 2
    is_safe = bool(_PER_ELEMENT.fullmatch(op.name)) and target.shape == source.shape
    if _PER_CHANNEL.fullmatch(op.name) and (is_conv or op.name in ("mean", "amax")):
        axis = 1 if is_conv else -1
        is_safe |= target.dim() > 1 and target.shape[axis] == source.shape[axis]
    if not is_safe:
        raise NotAPair(f"{op.name} follows it, which may mix its units")
    if op.name == "squeeze":  # a seed may have one unit, and its axis stays
        axes = [axis for axis, size in enumerate(source.shape) if size == 1 and axis != channel]
        removed = axes[len(axes) - source.dim() + target.dim() :]
        return Function(torch.squeeze, (INPUT, tuple(removed)))
    given = (op.args, op.kwargs)
    args, kwargs = pytree.tree_map(lambda leaf: INPUT if leaf is source else leaf, given)
    if "dropout" in op.name:
        args, kwargs = (), inspect.signature(op.function).bind(*args, **kwargs).arguments
    return Function(op.function, args, kwargs)


def _is_depthwise(module: Any) -> bool:
    is_conv = type(module) in LAYERS and not isinstance(module, nn.Linear)
    return is_conv and 1 < module.groups == module.in_channels == module.out_channels
