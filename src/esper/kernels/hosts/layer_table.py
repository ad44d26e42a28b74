"""Layers as rows of numbers, for kernels that read a host's layers from a table.

A series is stored as an image of height 1, a vector as an image of one pixel, so that one row
format describes all layers. Attention becomes three rows (code, projection, attending). Mixing
positions is a convolution whose channels are the positions. Tested through the kernels:
`tests/tolaria/test_steps.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from enum import IntEnum

import numpy as np

from esper.kasmina import layers
from esper.kasmina.layers import Layer, Program, Shape
from esper.tolaria.batched import TrainingSetup


class Kind(IntEnum):
    CONV = 0
    DEPTHWISE = 1
    NORM = 2
    RELU = 3
    CODE = 4  # this and the next: parts of an attention
    ATTEND = 5


_KINDS: dict[type[Layer], Kind] = {
    layers.Conv: Kind.CONV,
    layers.Linear: Kind.CONV,
    layers.Norm: Kind.NORM,
    layers.Relu: Kind.RELU,
    layers.MixPositions: Kind.CONV,
    layers.Attention: Kind.CODE,
}
_CAN_RECTIFY = (Kind.CONV, Kind.DEPTHWISE, Kind.NORM)


@dataclass
class Row:
    """One layer, field by field what the fused kernel's struct of this name is."""

    kind: Kind
    channels: int
    height: int
    width: int
    out_channels: int
    out_height: int
    out_width: int
    kernel_height: int = 1
    kernel_width: int = 1
    stride: int = 1
    pad_height: int = 0
    pad_width: int = 0
    channel_step: int = 0  # rows from a channel to the next, and so on
    out_channel_step: int = 0
    position_step: int = 1
    params: int = 0  # where the layer's parameters begin within the program's
    transposed: int = 0  # where its transposed weights begin
    out: int = 0
    saved: int = 0  # what the way back needs besides input and output
    rectifies: int = 0  # 1: a ReLU follows, and is part of the layer

    @property
    def num_inputs(self) -> int:
        return self.channels * self.height * self.width

    @property
    def num_outputs(self) -> int:
        return self.out_channels * self.out_height * self.out_width

    @property
    def num_taps(self) -> int:
        """Weights per output channel of a convolution."""
        return self.channels * self.kernel_height * self.kernel_width


def has_kernels(program: Program) -> bool:
    """Whether every layer of a program is of a kind that the compiled code knows."""
    known = (*_KINDS, layers.Flatten)
    return all(type(layer) in known for layer in program.layers)  # not a subclass


def program_tables(setup: TrainingSetup) -> tuple[list[Program], dict[str, np.ndarray]]:
    """All that hosts can run: segments, head, then seeds; and where their parameters are.

    The tables are described in `numba_hosts.Tables`.
    """
    host, layout = setup.host, setup.parameter_table.layout
    programs, numbers = list(host.programs), np.full(layout.seed_sizes.shape, -1)
    for slot, choices in enumerate(layout.seed_programs):
        for number, program in enumerate(choices):
            if program is not None:
                numbers[slot, number] = len(programs)
                programs.append(program)
    host_sizes = [program.num_params for program in host.segments]
    return programs, {
        "host_starts": np.cumsum([0, *host_sizes]),
        "seed_programs": numbers,
        "seed_sizes": layout.seed_sizes.numpy(),
        "widens": np.array([program.widens for program in programs]),
        "part_starts": np.array([*layout.starts, layout.num_columns]),
    }


def program_rows(program: Program) -> list[Row]:
    """A program's layers, with a ReLU as part of the layer before it where that is possible.

    Flatten has no row: it changes nothing in memory.
    """
    rows, params = list[Row](), 0
    for layer, shape, specs in zip(
        program.layers, program.shapes, program.parameters, strict=False
    ):
        if isinstance(layer, layers.Relu) and rows and rows[-1].kind in _CAN_RECTIFY:
            rows[-1].rectifies = 1
        elif not isinstance(layer, layers.Flatten):
            rows += _layer_rows(layer, shape, params)
        params += sum(math.prod(spec.shape) for spec in specs)
    return rows


def _layer_rows(layer: Layer, shape: Shape, params: int) -> list[Row]:
    if type(layer) not in _KINDS:
        raise ValueError(f"no compiled kernel for {layer}")
    image, output = _as_image(shape), _as_image(layer.output_shape(shape))
    row = Row(_KINDS[type(layer)], *image, *output)
    row.params = params
    row.channel_step, row.out_channel_step = math.prod(image[1:]), math.prod(output[1:])
    channels, length = row.channels, row.width
    if isinstance(layer, layers.Conv):
        row.kind = Kind.DEPTHWISE if layer.depthwise else Kind.CONV
        row.kernel_width, row.pad_width, row.stride = layer.kernel, layer.pad, layer.stride
        if len(shape) == 3:
            row.kernel_height, row.pad_height = layer.kernel, layer.pad
    elif isinstance(layer, layers.MixPositions):
        row.channels = row.out_channels = row.position_step = length
        row.width = row.out_width = channels
        row.channel_step = row.out_channel_step = 1
    elif isinstance(layer, layers.Attention):
        projected, weights = 3 * row.out_channels, params + channels * length
        return [
            replace(row, out_channels=channels),
            replace(row, kind=Kind.CONV, out_channels=projected, params=weights),
            replace(row, kind=Kind.ATTEND, channels=projected),
        ]
    return [row]


def _as_image(shape: Shape) -> list[int]:
    channels, *positions = shape
    return [channels, *[1] * (2 - len(positions)), *positions]


def as_table(programs: Sequence[Sequence[Row]]) -> np.ndarray:
    """Rows `[programs, longest, fields of a row]`."""
    table = np.zeros((len(programs), max(map(len, programs)), len(fields(Row))), np.int64)
    for number, rows in enumerate(programs):
        table[number, : len(rows)] = [astuple(row) for row in rows]
    return table
