"""A program: a sequence of layers for a given input shape, with its costs known beforehand.

The parameters of a program are concatenated in one row of length D; those of G networks are a
tensor `[G, D]`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from esper.kasmina.layers import Layer, ParameterSpec, Shape


@dataclass(frozen=True)
class Program:
    """Layers in sequence. With `silent`, the last layer that has weights is initialised to zero.

    A seed that `widens` reads the input of its slot's segment, not the slot, and its output is
    added to that of the next segment's first layer with weights.
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

    def init(self) -> tuple[Tensor, Tensor]:
        """Centre and spread of every parameter's initial value, float64 `[D]` each."""
        specs = [spec for row in self.parameters for spec in row]
        sizes = torch.tensor(self.sizes, dtype=torch.int64)
        centre, spread = (
            torch.tensor(values, dtype=torch.float64).repeat_interleave(sizes)
            for values in ([s.centre for s in specs], [s.spread for s in specs])
        )
        return centre, spread

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
