"""Training on the CPU by numba: the tables that the kernels read, and their threads.

Parity test: `tests/tolaria/test_steps.py`, against `tolaria/batched.py`.
"""

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.lifecycle import SlotStates
from esper.kernels.hosts.layer_table import Column, num_outputs, program_rows, room
from esper.leyline.stages import SeedStage
from esper.tolaria.batched import TrainingSetup
from esper.tolaria.optimizers import AdamW


class CompiledSteps:
    """Hosts one after the other, each through all its minibatches; see `numba_hosts`."""

    def __init__(self, setup: TrainingSetup):
        from esper.kernels.hosts import numba_hosts  # numba is loaded where it is used

        self._setup, self._compiled = setup, numba_hosts
        self._tables = numba_hosts.Tables(**_tables(setup))
        self._optimizer = numba_hosts.OptimizerNumbers(*optimizer_numbers(setup.optimizer))
        parameter_table, feed = setup.parameter_table, setup.feed
        self._weights = numba_hosts.Weights(
            parameter_table.params.numpy(),
            parameter_table.grads.numpy(),
            parameter_table.all_moments.numpy(),
            parameter_table.steps.numpy(),
            setup.learning_rates.numpy(),
        )
        self._data = numba_hosts.Data(
            feed.inputs.flatten(1).numpy(), feed.labels.numpy(), feed.first_row[:, 0].numpy()
        )

    def prepare(self, states: SlotStates) -> None:
        behind, inputs = states.stage == SeedStage.TRAINING, self._setup.blend_inputs
        self._slots = self._compiled.Slots(
            inputs.alpha.numpy(),
            inputs.shadow_alpha.numpy(),
            inputs.style.numpy(),
            states.blueprint.numpy(),
            behind.numpy(),
        )
        self._active_slots = (states.has_seed & ~behind).any(0).nonzero().flatten()

    def run(self, count: int) -> None:
        feed = self._setup.feed
        rows, losses = feed.rows[:count].numpy(), feed.losses[:count].numpy()
        padded = -(-rows.shape[2] // 8) * 8  # examples, as the kernels round them up
        self._for_all_hosts(
            lambda first, last: self._compiled.train_hosts(
                first,
                last,
                self._tables,
                self._memory(padded),
                self._weights,
                self._slots,
                self._data,
                rows,
                losses,
                self._optimizer,
            )
        )

    def logits(self, x: Tensor, ablate: bool) -> tuple[Tensor, list[int]]:
        ablated = self._active_slots if ablate else self._active_slots[:0]
        num_hosts, batch = x.shape[0], x.shape[-1]
        logits = x.new_empty(num_hosts, self._setup.host.num_classes, 1 + len(ablated), batch)
        flat = x.contiguous().view(num_hosts, -1, batch)
        self._for_all_hosts(
            lambda first, last: self._compiled.logits_of_hosts(
                first,
                last,
                self._tables,
                self._memory(batch),
                self._weights.params,
                self._slots,
                flat.numpy(),
                ablated.numpy(),
                logits.numpy(),
            )
        )
        return logits.flatten(2), ablated.tolist()

    def _for_all_hosts(self, work: Callable[[int, int], None]) -> None:
        """Hosts split evenly over as many threads as torch may use."""
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

    def __init__(self) -> None:
        self.memory = np.empty(0, dtype=np.uint8)


_threads = _Threads()


@cache
def _pool(num_threads: int, _process: int) -> ThreadPoolExecutor:
    """Threads that stay, and keep their memory; a forked process has its own."""
    return ThreadPoolExecutor(num_threads)


def _tables(setup: TrainingSetup) -> dict[str, Any]:
    """What every host can run, as numbers: the fields of `numba_hosts.Tables`."""
    host, layout = setup.host, setup.parameter_table.layout
    shape = (host.num_slots, len(setup.menu))
    seed_programs, seed_sizes = np.full(shape, -1), np.zeros(shape, dtype=np.int64)
    programs = list(host.programs)
    for slot, site in enumerate(host.sites):
        for number, entry in enumerate(setup.menu):
            if entry.fits(site):
                seed_programs[slot, number] = len(programs)
                programs.append(entry.program(site))
                seed_sizes[slot, number] = programs[-1].num_params
    tables = [program_rows(program) for program in programs]
    lengths = np.array([len(table) for table in tables])
    rows = np.zeros((len(tables), lengths.max(), len(Column)), dtype=np.int64)
    for number, table in enumerate(tables):
        rows[number, : len(table)] = table
    host_sizes = [program.num_params for program in host.programs]
    return {
        "programs": rows,
        "lengths": lengths,
        "host_starts": np.cumsum([0, *host_sizes[:-1]]),
        "seed_programs": seed_programs,
        "seed_sizes": seed_sizes,
        "widens": np.array([program.widens for program in programs]),
        "part_starts": np.array([*layout.starts, layout.num_columns]),
        "room": _whole_room(setup, tables, seed_programs),
        "widest": _widest(rows),
    }


def _whole_room(setup: TrainingSetup, tables: list[np.ndarray], seed_programs: np.ndarray) -> int:
    """Workspace of a host with the largest seeds, for one example."""
    host = setup.host
    total = math.prod(host.input_shape) + 2 * host.num_classes
    total += sum(room(table) for table in tables[: len(host.programs)])
    for site, choices in zip(host.sites, seed_programs, strict=True):
        fitting = [tables[number] for number in choices if number >= 0]
        total += max(map(room, fitting), default=0)
        total += 3 * math.prod(site.shape)  # the blend
        total += max(map(num_outputs, fitting), default=0)  # the gradient of one that widens
    return 2 * total  # ablated passes need room besides the first


def _widest(rows: np.ndarray) -> int:
    """The most rows that a layer works on at a time, as a multiple of eight."""
    taps = rows[..., Column.KERNEL_HEIGHT] * rows[..., Column.KERNEL_WIDTH]
    most = max(
        int((rows[..., Column.CHANNELS] * taps).max()),
        3 * int(rows[..., Column.OUT_CHANNELS].max()),
        int(rows[..., Column.WIDTH].max()),
    )
    return (most + 7) // 8 * 8


def optimizer_numbers(optimizer: AdamW) -> tuple[float, float, float, float]:
    """The fields of `numba_hosts.OptimizerNumbers`."""
    return (*optimizer.betas, optimizer.epsilon, optimizer.weight_decay)
