"""P growing hosts as one batched program: the forward pass and one minibatch of training.

Host segments run for all P hosts at once. Seeds of one blueprint in one slot form a group. Groups
run one by one, and one blend per slot joins their outputs to the hosts. Seeds that widen read the
input of their slot's segment, and are added to the output of the next layer in any style. This is
the plain twin of every kernel in `kernels.hosts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina.blending import blend
from esper.kasmina.blueprints import Blueprint
from esper.kasmina.hosts import Host
from esper.kasmina.layers import Program
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.constants import BlendStyle
from esper.leyline.stages import SeedStage
from esper.tolaria.augmentation import Augmentation
from esper.tolaria.optimizers import AdamW
from esper.tolaria.parameter_table import ParameterTable
from esper.tolaria.tasks import Task

CHUNK = 32  # minibatches whose rows are on the device at a time
MAX_AUGMENTED = 2**24  # values of the augmented inputs of a population


class SeedGroup(NamedTuple):
    """Seeds of one blueprint in one slot."""

    program: Program
    rows: Tensor  # parameters [K, D]
    hosts: Tensor  # [K]: the host of each seed


class SlotSeeds(NamedTuple):
    """All seeds in one slot, and how they are blended in."""

    groups: Sequence[SeedGroup]
    alpha: Tensor  # [P]
    style: Tensor | None  # [P]; None: all ADD


def run_hosts(
    host: Host, rows: Tensor, slots: Sequence[SlotSeeds], x: Tensor, ablate: bool = False
) -> Tensor:
    """Logits `[P, classes, batch]` of hosts with parameters `[P, D]` on `x [P, *shape, batch]`.

    With `ablate`, each slot that has seeds adds a copy of the batch in which it is switched off:
    the last axis is (1 + such slots) x batch, the first copy with all seeds on.
    """
    batch = x.shape[-1]
    parts = torch.split(rows, [program.num_params for program in host.programs], dim=1)
    added: Tensor | None = None  # to the next segment's first layer
    for segment, part, seeds in zip(host.segments, parts[:-1], slots, strict=True):
        before, x = x, segment.forward(part, x, added)
        unchanged = x[..., :batch]
        inside = [group for group in seeds.groups if not group.program.widens]
        widening = [group for group in seeds.groups if group.program.widens]
        x = _blend_in(x, inside, seeds) if inside else x
        added = _widened(before, widening, seeds.alpha) if widening else None
        if ablate and seeds.groups:
            x = torch.cat((x, unchanged), dim=-1)
            added = None if added is None else F.pad(added, (0, batch))
    return host.head.forward(parts[-1], x, added)


def _blend_in(x: Tensor, groups: Sequence[SeedGroup], seeds: SlotSeeds) -> Tensor:
    output = _outputs(x, groups)
    if seeds.style is None:
        return torch.addcmul(x, _per_host(seeds.alpha, x), output)
    return blend(x, output, seeds.alpha, seeds.style)


def _widened(x: Tensor, groups: Sequence[SeedGroup], alpha: Tensor) -> Tensor:
    output = _outputs(x, groups)
    return _per_host(alpha, output) * output


def _outputs(x: Tensor, groups: Sequence[SeedGroup]) -> Tensor:
    """What the seeds give on hosts' activations `x`; 0 for hosts without one."""
    outputs = torch.cat(
        [group.program.forward(group.rows, x.index_select(0, group.hosts)) for group in groups]
    )
    hosts = torch.cat([group.hosts for group in groups])
    return x.new_zeros(len(x), *outputs.shape[1:]).index_copy_(0, hosts, outputs)


def _per_host(alpha: Tensor, x: Tensor) -> Tensor:
    return alpha.view(-1, *(1,) * (x.dim() - 1))


@dataclass(frozen=True, eq=False)
class BlendInputs:
    """The slots' states that a minibatch reads, on the device."""

    alpha: Tensor  # [P, S]
    shadow_alpha: Tensor  # [P, S]: with seeds in shadow training at their targets
    style: Tensor  # [P, S]

    @classmethod
    def empty(
        cls, num_hosts: int, num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> "BlendInputs":
        alpha, shadow_alpha, style = torch.zeros(3, num_hosts, num_slots, device=device).unbind()
        return cls(alpha.to(dtype), shadow_alpha.to(dtype), style.long())

    def fill(self, states: SlotStates) -> None:
        """Copy the slots' states, in place."""
        in_shadow = states.stage == SeedStage.TRAINING
        self.alpha.copy_(states.alpha, non_blocking=True)
        self.shadow_alpha.copy_(
            torch.where(in_shadow, states.alpha_target, states.alpha), non_blocking=True
        )
        self.style.copy_(states.style, non_blocking=True)


class Feed:
    """Data `[V, N, ...]` in V views, and the rows of the next minibatches `[M, P, batch]`.

    With an augmentation, the kernels read changed copies of the loaded rows in place of the data.
    """

    def __init__(self, task: Task, view_ids: Tensor, batch_size: int, augmentation: Augmentation):
        device, num_hosts = task.device, len(view_ids)
        self.inputs, self.labels = self._data = task.train_x.flatten(0, 1), task.train_y.flatten()
        self._rows_per_view, self._augmentation = task.train_y.shape[1], augmentation
        self.is_augmented = augmentation.is_on(task.input_shape)
        self.capacity, num_rows = CHUNK, num_hosts * batch_size  # minibatches; rows of each
        if self.is_augmented:
            most = MAX_AUGMENTED // (num_rows * self.inputs[0].numel())
            self.capacity = max(1, min(CHUNK, most))
            self.inputs = self.inputs.new_zeros(self.capacity * num_rows, *task.input_shape)
            self.labels = self.labels.new_zeros(self.capacity * num_rows)
        self.first_row = torch.zeros(num_hosts, 1, dtype=torch.int64, device=device)
        self._first_in_data = torch.zeros_like(self.first_row)
        self.set_views(view_ids)
        shape = (self.capacity, num_hosts, batch_size)
        rows = torch.arange(self.capacity * num_rows, device=device).view(shape)
        self.rows = rows if self.is_augmented else torch.zeros_like(rows)
        self.losses = torch.zeros(shape[:2], dtype=self.inputs.dtype, device=device)
        self._cursor = 0  # of the next minibatch

    def set_views(self, view_ids: Tensor) -> None:
        """Set the view `[P]` that each host reads from now on."""
        first = self._first_in_data if self.is_augmented else self.first_row
        first.copy_(view_ids.unsqueeze(1) * self._rows_per_view)

    def load(self, rows: Tensor, keys: Tensor | None = None) -> None:
        """Load the rows of at most `capacity` minibatches; a host's rows are numbered in its view.

        With an augmentation, examples have `keys` in the shape of `rows`.
        """
        if keys is None:
            self.rows[: len(rows)].copy_(rows, non_blocking=True)
        else:
            inputs, labels = self._data
            flat = (rows.to(labels.device) + self._first_in_data).flatten()
            changed = self._augmentation.apply(inputs.index_select(0, flat), keys.flatten())
            self.inputs[: len(flat)] = changed
            self.labels[: len(flat)] = labels.index_select(0, flat)
        self._cursor = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs `[P, *shape, batch]` and labels `[P, batch]` of the minibatch at the cursor."""
        rows = self.rows[self._cursor] + self.first_row
        flat = rows.flatten()
        x = self.inputs.index_select(0, flat).view(*rows.shape, *self.inputs.shape[1:])
        return x.movedim(1, -1).contiguous(), self.labels.index_select(0, flat).view(rows.shape)

    def record_loss(self, losses: Tensor) -> None:
        """Store the losses `[P]` of the minibatch at the cursor, and advance the cursor."""
        self.losses[self._cursor] = losses
        self._cursor += 1


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """The tensors and settings of training; what changes from step to step changes in place."""

    host: Host
    menu: tuple[Blueprint, ...]
    parameter_table: ParameterTable
    optimizer: AdamW
    blend_inputs: BlendInputs
    feed: Feed
    learning_rates: Tensor  # [P]


class GroupKey(NamedTuple):
    """Seeds that can run together."""

    slot: int
    blueprint: int
    shadow_training: bool  # trained in the shadow pass; not part of the host's own pass


def group_seeds(states: SlotStates) -> dict[GroupKey, Tensor]:
    """The hosts in each group."""
    shadow = states.stage == SeedStage.TRAINING
    hosts, slots = states.has_seed.nonzero(as_tuple=True)
    keys = torch.stack((slots, states.blueprint[hosts, slots], shadow[hosts, slots].long()), 1)
    kinds, group_of = torch.unique(keys, dim=0, return_inverse=True)
    return {
        GroupKey(slot, blueprint, bool(in_shadow)): hosts[group_of == group]
        for group, (slot, blueprint, in_shadow) in enumerate(kinds.tolist())
    }


class EagerSteps:
    """Minibatches of a population, every operation launched on its own."""

    def __init__(self, setup: TrainingSetup):
        self._setup, self._inputs = setup, setup.blend_inputs
        self._table = table = setup.parameter_table
        self._host_columns = table.layout.host_columns()
        self._part_of_column = table.layout.part_of_column().to(table.params.device)

    def prepare(self, states: SlotStates) -> None:
        """Called when slots have changed."""
        setup, table = self._setup, self._table
        groups = group_seeds(states)
        self._hosts = {key: hosts.to(table.params.device) for key, hosts in groups.items()}
        self._programs = {
            key: setup.menu[key.blueprint].program(setup.host.sites[key.slot]) for key in groups
        }
        self._columns = {
            key: table.layout.seed_columns(key.slot, program.num_params)
            for key, program in self._programs.items()
        }
        # the host and each seed take an optimiser step
        self._trains = F.pad(states.has_seed, (1, 0), value=True).to(table.steps)
        styled = (states.style != BlendStyle.ADD) & states.has_seed
        self._is_styled: list[bool] = styled.any(0).tolist()

    def run(self, count: int) -> None:
        """Train on the next `count` minibatches of the feed."""
        for _ in range(count):
            self._train()

    @torch.no_grad()
    def logits(self, x: Tensor, ablate: bool) -> tuple[Tensor, list[int]]:
        """Logits as in `run_hosts`, and the slots that added a copy."""
        rows = {key: self._seed_rows(key) for key in self._keys(in_shadow=False)}
        slots = self._slots(rows, self._inputs.alpha)
        logits = run_hosts(self._setup.host, self._host_rows(), slots, x, ablate=ablate)
        return logits, sorted({key.slot for key in rows})

    def _train(self) -> None:
        """Train every host and seed on the feed's next minibatch."""
        table, feed = self._table, self._setup.feed
        minibatch = feed.next()
        host_rows = self._host_rows().requires_grad_()
        in_host = {
            key: self._seed_rows(key).requires_grad_() for key in self._keys(in_shadow=False)
        }
        losses = self._losses(host_rows, in_host, self._inputs.alpha, minibatch)
        leaves = [host_rows, *in_host.values()]
        host_grads, *seed_grads = torch.autograd.grad(losses.sum(), leaves)
        table.grads.zero_()
        table.grads[:, self._host_columns] = host_grads
        self._collect(dict(zip(in_host, seed_grads, strict=True)))
        if in_shadow := self._keys(in_shadow=True):
            self._train_in_shadow(in_shadow, minibatch)
        table.steps.add_(self._trains)
        rates = self._setup.learning_rates.unsqueeze(1)
        self._setup.optimizer.update(table, self._part_of_column, rates)
        feed.record_loss(losses.detach())

    def _train_in_shadow(self, keys: list[GroupKey], minibatch: Any) -> None:
        """The shadow pass: seeds in shadow training are switched on, and only they are trained."""
        rows = {key: self._seed_rows(key) for key in self._programs}
        leaves = [rows[key].requires_grad_() for key in keys]
        losses = self._losses(self._host_rows(), rows, self._inputs.shadow_alpha, minibatch)
        grads = torch.autograd.grad(losses.sum(), leaves)
        self._collect(dict(zip(keys, grads, strict=True)))

    def _losses(
        self, host_rows: Tensor, seed_rows: dict[GroupKey, Tensor], alpha: Tensor, minibatch: Any
    ) -> Tensor:
        x, labels = minibatch
        logits = run_hosts(self._setup.host, host_rows, self._slots(seed_rows, alpha), x)
        return F.cross_entropy(logits, labels, reduction="none").mean(1)

    def _slots(self, seed_rows: dict[GroupKey, Tensor], alpha: Tensor) -> list[SlotSeeds]:
        slots: list[SlotSeeds] = []
        for slot, is_styled in enumerate(self._is_styled):
            groups = [
                SeedGroup(self._programs[key], rows, self._hosts[key])
                for key, rows in seed_rows.items()
                if key.slot == slot
            ]
            style = self._inputs.style[:, slot] if is_styled else None
            slots.append(SlotSeeds(groups, alpha[:, slot], style))
        return slots

    def _keys(self, in_shadow: bool) -> list[GroupKey]:
        return [key for key in self._programs if key.shadow_training == in_shadow]

    def _host_rows(self) -> Tensor:
        return self._table.params[:, self._host_columns].detach()

    def _seed_rows(self, key: GroupKey) -> Tensor:
        return self._table.params[:, self._columns[key]].index_select(0, self._hosts[key])

    def _collect(self, grads: dict[GroupKey, Tensor]) -> None:
        for key, grad in grads.items():
            self._table.grads[:, self._columns[key]].index_copy_(0, self._hosts[key], grad)
