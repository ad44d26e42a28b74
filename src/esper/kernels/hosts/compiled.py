"""Training on the CPU by numba: the tables that the kernels read, and their threads.

Parity test: `tests/tolaria/test_steps.py`, against `tolaria/batched.py`.
"""

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.lifecycle import SlotStates
from esper.kernels.hosts.layer_table import Kind, Row, as_table, program_rows, program_tables
from esper.leyline.stages import SeedStage
from esper.tolaria.batched import TrainingSetup


class CompiledSteps:
    """Hosts one after the other, each through all its minibatches; see `numba_hosts`."""

    def __init__(self, setup: TrainingSetup):
        from esper.kernels.hosts import numba_hosts  # numba is loaded where it is used

        self._setup, self._compiled = setup, numba_hosts
        self._tables = numba_hosts.Tables(**_tables(setup))
        self._optimizer = astuple(setup.optimizer)
        table, feed = setup.parameter_table, setup.feed
        weights = (table.params, table.grads, table.all_moments, table.steps, setup.learning_rates)
        self._weights = numba_hosts.Weights(*(tensor.numpy() for tensor in weights))
        self._data = numba_hosts.Data(
            feed.inputs.flatten(1).numpy(), feed.labels.numpy(), feed.first_row[:, 0].numpy()
        )

    def prepare(self, states: SlotStates) -> None:
        behind, inputs = states.stage == SeedStage.TRAINING, self._setup.blend_inputs
        slots = (inputs.alpha, inputs.shadow_alpha, inputs.style, states.blueprint, behind)
        self._slots = self._compiled.Slots(*(tensor.numpy() for tensor in slots))
        self._active_slots = states.is_active.any(0).nonzero().flatten()

    def run(self, count: int) -> None:
        feed = self._setup.feed
        rows, losses = feed.rows[:count].numpy(), feed.losses[:count].numpy()
        padded = -(-rows.shape[2] // 8) * 8  # examples, as the kernels round them up
        arguments = (self._weights, self._slots, self._data, rows, losses, self._optimizer)
        self._for_all_hosts(self._compiled.train_hosts, padded, *arguments)

    def logits(self, x: Tensor, ablate: bool) -> tuple[Tensor, list[int]]:
        ablated = self._active_slots if ablate else self._active_slots[:0]
        num_hosts, batch = x.shape[0], x.shape[-1]
        logits = x.new_empty(num_hosts, self._setup.host.num_classes, 1 + len(ablated), batch)
        flat = x.contiguous().view(num_hosts, -1, batch)
        arrays = (flat.numpy(), ablated.numpy(), logits.numpy())
        arguments = (self._weights.params, self._slots, *arrays)
        self._for_all_hosts(self._compiled.logits_of_hosts, batch, *arguments)
        return logits, ablated.tolist()

    def _for_all_hosts(self, kernel: Callable[..., None], examples: int, *arguments: Any) -> None:
        """Hosts split evenly over as many threads as torch may use."""

        def work(first: int, last: int) -> None:
            kernel(first, last, self._tables, self._memory(examples), *arguments)

        num_hosts = self._setup.parameter_table.num_hosts
        num_threads = min(torch.get_num_threads(), num_hosts)
        bounds = [num_hosts * t // num_threads for t in range(num_threads + 1)]
        if num_threads == 1:
            work(0, num_hosts)
            return
        list(_pool(num_threads, os.getpid()).map(work, bounds[:-1], bounds[1:]))

    def _memory(self, examples: int) -> np.ndarray:
        """The calling thread's workspace, for all populations that it serves.

        Fresh memory costs a page fault for every page of it, a quarter of the time of small hosts.
        """
        size, dtype = self._tables.room * examples, self._weights.params.dtype
        if _threads.memory.nbytes < size * dtype.itemsize:
            _threads.memory = np.empty(size * dtype.itemsize, dtype=np.uint8)
        return _threads.memory[: size * dtype.itemsize].view(dtype)


class _Threads(threading.local):
    """What each thread keeps."""

    memory = np.empty(0, dtype=np.uint8)


_threads = _Threads()


@cache
def _pool(num_threads: int, _process: int) -> ThreadPoolExecutor:
    """Threads that stay, and keep their memory; a forked process has its own."""
    return ThreadPoolExecutor(num_threads)


def _tables(setup: TrainingSetup) -> dict[str, Any]:
    """What every host can run, as numbers: the fields of `numba_hosts.Tables`."""
    programs, tables = program_tables(setup)
    rows = [program_rows(program) for program in programs]
    return tables | {
        "programs": as_table(rows),
        "lengths": np.array([len(layers) for layers in rows]),
        "room": _whole_room(setup, rows, tables["seed_programs"]),
        # rows that a layer works on at a time, as a multiple of eight
        "widest": (max(max(r.num_taps, r.out_channels) for r in chain(*rows)) + 7) // 8 * 8,
    }


def _whole_room(setup: TrainingSetup, rows: list[list[Row]], seed_programs: np.ndarray) -> int:
    """Workspace of a host with the largest seeds, for one example."""
    host = setup.host
    rooms = [sum(map(_room, layers)) for layers in rows]
    total = math.prod(host.input_shape) + 2 * host.num_classes + sum(rooms[: len(host.programs)])
    for site, choices in zip(host.sites, seed_programs, strict=True):
        fitting = [number for number in choices if number >= 0]
        total += max((rooms[number] for number in fitting), default=0)
        total += 3 * math.prod(site.shape)  # the blend
        # the gradient of one that widens
        total += max((rows[number][-1].num_outputs for number in fitting), default=0)
    return 2 * total  # ablated passes need room besides the first


def _room(row: Row) -> int:
    """Workspace that a layer needs for one example, forward and backward."""
    height, width = row.height + 2 * row.kernel_height, row.width + 2 * row.kernel_width
    padded = row.channels * height * (width + row.stride)
    scores = row.width * (row.width + 1)
    between = {Kind.ATTEND: scores, Kind.NORM: row.num_inputs + 3}.get(row.kind, 0)
    return 2 * row.num_inputs + row.num_outputs + 2 * padded + between
