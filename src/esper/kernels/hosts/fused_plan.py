"""Tables of the fused kernel: layers as rows of numbers, and their places in its memory.

Every place in the workspace is fixed here, once for all hosts of a population: each slot has room
for the largest seed that can grow there. Attention becomes three rows (code, projection,
attending). Mixing positions is a convolution whose channels are the positions.

Parity test: `tests/tolaria/test_fused.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from esper.kasmina.programs import Program
from esper.kernels.hosts import layer_table
from esper.kernels.hosts.layer_table import Column, program_rows
from esper.tolaria.batched import TrainingSetup


class Kind(IntEnum):
    CONV = 0
    DEPTHWISE = 1
    NORM = 2
    RELU = 3
    CODE = 4
    ATTEND = 5


MOST_CHANNELS = 16  # that a task takes
_CAN_RECTIFY = (Kind.CONV, Kind.DEPTHWISE, Kind.NORM)


@dataclass(kw_only=True)
class Row:
    """One layer, field by field what the kernel's struct of this name is; all in rows or reals."""

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
    channel_step: int  # rows from a channel to the next, and so on
    out_channel_step: int
    position_step: int = 1
    params: int  # where the layer's parameters begin within the program's
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
    def is_needed_by_none(self) -> bool:
        """Whether the way back can do without the layer's output."""
        return self.kind in (Kind.CONV, Kind.DEPTHWISE) and not self.rectifies

    @property
    def num_taps(self) -> int:
        """Weights per output channel of a convolution."""
        return self.channels * self.kernel_height * self.kernel_width

    @property
    def padded_channels(self) -> int:
        """Output channels come in blocks of four."""
        return -(-self.out_channels // 4) * 4

    @property
    def transposed_size(self) -> int:
        return self.num_taps * self.padded_channels if self.kind == Kind.CONV else 0


@dataclass(frozen=True, eq=False)
class Plan:
    """What the hosts of a population can run, and where it lies; sizes in rows of examples."""

    programs: np.ndarray  # int32 [programs, longest, fields of a row]: segments, head, seeds
    lengths: np.ndarray  # [programs]
    widens: np.ndarray  # [programs]: reads before its segment, is added behind the next layer
    host_starts: np.ndarray  # [S + 1]: where the parameters of segments and head begin
    seed_programs: np.ndarray  # [S, B]: -1 where a blueprint does not fit
    seed_sizes: np.ndarray  # [S, B]
    part_starts: np.ndarray  # [S + 2]
    homes: np.ndarray  # where a part's parameters lie in the transposed weights, or -1
    home_starts: np.ndarray  # [S, B]: where those of a seed begin; the host's are first
    slot_rows: np.ndarray  # [S, 2]: what the blend keeps, and its output
    grad_rows: int  # where the first of three tensors of gradients begins
    grad_size: int
    score_rows: int  # where gradients of attention's scores lie
    num_rows: int
    transposed_size: int  # reals

    @property
    def tables(self) -> dict[str, np.ndarray]:
        return {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if isinstance(getattr(self, entry.name), np.ndarray)
        }


def plan(setup: TrainingSetup) -> Plan:
    """The tables of a population; its input is at the workspace's beginning."""
    host, layout = setup.host, setup.parameter_table.layout
    room = _Room(rows=math.prod(host.input_shape))
    programs: list[list[Row]] = []
    slot_rows, seeds_of_slots = [], []
    for segment, site in zip(host.segments, host.sites, strict=True):
        programs.append(room.place(kernel_rows(segment)))
        choices = [e.program(site) if e.fits(site) else None for e in setup.menu]
        seeds_of_slots.append(room.place_alternatives(choices))
        size = programs[-1][-1].num_outputs
        slot_rows.append((room.rows, room.rows + size))
        room.rows += 2 * size
    programs.append(room.place(kernel_rows(host.head)))
    shape = (host.num_slots, len(setup.menu))
    seed_programs, seed_sizes, home_starts = np.full(shape, -1), np.zeros(shape), np.zeros(shape)
    widens = [False] * len(programs)
    sizes = [program.num_params for program in host.programs]
    for slot, seeds in enumerate(seeds_of_slots):
        for number, (program, rows) in seeds.items():
            seed_programs[slot, number] = len(programs)
            seed_sizes[slot, number] = program.num_params
            home_starts[slot, number] = sum(sizes)
            sizes.append(program.num_params)
            programs.append(rows)
            widens.append(program.widens)
    everything = [row for rows in programs for row in rows]
    grad_size = max(max(row.num_inputs, row.num_outputs) for row in everything)
    scores = max((row.width**2 for row in everything if row.kind == Kind.ATTEND), default=0)
    beyond = grad_size  # a task may read channels beyond a tensor's last one, and of its weights
    return Plan(
        programs=_table(programs),
        lengths=_int32([len(rows) for rows in programs]),
        widens=_int32(widens),
        host_starts=_int32(np.cumsum([0, *(p.num_params for p in host.segments)])),
        seed_programs=_int32(seed_programs),
        seed_sizes=_int32(seed_sizes),
        part_starts=_int32([*layout.starts, layout.num_columns]),
        homes=_int32(np.concatenate(list(map(_homes, programs, sizes)))),
        home_starts=_int32(home_starts),
        slot_rows=_int32(slot_rows),
        grad_rows=room.rows,
        grad_size=grad_size,
        score_rows=room.rows + 3 * grad_size,
        num_rows=room.rows + 3 * grad_size + scores + beyond,
        transposed_size=room.transposed + MOST_CHANNELS * max(map(_reals_per_channel, everything)),
    )


def kernel_rows(program: Program) -> list[Row]:
    """A program's layers in the kernel's kinds, not yet placed."""
    rows: list[Row] = []
    for numbers in program_rows(program).tolist():
        layer = dict(zip(Column, numbers, strict=True))
        if layer[Column.KIND] == layer_table.RELU and rows and rows[-1].kind in _CAN_RECTIFY:
            rows[-1].rectifies = 1
        else:
            rows += _rows_of_layer(layer)
    return rows


def _rows_of_layer(layer: dict[Column, int]) -> list[Row]:
    channels, height, width = (layer[c] for c in (Column.CHANNELS, Column.HEIGHT, Column.WIDTH))
    sizes = {
        "channels": channels,
        "height": height,
        "width": width,
        "out_channels": layer[Column.OUT_CHANNELS],
        "out_height": layer[Column.OUT_HEIGHT],
        "out_width": layer[Column.OUT_WIDTH],
        "channel_step": height * width,
        "out_channel_step": layer[Column.OUT_HEIGHT] * layer[Column.OUT_WIDTH],
        "params": layer[Column.PARAMS],
    }
    match layer[Column.KIND]:
        case layer_table.CONV | layer_table.DEPTHWISE as kind:
            window = {
                "kernel_height": layer[Column.KERNEL_HEIGHT],
                "kernel_width": layer[Column.KERNEL_WIDTH],
                "stride": layer[Column.STRIDE],
                "pad_height": layer[Column.PAD_HEIGHT],
                "pad_width": layer[Column.PAD_WIDTH],
            }
            known = Kind.CONV if kind == layer_table.CONV else Kind.DEPTHWISE
            return [Row(kind=known, **sizes, **window)]
        case layer_table.NORM:
            return [Row(kind=Kind.NORM, **sizes)]
        case layer_table.RELU:
            return [Row(kind=Kind.RELU, **sizes)]
        case layer_table.MIX_POSITIONS:
            turned = {"channels": width, "width": channels, "channel_step": 1}
            turned_out = {"out_channels": width, "out_width": channels, "out_channel_step": 1}
            return [Row(kind=Kind.CONV, **{**sizes, **turned, **turned_out}, position_step=width)]
        case _:
            return _attention_rows(sizes)


def _attention_rows(sizes: dict[str, int]) -> list[Row]:
    channels, length, width = sizes["channels"], sizes["width"], sizes["out_channels"]
    projected = {"out_channels": 3 * width}
    params = sizes["params"]
    return [
        Row(kind=Kind.CODE, **{**sizes, "out_channels": channels}),
        Row(kind=Kind.CONV, **{**sizes, **projected, "params": params + channels * length}),
        Row(kind=Kind.ATTEND, **{**sizes, "channels": 3 * width}),
    ]


@dataclass
class _Room:
    """What is taken so far: rows of the workspace, and reals of transposed weights."""

    rows: int
    transposed: int = 0

    def place(self, rows: Sequence[Row]) -> list[Row]:
        """Give every layer of a program its room."""
        before: Row | None = None
        for row in rows:
            row.transposed = self.transposed
            self.transposed += row.transposed_size
            # a row more: a norm that follows keeps its deviations there
            row.out = self._take(row.num_outputs + 1)
            if row.kind == Kind.NORM and before is not None and before.is_needed_by_none:
                row.saved = before.out  # in place
            elif row.kind == Kind.NORM:
                row.saved = self._take(row.num_inputs + 1)
            elif row.kind == Kind.ATTEND:
                row.saved = self._take(row.width**2)
            before = row
        return list(rows)

    def place_alternatives(
        self, programs: Sequence[Program | None]
    ) -> dict[int, tuple[Program, list[Row]]]:
        """Programs of which a host runs one at most: they lie over one another."""
        placed, ends = {}, [self]
        for number, program in enumerate(programs):
            if program is not None:
                room = _Room(self.rows, self.transposed)
                placed[number] = program, room.place(kernel_rows(program))
                ends.append(room)
        self.rows = max(end.rows for end in ends)
        self.transposed = max(end.transposed for end in ends)
        return placed

    def _take(self, rows: int) -> int:
        self.rows += rows
        return self.rows - rows


def _reals_per_channel(row: Row) -> int:
    """Transposed weights of an input channel."""
    return row.transposed_size // row.channels


def _homes(rows: Sequence[Row], num_params: int) -> np.ndarray:
    """Where each parameter of a placed program lies in the transposed weights; -1: nowhere."""
    homes = np.full(num_params, -1)
    for row in rows:
        if row.kind == Kind.CONV:
            channels, taps = np.arange(row.out_channels)[:, None], np.arange(row.num_taps)
            places = row.transposed + taps * row.padded_channels + channels
            homes[row.params : row.params + places.size] = places.ravel()
    return homes


def _table(programs: Sequence[Sequence[Row]]) -> np.ndarray:
    longest = max(len(rows) for rows in programs)
    table = np.zeros((len(programs), longest, len(fields(Row))), dtype=np.int32)
    for number, rows in enumerate(programs):
        for layer, row in enumerate(rows):
            table[number, layer] = [getattr(row, entry.name) for entry in fields(Row)]
    return table


def _int32(values: object) -> np.ndarray:
    return np.asarray(values).astype(np.int32)
