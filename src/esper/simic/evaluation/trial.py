"""Several ways to grow on the same hosts: arms that differ in nothing else.

An arm has one or more *lanes*, such as one for each rent; every lane holds all H hosts. Hosts of
one number are the same in every lane: architecture, initial weights, data and their order.

    trial = Trial(hosts=hosts, view_ids=(0, 1), repeats=4, task=task, menu=menu)
    alone, grown = trial.run([Arm("host alone", ConstantPlan(())), Arm("heuristic", heuristic)])
    (grown.test - alone.test).mean()
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import Blueprint
from esper.kasmina.hosts import Host
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.protocols import Controller, StepOutcome
from esper.leyline.reports import Reports
from esper.leyline.stages import SeedStage
from esper.simic.rewards import growth_score
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tolaria.environment import GrowthConfig, GrowthEnvironment
from esper.tolaria.host_batch import HostBatchConfig, PopulationBatch
from esper.tolaria.optimizers import AdamW, Optimizer
from esper.tolaria.tasks import Task

FORWARD_FLOPS = 2  # of a multiply-add: a multiply and an add
TRAINING_FLOPS = 3 * FORWARD_FLOPS  # twice as much backward

Examine = Callable[[PopulationBatch], Tensor]


@dataclass(frozen=True, eq=False)
class Seeds:
    """The seeds of finished networks, each `[lanes, H, S]`."""

    blueprint: Tensor  # -1: none
    style: Tensor  # BlendStyle
    alpha: Tensor  # weight in the blend


@dataclass(frozen=True, eq=False)
class Arm:
    """A way in which networks come to be."""

    name: str
    controller: Controller
    rents: tuple[float, ...] = (0.1,)  # one per lane: what the controller is told
    born: Seeds | None = None  # seeds that are there, committed, before training starts


@dataclass(frozen=True, kw_only=True, eq=False)
class Harvest:
    """What came of an arm's networks, each `[lanes, H]` in float64; accuracy is 0 to 1."""

    validation: Tensor
    test: Tensor  # NaN where nobody looked
    host_params: Tensor
    added_params: Tensor  # of committed seeds
    params: Tensor
    macs: Tensor  # multiply-adds of one prediction
    compute_charge: Tensor
    training_flops: Tensor  # seeds count as long as they live, and so does all watching
    watching_flops: Tensor  # the part of it in validation, with all seeds and without each
    rolled_back: Tensor
    seeds: Seeds  # that were committed

    def scores(self, rents: Sequence[float], *, accuracy: Tensor | None = None) -> Tensor:
        """The test scores at these rents, one per lane, or all of them for a single lane."""
        rent = torch.tensor(rents, dtype=torch.float64).unsqueeze(1)
        accuracy = self.test if accuracy is None else accuracy
        return growth_score(
            accuracy, self.added_params, self.host_params, rent, self.compute_charge
        )

    def validation_scores(self, rents: Sequence[float]) -> Tensor:
        """What may be chosen by: as `scores`, on validation rows."""
        return self.scores(rents, accuracy=self.validation)

    @classmethod
    def cat(cls, harvests: Sequence["Harvest"]) -> "Harvest":
        """The lanes of several arms as those of one."""
        arrays = {
            e.name: torch.cat([getattr(h, e.name) for h in harvests])
            for e in fields(cls)
            if e.name != "seeds"
        }
        seeds = {
            e.name: torch.cat([getattr(h.seeds, e.name) for h in harvests]) for e in fields(Seeds)
        }
        return cls(**arrays, seeds=Seeds(**seeds))


@dataclass(frozen=True)
class Cost:
    """What it took: networks trained, and the arithmetic of it."""

    networks: int = 0
    flops: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.networks + other.networks, self.flops + other.flops)

    def times(self, factor: float) -> "Cost":
        """As many networks, each of which took `factor` as much."""
        return Cost(self.networks, factor * self.flops)

    @classmethod
    def of(cls, harvests: Sequence[Harvest]) -> "Cost":
        return cls(
            sum(harvest.validation.numel() for harvest in harvests),
            sum(float(harvest.training_flops.sum()) for harvest in harvests),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """Hosts, data and training that arms share; H = hosts x views x repeats, in this order."""

    hosts: tuple[Host, ...]
    view_ids: tuple[int, ...]
    repeats: int
    task: Task
    menu: tuple[Blueprint, ...]
    host_batch: HostBatchConfig = HostBatchConfig()
    growth: GrowthConfig = GrowthConfig()
    optimizer: Optimizer = AdamW()
    examine: Examine | None = None  # reads the test rows; left out where something is chosen
    max_macs: float = 5e7
    """Multiply-adds of one row through all hosts that train side by side: the larger they are, the
    fewer at a time. Further arms wait for their turn."""

    @property
    def num_hosts(self) -> int:
        """H."""
        return len(self.hosts) * len(self.view_ids) * self.repeats

    @property
    def max_lanes(self) -> int:
        """Lanes that train side by side."""
        each = self.num_hosts // len(self.hosts)
        return max(1, int(self.max_macs // (each * sum(host.macs for host in self.hosts))))

    @property
    def type_of_host(self) -> Tensor:
        """The type of each host `[H]`: its architecture and view, numbered in order."""
        return torch.arange(self.num_hosts) // self.repeats

    @property
    def type_names(self) -> tuple[str, ...]:
        widths = ["-".join(str(site.width) for site in host.sites) for host in self.hosts]
        views = [self.task.names[view] for view in self.view_ids]
        return tuple(f"{w} on {view}" for w, view in product(widths, views))

    def run(self, arms: Sequence[Arm], *, rng_seed: int = 0) -> list[Harvest]:
        """The harvest of every arm; hosts of another `rng_seed` are others of the same types."""
        harvests, wave = [], list[Arm]()
        for arm in arms:
            if wave and sum(len(a.rents) for a in (*wave, arm)) > self.max_lanes:
                harvests += self._run_wave(wave, rng_seed)
                wave = []
            wave.append(arm)
        return harvests + self._run_wave(wave, rng_seed)

    def _run_wave(self, arms: Sequence[Arm], rng_seed: int) -> list[Harvest]:
        num_lanes = sum(len(arm.rents) for arm in arms)
        each = self.num_hosts // len(self.hosts)
        config = replace(self.host_batch, num_types=len(self.hosts), envs_per_type=num_lanes * each)
        names = torch.arange(self.num_hosts).view(len(self.hosts), 1, each)
        views = torch.tensor(self.view_ids).repeat_interleave(self.repeats)
        host_batch = PopulationBatch(
            self.hosts,
            self.menu,
            self.task,
            config,
            optimizer=self.optimizer,
            host_ids=names.expand(-1, num_lanes, -1).flatten(),
        )
        host_batch.new_hosts(self.hosts, views.repeat(len(self.hosts) * num_lanes), rng_seed)
        lanes = Lanes(arms, self.num_hosts, len(self.hosts))
        host_batch.preset_seeds(lanes.born(host_batch.states))
        environment = GrowthEnvironment(host_batch, self.growth)
        environment.begin(host_batch.facts(), lanes.rent)
        final = play(environment, lanes)
        if self.examine:
            final = final._replace(test=self.examine(host_batch))
        return [
            harvest(final, ids, self.rows_read, config.validation_rows) for ids in lanes.env_ids
        ]

    @property
    def rows_read(self) -> int:
        """Examples that a network trains on."""
        return self.host_batch.minibatches * self.host_batch.batch_size * self.growth.num_steps

    def flops_of(self, host: Host) -> float:
        """What it takes to train a host that nothing grows in, on every view and repeat."""
        looks = (1 + self.growth.num_steps) * self.host_batch.validation_rows
        each = self.rows_read * TRAINING_FLOPS + looks * FORWARD_FLOPS
        return float(len(self.view_ids) * self.repeats * each * host.macs)


class Lanes:
    """Which env is which host of which arm: envs lie by (place, lane, host in the place)."""

    def __init__(self, arms: Sequence[Arm], num_hosts: int, num_places: int = 1):
        self.arms = tuple(arms)
        rents = torch.tensor([rent for arm in arms for rent in arm.rents])
        each, host = num_hosts // num_places, torch.arange(num_hosts)
        lane = torch.arange(len(rents)).unsqueeze(1)
        ids = (host // each) * (len(rents) * each) + lane * each + host % each
        self.env_ids = torch.split(ids, [len(arm.rents) for arm in arms])  # [lanes, H] per arm
        self.rent = torch.empty(ids.numel())
        self.rent[ids] = rents.unsqueeze(1).expand_as(ids)

    def born(self, states: SlotStates) -> SlotStates:
        """Dormant states with the seeds that arms begin with: committed, at their weights."""
        for arm, ids in zip(self.arms, self.env_ids, strict=True):
            if arm.born is not None:
                blueprint = arm.born.blueprint.flatten(0, 1)
                is_there = blueprint >= 0
                weight = (arm.born.alpha.flatten(0, 1) * is_there).to(states.alpha.dtype)
                seeds = replace(
                    states.at(ids.flatten()),
                    blueprint=blueprint,
                    style=arm.born.style.flatten(0, 1),
                    stage=torch.where(is_there, int(SeedStage.FOSSILIZED), int(SeedStage.DORMANT)),
                    alpha=weight,
                    alpha_target=weight,
                )
                states = states.put(seeds, ids.flatten())
        return states


class Final(NamedTuple):
    """How an episode ended, in every env."""

    reports: Reports
    outcome: StepOutcome
    rolled_back: Tensor
    style: Tensor  # [N, S], of the seeds
    watched_macs: Tensor  # of one row through all passes that only look
    test: Tensor


def play(environment: GrowthEnvironment, lanes: Lanes) -> Final:
    """One episode that has begun, each arm's envs under its own controller."""
    for arm, ids in zip(lanes.arms, lanes.env_ids, strict=True):
        arm.controller.begin(torch.arange(ids.numel()))
    space, num_envs = environment.action_space, environment.num_envs
    actions = torch.zeros(num_envs, space.num_heads, dtype=torch.int64)
    rolled_back = torch.zeros(num_envs, dtype=torch.bool)
    watched_macs, reports = torch.zeros(num_envs), environment.observe()
    for _ in range(environment.config.num_steps):
        for arm, ids in zip(lanes.arms, lanes.env_ids, strict=True):
            part = reports.select(ids.flatten())
            masks = compute_batch_masks(part, space)
            actions[ids.flatten()] = arm.controller.decide(part, masks).cpu()
        outcome = environment.step(actions)
        rolled_back |= outcome.rolled_back
        reports = environment.observe()
        counterfactuals = (reports.contribution_known & (reports.contribution_age == 0)).sum(dim=-1)
        watched_macs += reports.macs * (1 + counterfactuals)
    watched_macs += reports.macs  # once more, with what is committed
    unread = torch.full((num_envs,), torch.nan)
    style = environment.host_batch.states.style
    return Final(reports, outcome, rolled_back, style, watched_macs, unread)


def harvest(final: Final, env_ids: Tensor, rows: int, validation_rows: int) -> Harvest:
    """An arm's part of an episode in which every network read `rows` examples.

    `validation_rows` were looked at in every pass that only looks.
    """
    reports, outcome = final.reports, final.outcome
    is_committed = reports.stage == SeedStage.FOSSILIZED
    macs = reports.host_macs + (reports.seed_macs * is_committed).sum(dim=-1)
    trained_macs = reports.host_macs * (1 + outcome.added_compute)

    def pick(per_env: Tensor) -> Tensor:
        return per_env[env_ids].double()

    watching_flops = pick(final.watched_macs) * validation_rows * FORWARD_FLOPS
    return Harvest(
        validation=pick(outcome.accuracy),
        test=pick(final.test),
        host_params=pick(reports.host_params),
        added_params=pick(outcome.added_params),
        params=pick(reports.host_params + outcome.added_params),
        macs=pick(macs),
        compute_charge=pick(reports.compute_price * outcome.added_compute),
        training_flops=pick(trained_macs) * rows * TRAINING_FLOPS + watching_flops,
        watching_flops=watching_flops,
        rolled_back=final.rolled_back[env_ids],
        seeds=Seeds(
            torch.where(is_committed, reports.blueprint, -1)[env_ids],
            torch.where(is_committed, final.style, 0)[env_ids],
            torch.where(is_committed, reports.alpha, 0.0)[env_ids],
        ),
    )
