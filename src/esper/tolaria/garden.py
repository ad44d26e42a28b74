"""Populations of real networks as one garden: hosts of several architectures, views of one task.

Each episode draws, for every group of envs, the widths of a host, and for every env the view of
the data that it learns from. Hosts of one architecture are one population; populations are built
when first drawn and used again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import Blueprint
from esper.kasmina.hosts import Host
from esper.kasmina.lifecycle import SlotStates, begin_step, end_step, uproot
from esper.tolaria.environment import Evidence, GardenPlan
from esper.tolaria.evaluation import Evaluation, evaluate
from esper.tolaria.governor import Governor, Rollback
from esper.tolaria.optimizers import AdamW, Optimizer
from esper.tolaria.population import Population
from esper.tolaria.tasks import Task, minibatch_indices


@dataclass(frozen=True, kw_only=True)
class GardenConfig:
    """How hosts train in one step of an episode."""

    num_types: int = 8
    """Architectures per episode; each gets the same number of envs."""
    envs_per_type: int = 8
    """Hosts of one architecture."""
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


class PopulationGarden:
    """`num_types` populations side by side; env n is host n % envs_per_type of type n // it."""

    def __init__(
        self,
        hosts: Sequence[Host],
        menu: Sequence[Blueprint],
        task: Task,
        config: GardenConfig | None = None,
        *,
        optimizer: Optimizer | None = None,
    ):
        self.config = config = config or GardenConfig()
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
            raise ValueError("hosts of one garden have the same number of slots")
        self.hosts, self.menu, self.task = tuple(hosts), tuple(menu), task
        self.optimizer = optimizer or AdamW()
        self.num_envs = config.num_types * config.envs_per_type
        self.num_slots, self.num_blueprints = hosts[0].num_slots, len(menu)
        self.events: tuple[Rollback, ...] = ()  # of the last step, hosts numbered as envs
        self._populations: dict[tuple[Host, int], Population] = {}
        self._plots: list[_Plot] = []

    @property
    def states(self) -> SlotStates:
        return SlotStates.cat([plot.population.states for plot in self._plots])

    @property
    def types(self) -> tuple[Host, ...]:
        """The architectures of this episode."""
        return tuple(plot.population.host for plot in self._plots)

    @property
    def view_ids(self) -> Tensor:
        """The view of the data that each env learns from, `[N]`."""
        return torch.cat([plot.population.view_ids for plot in self._plots])

    def reset(self, generator: torch.Generator) -> GardenPlan:
        order = torch.randperm(len(self.hosts), generator=generator).tolist()
        views = torch.randint(self.task.num_views, (self.num_envs,), generator=generator)
        rng_seed = int(torch.randint(2**31, (1,), generator=generator))
        chosen = [self.hosts[i] for i in order[: self.config.num_types]]
        self.plant(chosen, views, rng_seed)
        return self.plan()

    def plant(self, hosts: Sequence[Host], view_ids: Tensor, rng_seed: int) -> None:
        """New networks of these architectures, on these views, from this seed."""
        each = self.config.envs_per_type
        self._rng_seed, self._step = rng_seed, 0
        self._plots = []
        for number, host in enumerate(hosts):
            population = self._population(host, number)
            population.reset(rng_seed, view_ids[number * each : (number + 1) * each])
            self._plots.append(_Plot(population, Governor(population)))

    def plan(self) -> GardenPlan:
        """What is known of this episode's hosts before they train."""
        plans = [_plan_of(host, self.menu) for host in self.types]
        each = self.config.envs_per_type
        return GardenPlan(
            *(
                torch.stack(field).repeat_interleave(each, dim=0)
                for field in zip(*plans, strict=True)
            )
        )

    def grow(self, states: SlotStates) -> Evidence:
        """One step: every population trains, is watched and validated."""
        each = self.config.envs_per_type
        evidence, events = [], []
        for number, plot in enumerate(self._plots):
            first = number * each
            part = states.at(torch.arange(first, first + each))
            plot.population.adopt(begin_step(part))
            rollbacks = plot.governor.watch(self._train(plot.population))
            plot.population.adopt(end_step(plot.population.states))
            evidence.append(_evidence(plot.population, self._evaluate(plot), rollbacks))
            events += [_renumbered(event, first) for event in rollbacks]
        self._step += 1
        self.events = tuple(events)
        return Evidence(*(torch.cat(field) for field in zip(*evidence, strict=True)))

    def committed_accuracy(self) -> Tensor:
        accuracies = []
        for plot in self._plots:
            population = plot.population
            population.adopt(uproot(population.states, torch.arange(population.num_hosts)))
            accuracies.append(self._evaluate(plot).accuracy.float().cpu())
        return torch.cat(accuracies)

    def _population(self, host: Host, number: int) -> Population:
        """The population of an architecture in a place: host ids are env numbers."""
        if (host, number) not in self._populations:
            each = self.config.envs_per_type
            self._populations[host, number] = Population(
                host,
                self.menu,
                self.task,
                num_hosts=each,
                batch_size=self.config.batch_size,
                optimizer=self.optimizer,
                host_ids=torch.arange(number * each, (number + 1) * each),
            )
        return self._populations[host, number]

    def _train(self, population: Population) -> Tensor:
        config = self.config
        first = self._step * config.minibatches
        rows = minibatch_indices(
            self._rng_seed,
            population.host_ids,
            range(first, first + config.minibatches),
            config.batch_size,
            self.task.num_rows[population.view_ids],
        )
        population.learning_rates.fill_(self.optimizer.learning_rate * self._learning_share())
        return population.train(rows)

    def _learning_share(self) -> float:
        """Of the full learning rate: 1, then a straight line down to 0.02 in the last step."""
        last = self.config.episode_steps - 1
        start = self.config.constant_share * last
        fallen = (self._step - start) / max(last - start, 1.0)
        return 1.0 - 0.98 * min(max(fallen, 0.0), 1.0)

    def _evaluate(self, plot: "_Plot") -> Evaluation:
        return evaluate(plot.population, self.config.validation_rows)


@dataclass(frozen=True)
class _Plot:
    population: Population
    governor: Governor


def _plan_of(host: Host, menu: Sequence[Blueprint]) -> GardenPlan:
    """What is known of one host, without the axis of envs."""
    sites = host.sites
    programs = [[b.program(site) if b.fits(site) else None for b in menu] for site in sites]

    def per_choice(attribute: str) -> Tensor:
        return torch.tensor(
            [[float(getattr(p, attribute)) if p else 0.0 for p in row] for row in programs]
        )

    return GardenPlan(
        host_params=torch.tensor(float(host.num_params)),
        host_macs=torch.tensor(float(host.macs)),
        slot_exists=torch.ones(len(sites), dtype=torch.bool),
        site_kind=torch.tensor([int(site.kind) for site in sites]),
        site_width=torch.tensor([float(site.width) for site in sites]),
        site_depth=torch.linspace(0, 1, len(sites)),
        fits=torch.tensor([[p is not None for p in row] for row in programs]),
        cost_params=per_choice("num_params"),
        cost_macs=per_choice("macs"),
        reach=per_choice("reach"),
        depth=per_choice("depth"),
    )


def _evidence(
    population: Population, evaluation: Evaluation, rollbacks: Sequence[Rollback]
) -> Evidence:
    rolled_back = torch.zeros(population.num_hosts, dtype=torch.bool)
    rolled_back[[event.host for event in rollbacks]] = True
    return Evidence(
        loss=evaluation.loss.float().cpu(),
        accuracy=evaluation.accuracy.float().cpu(),
        contribution=evaluation.contribution.float().cpu(),
        contribution_error=evaluation.contribution_error.float().cpu(),
        contribution_known=evaluation.contribution_known.cpu(),
        gradient_norm=population.gradient_norms().float().cpu(),
        gradient_known=population.states.has_seed,
        rolled_back=rolled_back,
    )


def _renumbered(event: Rollback, first: int) -> Rollback:
    return Rollback(
        event.host + first, event.breakage, event.loss, event.usual_loss, event.steps_lost
    )
