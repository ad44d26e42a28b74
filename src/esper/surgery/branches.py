"""New units between two layers of a model: a branch while they grow, then part of the layers.

The branch computes what the new units would add to the output of the last layer of a pair
(`pairs.py`). Its last layer is zero at first. When the branch is merged, its weights are joined to
those of the model's layers, which then compute the same without it.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.surgery.pairs import LayerPair, is_transposed


class Branch(nn.Module):
    """New units of a pair's first layer, from its input to the output of the last layer."""

    def __init__(self, pair: LayerPair, layers: list[nn.Module]):
        super().__init__()
        self.pair = pair
        self.layers = nn.ModuleList(layers)

    @property
    def last_layer(self) -> nn.Module:
        """The layer that is zero in a new branch; only its gradient is not."""
        return self.layers[-1]

    def forward(self, x: Tensor) -> Tensor:
        layers = iter(self.layers)
        x = next(layers)(x)
        for step in self.pair.steps:
            x = next(layers)(x) if isinstance(step, str) else step(x, self.training)
        return next(layers)(x)  # type: ignore[no-any-return]

    def merge_into(self, modules: Callable[[str], nn.Module], alpha: float) -> "list[Enlarged]":
        """Make it part of the model's layers, which then compute the same without it."""
        *names, end = self.pair.layers
        *layers, last = self.layers
        scale(last, alpha)
        changed = enlarge(modules(end), last, 1)
        for name, layer in zip(names, layers, strict=True):
            changed += enlarge(modules(name), layer, 0)
        return changed


def new_branch(
    pair: LayerPair, units: int, modules: Callable[[str], nn.Module], generator: torch.Generator
) -> Branch:
    """A branch with initial weights; only `generator` is used."""
    *names, end = pair.layers
    layers = [layer_like(modules(name), outputs=units) for name in names]
    for layer in layers:
        draw(layer, generator)
    last = layer_like(modules(end), inputs=units * pair.features)
    nn.init.zeros_(last.get_parameter("weight"))
    return Branch(pair, [*layers, last])


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


# the sizes that a layer remembers, by axis of its weights
_SIZES = (
    ("out_features", "out_channels", "num_features", "nf"),
    ("in_features", "in_channels", "nx"),
)


def layer_like(layer: Any, inputs: int | None = None, outputs: int | None = None) -> nn.Module:
    """A layer with the settings of another and other sizes, its weights not yet set.

    None: as it has. A last layer, with the outputs that it has, gets no bias: the model's has one.
    """
    device = next((t.device for t in layer.state_dict().values()), torch.device("cpu"))
    dtype = next((p.dtype for p in layer.parameters()), None)
    kind, settings = type(layer), settings_of(layer)
    if is_transposed(layer):
        kind, settings = nn.Linear, {"in_features": layer.nx, "out_features": layer.nf}
    for names, size in zip(_SIZES, (outputs, inputs), strict=True):
        settings |= {name: size for name in names if name in settings and size is not None}
    if settings.get("groups", 1) > 1:  # a depthwise convolution
        settings["in_channels"] = settings["groups"] = outputs
    if outputs is None:
        settings["bias"] = False
    with torch.device("meta"):
        new: nn.Module = kind(**settings)
    return new.to(dtype=dtype).to_empty(device=device)


def settings_of(layer: nn.Module) -> dict[str, Any]:
    """The constructor arguments that a layer stores as attributes, and whether it has a bias."""
    known = vars(layer) | {"bias": getattr(layer, "bias", None) is not None}
    return {
        name: known[name] for name in inspect.signature(type(layer)).parameters if name in known
    }


@dataclass(frozen=True)
class Enlarged:
    """A parameter that was replaced by a larger one."""

    old: nn.Parameter
    new: nn.Parameter
    part: nn.Parameter  # the seed's
    join: Callable[[Tensor, Tensor], Tensor]  # what belongs to `old` and to `part`

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
                state[key] = self.join(value, part.get(key, none))
        return state


def joined(old: Tensor, part: Tensor, axis: int, flips: bool = False) -> Tensor:
    """`old` with `part` after it along an axis; zero where `part` is smaller along the others."""
    part = part.t() if flips else part
    shape = list(old.shape)
    shape[axis] += part.shape[axis]
    larger = old.new_zeros(shape)
    larger[tuple(slice(n) for n in old.shape)] = old.detach()
    place = [slice(n) for n in part.shape]
    place[axis] = slice(old.shape[axis], None)
    larger[tuple(place)] = part.detach().to(old.dtype)
    return larger


def enlarge(module: Any, part: nn.Module, axis: int) -> list[Enlarged]:
    """Join the weights and buffers of a part to those of a module, along an axis."""
    changed = []
    for name, added in part.named_parameters():
        old = getattr(module, name)
        flips = is_transposed(module) and added.dim() > 1
        join = partial(joined, axis=1 - axis if flips else axis, flips=flips)
        new = nn.Parameter(join(old, added), old.requires_grad)
        setattr(module, name, new)
        changed.append(Enlarged(old, new, added, join))
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
