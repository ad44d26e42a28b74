"""P growing hosts as one batched program: the forward pass and one minibatch of training.

Host segments run for all P hosts at once. Seeds of one blueprint in one slot form a group. Groups
run one by one, and one blend per slot joins their outputs to the hosts. Seeds that widen read the
input of their slot's segment, and are added to the output of the next layer in any style. This is
the plain twin of every kernel in `kernels.hosts`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina.blending import blend
from esper.kasmina.hosts import Host
from esper.kasmina.layers import Program
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.constants import BlendStyle
from esper.leyline.stages import SeedStage
from esper.tolaria.host_optimizer import AdamW
from esper.tolaria.parameter_table import ParameterTable
from esper.tolaria.tasks import Task

CHUNK = 32  # minibatches whose rows are on the device at a time


@dataclass(frozen=True, eq=False)
class SeedGroup:
    """Seeds of one blueprint in one slot."""

    slot: int
    in_shadow: bool  # trained in the shadow pass; not part of the host's own pass
    program: Program
    columns: slice  # of their parameters
    hosts: Tensor  # [K]: the host of each seed


Seeds = Mapping[SeedGroup, Tensor]  # with their parameters [K, D]


class BlendInputs:
    """The slots' states that a minibatch reads, on the device and in the type of `params`."""

    def __init__(self, params: Tensor, num_slots: int):
        self.alpha, self.shadow_alpha, style = params.new_zeros(3, len(params), num_slots).unbind()
        self.style = style.long()

    def fill(self, states: SlotStates) -> None:
        """Copy the slots' states, in place; seeds in shadow training are at their targets there."""
        in_shadow = states.stage == SeedStage.TRAINING
        shadow_alpha = torch.where(in_shadow, states.alpha_target, states.alpha)
        self.alpha.copy_(states.alpha, non_blocking=True)
        self.shadow_alpha.copy_(shadow_alpha, non_blocking=True)
        self.style.copy_(states.style, non_blocking=True)


class Feed:
    """Data `[V, N, ...]` in V views, and the rows of the next minibatches `[M, P, batch]`."""

    def __init__(self, task: Task, num_hosts: int, batch_size: int):
        self.inputs = task.train_x.flatten(0, 1)  # [V * N, *shape]
        self.labels = task.train_y.flatten()  # [V * N]
        self._rows_per_view = task.train_y.shape[1]
        self.first_row = self.labels.new_zeros(num_hosts, 1)  # of each host's view
        self.rows = self.labels.new_zeros(CHUNK, num_hosts, batch_size)
        self.losses = self.inputs.new_zeros(CHUNK, num_hosts)

    def set_views(self, view_ids: Tensor) -> None:
        """Set the view `[P]` that each host reads from now on."""
        self.first_row.copy_(view_ids.unsqueeze(1) * self._rows_per_view)

    def load(self, rows: Tensor) -> None:
        """Load the rows of at most `CHUNK` minibatches; a host's rows are numbered in its view."""
        self.rows[: len(rows)].copy_(rows, non_blocking=True)

    def minibatch(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs `[P, *shape, batch]` and labels `[P, batch]` of a loaded minibatch."""
        rows = self.rows[number] + self.first_row
        flat = rows.flatten()
        x = self.inputs.index_select(0, flat).view(*rows.shape, *self.inputs.shape[1:])
        return x.movedim(1, -1).contiguous(), self.labels.index_select(0, flat).view(rows.shape)


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """The tensors and settings of training; what changes from step to step changes in place."""

    host: Host
    parameter_table: ParameterTable
    optimizer: AdamW
    blend_inputs: BlendInputs
    feed: Feed
    learning_rates: Tensor  # [P]


def group_seeds(states: SlotStates) -> dict[tuple[int, int, bool], Tensor]:
    """Seeds that can run together: slot, blueprint and whether in shadow training, to hosts."""
    shadow = states.stage == SeedStage.TRAINING
    hosts, slots = states.has_seed.nonzero(as_tuple=True)
    keys = torch.stack((slots, states.blueprint[hosts, slots], shadow[hosts, slots].long()), 1)
    kinds, group_of = torch.unique(keys, dim=0, return_inverse=True)
    return {
        (slot, blueprint, bool(in_shadow)): hosts[group_of == group]
        for group, (slot, blueprint, in_shadow) in enumerate(kinds.tolist())
    }


class EagerSteps:
    """Minibatches of a population, every operation launched on its own."""

    def __init__(self, setup: TrainingSetup):
        self._setup, self._inputs = setup, setup.blend_inputs
        self._table = table = setup.parameter_table
        self._part_of_column = table.layout.part_of_column().to(table.params.device)

    def prepare(self, states: SlotStates) -> None:
        """Called when slots have changed."""
        table, self._groups = self._table, list[SeedGroup]()
        for (slot, blueprint, in_shadow), hosts in group_seeds(states).items():
            program = table.layout.seed_programs[slot][blueprint]
            assert program is not None, "the population has checked it"
            columns = table.layout.seed_columns(slot, program.num_params)
            on_device = hosts.to(table.params.device)
            self._groups.append(SeedGroup(slot, in_shadow, program, columns, on_device))
        # the host and each seed take an optimiser step
        self._trains = F.pad(states.has_seed, (1, 0), value=True).to(table.steps)
        styled = (states.style != BlendStyle.ADD) & states.has_seed
        self._styles = [  # of each slot's seeds [P]; None: all are ADD
            self._inputs.style[:, slot] if is_styled else None
            for slot, is_styled in enumerate(styled.any(0).tolist())
        ]

    def run(self, count: int) -> None:
        """Train every host and seed on the feed's first `count` minibatches."""
        table, setup = self._table, self._setup
        for number in range(count):
            x, labels = setup.feed.minibatch(number)
            table.grads.zero_()
            setup.feed.losses[number] = self._add_gradients(x, labels, in_shadow=False)
            if any(group.in_shadow for group in self._groups):
                self._add_gradients(x, labels, in_shadow=True)
            table.steps.add_(self._trains)
            rates = setup.learning_rates.unsqueeze(1)
            setup.optimizer.update(table, self._part_of_column, rates)

    @torch.no_grad()
    def logits(self, x: Tensor, ablate: bool) -> tuple[Tensor, list[int]]:
        """Logits `[P, classes, 1 + K, batch]` with all seeds on, then with each of K slots off."""
        seeds = self._seeds(in_shadow=False)
        logits = self._run(self._host_rows(), seeds, self._inputs.alpha, x, ablate)
        slots = sorted({group.slot for group in seeds}) if ablate else []
        return logits.view(*logits.shape[:2], 1 + len(slots), x.shape[-1]), slots

    def _add_gradients(self, x: Tensor, labels: Tensor, in_shadow: bool) -> Tensor:
        """Losses `[P]`, after their gradients were stored.

        In the shadow pass, the seeds in shadow training are switched on, and only they are trained.
        """
        table, host_rows, seeds = self._table, self._host_rows(), self._seeds(in_shadow)
        alpha = self._inputs.shadow_alpha if in_shadow else self._inputs.alpha
        trained = [group for group in seeds if group.in_shadow == in_shadow]
        leaves = [seeds[group].requires_grad_() for group in trained]
        if not in_shadow:
            leaves.append(host_rows.requires_grad_())
        logits = self._run(host_rows, seeds, alpha, x)
        losses = F.cross_entropy(logits, labels, reduction="none").mean(1)
        grads = torch.autograd.grad(losses.sum(), leaves)
        if not in_shadow:
            table.grads[:, table.layout.host_columns()] = grads[-1]
        for group, grad in zip(trained, grads, strict=False):
            table.grads[:, group.columns].index_copy_(0, group.hosts, grad)
        return losses.detach()

    def _run(
        self, rows: Tensor, seeds: Seeds, alpha: Tensor, x: Tensor, ablate: bool = False
    ) -> Tensor:
        """Logits `[P, classes, batch]` of hosts with parameters `[P, D]` on `x [P, *shape, batch]`.

        `alpha` is `[P, S]`. With `ablate`, each slot that has seeds adds a copy of the batch in
        which it is switched off: the last axis is (1 + such slots) x batch, the first copy with all
        seeds on.
        """
        host, batch = self._setup.host, x.shape[-1]
        parts = torch.split(rows, [program.num_params for program in host.programs], dim=1)
        added: Tensor | None = None  # to the next segment's first layer
        for slot, segment in enumerate(host.segments):
            before, x = x, segment.forward(parts[slot], x, added)
            unchanged, share, style = x[..., :batch], alpha[:, slot], self._styles[slot]
            output = _outputs(seeds, slot, x, widens=False)
            added = _outputs(seeds, slot, before, widens=True)
            has_seeds = output is not None or added is not None
            if output is not None and style is None:
                x = torch.addcmul(x, _per_host(share, x), output)
            elif output is not None and style is not None:
                x = blend(x, output, share, style)
            if added is not None:
                added = _per_host(share, added) * added
            if ablate and has_seeds:
                x = torch.cat((x, unchanged), dim=-1)
                added = None if added is None else F.pad(added, (0, batch))
        return host.head.forward(parts[-1], x, added)

    def _host_rows(self) -> Tensor:
        return self._table.params[:, self._table.layout.host_columns()].detach()

    def _seeds(self, in_shadow: bool) -> Seeds:
        """The seeds that a pass runs: all of them in the shadow pass."""
        params = self._table.params
        return {
            group: params[:, group.columns].index_select(0, group.hosts)
            for group in self._groups
            if in_shadow or not group.in_shadow
        }


def _outputs(seeds: Seeds, slot: int, x: Tensor, widens: bool) -> Tensor | None:
    """What a slot's seeds give on hosts' activations `x`, 0 for hosts without one; None: no seeds."""
    groups = [g for g in seeds if g.slot == slot and g.program.widens == widens]
    if not groups:
        return None
    outputs = torch.cat([g.program.forward(seeds[g], x.index_select(0, g.hosts)) for g in groups])
    hosts = torch.cat([group.hosts for group in groups])
    return x.new_zeros(len(x), *outputs.shape[1:]).index_copy_(0, hosts, outputs)


def _per_host(alpha: Tensor, x: Tensor) -> Tensor:
    return alpha.view(-1, *(1,) * (x.dim() - 1))
