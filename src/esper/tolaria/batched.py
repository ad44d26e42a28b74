"""P growing hosts as one batched program: the forward pass and one minibatch of training.

Host segments run for all P at once; seeds run group by group, and one blend per slot joins
them all to their hosts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina.blending import blend
from esper.kasmina.blueprints.registry import Blueprint
from esper.kasmina.hosts import Host
from esper.kasmina.lifecycle import SlotStates
from esper.kasmina.programs import Program
from esper.leyline.stages import SeedStage
from esper.tolaria.feed import Feed
from esper.tolaria.groups import GroupKey, Membership, Signature
from esper.tolaria.optimizers import Optimizer
from esper.tolaria.parameter_table import ParameterTable


class SeedGroup(NamedTuple):
    """Seeds of one blueprint in one slot."""

    program: Program
    rows: Tensor  # parameters [capacity, D]
    source: Tensor  # [capacity]: the host whose activations each seed reads
    destination: Tensor  # [capacity]: the host it acts on; P for padding


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
    for segment, part, seeds in zip(host.segments, parts[:-1], slots, strict=True):
        x = segment.forward(part, x)
        if seeds.groups:
            blended = _blend_in(x, seeds)
            x = torch.cat((blended, x[..., :batch]), dim=-1) if ablate else blended
    return host.head.forward(parts[-1], x)


def _blend_in(x: Tensor, seeds: SlotSeeds) -> Tensor:
    sources = torch.cat([group.source for group in seeds.groups])
    places = torch.cat([group.destination for group in seeds.groups])
    seen = torch.split(x.index_select(0, sources), [len(group.source) for group in seeds.groups])
    outputs = _run_groups(seeds.groups, seen)
    # one row more than hosts: padding writes there, and nobody reads it
    output = x.new_zeros(x.shape[0] + 1, *x.shape[1:])
    output = output.index_copy_(0, places, torch.cat(outputs))[:-1]
    if seeds.style is None:
        return torch.addcmul(x, seeds.alpha.view(-1, *(1,) * (x.dim() - 1)), output)
    return blend(x, output, seeds.alpha, seeds.style)


def _run_groups(groups: Sequence[SeedGroup], seen: Sequence[Tensor]) -> list[Tensor]:
    """What each group makes of what it sees.

    A captured program runs the groups beside one another, each on a stream of its own: they are
    independent, and one of them alone leaves most of a GPU idle. Backward follows by itself.
    """
    if not (seen[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return [g.program.forward(g.rows, part) for g, part in zip(groups, seen, strict=True)]
    main = torch.cuda.current_stream()
    outputs = []
    streams = side_streams(len(groups))
    for group, part, stream in zip(groups, seen, streams, strict=True):
        stream.wait_stream(main)
        part.record_stream(stream)  # its memory is not to be used again before the group is done
        with torch.cuda.stream(stream):
            outputs.append(group.program.forward(group.rows, part))
    for output, stream in zip(outputs, streams, strict=True):
        main.wait_stream(stream)
        output.record_stream(main)
    return outputs


def side_streams(count: int) -> list[torch.cuda.Stream]:
    """The same streams every time, so that what they freed is used again."""
    while len(_SIDE_STREAMS) < count:
        _SIDE_STREAMS.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    return _SIDE_STREAMS[:count]


_SIDE_STREAMS: list[torch.cuda.Stream] = []


@dataclass(frozen=True, eq=False)
class BlendInputs:
    """What a minibatch reads of the slots' states, on the device; `[P, S]` unless said."""

    alpha: Tensor  # of the seeds that the host feels
    alpha_behind: Tensor  # the same, with the seeds behind the host switched on
    style: Tensor
    trains: Tensor  # [P, 1 + S]: 1 for the host and each seed, which take a step

    @classmethod
    def empty(
        cls, num_hosts: int, num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> "BlendInputs":
        alpha, alpha_behind, style = torch.zeros(3, num_hosts, num_slots, device=device).unbind()
        trains = torch.zeros(num_hosts, 1 + num_slots, device=device, dtype=dtype)
        return cls(alpha.to(dtype), alpha_behind.to(dtype), style.long(), trains)

    def fill(self, states: SlotStates) -> None:
        """Take in the slots' states, in place."""
        behind = states.stage == SeedStage.TRAINING
        self.alpha.copy_(states.alpha, non_blocking=True)
        self.alpha_behind.copy_(
            torch.where(behind, states.alpha_target, states.alpha), non_blocking=True
        )
        self.style.copy_(states.style, non_blocking=True)
        self.trains[:, 0] = 1
        self.trains[:, 1:].copy_(states.has_seed, non_blocking=True)


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """All that training works on; whatever changes from step to step changes in place."""

    host: Host
    menu: tuple[Blueprint, ...]
    parameter_table: ParameterTable
    optimizer: Optimizer
    blend_inputs: BlendInputs
    feed: Feed
    learning_rates: Tensor  # [P]

    def seed_program(self, key: GroupKey) -> Program:
        return self.menu[key.blueprint].program(self.host.sites[key.slot])

    def arithmetic(self, signature: Signature) -> int:
        """Multiply-adds of one example's forward pass through all hosts and groups."""
        seeds = (size * self.seed_program(key).macs for key, size in signature.capacities)
        return self.parameter_table.num_hosts * self.host.macs + sum(seeds)


class Minibatch:
    """One training step of a population for one signature; what it reads are tensors."""

    def __init__(self, setup: TrainingSetup, signature: Signature):
        self.signature = signature
        self._setup = setup
        self._parameter_table, self._inputs = setup.parameter_table, setup.blend_inputs
        self._programs = {key: setup.seed_program(key) for key, _ in signature.capacities}
        device = setup.parameter_table.params.device
        self.members = Membership(signature, setup.parameter_table.num_hosts, device)
        self._part_of_column = setup.parameter_table.layout.part_of_column().to(device)

    def train(self) -> None:
        """The feed's next minibatch: every host and seed takes a step."""
        parameter_table, feed = self._parameter_table, self._setup.feed
        x, labels = feed.next()
        host_rows = self._host_rows().requires_grad_()
        in_host = {key: self._seed_rows(key).requires_grad_() for key in self._keys(behind=False)}
        losses = self._losses(host_rows, in_host, self._inputs.alpha, x, labels)
        leaves = [host_rows, *in_host.values()]
        host_grads, *seed_grads = torch.autograd.grad(losses.sum(), leaves)
        parameter_table.grads.zero_()
        parameter_table.grads[:-1, parameter_table.layout.host_columns()] = host_grads
        self._collect(dict(zip(in_host, seed_grads, strict=True)))
        if behind := self._keys(behind=True):
            self._train_behind_hosts(behind, x, labels)
        parameter_table.steps.add_(self._inputs.trains)
        self._setup.optimizer.update(
            parameter_table.params[:-1],
            parameter_table.grads[:-1],
            [moment[:-1] for moment in parameter_table.moments],
            parameter_table.steps.clamp(min=1),
            self._part_of_column,
            self._setup.learning_rates.unsqueeze(1),
        )
        feed.finish(losses.detach())

    @property
    def felt_slots(self) -> tuple[int, ...]:
        """Slots in which there is room for seeds that hosts feel."""
        return tuple(sorted({key.slot for key in self._keys(behind=False)}))

    @torch.no_grad()
    def logits(self, x: Tensor, ablate: bool = False) -> Tensor:
        """What the hosts say, without training; see `run_hosts`."""
        rows = {key: self._seed_rows(key) for key in self._keys(behind=False)}
        slots = self._slots(rows, self._inputs.alpha)
        return run_hosts(self._setup.host, self._host_rows(), slots, x, ablate)

    def _train_behind_hosts(self, behind: list[GroupKey], x: Tensor, labels: Tensor) -> None:
        """The shadow pass: seeds behind their hosts switched on, and only they are trained."""
        rows = {key: self._seed_rows(key) for key in self._programs}
        leaves = [rows[key].requires_grad_() for key in behind]
        losses = self._losses(self._host_rows(), rows, self._inputs.alpha_behind, x, labels)
        grads = torch.autograd.grad(losses.sum(), leaves)
        self._collect(dict(zip(behind, grads, strict=True)))

    def _losses(
        self,
        host_rows: Tensor,
        seed_rows: dict[GroupKey, Tensor],
        alpha: Tensor,
        x: Tensor,
        labels: Tensor,
    ) -> Tensor:
        logits = run_hosts(self._setup.host, host_rows, self._slots(seed_rows, alpha), x)
        return F.cross_entropy(logits, labels, reduction="none").mean(1)

    def _slots(self, seed_rows: dict[GroupKey, Tensor], alpha: Tensor) -> list[SlotSeeds]:
        slots: list[SlotSeeds] = []
        for slot, plain in enumerate(self.signature.plain_slots):
            groups = [
                SeedGroup(
                    self._programs[key],
                    rows,
                    self.members.source[key],
                    self.members.destination[key],
                )
                for key, rows in seed_rows.items()
                if key.slot == slot
            ]
            style = None if plain else self._inputs.style[:, slot]
            slots.append(SlotSeeds(groups, alpha[:, slot], style))
        return slots

    def _keys(self, behind: bool) -> list[GroupKey]:
        return [key for key in self._programs if key.shadow_training == behind]

    def _host_rows(self) -> Tensor:
        return self._parameter_table.params[
            :-1, self._parameter_table.layout.host_columns()
        ].detach()

    def _seed_rows(self, key: GroupKey) -> Tensor:
        return self._columns(self._parameter_table.params, key).index_select(
            0, self.members.destination[key]
        )

    def _collect(self, grads: dict[GroupKey, Tensor]) -> None:
        for key, grad in grads.items():
            columns = self._columns(self._parameter_table.grads, key)
            columns.index_copy_(0, self.members.destination[key], grad)

    def _columns(self, table: Tensor, key: GroupKey) -> Tensor:
        return table[
            :, self._parameter_table.layout.seed_columns(key.slot, self._programs[key].num_params)
        ]
