"""More attention heads, or units of a gated layer: linear layers that get wider together.

The output of attention is a sum over heads, that of a gated layer a sum over units. New ones are a
copy of the module with other layers, whose output is added; when merged they are part of the layers.
The number of heads in the module's attributes grows too. Modules whose code does not work with more
of them are found by a test.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.growing.deepening import without_caches
from esper.growing.pairs import NotAPair, check_layer
from esper.growing.tracing import Run, without_graphs
from esper.growing.widening import Enlarged, draw, enlarge, layer_like, scale

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
class Heads:
    """A module that can have more heads or units; costs are of one of them."""

    module: str
    inputs: tuple[str, ...]  # names inside the module: queries, keys, values; gate and values
    output: str
    width: int  # heads that it has
    size: int  # of a head
    params: int
    macs: float  # per example
    cross = 0
    cross_macs = 0.0
    is_block = False

    @property
    def name(self) -> str:
        return f"{self.module}->{'units' if self.inputs in _GATED else 'heads'}"

    @property
    def first(self) -> str:
        return self.module

    last = first

    @property
    def inside(self) -> frozenset[str]:
        return frozenset(f"{self.module}.{name}" for name in self.inputs)


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
        pair, attention = self.pair, modules(self.pair.module)
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
    attention = modules(pair.module)
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


def find_heads(
    model: nn.Module, run: Run, macs: Mapping[str, float]
) -> tuple[list[Heads], dict[str, str]]:
    """The attention modules that can have more heads, and the reason for others."""
    modules = dict(model.named_modules())
    found, refused = [], {}
    for name in run.calls:
        if isinstance(modules[name], nn.MultiheadAttention):
            refused[name] = "nn.MultiheadAttention has its layers in one weight"
        try:
            if heads := _heads(name, modules, run, macs):
                found.append(heads)
        except NotAPair as reason:
            refused[name] = str(reason)
    return found, refused


def _heads(
    name: str, modules: dict[str, nn.Module], run: Run, macs: Mapping[str, float]
) -> Heads | None:
    module = modules[name]
    inputs = next((names for names in (*_INPUTS, *_GATED) if _are_linear(module, names)), None)
    output = next((n for n in _OUTPUTS if _are_linear(module, (n,))), None)
    if inputs is None or output is None:
        return None
    for part in (*inputs, output):
        if f"{name}.{part}" not in run.calls:
            raise NotAPair(f"{part!r} is not called")
        check_layer(f"{name}.{part}", modules, run)
    known, widths = vars(module), {module.get_submodule(n).out_features for n in inputs}
    is_gated = inputs in _GATED
    size = 1 if is_gated else next((known[n] for n in _HEAD_SIZES if n in known), 0)
    count = next((known[n] for n in _COUNTS if n in known), 0)
    width = max(map(int, widths))  # type: ignore[arg-type]
    size = size or (width // count if count else 0)
    if len(widths) > 1 or module.get_submodule(output).in_features != width:
        raise NotAPair("its layers have different sizes, such as fewer keys than queries")
    if not size or width % size:
        raise NotAPair("the size of its heads is not known; it has no attribute head_dim")
    parts = [module.get_submodule(n) for n in (*inputs, output)]
    total = sum(p.numel() for part in parts for p in part.parameters())
    if total < sum(p.numel() for p in module.parameters()):
        raise NotAPair("it has other weights, which new heads would have to share")
    bias = parts[-1].bias
    total -= 0 if bias is None else bias.numel()  # type: ignore[operator]
    heads = width // size
    return Heads(name, inputs, output, heads, size, total // heads, macs.get(name, 0.0) / heads)


def _are_linear(module: nn.Module, names: Iterable[str]) -> bool:
    children = dict(module.named_children())
    return all(type(children.get(name)) is nn.Linear for name in names)
