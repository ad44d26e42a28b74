"""Layers as rows of numbers, for kernels that read a host's layers from a table.

A series is stored as an image of height 1, a vector as an image of one pixel, so that one row
format describes all layers. Tested through the kernels: `tests/tolaria/test_steps.py`.
"""

import math
from enum import IntEnum

import numpy as np

from esper.kasmina.layers import (
    Attention,
    Conv,
    Flatten,
    Layer,
    Linear,
    MixPositions,
    Norm,
    Relu,
    Shape,
)
from esper.kasmina.programs import Program

CONV, DEPTHWISE, NORM, RELU, MIX_POSITIONS, ATTENTION = range(6)


class Column(IntEnum):
    KIND = 0
    CHANNELS = 1
    HEIGHT = 2
    WIDTH = 3
    OUT_CHANNELS = 4
    OUT_HEIGHT = 5
    OUT_WIDTH = 6
    KERNEL_HEIGHT = 7
    KERNEL_WIDTH = 8
    STRIDE = 9
    PAD_HEIGHT = 10
    PAD_WIDTH = 11
    PARAMS = 12  # where the layer's parameters begin within the program's


def has_kernels(program: Program) -> bool:
    """Whether every layer of a program is of a kind that the compiled code knows."""
    known = (Attention, Conv, Flatten, Linear, MixPositions, Norm, Relu)
    return all(type(layer) in known for layer in program.layers)  # a subclass may do otherwise


def program_rows(program: Program) -> np.ndarray:
    """A program as rows `[layers, columns]`; Flatten has none: it changes nothing in memory."""
    rows, params = [], 0
    for layer, shape, specs in zip(
        program.layers, program.shapes, program.parameters, strict=False
    ):
        if not isinstance(layer, Flatten):
            rows.append(_layer_row(layer, shape, params))
        params += sum(math.prod(spec.shape) for spec in specs)
    return np.array(rows, dtype=np.int64)


def _layer_row(layer: Layer, shape: Shape, params: int) -> list[int]:
    row = [0] * len(Column)
    row[Column.CHANNELS : Column.OUT_CHANNELS] = _as_image(shape)
    row[Column.OUT_CHANNELS : Column.KERNEL_HEIGHT] = _as_image(layer.output_shape(shape))
    row[Column.KERNEL_HEIGHT : Column.PAD_HEIGHT] = [1, 1, 1]
    row[Column.PARAMS] = params
    match layer:
        case Conv():
            row[Column.KIND] = DEPTHWISE if layer.depthwise else CONV
            row[Column.KERNEL_WIDTH], row[Column.PAD_WIDTH] = layer.kernel, layer.pad
            row[Column.STRIDE] = layer.stride
            if len(shape) == 3:
                row[Column.KERNEL_HEIGHT], row[Column.PAD_HEIGHT] = layer.kernel, layer.pad
        case Linear():
            row[Column.KIND] = CONV
        case Norm():
            row[Column.KIND] = NORM
        case Relu():
            row[Column.KIND] = RELU
        case MixPositions():
            row[Column.KIND] = MIX_POSITIONS
        case Attention():
            row[Column.KIND] = ATTENTION
        case _:
            raise ValueError(f"no compiled kernel for {layer}")
    return row


def _as_image(shape: Shape) -> list[int]:
    channels, *positions = shape
    return [channels, *[1] * (2 - len(positions)), *positions]


def room(rows: np.ndarray) -> int:
    """Workspace that a program's layers need for one example, forward and backward."""
    return sum(_layer_room(dict(zip(Column, row.tolist(), strict=True))) for row in rows)


def num_outputs(rows: np.ndarray) -> int:
    """Of a program, for one example."""
    return int(rows[-1, Column.OUT_CHANNELS : Column.OUT_WIDTH + 1].prod())


def _layer_room(row: dict[Column, int]) -> int:
    inputs = row[Column.CHANNELS] * row[Column.HEIGHT] * row[Column.WIDTH]
    outputs = row[Column.OUT_CHANNELS] * row[Column.OUT_HEIGHT] * row[Column.OUT_WIDTH]
    padded = (
        row[Column.CHANNELS]
        * (row[Column.HEIGHT] + 2 * row[Column.KERNEL_HEIGHT])
        * (row[Column.WIDTH] + 2 * row[Column.KERNEL_WIDTH] + row[Column.STRIDE])
    )
    length = row[Column.WIDTH]
    between = {ATTENTION: 6 * outputs + length * length + length, NORM: inputs + 3}
    return 2 * inputs + outputs + 2 * padded + between.get(row[Column.KIND], 0)
