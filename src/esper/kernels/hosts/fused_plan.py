"""Tables of the fused kernel: layers as rows of numbers, and their places in its memory.

Every place in the workspace is fixed here, once for all hosts of a population: each slot has room
for the largest seed that can grow there.

Parity test: `tests/tolaria/test_fused.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from esper.kernels.hosts.layer_table import Kind, Row, as_table, program_rows, program_tables
from esper.tolaria.batched import TrainingSetup

MOST_CHANNELS = 16  # that a task takes


class Plan(NamedTuple):
    """What the hosts of a population can run, and where it lies; sizes in rows of examples.

    The tables are int32. Besides those of `numba_hosts.Tables` there are

    - homes: where a part's parameters lie in the transposed weights, or -1;
    - home_starts [S, B]: where those of a seed begin; the host's are first;
    - slot_rows [S, 2]: what the blend keeps, and its output.
    """

    tables: dict[str, np.ndarray]
    grad_rows: int  # where the first of three tensors of gradients begins
    grad_size: int
    score_rows: int  # where gradients of attention's scores lie
    num_rows: int
    transposed_size: int  # reals


def plan(setup: TrainingSetup) -> Plan:
    """The tables of a population; its input is at the workspace's beginning."""
    programs, tables = program_tables(setup)
    seed_programs, num_slots = tables["seed_programs"], setup.host.num_slots
    rows, slot_rows = [program_rows(program) for program in programs], []
    room = _Room(rows=math.prod(setup.host.input_shape))
    for slot, seeds in enumerate(seed_programs):
        room.place(rows[slot])
        room.place_alternatives([rows[number] for number in seeds if number >= 0])
        size = rows[slot][-1].num_outputs
        slot_rows.append((room.rows, room.rows + size))
        room.rows += 2 * size
    room.place(rows[num_slots])
    sizes = [program.num_params for program in programs]
    home_starts = np.cumsum([0, *sizes])[seed_programs]
    everything = [row for layers in rows for row in layers]
    grad_size = max(max(row.num_inputs, row.num_outputs) for row in everything)
    scores = max((row.width**2 for row in everything if row.kind == Kind.ATTEND), default=0)
    beyond = grad_size  # a task may read channels beyond a tensor's last one, and of its weights
    reals_per_channel = max(_transposed_size(row) // row.channels for row in everything)
    tables |= {
        "programs": as_table(rows),
        "lengths": np.array([len(layers) for layers in rows]),
        "homes": np.concatenate(list(map(_homes, rows, sizes))),
        "home_starts": np.where(seed_programs >= 0, home_starts, 0),
        "slot_rows": np.array(slot_rows),
    }
    return Plan(
        tables={name: table.astype(np.int32) for name, table in tables.items()},
        grad_rows=room.rows,
        grad_size=grad_size,
        score_rows=room.rows + 3 * grad_size,
        num_rows=room.rows + 3 * grad_size + scores + beyond,
        transposed_size=room.transposed + MOST_CHANNELS * reals_per_channel,
    )


def _is_needed_by_none(row: Row) -> bool:
    """Whether the way back can do without the layer's output."""
    return row.kind in (Kind.CONV, Kind.DEPTHWISE) and not row.rectifies


def _transposed_size(row: Row) -> int:
    return row.num_taps * _padded_channels(row) if row.kind == Kind.CONV else 0


def _padded_channels(row: Row) -> int:
    """Output channels come in blocks of four."""
    return -(-row.out_channels // 4) * 4


@dataclass
class _Room:
    """What is taken so far: rows of the workspace, and reals of transposed weights."""

    rows: int
    transposed: int = 0

    def place(self, rows: Sequence[Row]) -> None:
        """Give every layer of a program its room."""
        before: Row | None = None
        for row in rows:
            row.transposed = self.transposed
            self.transposed += _transposed_size(row)
            # a row more: a norm that follows keeps its deviations there
            row.out = self._take(row.num_outputs + 1)
            if row.kind == Kind.NORM and before is not None and _is_needed_by_none(before):
                row.saved = before.out  # in place
            elif row.kind == Kind.NORM:
                row.saved = self._take(row.num_inputs + 1)
            elif row.kind == Kind.ATTEND:
                row.saved = self._take(row.width**2)
            before = row

    def place_alternatives(self, programs: Sequence[Sequence[Row]]) -> None:
        """Programs of which a host runs one at most: they lie over one another."""
        rooms = [_Room(self.rows, self.transposed) for _ in programs]
        for room, rows in zip(rooms, programs, strict=True):
            room.place(rows)
        self.rows = max([self.rows, *(room.rows for room in rooms)])
        self.transposed = max([self.transposed, *(room.transposed for room in rooms)])

    def _take(self, rows: int) -> int:
        self.rows += rows
        return self.rows - rows


def _homes(rows: Sequence[Row], num_params: int) -> np.ndarray:
    """Where each parameter of a placed program lies in the transposed weights; -1: nowhere."""
    homes = np.full(num_params, -1)
    for row in rows:
        if row.kind == Kind.CONV:
            channels, taps = np.arange(row.out_channels)[:, None], np.arange(row.num_taps)
            places = row.transposed + taps * _padded_channels(row) + channels
            homes[row.params : row.params + places.size] = places.ravel()
    return homes
