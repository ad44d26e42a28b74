"""Pairs of layers between which a model can get wider, found in a traced forward pass.

A pair is a layer A whose output reaches only one other layer B, through functions that treat every
unit alike: activations, dropout, batch norm, depthwise convolutions, pooling, flatten. Then k more
units of A are a branch from A's input to B's output, and the branch can be merged into A and B.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.kasmina.host_reports import SeedFacts
from esper.surgery.inputs import tensors
from esper.surgery.tracing import Op, Run

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)  # exact classes: a subclass may compute something else


def is_transposed(module: Any) -> bool:
    """Whether it is a linear layer whose weight is [inputs, outputs], as in GPT-2."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _is_layer(module: Any) -> bool:
    return type(module) in LAYERS or is_transposed(module)


def _weight_of(layer: Any) -> Tensor:
    """The weight of a layer, [outputs, inputs, ...]."""
    weight: Tensor = layer.weight
    return weight.t() if is_transposed(layer) else weight


@dataclass(frozen=True)
class Function:
    """A function between two layers, with its arguments after the first."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, x: Tensor, training: bool) -> Tensor:
        mode = {"training": training} if "training" in self.kwargs else {}  # traced in eval mode
        return self.function(x, *self.args, **self.kwargs | mode)


Step = str | Function  # between two layers: the name of a module with a weight per unit is a str


class Refused(Exception):
    """The reason why a model cannot grow somewhere, or a layer not get wider."""


@dataclass(frozen=True, eq=False)  # equal only to itself: its functions may hold tensors
class LayerPair:
    """Two layers between which new units can grow, and what is between them."""

    layers: tuple[str, ...]  # the first, those with a weight per unit, the last
    steps: tuple[Step, ...]  # from the first to the last
    width: int  # units of the first layer
    features: int  # inputs of the last layer for each unit; more than 1 after a flatten
    params: int  # of one unit
    macs: float  # of one unit, per example
    cross: int  # weights of the last layer between a unit and one of its outputs
    cross_macs: float
    inside: frozenset[str]  # modules after which no seed can grow as well

    @property
    def first(self) -> str:
        return self.layers[0]

    @property
    def last(self) -> str:
        return self.layers[-1]

    @property
    def name(self) -> str:
        return f"{self.first}->{self.last}"

    def facts_of(self, units: int) -> SeedFacts:
        """Of so many new units."""
        # two layers; a unit sees what the first layer saw before
        return SeedFacts(units * self.params, round(units * self.macs), depth=2, reach=0.0)


def pair_at(name: str, run: Run, macs: Mapping[str, float]) -> LayerPair | None:
    """The pair whose first layer has this name; None if it is not a layer."""
    first, modules = run.modules[name], run.modules
    if not _is_layer(first):
        return None
    _check_layer(name, run)
    if getattr(first, "groups", 1) > 1:
        raise Refused("its groups share no inputs, so units cannot be added one by one")
    start = run.tensors[name]
    channel = -1 if isinstance(first, nn.Linear) or is_transposed(first) else 1
    inside, steps = [start], []
    for op in _chain(start, run):
        source, target = inside[-1], op.output
        is_new = target is not source  # else the function worked in place, or did nothing
        end = run.makers.get(id(target), "") if is_new else ""
        maker = modules[end] if end else None
        if _is_layer(maker) and not _is_depthwise(maker):
            break
        step = _step(op, source, target, maker, run, channel)
        if _is_depthwise(maker) and isinstance(step, str):
            _check_layer(step, run)
        steps.append(step)
        inside.append(target)
    else:
        raise Refused("its output reaches no other layer")
    _check_layer(end, run)
    if getattr(modules[end], "groups", 1) > 1:
        raise Refused("the next layer is grouped")
    weight, width = _weight_of(modules[end]), start.shape[channel]
    features, rest = divmod(weight.shape[1], width)
    if rest:
        raise Refused("the next layer has other inputs")
    middle = [step for step in steps if isinstance(step, str)]
    per_unit = (p[0] for module in middle for p in modules[module].parameters())
    params = _weight_of(first)[0].numel() + (first.bias is not None)
    wider = {id(tensor) for tensor in inside}
    return LayerPair(
        layers=(name, *middle, end),
        steps=tuple(steps),
        width=width,
        features=features,
        params=params + sum(p.numel() for p in per_unit) + features * weight[:, 0].numel(),
        macs=sum(macs.get(layer, 0.0) for layer in (name, *middle, end)) / width,
        cross=features * weight[0, 0].numel(),
        cross_macs=macs.get(end, 0.0) / width / len(weight),
        inside=frozenset(n for n, tensor in run.tensors.items() if id(tensor) in wider),
    )


def _check_layer(name: str, run: Run) -> None:
    layer, modules = run.modules[name], run.modules.values()
    uses = Counter(id(p) for m in modules for p in m._parameters.values() if p is not None)
    own, calls = list(layer._parameters.values()), len(run.calls.get(name, ()))
    if calls != 1:
        raise Refused(f"{name!r} is called {calls} times in a forward pass")
    if layer._parameters.get("weight") is None:
        raise Refused(f"the weight of {name!r} is computed from others")
    if any(uses[id(p)] > 1 for p in own):
        raise Refused(f"{name!r} shares its weights with another module")
    if any(p is not None and not p.requires_grad for p in own):
        raise Refused(f"{name!r} is frozen")


def _chain(tensor: Tensor, run: Run) -> Iterator[Op]:
    """The operations that follow a tensor; each must be the only one that reads its input.

    Several functions that one module without children calls are one operation.
    """
    while True:
        readers = run.readers.get(id(tensor), [])
        in_place = [op for op in readers if op.output is tensor]
        others = [op for op in readers if op.output is not tensor]
        if any(output is tensor for output in run.outputs):
            raise Refused("its units are an output of the model")
        name = others[0].module if len({op.module for op in others}) == 1 else ""
        if name in run.tensors and not any(run.modules[name].children()):
            output = run.tensors[name]
            if len(others) > 1 or is_transposed(run.modules[name]):
                others = [Op(run.modules[name], (tensor,), {}, output)]
        if len(others) != 1 or not isinstance(others[0].output, Tensor):
            names = ", ".join(op.name for op in others) or "nothing"
            raise Refused(f"its units are read by {names}; a pair has one reader")
        if in_place and readers[-1] in in_place:
            raise Refused(f"its units are changed by {readers[-1].name} after they were read")
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
            raise Refused(f"{kind} follows it: its statistics mix old and new units")
        raise Refused(f"{op.name} follows it, which mixes its units with other tensors")
    is_source = [arg is source for arg in (*op.args, *op.kwargs.values())]
    if is_source.count(True) != 1 or (op.args and not is_source[0]):
        raise Refused(f"{op.name} follows it, with its units not as the first argument alone")
    given = {name: value for name, value in op.kwargs.items() if value is not source}
    step = Function(op.function, op.args[1:], given)
    has_state = isinstance(op.function, nn.Module) and bool(op.function.state_dict())
    if isinstance(op.function, nn.Module):
        step = Function(op.function.forward)  # without its hooks
    elif op.name in ("view", "reshape"):  # a flatten, for any number of rows
        step = Function(torch.flatten, (1, 1 + source.dim() - target.dim()))
    elif op.name == "squeeze":  # a seed may have one unit, and its axis stays
        ones = (axis for axis, size in enumerate(source.shape) if size == 1)
        axes = [axis for axis in ones if axis != channel % source.dim()]
        step = Function(torch.squeeze, (tuple(axes[len(axes) - source.dim() + target.dim() :]),))
    if has_state or not _treats_units_alike(step, source.shape, target.shape, channel):
        raise Refused(f"{op.name} follows it, which may mix its units")
    return step


def _treats_units_alike(
    step: Function, source: torch.Size, target: torch.Size, channel: int
) -> bool:
    """Whether a function of two rows and twice the units is that of a row and each half of them."""
    shape = [2, *source[1:]]
    shape[channel] *= 2
    x = torch.linspace(-2, 2, math.prod(shape)).view(shape)
    try:
        parts = [step(half.clone(), False) for half in x[:1].chunk(2, channel)]
        is_same = torch.allclose(step(x, False)[:1], torch.cat(parts, channel))
        return is_same and parts[0].shape[1:] == target[1:]
    except (RuntimeError, IndexError):
        return False  # it needs the size that it had


def _is_depthwise(module: Any) -> bool:
    is_conv = type(module) in LAYERS and not isinstance(module, nn.Linear)
    return is_conv and 1 < module.groups == module.in_channels == module.out_channels
