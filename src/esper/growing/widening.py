"""New units between two layers: a branch while they grow, part of the layers when merged."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.growing.pairs import Pair, UnitsProgram, is_transposed, weight_of


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
    program: UnitsProgram, modules: Callable[[str], nn.Module], generator: torch.Generator
) -> Branch:
    """A branch with initial weights; only `generator` is used."""
    pair, units = program.pair, program.units
    assert isinstance(pair, Pair)
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
    device = next((t.device for t in layer.state_dict().values()), None)
    with torch.device("meta"):
        new = _on_meta(layer, inputs, outputs)
    dtype = next((p.dtype for p in layer.parameters()), None)
    return new.to(dtype=dtype).to_empty(device=device or "cpu")


def _on_meta(layer: Any, inputs: int | None, outputs: int | None) -> nn.Module:
    if isinstance(layer, _BatchNorm):
        settings = (layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        return type(layer)(outputs or layer.num_features, *settings)
    bias = layer.bias is not None and outputs is not None
    own = weight_of(layer).shape
    sizes = (own[1] if inputs is None else inputs, own[0] if outputs is None else outputs)
    if isinstance(layer, nn.Linear) or is_transposed(layer):
        return nn.Linear(*sizes, bias=bias)
    made: nn.Module = type(layer)(
        *sizes,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        groups=sizes[0] if layer.groups > 1 else 1,  # depthwise
        bias=bias,
        padding_mode=layer.padding_mode,
    )
    return made


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
        return {
            key: joined(value, self.turned(part.get(key, torch.zeros_like(self.part))), self.axis)
            if isinstance(value, Tensor) and value.dim() > 0
            else copy.deepcopy(value)
            for key, value in old.items()
        }

    def turned(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.is_transposed else tensor


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
