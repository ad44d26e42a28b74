"""Host networks: segments with a slot after each, and a head.

    @host
    def conv1d(input_shape: Shape, num_classes: int, widths: Sequence[int], norm: bool) -> Rows: ...

    host = build_host("conv1d", input_shape=(1, 40), num_classes=10, widths=(8, 8, 8))

A host kind is a function from sizes to layers: a row of layers per segment, and one for the head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from esper.kasmina.blueprints import HostSite, Site
from esper.kasmina.layers import Conv, Flatten, Layer, Linear, Norm, Program, Relu, Shape

Rows = tuple[tuple[Layer, ...], ...]  # the layers of each segment, then the head's
BuildRows = Callable[[Shape, int, Sequence[int], bool], Rows]

HOSTS: dict[str, BuildRows] = {}


def host(build_rows: BuildRows) -> BuildRows:
    """Register a host kind under the name of its function."""
    name = build_rows.__name__
    if name in HOSTS:
        raise ValueError(f"host {name!r} is registered already")
    HOSTS[name] = build_rows
    return build_rows


@dataclass(frozen=True)
class Host:
    """A host network before it is built: segments, a site for seeds after each, and a head."""

    segments: tuple[Program, ...]
    head: Program

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        return tuple(
            HostSite(segment.output_shape, segment, following)
            for segment, following in zip(self.segments, self.programs[1:], strict=True)
        )

    @property
    def programs(self) -> tuple[Program, ...]:
        """The segments and the head, in the order in which a row stores their parameters."""
        return (*self.segments, self.head)

    @property
    def input_shape(self) -> Shape:
        return self.segments[0].input_shape

    @property
    def num_slots(self) -> int:
        return len(self.segments)

    @property
    def num_classes(self) -> int:
        return self.head.output_shape[0]

    @cached_property
    def num_params(self) -> int:
        return sum(program.num_params for program in self.programs)

    @cached_property
    def macs(self) -> int:
        """Multiply-adds for one example."""
        return sum(program.macs for program in self.programs)

    def init(self) -> Tensor:
        """Centre and spread of every parameter's initial value, float64 `[2, num_params]`."""
        return torch.cat([program.init() for program in self.programs], dim=1)


def build_host(
    name: str, *, input_shape: Shape, num_classes: int, widths: Sequence[int], norm: bool = False
) -> Host:
    """A host of a registered kind, with a width per segment; `norm` adds a norm to each."""
    if name not in HOSTS:
        raise ValueError(f"no host {name!r}; there are {list(HOSTS)}")
    if not widths or min(widths) < 1:
        raise ValueError(f"widths={tuple(widths)}; a host needs one or more segments of width >= 1")
    *rows, head = HOSTS[name](input_shape, num_classes, widths, norm)
    segments: list[Program] = []
    shape = input_shape
    for row in rows:
        segments.append(Program(row, shape))
        shape = segments[-1].output_shape
    return Host(tuple(segments), Program(head, shape))


@host
def conv1d(input_shape: Shape, num_classes: int, widths: Sequence[int], norm: bool) -> Rows:
    """Strided convolutions along a series; with widths 25-25-25 the CNN published with MNIST-1D."""
    kernels = [5] + [3] * (len(widths) - 1)
    return (
        *(
            _segment(Conv(width, kernel, stride=2, padding=1), norm)
            for width, kernel in zip(widths, kernels, strict=True)
        ),
        (Flatten(), Linear(num_classes)),
    )


@host
def conv2d(input_shape: Shape, num_classes: int, widths: Sequence[int], norm: bool) -> Rows:
    """Strided convolutions over an image."""
    segments = (_segment(Conv(width, stride=2), norm) for width in widths)
    return (*segments, (Flatten(), Linear(num_classes)))


@host
def mlp(input_shape: Shape, num_classes: int, widths: Sequence[int], norm: bool) -> Rows:
    """Fully connected layers on the flattened input."""
    first, *others = (_segment(Linear(width), norm) for width in widths)
    return ((Flatten(), *first), *others, (Linear(num_classes),))


def _segment(layer: Layer, norm: bool) -> tuple[Layer, ...]:
    return (layer, Norm(), Relu()) if norm else (layer, Relu())
