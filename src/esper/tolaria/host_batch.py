"""Populations of real networks as one host batch: several architectures, views of one task.

Each episode samples an architecture for every group of envs, and for every env the view of the data
that it learns from. Hosts of one architecture are one population. Populations are built on first
use and reused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.host_reports import HostFacts, StepMeasurements, site_facts
from esper.kasmina.hosts import Host
from esper.kasmina.lifecycle import SlotStates, Transition, begin_step, end_step, remove_live_seeds
from esper.leyline.arrays import copy_together
from esper.runtime.checks import require_at_least, require_fraction
from esper.tolaria.governor import Governor, Rollback
from esper.tolaria.host_optimizer import AdamW
from esper.tolaria.host_validation import HostValidation, accuracy_on, validate_hosts
from esper.tolaria.population import Kernels, Population
from esper.tolaria.tasks import Task, minibatch_indices

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HostBatchConfig:
    """Settings of a host batch."""

    num_types: int = 8
    """Architectures per episode, with the same number of envs each."""
    envs_per_type: int = 8
    """Hosts of one architecture."""
    siblings: int = 1
    """Envs that share initial weights, data view, data order and rent: only actions differ."""
    controls: int = 0
    """Of the siblings, those that never grow; the others' lead over them is reported."""
    minibatches: int = 20
    """Minibatches per step and host."""
    batch_size: int = 100
    """Rows per minibatch."""
    validation_rows: int = 400
    """Validation rows per step."""
    episode_steps: int = 25
    """Length of the learning-rate schedule: constant, then linear down to a fiftieth."""
    constant_share: float = 0.7
    """Share of the episode at the full learning rate."""

    def __post_init__(self) -> None:
        counts = ("num_types", "envs_per_type", "siblings", "minibatches", "batch_size")
        require_at_least(self, 1, *counts, "episode_steps", "validation_rows")
        require_fraction(self, "constant_share")
        if self.envs_per_type % self.siblings:
            raise ValueError(
                f"envs_per_type={self.envs_per_type} does not split into siblings={self.siblings}"
            )
        if not 0 <= self.controls < self.siblings:
            raise ValueError(
                f"controls={self.controls}; use 0 to siblings - 1 = {self.siblings - 1}"
            )


class PopulationBatch:
    """`num_types` populations; env n is host `n % envs_per_type` of type `n // envs_per_type`.

    `host_ids` `[N]` are the keys of the envs' random numbers, by default one per group of siblings.
    Hosts with the same architecture, view and id start with the same weights and read the same
    rows in the same order.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        menu: Sequence[Blueprint],
        task: Task,
        config: HostBatchConfig | None = None,
        *,
        optimizer: AdamW | None = None,
        host_ids: Tensor | None = None,
    ):
        config = config or HostBatchConfig()
        self.config, self.hosts, self.menu, self.task = config, tuple(hosts), tuple(menu), task
        self.optimizer = optimizer or AdamW()
        self.num_envs, self.siblings = config.num_types * config.envs_per_type, config.siblings
        self._families = torch.arange(self.num_envs) // config.siblings
        self.host_ids = self._families if host_ids is None else host_ids
        self.num_slots, self.num_blueprints = hosts[0].num_slots, len(menu)
        self.events: tuple[Rollback, ...] = ()  # rollbacks of the last step; `host` is the env
        self._built: dict[Host, list[_Member]] = {}
        self._members: list[_Member] = []  # of this episode

    @property
    def types(self) -> tuple[Host, ...]:
        """The architectures of this episode."""
        return tuple(member.population.host for member in self._members)

    @property
    def view_ids(self) -> Tensor:
        """The view of the data that each env learns from, `[N]`."""
        return torch.cat([member.population.view_ids for member in self._members])

    @property
    def host_names(self) -> tuple[str, ...]:
        """The host in each env, by its widths: "4-8-16"."""
        names = ["-".join(str(site.width) for site in host.sites) for host in self.types]
        return tuple(name for name in names for _ in range(self.config.envs_per_type))

    @property
    def blueprint_names(self) -> tuple[str, ...]:
        return tuple(blueprint.name for blueprint in self.menu)

    @property
    def untrained_accuracy(self) -> float:
        return 1.0 / self.task.num_classes

    def find_kernels(self) -> Kernels:
        """The kernels that run the populations; builds the first population to find out."""
        (member,) = self._members_for(self.hosts[:1])
        return member.population.kernels

    def reset(self, generator: torch.Generator) -> HostFacts:
        order = torch.randperm(len(self.hosts), generator=generator)
        families = self.num_envs // self.siblings
        views = torch.randint(self.task.num_views, (families,), generator=generator)
        rng_seed = int(torch.randint(2**31, (1,), generator=generator))
        chosen = [self.hosts[i] for i in order[: self.config.num_types].tolist()]
        self.new_hosts(chosen, views[self._families], rng_seed)
        return self.facts()

    def new_hosts(self, hosts: Sequence[Host], view_ids: Tensor, rng_seed: int) -> None:
        """Start new networks of these architectures on these views."""
        config = self.config
        self._step = 0
        self._rows = minibatch_indices(
            rng_seed,
            self.host_ids.to(self.task.device),
            range(config.episode_steps * config.minibatches),
            config.batch_size,
            self.task.num_rows[view_ids],
        )
        self._members = self._members_for(hosts)
        ids = self.host_ids
        self._on_streams(
            lambda m: m.population.reset(rng_seed, view_ids[m.env_ids], ids[m.env_ids])
        )
        self._on_streams(lambda m: m.governor.reset())
        self._collect_states()

    def preset_seeds(self, states: SlotStates) -> None:
        """Give new hosts seeds before they train, so that they start fully grown."""
        transition = Transition.of(states, germinated=states.has_seed)
        self._on_streams(lambda m: m.population.adopt(transition.at(m.env_ids)))
        self._collect_states()

    def facts(self) -> HostFacts:
        """Facts about this episode's hosts and their data."""
        types, views = [site_facts(host.sites, self.menu) for host in self.types], self.view_ids
        of_types = {name: torch.stack([facts[name] for facts in types]) for name in types[0]}
        of_types |= {name: of_types[name].float() for name in ("cost_params", "cost_macs")}
        of_types["host_params"] = torch.tensor([float(host.num_params) for host in self.types])
        of_types["host_macs"] = torch.tensor([float(host.macs) for host in self.types])
        each = self.config.envs_per_type
        of_data = {"train_rows": self.task.num_rows[views], "locality": self.task.locality[views]}
        return {n: v.repeat_interleave(each, dim=0) for n, v in of_types.items()} | of_data

    def train_step(self, transition: Transition) -> StepMeasurements:
        """One step: every population trains, is checked by its governor and validated."""
        # start all populations before waiting for the first
        losses = self._on_streams(lambda m: self._train(m, transition.at(m.env_ids)))
        ended = self._on_streams(
            lambda m, its: (
                m.governor.check(its),
                self._evaluate(m, end_step(m.population.states)),
            ),
            losses,
        )
        events, evaluations = zip(*ended, strict=True)
        measured = self._on_streams(_measurements, evaluations, events)
        self._step += 1
        self._collect_states()
        self.events = tuple(
            replace(rollback, host=member.envs.start + rollback.host)
            for member, rollbacks in zip(self._members, events, strict=True)
            for rollback in rollbacks
        )
        return StepMeasurements(*(torch.cat(field) for field in zip(*measured, strict=True)))

    def committed_accuracy(self) -> Tensor:
        all_hosts = torch.arange(self.config.envs_per_type)
        evaluations = self._on_streams(
            lambda m: self._evaluate(m, remove_live_seeds(m.population.states, all_hosts))
        )
        self._collect_states()
        return torch.cat(
            self._on_streams(lambda _, found: found.accuracy.float().cpu(), evaluations)
        )

    def accuracy_on(self, x: Tensor, labels: Tensor) -> Tensor:
        """Accuracy `[N]` on rows `[V, rows, *shape]` of each env's view."""
        return torch.cat(
            self._on_streams(lambda m: accuracy_on(m.population, x, labels).float().cpu())
        )

    def _on_streams(self, work: Callable[..., T], *per_member: Sequence[Any]) -> list[T]:
        """The results of `work(member, ...)`, for each population on its own stream."""
        results = []
        for member, *arguments in zip(self._members, *per_member, strict=True):
            with member.on_stream():
                results.append(work(member, *arguments))
        return results

    def _collect_states(self) -> None:
        self.states = SlotStates.cat([member.population.states for member in self._members])

    def _members_for(self, hosts: Sequence[Host]) -> list["_Member"]:
        """A population for each host, built on first use and reused."""
        config, device = self.config, self.task.device
        free = {host: list(members) for host, members in self._built.items()}
        members = []
        for number, host in enumerate(hosts):
            if not free.get(host):
                population = Population(
                    host,
                    self.menu,
                    self.task,
                    num_hosts=config.envs_per_type,
                    batch_size=config.batch_size,
                    optimizer=self.optimizer,
                )
                stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
                built = _Member(population, Governor(population), stream)
                self._built.setdefault(host, []).append(built)
                free[host] = [built]
            first = number * config.envs_per_type
            envs = range(first, first + config.envs_per_type)
            members.append(replace(free[host].pop(), envs=envs))
        return members

    def _train(self, member: "_Member", transition: Transition) -> Tensor:
        first, population = self._step * self.config.minibatches, member.population
        population.adopt(transition.then(begin_step))
        rows = self._rows[first : first + self.config.minibatches]
        population.learning_rates.fill_(self.optimizer.learning_rate * self._learning_share())
        return population.train(rows[:, member.envs.start : member.envs.stop])

    def _learning_share(self) -> float:
        """Share of the full learning rate: 1, then linear down to 0.02 in the last step."""
        last = self.config.episode_steps - 1
        start = self.config.constant_share * last
        fallen = (self._step - start) / max(last - start, 1.0)
        return 1.0 - 0.98 * min(max(fallen, 0.0), 1.0)

    def _evaluate(self, member: "_Member", transition: Transition) -> HostValidation:
        member.population.adopt(transition)
        return validate_hosts(member.population, self.config.validation_rows)


@dataclass(frozen=True)
class _Member:
    """A population, and the envs that are its hosts."""

    population: Population
    governor: Governor
    stream: torch.cuda.Stream | None  # populations train in parallel on a GPU
    envs: range = range(0)

    @property
    def env_ids(self) -> Tensor:
        return torch.arange(self.envs.start, self.envs.stop)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the block on this population's CUDA stream, ordered after the caller's stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield


def _measurements(
    member: _Member, evaluation: HostValidation, rollbacks: Sequence[Rollback]
) -> StepMeasurements:
    population = member.population
    rolled_back = torch.zeros(population.num_hosts, dtype=torch.bool)
    rolled_back[[event.host for event in rollbacks]] = True
    values = evaluation._asdict() | {"gradient_norm": population.gradient_norms()}
    known = values.pop("contribution_known")
    on_cpu = copy_together([value.float() for value in values.values()], torch.device("cpu"))
    return StepMeasurements(
        **dict(zip(values, on_cpu, strict=True)),
        contribution_known=known,
        gradient_known=population.states.has_seed,
        rolled_back=rolled_back,
    )
