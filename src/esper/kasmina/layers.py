"""Layers as data: what hosts and seeds are made of, for one network or for many at once.

A layer gives its output shape, its parameters and its costs before anything is built. `forward`
runs it for G networks together; `module` is the same layer as an `nn.Module` for one network, with
its parameters in the same order. A `Program` is a sequence of layers.

Activations of G networks are `[G, width, *positions, batch]`. With the examples last, a layer is a
matrix product from the left, a shift along the positions is a view, and the innermost loop is
always over the examples.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]  # (width, *positions): one example between two layers

NORM_EPSILON = 1e-5


class ParameterSpec(NamedTuple):
    """A parameter before it is built; its initial values are uniform in `centre` +- `spread`."""

    name: str
    shape: Shape
    centre: float
    spread: float


class Layer(Protocol):
    """One layer of a host or a seed. The defaults are those of a layer without weights."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def parameters(self, shape: Shape) -> tuple[ParameterSpec, ...]:
        return ()

    def macs(self, shape: Shape) -> int:
        """Multiply-adds for one example: every weight at every position of the output."""
        weights = [math.prod(s.shape) for s in self.parameters(shape) if len(s.shape) > 1]
        return sum(weights) * math.prod(self.output_shape(shape)[1:])

    def window(self, shape: Shape) -> int:
        """Input positions along an axis that one output sees through the weights."""
        return 1

    def forward(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        """`[G, *output_shape, batch]` from `[G, *shape, batch]`, parameters `[G, *]` each."""
        ...

    def module(self, shape: Shape) -> nn.Module:
        """The layer for one network, `[batch, *shape]` in, `[batch, *output_shape]` out."""
        ...


def _fan_in_uniform(fan_in: int, **shapes: Shape) -> tuple[ParameterSpec, ...]:
    """torch's default for linear and convolution layers: uniform in +- 1/sqrt(fan in)."""
    spread = 1 / math.sqrt(fan_in)
    return tuple(ParameterSpec(name, shape, 0.0, spread) for name, shape in shapes.items())


@dataclass(frozen=True)
class Conv(Layer):
    """A convolution along one or two axes of positions; `depthwise`: one kernel per channel."""

    width: int
    kernel: int = 3
    stride: int = 1
    padding: int | None = None  # None: keeps the number of positions at stride 1
    depthwise: bool = False

    def output_shape(self, shape: Shape) -> Shape:
        keeps_shape = (self.stride, self.width, 2 * self.pad) == (1, shape[0], self.kernel - 1)
        if self.depthwise and not keeps_shape:
            raise ValueError(f"{self} on {shape}: a depthwise layer keeps the shape")
        if len(shape) not in (2, 3):
            raise ValueError(f"{self} needs one or two axes of positions, got shape {shape}")
        lengths = ((size + 2 * self.pad - self.kernel) // self.stride + 1 for size in shape[1:])
        return (self.width, *lengths)

    def parameters(self, shape: Shape) -> tuple[ParameterSpec, ...]:
        channels = 1 if self.depthwise else shape[0]
        taps = (self.kernel,) * (len(shape) - 1)
        weight = (self.width, channels, *taps)
        return _fan_in_uniform(math.prod(weight[1:]), weight=weight, bias=(self.width,))

    def window(self, shape: Shape) -> int:
        return self.kernel

    def forward(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        weight, bias = parameters
        axes = tuple(range(2, x.dim() - 1))  # of positions
        windows = F.pad(x, (0, 0) + (self.pad, self.pad) * len(axes))
        for axis in axes:
            windows = windows.unfold(axis, self.kernel, self.stride)  # appends an axis of taps
        # the inputs of each output: a view [G, C, *kernel, *outputs, batch]
        windows = windows.movedim(tuple(range(-len(axes), 0)), axes)
        lengths = windows.shape[2 + len(axes) : -1]
        if self.depthwise:
            scaled = windows * _per_channel(weight.squeeze(2), x)
            return scaled.sum(axes) + _per_channel(bias, x)
        columns = windows.reshape(len(x), math.prod(weight.shape[2:]), -1)
        y = torch.baddbmm(bias.unsqueeze(-1), weight.flatten(2), columns)
        return y.view(len(x), self.width, *lengths, x.shape[-1])

    def module(self, shape: Shape) -> nn.Module:
        kind = nn.Conv1d if len(shape) == 2 else nn.Conv2d
        groups = shape[0] if self.depthwise else 1
        return kind(shape[0], self.width, self.kernel, self.stride, self.pad, groups=groups)

    @property
    def pad(self) -> int:
        return self.kernel // 2 if self.padding is None else self.padding


@dataclass(frozen=True)
class Linear(Layer):
    """A fully connected layer on a vector."""

    width: int

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 1:
            raise ValueError(f"{self} needs a vector, got shape {shape}; put Flatten before it")
        return (self.width,)

    def parameters(self, shape: Shape) -> tuple[ParameterSpec, ...]:
        return _fan_in_uniform(shape[0], weight=(self.width, shape[0]), bias=(self.width,))

    def forward(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        weight, bias = parameters
        return torch.baddbmm(bias.unsqueeze(-1), weight, x)

    def module(self, shape: Shape) -> nn.Module:
        return nn.Linear(shape[0], self.width)


@dataclass(frozen=True)
class Norm(Layer):
    """Group norm with one group: each example over its channels and positions."""

    def parameters(self, shape: Shape) -> tuple[ParameterSpec, ...]:
        width = (shape[0],)
        return ParameterSpec("weight", width, 1.0, 0.0), ParameterSpec("bias", width, 0.0, 0.0)

    def forward(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        weight, bias = (_per_channel(parameter, x) for parameter in parameters)
        over = tuple(range(1, x.dim() - 1))
        variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
        return torch.addcmul(bias, (x - mean) * torch.rsqrt(variance + NORM_EPSILON), weight)

    def module(self, shape: Shape) -> nn.Module:
        return nn.GroupNorm(1, shape[0], eps=NORM_EPSILON)


@dataclass(frozen=True)
class Relu(Layer):
    def forward(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        return torch.relu(x)

    def module(self, shape: Shape) -> nn.Module:
        return nn.ReLU()


@dataclass(frozen=True)
class Flatten(Layer):
    def output_shape(self, shape: Shape) -> Shape:
        return (math.prod(shape),)

    def forward(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        return x.flatten(1, -2)

    def module(self, shape: Shape) -> nn.Module:
        return nn.Flatten()


@dataclass(frozen=True)
class MixPositions(Layer):
    """A linear map from all positions to all positions, shared by the channels."""

    def output_shape(self, shape: Shape) -> Shape:
        _require_series(self, shape)
        return shape

    def parameters(self, shape: Shape) -> tuple[ParameterSpec, ...]:
        length = shape[1]
        return _fan_in_uniform(length, weight=(length, length), bias=(length,))

    def macs(self, shape: Shape) -> int:
        return shape[0] * shape[1] * shape[1]

    def window(self, shape: Shape) -> int:
        return shape[1]

    def forward(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        weight, bias = parameters
        return torch.matmul(weight.unsqueeze(1), x) + bias[:, None, :, None]

    def module(self, shape: Shape) -> nn.Module:
        return nn.Linear(shape[1], shape[1])


@dataclass(frozen=True)
class Attention(Layer):
    """One head of attention over the positions of a series, with a learned position code."""

    width: int  # of queries, keys, values and the output

    def output_shape(self, shape: Shape) -> Shape:
        _require_series(self, shape)
        return (self.width, shape[1])

    def parameters(self, shape: Shape) -> tuple[ParameterSpec, ...]:
        channels, _ = shape
        return (
            ParameterSpec("code", shape, 0.0, 1.0),
            *_fan_in_uniform(channels, weight=(3 * self.width, channels), bias=(3 * self.width,)),
        )

    def macs(self, shape: Shape) -> int:
        channels, length = shape
        return 3 * self.width * channels * length + 2 * self.width * length * length

    def window(self, shape: Shape) -> int:
        return shape[1]

    def forward(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        code, weight, bias = parameters
        coded = (x + code.unsqueeze(-1)).flatten(2)
        projected = torch.baddbmm(bias.unsqueeze(-1), weight, coded)
        projected = projected.view(*projected.shape[:2], *x.shape[2:])
        query, key, value = projected.chunk(3, dim=1)
        scores = torch.einsum("gclb,gcmb->gblm", query, key) / math.sqrt(self.width)
        return torch.einsum("gblm,gcmb->gclb", scores.softmax(-1), value)

    def module(self, shape: Shape) -> nn.Module:
        return _AttentionModule(shape, self.width)


def _require_series(layer: Layer, shape: Shape) -> None:
    if len(shape) != 2:
        raise ValueError(f"{layer} needs one axis of positions, got shape {shape}")


class _AttentionModule(nn.Module):
    def __init__(self, shape: Shape, width: int):
        super().__init__()
        channels, length = shape
        self.code = nn.Parameter(torch.zeros(channels, length))
        self.project = nn.Linear(channels, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project((x + self.code).transpose(1, 2)).chunk(3, dim=-1)
        attended: Tensor = F.scaled_dot_product_attention(query, key, value)
        return attended.transpose(1, 2)


def _per_channel(parameter: Tensor, x: Tensor) -> Tensor:
    """A parameter `[G, C, *]` that broadcasts over activations `[G, C, *, *positions, batch]`."""
    return parameter.reshape(*parameter.shape, *(1,) * (x.dim() - 2))


@dataclass(frozen=True)
class Program:
    """Layers in sequence. With `silent`, the last layer that has weights is initialised to zero.

    Its parameters are concatenated in one row of length D; those of G networks are a tensor
    `[G, D]`. A seed that `widens` reads the input of its slot's segment, not the slot, and its
    output is added to that of the next segment's first layer with weights.
    """

    layers: tuple[Layer, ...]
    input_shape: Shape
    silent: bool = False
    widens: bool = False

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape before each layer, and after the last."""
        shapes = [self.input_shape]
        for layer in self.layers:
            shapes.append(layer.output_shape(shapes[-1]))
        return tuple(shapes)

    @property
    def output_shape(self) -> Shape:
        return self.shapes[-1]

    @cached_property
    def parameters(self) -> tuple[tuple[ParameterSpec, ...], ...]:
        """The parameters of each layer, in the order in which a row stores them."""
        rows = [layer.parameters(shape) for layer, shape in self._steps()]
        if self.silent:
            last = max((i for i, row in enumerate(rows) if row), default=None)
            if last is None:
                raise ValueError(f"{self.layers} has no weights that could start at zero")
            rows[last] = tuple(spec._replace(centre=0.0, spread=0.0) for spec in rows[last])
        return tuple(rows)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(spec.shape) for row in self.parameters for spec in row)

    @property
    def num_params(self) -> int:
        """D."""
        return sum(self.sizes)

    @cached_property
    def macs(self) -> int:
        """Multiply-adds for one example."""
        return sum(layer.macs(shape) for layer, shape in self._steps())

    @cached_property
    def depth(self) -> int:
        """Number of layers that multiply by weights."""
        return sum(layer.macs(shape) > 0 for layer, shape in self._steps())

    @cached_property
    def reach(self) -> float:
        """Share of the input's positions that one output sees; 1 for a vector.

        A seed that widens has 0: its units see what the layer saw before.
        """
        if self.widens:
            return 0.0
        seen = 1 + sum(layer.window(shape) - 1 for layer, shape in self._steps())
        return math.prod(min(1.0, seen / length) for length in self.input_shape[1:])

    @cached_property
    def any_length(self) -> bool:
        """Whether its parameters are the same for another number of positions."""
        other = tuple(2 * length for length in self.input_shape[1:])
        return Program(self.layers, (self.input_shape[0], *other)).num_params == self.num_params

    def init(self) -> Tensor:
        """Centre and spread of every parameter's initial value, float64 `[2, D]`."""
        specs = [spec for row in self.parameters for spec in row]
        sizes = torch.tensor(self.sizes, dtype=torch.int64)
        values = [[spec.centre for spec in specs], [spec.spread for spec in specs]]
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(sizes, dim=1)

    def forward(self, rows: Tensor, x: Tensor, added: Tensor | None = None) -> Tensor:
        """`[G, *output_shape, batch]` from parameter rows `[G, D]` and `[G, *input_shape, batch]`.

        `added` is added to the output of the first layer with weights.
        """
        parts = iter(torch.split(rows, list(self.sizes), dim=1))
        for layer, specs in zip(self.layers, self.parameters, strict=True):
            x = layer.forward([next(parts).view(-1, *spec.shape) for spec in specs], x)
            if specs and added is not None:
                x, added = x + added, None
        return x

    def module(self) -> nn.Sequential:
        """The program as a plain torch module for one network; parameters in the order of a row."""
        return nn.Sequential(*(layer.module(shape) for layer, shape in self._steps()))

    def _steps(self) -> Iterator[tuple[Layer, Shape]]:
        return zip(self.layers, self.shapes, strict=False)
