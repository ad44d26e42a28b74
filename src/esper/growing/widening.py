"""New units of layers: a branch while they grow, part of the layers when merged.

The units are between two layers (`pairs.py`), heads of attention or units of a gated layer. The
output of attention is a sum over heads, that of a gated layer a sum over units. New ones are a copy
of the module with other layers, whose output is added. Modules whose code does not work with more of
them are found by a test.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.growing.pairs import (
    Modules,
    NotAPair,
    Pair,
    Part,
    check_layer,
    is_transposed,
    weight_of,
)
from esper.growing.tracing import Run, without_graphs


class Branch(nn.Module):
    """`last(steps(first(x)))` for the new units; `last` is zero at first."""

    def __init__(self, pair: Pair, first: nn.Module, middle: dict[str, nn.Module], last: nn.Module):
        super().__init__()
        self.pair = pair
        self.first, self.last = first, last
        self.middle = nn.ModuleList(middle.values())
        self._index = {name: index for index, name in enumerate(middle)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for step in self.pair.steps:
            if step.module is None:
                x = step.apply(x, self.training)
            else:
                x = self.middle[self._index[step.module]](x)
        return self.last(x)  # type: ignore[no-any-return]

    def merge_into(self, modules: Callable[[str], nn.Module], alpha: float) -> "list[Enlarged]":
        """Enlarge the model's layers by the units; they then compute the same without a branch."""
        pair = self.pair
        changed = enlarge(modules(pair.first), self.first, 0)
        for name, index in self._index.items():
            changed += enlarge(modules(name), self.middle[index], 0)
        scale(self.last, alpha)
        return changed + enlarge(modules(pair.last), self.last, 1)


def new_branch(
    pair: Pair, units: int, modules: Callable[[str], nn.Module], generator: torch.Generator
) -> Branch:
    """A branch with initial weights; only `generator` is used."""
    first = layer_like(modules(pair.first), None, units)
    last = layer_like(modules(pair.last), units * pair.features, None)
    middle = {s.module: layer_like(modules(s.module), units, units) for s in pair.steps if s.module}
    branch = Branch(pair, first, middle, last)
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    for layer in (first, *middle.values()):
        draw(layer, generator)
    return branch


def draw(layer: nn.Module, generator: torch.Generator) -> None:
    """Initial weights by torch's default, from a generator."""
    if isinstance(layer, _BatchNorm):
        layer.reset_parameters()
        return
    bound = layer.get_parameter("weight")[0].numel() ** -0.5
    for parameter in layer.parameters():
        drawn = torch.rand(parameter.shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            parameter.copy_(bound * (2 * drawn - 1))


def scale(layer: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(factor)


def layer_like(layer: Any, inputs: int | None, outputs: int | None) -> nn.Module:
    """A layer with the settings of another and other sizes, its weights not yet set.

    None: as it has. A last layer, with the outputs that it has, gets no bias: the model's has one.
    """
    device = next((t.device for t in layer.state_dict().values()), torch.device("cpu"))
    dtype = next((p.dtype for p in layer.parameters()), None)
    kind: Any = type(layer)
    settings: tuple[Any, ...]
    if isinstance(layer, _BatchNorm):
        settings = (layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        settings = (outputs, *settings)
    else:
        own, bias = weight_of(layer).shape, layer.bias is not None and outputs is not None
        sizes = (own[1] if inputs is None else inputs, own[0] if outputs is None else outputs)
        if isinstance(layer, nn.Linear) or is_transposed(layer):
            kind, settings = nn.Linear, (*sizes, bias)
        else:
            groups = sizes[0] if layer.groups > 1 else 1  # depthwise
            settings = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
            settings = (*sizes, *settings, groups, bias, layer.padding_mode)
    with torch.device("meta"):
        new: nn.Module = kind(*settings)
    return new.to(dtype=dtype).to_empty(device=device)


@dataclass(frozen=True)
class Enlarged:
    """A parameter that was replaced by a larger one."""

    old: nn.Parameter
    new: nn.Parameter
    part: nn.Parameter  # the seed's
    axis: int
    is_transposed: bool  # the part's weight is, compared with the layer's

    def moments(self, old: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """The optimiser's state of the larger parameter: that of both, zero where there is none.

        State of another shape, such as Adafactor's of rows and columns, starts from scratch.
        """
        sizes = {v.shape for v in old.values() if isinstance(v, Tensor) and v.dim() > 0}
        if sizes - {self.old.shape}:
            return {}
        state, none = copy.deepcopy(old), torch.zeros_like(self.part)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                added = part.get(key, none)
                state[key] = joined(value, added.t() if self.is_transposed else added, self.axis)
        return state


def joined(old: Tensor, part: Tensor, axis: int) -> Tensor:
    """`old` with `part` after it along an axis; zero where `part` is smaller along the others."""
    shape = list(old.shape)
    shape[axis] += part.shape[axis]
    larger = old.new_zeros(shape)
    larger[tuple(slice(n) for n in old.shape)] = old.detach()
    place = [slice(n) for n in part.shape]
    place[axis] = slice(old.shape[axis], None)
    larger[tuple(place)] = part.detach().to(old.dtype)
    return larger


# the sizes that a layer remembers, by axis of its weights
_SIZES = (
    ("out_features", "out_channels", "num_features", "nf"),
    ("in_features", "in_channels", "nx"),
)


def enlarge(module: Any, part: nn.Module, axis: int) -> list[Enlarged]:
    """Join the weights and buffers of a part to those of a module, along an axis."""
    changed = []
    for name, added in part.named_parameters():
        old, flips = getattr(module, name), is_transposed(module) and added.dim() > 1
        along = 1 - axis if flips else axis
        larger = joined(old, added.t() if flips else added, along)
        new = nn.Parameter(larger, old.requires_grad)
        setattr(module, name, new)
        changed.append(Enlarged(old, new, added, along, flips))
    for name, statistics in part.named_buffers():
        if statistics.dim() > 0:
            setattr(module, name, joined(getattr(module, name), statistics, 0))
    size = next(vars(part)[name] for name in _SIZES[axis] if name in vars(part))
    for name in _SIZES[axis]:
        if name in vars(module):
            setattr(module, name, vars(module)[name] + size)
    if vars(module).get("groups", 1) > 1:  # a depthwise convolution
        module.in_channels = module.groups = module.out_channels
    return changed


_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
)
_GATED = (("gate_proj", "up_proj"), ("w1", "w3"), ("wi_0", "wi_1"))  # a head is one unit
_OUTPUTS = ("down_proj", "w2", "o_proj", "out_proj", "to_out", "out_lin", "wo", "o", "out", "proj")
_HEAD_SIZES = ("head_dim", "attention_head_size", "dim_head", "d_head")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_TOTALS = ("all_head_size", "inner_dim", "intermediate_size")


@dataclass(frozen=True, eq=False)
class Heads(Part):
    """A module that can have more heads or units; `first` and `last` are its name."""

    inputs: tuple[str, ...]  # names inside the module: queries, keys, values; gate and values
    output: str
    size: int  # of a head


class HeadsBranch(nn.Module):
    """The new heads, called with the arguments of the attention module."""

    def __init__(self, pair: Heads, attention: nn.Module):
        super().__init__()
        self.pair, self.attention = pair, attention

    @property
    def last(self) -> nn.Module:
        return self.attention.get_submodule(self.pair.output)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = without_caches(args, kwargs)
        output = self.attention(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

    def merge_into(self, modules: Callable[[str], nn.Module], alpha: float) -> list[Enlarged]:
        pair, attention = self.pair, modules(self.pair.first)
        own = self.attention.get_submodule
        units = own(pair.inputs[0]).out_features // pair.size  # type: ignore[operator]
        scale(self.last, alpha)
        changed = enlarge(attention.get_submodule(pair.output), self.last, 1)
        for name in pair.inputs:
            changed += enlarge(attention.get_submodule(name), own(name), 0)
        _set_heads(attention, pair, pair.width + int(units))
        return changed


def new_heads(
    pair: Heads, heads: int, modules: Callable[[str], nn.Module], generator: torch.Generator
) -> HeadsBranch:
    """New heads with initial weights; their output layer is zero."""
    attention = modules(pair.first)
    branch = HeadsBranch(pair, copy.deepcopy(attention, without_graphs(attention)))
    for name in pair.inputs:
        layer = layer_like(attention.get_submodule(name), None, heads * pair.size)
        draw(layer, generator)
        setattr(branch.attention, name, layer)
    last = layer_like(attention.get_submodule(pair.output), heads * pair.size, None)
    nn.init.zeros_(last.get_parameter("weight"))
    setattr(branch.attention, pair.output, last)
    _set_heads(branch.attention, pair, heads)
    return branch


def _set_heads(attention: nn.Module, pair: Heads, heads: int) -> None:
    known = vars(attention)
    known |= {name: heads for name in _COUNTS if name in known}
    known |= {name: heads * pair.size for name in _TOTALS if name in known}


def heads_at(name: str, modules: Modules, run: Run, macs: Mapping[str, float]) -> Heads | None:
    """An attention module or gated layer that can be larger; None if it is none."""
    module = modules[name]
    if isinstance(module, nn.MultiheadAttention):
        raise NotAPair("nn.MultiheadAttention has its layers in one weight")
    inputs = next((names for names in (*_INPUTS, *_GATED) if _are_linear(module, names)), None)
    output = next((n for n in _OUTPUTS if _are_linear(module, (n,))), None)
    if inputs is None or output is None:
        return None
    for part in (*inputs, output):
        if f"{name}.{part}" not in run.calls:
            raise NotAPair(f"{part!r} is not called")
        check_layer(f"{name}.{part}", modules, run)
    *before, after = parts = [modules[f"{name}.{part}"] for part in (*inputs, output)]
    known, widths = vars(module), {layer.out_features for layer in before}
    is_gated = inputs in _GATED
    size = 1 if is_gated else next((known[n] for n in _HEAD_SIZES if n in known), 0)
    count = next((known[n] for n in _COUNTS if n in known), 0)
    width = max(widths)
    size = size or (width // count if count else 0)
    if widths != {after.in_features}:
        raise NotAPair("its layers have different sizes, such as fewer keys than queries")
    if not size or width % size:
        raise NotAPair("the size of its heads is not known; it has no attribute head_dim")
    total = sum(p.numel() for part in parts for p in part.parameters())
    if total < sum(p.numel() for p in module.parameters()):
        raise NotAPair("it has other weights, which new heads would have to share")
    total -= 0 if after.bias is None else after.bias.numel()
    heads, label = width // size, f"{name}->{'units' if is_gated else 'heads'}"
    costs = (total // heads, macs.get(name, 0.0) / heads)
    inside = frozenset(f"{name}.{part}" for part in inputs)
    return Heads(label, name, name, *costs, inside, inputs, output, size, width=heads)


def without_caches(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments without caches of keys and values: a growing model has no place there for a copy."""

    def kept(value: Any) -> Any:
        return None if type(value).__name__.endswith("Cache") else value

    return tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}


def _are_linear(module: nn.Module, names: Iterable[str]) -> bool:
    children = dict(module.named_children())
    return all(type(children.get(name)) is nn.Linear for name in names)
