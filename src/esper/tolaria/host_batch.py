"""Populations of real networks as one host_batch: hosts of several architectures, views of one task.

Each episode draws, for every group of envs, the widths of a host, and for every env the view of
the data that it learns from. Hosts of one architecture are one population; populations are built
when first drawn and used again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import Blueprint
from esper.kasmina.hosts import Host
from esper.kasmina.lifecycle import (
    SlotStates,
    Transition,
    begin_step,
    end_step,
    remove_live_seeds,
)
from esper.tolaria.evaluation import Evaluation, accuracy_on, evaluate
from esper.tolaria.governor import Governor, Rollback
from esper.tolaria.optimizers import AdamW, Optimizer
from esper.tolaria.population import Population
from esper.tolaria.reports import HostFacts, StepMeasurements
from esper.tolaria.steps import Kernels
from esper.tolaria.tasks import Task, minibatch_indices


@dataclass(frozen=True, kw_only=True)
class HostBatchConfig:
    """How hosts train in one step of an episode."""

    num_types: int = 8
    """Architectures per episode; each gets the same number of envs."""
    envs_per_type: int = 8
    """Hosts of one architecture."""
    siblings: int = 1
    """Envs that share a start, a view, an order of the data and a rent: only actions differ."""
    minibatches: int = 20
    """Minibatches per step and host."""
    batch_size: int = 100
    """Rows of a minibatch."""
    validation_rows: int = 400
    """Validation rows that a step's accuracy is measured on."""
    episode_steps: int = 25
    """Steps that the learning rate is scheduled over: constant, then falling to a fiftieth."""
    constant_share: float = 0.7
    """Share of the episode at the full learning rate."""

    def __post_init__(self) -> None:
        for name in ("num_types", "envs_per_type", "minibatches", "batch_size", "episode_steps",
                     "validation_rows"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use 1 or more")
        if self.siblings < 1 or self.envs_per_type % self.siblings:
            raise ValueError(
                f"envs_per_type={self.envs_per_type} does not split into siblings={self.siblings}"
            )


class PopulationBatch:
    """`num_types` populations side by side; env n is host n % envs_per_type of type n // it.

    Envs draw random numbers under the names `host_ids` `[N]`, one for each group of siblings if
    left out: hosts of one architecture, view and name begin alike and read the same rows in the
    same order.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        menu: Sequence[Blueprint],
        task: Task,
        config: HostBatchConfig | None = None,
        *,
        optimizer: Optimizer | None = None,
        host_ids: Tensor | None = None,
    ):
        self.config = config = config or HostBatchConfig()
        if len(hosts) < config.num_types:
            raise ValueError(
                f"{len(hosts)} hosts to draw from, but num_types={config.num_types} per episode"
            )
        available = task.validation_y.shape[1]
        if config.validation_rows > available:
            raise ValueError(
                f"validation_rows={config.validation_rows}, but {task.names} has {available}"
            )
        if len({host.num_slots for host in hosts}) != 1:
            raise ValueError("hosts of one host_batch have the same number of slots")
        self.hosts, self.menu, self.task = tuple(hosts), tuple(menu), task
        self.optimizer = optimizer or AdamW()
        self.num_envs, self.siblings = config.num_types * config.envs_per_type, config.siblings
        families = torch.arange(self.num_envs) // config.siblings
        self.host_ids = families if host_ids is None else host_ids
        self.num_slots, self.num_blueprints = hosts[0].num_slots, len(menu)
        self.events: tuple[Rollback, ...] = ()  # of the last step, hosts numbered as envs
        self._built: dict[Host, list[_Member]] = {}
        self._members: list[_Member] = []  # of this episode

    @property
    def states(self) -> SlotStates:
        return self._states

    @property
    def types(self) -> tuple[Host, ...]:
        """The architectures of this episode."""
        return tuple(member.population.host for member in self._members)

    @property
    def view_ids(self) -> Tensor:
        """The view of the data that each env learns from, `[N]`."""
        return torch.cat([member.population.view_ids for member in self._members])

    @property
    def kernels(self) -> Kernels:
        """The way in which the populations are run."""
        (member,) = self._members_for(self.hosts[:1])
        return member.population.kernels

    def reset(self, generator: torch.Generator) -> HostFacts:
        order = torch.randperm(len(self.hosts), generator=generator).tolist()
        families = self.num_envs // self.siblings
        views = torch.randint(self.task.num_views, (families,), generator=generator)
        rng_seed = int(torch.randint(2**31, (1,), generator=generator))
        chosen = [self.hosts[i] for i in order[: self.config.num_types]]
        self.new_hosts(chosen, views.repeat_interleave(self.siblings), rng_seed)
        return self.facts()

    def new_hosts(self, hosts: Sequence[Host], view_ids: Tensor, rng_seed: int) -> None:
        """New networks of these architectures, on these views, from this seed."""
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
        for member in self._members:
            with member.on_stream():
                ids = member.env_ids
                member.population.reset(rng_seed, view_ids[ids], self.host_ids[ids])
                member.governor.reset()
        self._collect_states()

    def preset_seeds(self, states: SlotStates) -> None:
        """Give new hosts seeds before they train, so that they start fully grown."""
        transition = Transition.of(states, germinated=states.has_seed)
        for member in self._members:
            with member.on_stream():
                member.population.adopt(transition.at(member.env_ids))
        self._collect_states()

    def facts(self) -> HostFacts:
        """What is known of this episode's hosts and their data before they train."""
        types = [_known_of(host, self.menu) for host in self.types]
        of_types = {name: torch.stack([known[name] for known in types]) for name in types[0]}
        each, views = self.config.envs_per_type, self.view_ids
        return HostFacts(
            **{name: value.repeat_interleave(each, dim=0) for name, value in of_types.items()},
            train_rows=self.task.num_rows[views],
            locality=self.task.locality[views],
        )

    def train_step(self, transition: Transition) -> StepMeasurements:
        """One step: every population trains, is checked by its governor and validated."""
        if self._step == self.config.episode_steps:
            raise ValueError(f"episode_steps={self._step} are over; reset() or new_hosts() anew")
        losses, evaluations, events = [], [], []
        for member in self._members:  # all are sent off before the first is waited for
            with member.on_stream():
                member.population.adopt(transition.at(member.env_ids).then(begin_step))
                losses.append(self._train(member))
        for member, loss in zip(self._members, losses, strict=True):
            with member.on_stream():
                events.append(member.governor.watch(loss))
                member.population.adopt(end_step(member.population.states))
                evaluations.append(self._evaluate(member))
        measured = []
        for member, evaluation, rollbacks in zip(self._members, evaluations, events, strict=True):
            with member.on_stream():
                measured.append(_measurements(member.population, evaluation, rollbacks))
        self._step += 1
        self._collect_states()
        self.events = tuple(
            replace(rollback, host=member.envs.start + rollback.host)
            for member, rollbacks in zip(self._members, events, strict=True)
            for rollback in rollbacks
        )
        return StepMeasurements(*(torch.cat(field) for field in zip(*measured, strict=True)))

    def committed_accuracy(self) -> Tensor:
        evaluations = []
        for member in self._members:
            with member.on_stream():
                all_hosts = torch.arange(member.population.num_hosts)
                member.population.adopt(remove_live_seeds(member.population.states, all_hosts))
                evaluations.append(self._evaluate(member))
        self._collect_states()
        accuracies = []
        for member, evaluation in zip(self._members, evaluations, strict=True):
            with member.on_stream():
                accuracies.append(evaluation.accuracy.float().cpu())
        return torch.cat(accuracies)

    def accuracy_on(self, x: Tensor, labels: Tensor) -> Tensor:
        """Accuracy `[N]` on rows `[V, rows, *shape]` of each env's view, such as test rows."""
        accuracies = []
        for member in self._members:
            with member.on_stream():
                accuracies.append(accuracy_on(member.population, x, labels).float().cpu())
        return torch.cat(accuracies)

    def _collect_states(self) -> None:
        self._states = SlotStates.cat([member.population.states for member in self._members])

    def _members_for(self, hosts: Sequence[Host]) -> list["_Member"]:
        """A population for each, built when first needed and used again in any place."""
        config, free = self.config, {host: list(members) for host, members in self._built.items()}
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
                built = _Member.of(population)
                self._built.setdefault(host, []).append(built)
                free[host] = [built]
            first = number * config.envs_per_type
            envs = range(first, first + config.envs_per_type)
            members.append(replace(free[host].pop(), envs=envs))
        return members

    def _train(self, member: "_Member") -> Tensor:
        first, population = self._step * self.config.minibatches, member.population
        rows = self._rows[
            first : first + self.config.minibatches, member.envs.start : member.envs.stop
        ]
        population.learning_rates.fill_(self.optimizer.learning_rate * self._learning_share())
        return population.train(rows)

    def _learning_share(self) -> float:
        """Of the full learning rate: 1, then a straight line down to 0.02 in the last step."""
        last = self.config.episode_steps - 1
        start = self.config.constant_share * last
        fallen = (self._step - start) / max(last - start, 1.0)
        return 1.0 - 0.98 * min(max(fallen, 0.0), 1.0)

    def _evaluate(self, member: "_Member") -> Evaluation:
        return evaluate(member.population, self.config.validation_rows)


@dataclass(frozen=True)
class _Member:
    """A population in the host_batch, and the envs that are its hosts."""

    population: Population
    governor: Governor
    stream: torch.cuda.Stream | None  # of its own, so that populations train side by side
    envs: range = range(0)

    @classmethod
    def of(cls, population: Population) -> "_Member":
        device = population.task.device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        return cls(population, Governor(population), stream)

    @property
    def env_ids(self) -> Tensor:
        return torch.arange(self.envs.start, self.envs.stop)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """What is done inside comes after what this member and the caller did before."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield


def _known_of(host: Host, menu: Sequence[Blueprint]) -> dict[str, Tensor]:
    """What is known of one host, by the names of a plan, without the axis of envs."""
    sites = host.sites
    programs = [[b.program(site) if b.fits(site) else None for b in menu] for site in sites]

    def per_choice(attribute: str) -> Tensor:
        return torch.tensor(
            [[float(getattr(p, attribute)) if p else 0.0 for p in row] for row in programs]
        )

    return {
        "host_params": torch.tensor(float(host.num_params)),
        "host_macs": torch.tensor(float(host.macs)),
        "slot_exists": torch.ones(len(sites), dtype=torch.bool),
        "site_kind": torch.tensor([int(site.kind) for site in sites]),
        "site_width": torch.tensor([float(site.width) for site in sites]),
        "site_depth": torch.linspace(0, 1, len(sites)),
        "fits": torch.tensor([[p is not None for p in row] for row in programs]),
        "cost_params": per_choice("num_params"),
        "cost_macs": per_choice("macs"),
        "reach": per_choice("reach"),
        "depth": per_choice("depth"),
    }


def _measurements(
    population: Population, evaluation: Evaluation, rollbacks: Sequence[Rollback]
) -> StepMeasurements:
    rolled_back = torch.zeros(population.num_hosts, dtype=torch.bool)
    rolled_back[[event.host for event in rollbacks]] = True
    per_host = torch.stack((evaluation.loss, evaluation.accuracy), dim=-1)
    measured = (
        per_host,
        evaluation.contribution,
        evaluation.contribution_error,
        population.gradient_norms(),
    )
    on_cpu = torch.cat(measured, dim=-1).float().cpu()  # one wait for the device
    per_host, contribution, error, gradient_norm = torch.split(
        on_cpu, [part.shape[-1] for part in measured], dim=-1
    )
    return StepMeasurements(
        loss=per_host[:, 0],
        accuracy=per_host[:, 1],
        contribution=contribution,
        contribution_error=error,
        contribution_known=evaluation.contribution_known,
        gradient_norm=gradient_norm,
        gradient_known=population.states.has_seed,
        rolled_back=rolled_back,
    )
