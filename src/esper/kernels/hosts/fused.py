"""Training on CUDA by one kernel: a block of threads trains a host on all its minibatches.

Hosts of a population have different seeds; batched operations run them group by group, in hundreds
of small launches. Here one launch does a whole call. Each block reads its own host's tables (see
`Plan`), so different hosts cost no more than identical ones.

Parity test: `tests/tolaria/test_fused.py`, against `tolaria/batched.py`.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.lifecycle import SlotStates
from esper.kernels.hosts.fused_build import (
    MOST_CHANNELS,
    NUM_PARTS,
    THREADS,
    library,
    shared_bytes,
)
from esper.kernels.hosts.layer_table import Kind, Row, as_table, program_rows, program_tables
from esper.leyline.stages import SeedStage
from esper.tolaria.batched import TrainingSetup

MOST_EXAMPLES = 128  # worked on at a time
MAX_WORKSPACE_BYTES = 8 * 2**30


# fmt: off
_POINTERS = (
    "programs", "lengths", "widens", "host_starts", "seed_programs", "seed_sizes", "part_starts", "homes",
    "home_starts", "slot_rows",
    "params", "grads", "moments", "steps", "rates", "alpha", "alpha_behind", "style", "blueprint",
    "behind", "inputs", "labels", "first_row", "batch_rows", "losses", "ablated", "logits",
    "workspace",
)
_DOUBLES = ("beta_mean", "beta_square", "epsilon", "weight_decay")
_INTS = (
    "longest", "num_hosts", "num_slots", "num_blueprints", "columns", "features",
    "classes", "host_size", "minibatches", "batch", "rows", "num_ablated", "n", "room", "grad_rows", "grad_size",
    "score_rows", "transposed_at", "parts_at", "parts_in_shared", "transposed_size",
)
# fmt: on


class Arguments(ctypes.Structure):
    """Field by field what the kernel's `Args` are; what is not given is null or 0."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_double) for name in _DOUBLES),
        *((name, ctypes.c_int) for name in _INTS),
    ]


class FusedSteps:
    """One block of threads per host; see `fused_hosts.cu`."""

    def __init__(self, setup: TrainingSetup):
        parameter_table, host = setup.parameter_table, setup.host
        if not has_room(setup):
            raise ValueError(
                f"hosts of {host.num_params} parameters on inputs {host.input_shape} need more "
                f"than {MAX_WORKSPACE_BYTES >> 30} GiB to work in; use kernels='eager'"
            )
        self._setup = setup
        self._device = parameter_table.params.device
        self._plan = plan(setup)
        self._tables = {
            name: torch.from_numpy(table).to(self._device)
            for name, table in self._plan.tables.items()
        }
        shape = (2, parameter_table.num_hosts, host.num_slots)
        self._slots = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._ablated = torch.zeros(host.num_slots, dtype=torch.int32, device=self._device)
        self._fixed = self._fixed_arguments()

    def prepare(self, states: SlotStates) -> None:
        behind = states.stage == SeedStage.TRAINING
        slots = torch.stack((states.blueprint, behind.to(states.blueprint.dtype)))
        self._slots.copy_(slots.to(torch.int32), non_blocking=True)
        active = states.is_active.any(0).nonzero().flatten()
        self._ablated[: len(active)].copy_(active, non_blocking=True)
        self._active_slots: list[int] = active.tolist()

    def run(self, count: int) -> None:
        feed = self._setup.feed
        num_hosts, batch = feed.rows.shape[1:]
        _, n = _pieces(batch)
        inputs = feed.inputs.data_ptr()
        self._launch("train", num_hosts, n, inputs=inputs, minibatches=count, batch=batch)

    def logits(self, x: Tensor, ablate: bool) -> tuple[Tensor, list[int]]:
        active = self._active_slots if ablate else []
        num_hosts, rows = x.shape[0], x.shape[-1]
        logits = x.new_empty(num_hosts, self._setup.host.num_classes, 1 + len(active), rows)
        x = x.contiguous()
        num_pieces, n = _pieces(rows)
        places = {"inputs": x.data_ptr(), "logits": logits.data_ptr()}
        num_tasks, num_ablated = num_hosts * num_pieces, len(active)
        self._launch("logits", num_tasks, n, **places, rows=rows, num_ablated=num_ablated)
        return logits, active

    def _launch(self, kernel: str, num_tasks: int, n: int, **arguments: int) -> None:
        """Launch on the current stream; the workspace is returned to its allocator."""
        blocks = min(num_tasks, max_blocks(self._device))
        memory, params = _Memory(self._plan, self._setup, n), self._setup.parameter_table.params
        workspace = params.new_empty(blocks * memory.workspace)
        filled = Arguments(
            **self._fixed,
            workspace=workspace.data_ptr(),
            n=n,
            room=memory.workspace,
            transposed_at=memory.weights_at,
            parts_at=memory.parts_at,
            parts_in_shared=memory.parts_in_shared,
            **arguments,
        )
        kernels = library(self._device, params.dtype, memory.weights_in_shared)
        kernels.launch(kernel, filled, blocks, memory.shared_bytes)

    def _fixed_arguments(self) -> dict[str, float]:
        """Where tensors are that stay in their place, and sizes."""
        table, feed, blend = self._setup.parameter_table, self._setup.feed, self._setup.blend_inputs
        host, plan, adamw = self._setup.host, self._plan, self._setup.optimizer
        tensors = {
            **self._tables,
            "params": table.params,
            "grads": table.grads,
            "moments": table.all_moments,
            "steps": table.steps,
            "rates": self._setup.learning_rates,
            "alpha": blend.alpha,
            "alpha_behind": blend.shadow_alpha,
            "style": blend.style,
            "blueprint": self._slots[0],
            "behind": self._slots[1],
            "labels": feed.labels,
            "first_row": feed.first_row,
            "batch_rows": feed.rows,
            "losses": feed.losses,
            "ablated": self._ablated,
        }
        numbers = (*adamw.betas, adamw.epsilon, adamw.weight_decay)
        return {
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            **dict(zip(_DOUBLES, numbers, strict=True)),
            "longest": plan.tables["programs"].shape[1],
            "num_hosts": table.num_hosts,
            "num_slots": host.num_slots,
            "num_blueprints": plan.tables["seed_programs"].shape[1],
            "columns": table.layout.num_columns,
            "features": feed.inputs[0].numel(),
            "classes": host.num_classes,
            "host_size": table.layout.host_size,
            "transposed_size": plan.transposed_size,
            "grad_rows": plan.grad_rows,
            "grad_size": plan.grad_size,
            "score_rows": plan.score_rows,
        }


def _pieces(examples: int) -> tuple[int, int]:
    """How many pieces the examples are worked on in, and how many are in each: fours of them."""
    count = -(-examples // MOST_EXAMPLES)
    return count, -(-examples // (4 * count)) * 4


def has_room(setup: TrainingSetup) -> bool:
    """Whether the workspaces of as many hosts as run at a time are of a bearable size."""
    memory = _Memory(plan(setup), setup, MOST_EXAMPLES)
    num_bytes = memory.workspace * setup.parameter_table.params.element_size()
    return num_bytes * max_blocks(setup.parameter_table.params.device) <= MAX_WORKSPACE_BYTES


def max_blocks(device: torch.device) -> int:
    """The number of blocks that run at a time; each needs its own workspace."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Memory:
    """What lies in a block's shared memory, most wanted first, and what in its workspace."""

    def __init__(self, plan: "Plan", setup: TrainingSetup, n: int):
        itemsize = setup.parameter_table.params.element_size()
        most = shared_bytes(setup.parameter_table.params.device) // itemsize
        self._shared, self.workspace = 8 * max(THREADS, n) + n, plan.num_rows * n
        self.weights_at, self.weights_in_shared = self._place(plan.transposed_size, most)
        num_columns = setup.parameter_table.layout.num_columns
        self.parts_at, self.parts_in_shared = self._place(NUM_PARTS * num_columns, most)
        self.shared_bytes = self._shared * itemsize

    def _place(self, size: int, most_shared: int) -> tuple[int, bool]:
        """Where it begins, and whether that is in shared memory."""
        size = -(-size // 4) * 4
        if self._shared + size <= most_shared:
            self._shared += size
            return self._shared - size, True
        self.workspace += size
        return self.workspace - size, False


class Plan(NamedTuple):
    """What the hosts of a population can run, and where it lies; sizes in rows of examples.

    Every place in the workspace is fixed here, once for all hosts: each slot has room for the
    largest seed that can grow there. The tables are int32; those of `numba_hosts.Tables`, and

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
        unneeded: int | None = None  # the output before, if the way back can do without it
        for row in rows:
            row.transposed = self.transposed
            self.transposed += _transposed_size(row)
            # a row more: a norm that follows keeps its deviations there
            row.out = self._take(row.num_outputs + 1)
            if row.kind == Kind.NORM and unneeded is not None:
                row.saved = unneeded  # in place
            elif row.kind == Kind.NORM:
                row.saved = self._take(row.num_inputs + 1)
            elif row.kind == Kind.ATTEND:
                row.saved = self._take(row.width**2)
            is_needed = row.rectifies or row.kind not in (Kind.CONV, Kind.DEPTHWISE)
            unneeded = None if is_needed else row.out

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
