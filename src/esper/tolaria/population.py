"""P growing hosts of one task, trained as one program.

    population = Population(host, menu, task, num_hosts=32, batch_size=100)
    transition = lifecycle.request(population.states, op, host_ids, slot_ids, blueprint=..., ...)
    population.adopt(transition.then(lifecycle.begin_step))
    losses = population.train(rows)                    # [minibatches, P]
    population.adopt(lifecycle.end_step(population.states))

The pure functions of `kasmina.lifecycle` change the slots; `adopt` changes the weights
accordingly: it initialises new seeds and clears the weights of removed ones.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.hosts import Host
from esper.kasmina.lifecycle import SlotStates, Transition
from esper.kernels.hosts.compiled import CompiledSteps
from esper.kernels.hosts.fused import FusedSteps, has_room
from esper.kernels.hosts.layer_table import has_kernels
from esper.runtime.checks import whole_number
from esper.tolaria.batched import CHUNK, BlendInputs, EagerSteps, Feed, TrainingSetup
from esper.tolaria.host_optimizer import AdamW
from esper.tolaria.parameter_table import ParameterTable
from esper.tolaria.randomness import fold
from esper.tolaria.tasks import Task

Kernels = Literal["eager", "compiled", "fused"]
_STEPS: dict[Kernels, type[EagerSteps | CompiledSteps | FusedSteps]] = {
    "eager": EagerSteps,
    "compiled": CompiledSteps,
    "fused": FusedSteps,
}


class Snapshot(NamedTuple):
    """A copy of the weights, optimiser state and slots of every host."""

    storage: Tensor  # parameters and moments
    steps: Tensor
    states: SlotStates


class Population:
    """Hosts of one architecture, each with its own weights, seeds, data view and optimiser state.

    It runs on the device and in the floating-point type of the task's data. `view_ids` is the view
    of the data that each host sees (default 0). `host_ids` are the keys of the hosts' random
    numbers: a host depends on its id, not on the other hosts. `kernels` selects what runs the
    minibatches: "eager" operations on any device, "compiled" code on a CPU or the "fused" kernel on
    CUDA; by default the fastest that supports all layers. Change `learning_rates` in place.
    """

    def __init__(
        self,
        host: Host,
        menu: Sequence[Blueprint],
        task: Task,
        *,
        num_hosts: int,
        batch_size: int = 100,
        optimizer: AdamW | None = None,
        rng_seed: int = 0,
        host_ids: Tensor | None = None,
        view_ids: Tensor | None = None,
        kernels: Kernels | None = None,
    ):
        if (task.input_shape, task.num_classes) != (host.input_shape, host.num_classes):
            raise ValueError(
                f"task {task.names} has inputs {task.input_shape} and {task.num_classes} classes; "
                f"the host takes {host.input_shape} and has {host.num_classes} classes"
            )
        device, dtype = task.device, task.train_x.dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"task inputs are {dtype}; use float32 or float64")
        whole_number("num_hosts", num_hosts, 1)
        whole_number("batch_size", batch_size, 1)
        self.task = task
        self.host, self.menu = host, tuple(menu)
        self.num_hosts, self.num_slots = num_hosts, host.num_slots
        self.optimizer = optimizer or AdamW()
        self.host_ids = torch.arange(num_hosts)
        self.view_ids = torch.zeros(num_hosts, dtype=torch.int64)
        self.parameter_table = ParameterTable(host, self.menu, num_hosts, device, dtype)
        self.learning_rates = self.parameter_table.params.new_zeros(num_hosts)  # set by `reset`
        self._feed = Feed(task, num_hosts, batch_size)
        self._blend_inputs = BlendInputs(self.parameter_table.params, host.num_slots)
        tensors = (self._blend_inputs, self._feed, self.learning_rates)
        setup = TrainingSetup(host, self.parameter_table, self.optimizer, *tensors)
        self.kernels: Kernels = kernels or fastest_kernels(setup)
        if self.kernels not in _STEPS:
            raise ValueError(f"kernels={kernels!r}; use one of {tuple(_STEPS)}")
        self.steps = _STEPS[self.kernels](setup)
        self.reset(rng_seed, view_ids, host_ids)

    def reset(
        self, rng_seed: int, view_ids: Tensor | None = None, host_ids: Tensor | None = None
    ) -> None:
        """Start new hosts without seeds; `rng_seed` and their ids determine their weights.

        Views and ids stay as they are unless given.
        """
        if host_ids is not None:
            if host_ids.shape != (self.num_hosts,):
                raise ValueError(f"host_ids {tuple(host_ids.shape)}; expected ({self.num_hosts},)")
            self.host_ids = host_ids.cpu()
        if view_ids is not None:
            self.view_ids = self._checked_views(view_ids)
            self._feed.set_views(self.view_ids)
        self.learning_rates.fill_(self.optimizer.learning_rate)
        self._rng_seed = rng_seed
        self._num_germinated = torch.zeros(self.num_hosts, self.num_slots, dtype=torch.int64)
        self.states = SlotStates.dormant(self.num_hosts, self.num_slots)  # changed by `adopt`
        table = self.parameter_table
        for tensor in (table.storage, table.grads, table.steps):
            tensor.zero_()
        table.init_hosts(fold(rng_seed, self.host_ids))
        self._prepare_steps()

    def adopt(self, transition: Transition) -> None:
        """Carry out a transition that starts from `self.states`."""
        states, germinated, removed = transition
        self._check_states(states)
        self.states = states
        table = self.parameter_table
        for slot in removed.any(dim=0).nonzero().flatten().tolist():
            hosts = removed[:, slot].nonzero().flatten()
            table.clear(hosts, table.layout.seed_columns(slot))
            table.steps[hosts, 1 + slot] = 0
        for slot in germinated.any(dim=0).nonzero().flatten().tolist():
            hosts = germinated[:, slot].nonzero().flatten()
            self._num_germinated[hosts, slot] += 1
            number = self._num_germinated[hosts, slot]
            keys = fold(self._rng_seed, self.host_ids[hosts], 1 + slot, number)
            table.init_seeds(slot, hosts, states.blueprint[hosts, slot], keys)
        self._prepare_steps()

    def train(self, rows: Tensor) -> Tensor:
        """Train on data rows `[M, P, batch]`, one optimiser step each; returns losses `[M, P]`."""
        self._check_rows(rows)
        losses = []
        for chunk in torch.split(rows, CHUNK):
            self._feed.load(chunk)
            self.steps.run(len(chunk))
            losses.append(self._feed.losses[: len(chunk)].clone())
        return torch.cat(losses)

    def logits(self, x: Tensor) -> Tensor:
        """`[P, classes, batch]` on `x [P, *shape, batch]`."""
        self._check_inputs(x)
        return self.steps.logits(x, ablate=False)[0][:, :, 0]

    def ablated_logits(self, x: Tensor) -> tuple[Tensor, Sequence[int]]:
        """Logits `[P, classes, 1 + K, batch]` with all seeds, then with each of K slots off.

        The second value is the K slots: those in which a host has an active seed.
        """
        self._check_inputs(x)
        return self.steps.logits(x, ablate=True)

    def save(self, earlier: Snapshot | None = None, keep: Tensor | None = None) -> Snapshot:
        """A snapshot of all hosts; those in `keep` stay as they are in the `earlier` one."""
        table, states = self.parameter_table, self.states
        storage, steps = table.storage.clone(), table.steps.clone()
        if earlier is not None and keep is not None and len(keep):
            storage[:, keep] = earlier.storage[:, keep]
            steps[keep] = earlier.steps[keep]
            states = states.put(earlier.states.at(keep), keep)
        return Snapshot(storage, steps, states)

    def restore(self, snapshot: Snapshot, host_ids: Tensor) -> None:
        """Restore some hosts with their seeds and optimiser state; the others are not touched."""
        table = self.parameter_table
        table.storage[:, host_ids] = snapshot.storage[:, host_ids]
        table.steps[host_ids] = snapshot.steps[host_ids]
        table.grads[host_ids] = 0
        self.states = self.states.put(snapshot.states.at(host_ids), host_ids)
        self._prepare_steps()

    def gradient_norms(self) -> Tensor:
        """Root mean square `[P, S]` of each seed's last gradient; 0 without a seed."""
        grads, layout = self.parameter_table.grads, self.parameter_table.layout
        squares = [
            grads[:, layout.seed_columns(slot)].square().sum(1) for slot in range(self.num_slots)
        ]
        sizes = self.seed_params().clamp(min=1).to(grads)
        return (torch.stack(squares, 1) / sizes).sqrt()

    def seed_params(self) -> Tensor:
        """Parameters of the seed in each slot `[P, S]`, 0 without a seed; on the CPU."""
        states, sizes = self.states, self.parameter_table.layout.seed_sizes
        slots = torch.arange(self.num_slots).expand_as(states.blueprint)
        return sizes[slots, states.blueprint.clamp(min=0)] * states.has_seed

    # Bounds checks; the compiled kernels do none.

    def _checked_views(self, view_ids: Tensor) -> Tensor:
        views, num_views = view_ids.cpu(), self.task.num_views
        if views.shape != (self.num_hosts,) or bool(((views < 0) | (views >= num_views)).any()):
            raise ValueError(
                f"view_ids {views.tolist()}; expected {self.num_hosts} numbers below {num_views}"
            )
        return views

    def _check_rows(self, rows: Tensor) -> None:
        expected = tuple(self._feed.rows.shape[1:])
        if rows.dtype != torch.int64 or len(rows) == 0 or rows.shape[1:] != expected:
            raise ValueError(
                f"minibatch rows are {rows.dtype} {tuple(rows.shape)}; expected int64 "
                f"[minibatches, hosts, batch] = [.., {expected[0]}, {expected[1]}], at least one "
                "minibatch"
            )
        if rows.device.type == "cpu":
            last = rows.amax(dim=(0, 2))
            past = (rows.amin(dim=(0, 2)) < 0) | (last >= self.task.num_rows[self.view_ids])
            if past.any():
                host = int(past.nonzero()[0])
                count = int(self.task.num_rows[self.view_ids[host]])
                raise ValueError(
                    f"host {host} is to read row {int(last[host])}; its view has {count} rows: "
                    "sample them with task.num_rows[population.view_ids]"
                )

    def _check_inputs(self, x: Tensor) -> None:
        expected = (self.num_hosts, *self.host.input_shape)
        dtype = self.parameter_table.params.dtype
        if tuple(x.shape[:-1]) != expected or x.dtype != dtype:
            raise ValueError(
                f"inputs are {x.dtype} {tuple(x.shape)}; expected {dtype} "
                f"[hosts, *shape, batch] = {(*expected, 'batch')}"
            )

    def _check_states(self, states: SlotStates) -> None:
        if states.stage.shape != (self.num_hosts, self.num_slots):
            raise ValueError(
                f"states of {tuple(states.stage.shape)} hosts and slots; "
                f"expected {(self.num_hosts, self.num_slots)}"
            )
        hosts, slots = states.has_seed.nonzero(as_tuple=True)
        blueprint = states.blueprint[hosts, slots]
        is_known = (blueprint >= 0) & (blueprint < len(self.menu))
        sizes = self.parameter_table.layout.seed_sizes  # 0 where a blueprint does not fit
        wrong = ~(is_known & (sizes[slots, blueprint * is_known] > 0))
        for host, slot, number in torch.stack((hosts, slots, blueprint), 1)[wrong].tolist():
            fitting = sizes[slot].nonzero().flatten().tolist()
            raise ValueError(f"host {host}, slot {slot}: blueprint {number}; {fitting} fit there")

    def _prepare_steps(self) -> None:
        """Update what the next minibatch reads of the slots."""
        self._blend_inputs.fill(self.states)
        self.steps.prepare(self.states)


def fastest_kernels(setup: TrainingSetup) -> Kernels:
    """The fastest kernels that support all layers and the optimiser."""
    on_cuda = setup.parameter_table.params.device.type == "cuda"
    seeds = filter(None, chain.from_iterable(setup.parameter_table.layout.seed_programs))
    supports_all = all(map(has_kernels, (*setup.host.programs, *seeds)))
    supports_all &= type(setup.optimizer) is AdamW  # a subclass may do otherwise
    if not supports_all or (on_cuda and not has_room(setup)):
        return "eager"
    return "fused" if on_cuda else "compiled"
