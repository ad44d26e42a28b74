"""Train several arms on the same hosts.

An *arm* is one way to build networks. It has one *lane* per rent, and every lane trains all H hosts.
Host h is identical in every lane: architecture, initial weights, data and data order.

    experiment = PairedExperiment(hosts=hosts, view_ids=(0, 1), repeats=4, task=task, menu=menu)
    alone, grown = experiment.run([Arm("host alone", ConstantPlan()), Arm("heuristic", heuristic)])
    (grown.validation - alone.validation).mean()
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Literal

import torch
from torch import Tensor

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.hosts import Host
from esper.leyline.arrays import TensorFields
from esper.leyline.protocols import Controller
from esper.leyline.reports import Reports
from esper.leyline.stages import SeedStage
from esper.runtime.checks import require_at_least, require_positive
from esper.runtime.ranks import ALONE, EnvShare, Ranks
from esper.simic.growth.rewards import growth_score
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tolaria.environment import GrowthConfig, GrowthEnvironment
from esper.tolaria.host_batch import HostBatchConfig, PopulationBatch
from esper.tolaria.optimizers import AdamW
from esper.tolaria.tasks import Task

FORWARD_FLOPS = 2  # per multiply-add
TRAINING_FLOPS = 3 * FORWARD_FLOPS  # the backward pass costs two forward passes

OnStep = Callable[[int, int], None]  # steps of `run` that are done, and all of them
Rows = Literal["test", "validation"]


@dataclass(frozen=True, eq=False)
class Arm:
    """One way to build networks."""

    name: str
    controller: Controller
    rents: tuple[float, ...] = (0.1,)  # one per lane, shown to the controller
    search_networks: int = 0  # trained before, to learn or to search


@dataclass(frozen=True, kw_only=True, eq=False)
class ArmOutcome(TensorFields):
    """The finished networks of an arm, each field `[lanes, H]`; accuracies are 0 to 1."""

    validation: Tensor
    test: Tensor  # NaN unless the experiment measures it
    host_params: Tensor
    added_params: Tensor  # of committed seeds
    params: Tensor
    macs: Tensor  # multiply-adds of one prediction
    compute_charge: Tensor
    training_flops: Tensor  # includes removed seeds and validation
    rolled_back: Tensor
    blueprint: Tensor  # of committed seeds, [lanes, H, S]; -1: empty slot
    style: Tensor  # BlendStyle of these seeds
    alpha: Tensor  # their blend weights

    def scores(self, rents: Sequence[float], rows: Rows = "test") -> Tensor:
        """Scores at one rent per lane; a single lane is scored at every rent."""
        accuracy = self.test if rows == "test" else self.validation
        rent = torch.tensor(rents, dtype=torch.float64).unsqueeze(1)
        sizes = self.added_params, self.host_params
        return growth_score(accuracy, *sizes, rent, self.compute_charge)


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedExperiment:
    """Hosts, data and training shared by all arms; H = hosts x views x repeats, in this order."""

    hosts: tuple[Host, ...]
    view_ids: tuple[int, ...]
    repeats: int
    task: Task
    menu: tuple[Blueprint, ...]
    host_batch: HostBatchConfig = HostBatchConfig()
    growth: GrowthConfig = GrowthConfig()
    optimizer: AdamW = AdamW()
    # leave out in experiments that choose something
    measure_test: Callable[[PopulationBatch], Tensor] | None = None
    max_macs: float = 5e7
    """Multiply-adds of one row through all hosts that train in parallel; other arms train later."""
    ranks: Ranks = ALONE  # that the networks of every architecture are split over
    on_step: OnStep = lambda done, total: None

    @property
    def num_hosts(self) -> int:
        """H."""
        return len(self.hosts) * len(self.view_ids) * self.repeats

    @property
    def max_lanes(self) -> int:
        """Lanes that train in parallel."""
        copies = self.num_hosts // len(self.hosts)
        return max(1, int(self.max_macs // (copies * sum(host.macs for host in self.hosts))))

    @property
    def type_names(self) -> tuple[str, ...]:
        widths = ["-".join(str(site.width) for site in host.sites) for host in self.hosts]
        views = [self.task.names[view] for view in self.view_ids]
        return tuple(f"{w} on {view}" for w, view in product(widths, views))

    @property
    def training_rows(self) -> int:
        """Examples that each network trains on."""
        return self.host_batch.minibatches * self.host_batch.batch_size * self.growth.num_steps

    def run(self, arms: Sequence[Arm], *, rng_seed: int = 0) -> list[ArmOutcome]:
        """The outcome of every arm; another `rng_seed` gives other hosts of the same types."""
        groups: list[list[Arm]] = [[]]  # that train together
        for arm in arms:
            if groups[-1] and sum(len(a.rents) for a in (*groups[-1], arm)) > self.max_lanes:
                groups.append([])
            groups[-1].append(arm)
        outcomes, done = list[ArmOutcome](), count(1)
        total = len(groups) * self.growth.num_steps
        part = replace(self, on_step=lambda *_: self.on_step(next(done), total))
        for group in groups:
            layout = EnvLayout(group, self.num_hosts, len(self.hosts), self.ranks)
            outcomes += part.play(layout, self.new_hosts(layout, rng_seed))
        return outcomes

    def new_hosts(self, layout: "EnvLayout", rng_seed: int = 0) -> PopulationBatch:
        """The hosts of every lane, untrained; with several ranks, those of this rank."""
        num_types, ids = len(self.hosts), layout.host_ids[layout.share.ids]
        views = torch.tensor(self.view_ids).repeat_interleave(self.repeats).repeat(num_types)
        num_envs = len(ids) // num_types
        config = replace(self.host_batch, num_types=num_types, envs_per_type=num_envs)
        host_batch = PopulationBatch(
            self.hosts, self.menu, self.task, config, optimizer=self.optimizer, host_ids=ids
        )
        host_batch.new_hosts(self.hosts, views[ids], rng_seed)
        return host_batch

    def play(self, layout: "EnvLayout", host_batch: PopulationBatch) -> list[ArmOutcome]:
        """Train new hosts to the end; the outcome of every arm."""
        environment = GrowthEnvironment(host_batch, self.growth)
        environment.begin(host_batch.facts(), layout.rent[layout.share.ids])
        rows = self.training_rows, self.host_batch.validation_rows
        own = play(environment, layout, *rows, self.on_step)
        if self.measure_test:
            own = replace(own, test=self.measure_test(host_batch).double())
        parts = self.ranks.gather((layout.share.ids, own.tensors()))
        finished = ArmOutcome(**layout.share.join(parts))
        return [finished.at(ids) for ids in layout.env_ids]  # [N] to [lanes, H] of each arm


class EnvLayout:
    """Maps envs to the hosts of each arm; envs are ordered by (architecture, lane, copy)."""

    def __init__(
        self, arms: Sequence[Arm], num_hosts: int, num_architectures: int = 1, ranks: Ranks = ALONE
    ):
        self.arms, self.ranks = tuple(arms), ranks
        rents = torch.tensor([rent for arm in arms for rent in arm.rents])
        envs = torch.arange(len(rents) * num_hosts).view(num_architectures, len(rents), -1)
        ids = envs.transpose(0, 1).flatten(1)
        self.env_ids = torch.split(ids, [len(arm.rents) for arm in arms])  # [lanes, H] per arm
        place = ids.flatten().argsort()  # of each env in [lanes, H]
        self.rent, self.host_ids = rents[place // num_hosts], place % num_hosts
        # of every architecture, a rank has as many envs as the others or one more
        parts = envs.flatten(1).tensor_split(ranks.size, dim=1)
        if not parts[-1].numel():
            raise ValueError(
                f"{envs[0].numel()} networks of each architecture are too few for {ranks.size} "
                "ranks; use fewer ranks"
            )
        self.share = EnvShare(len(place), parts[ranks.rank].flatten())


def play(
    environment: GrowthEnvironment,
    layout: EnvLayout,
    training_rows: int,
    validation_rows: int,
    on_step: OnStep = lambda done, total: None,
) -> ArmOutcome:
    """Play one episode, each arm's envs under its own controller; this rank's networks, `[n]`.

    `training_rows` is the number of examples a network trains on, `validation_rows` that of one
    validation pass. Every rank decides for all envs from the reports of all ranks.
    """
    for arm, ids in zip(layout.arms, layout.env_ids, strict=True):
        arm.controller.begin(torch.arange(ids.numel()))
    space, share = environment.action_space, layout.share
    actions = torch.zeros(share.total, space.num_heads, dtype=torch.int64)
    rolled_back = torch.zeros(environment.num_envs, dtype=torch.bool)
    validation_macs, reports = torch.zeros(environment.num_envs), environment.observe()
    num_steps = environment.config.num_steps
    for step in range(num_steps):
        every = Reports(**share.join(layout.ranks.gather((share.ids, reports.tensors()))))
        for arm, ids in zip(layout.arms, layout.env_ids, strict=True):
            part = every.at(ids.flatten())
            masks = compute_batch_masks(part, space)
            actions[ids.flatten()] = arm.controller.decide(part, masks).cpu()
        outcome = environment.step(actions[share.ids])
        rolled_back |= outcome.rolled_back
        reports = environment.observe()
        ablations = (reports.contribution_known & (reports.contribution_age == 0)).sum(dim=-1)
        validation_macs += reports.macs * (1 + ablations)
        on_step(step + 1, num_steps)
    validation_macs += reports.macs  # the final network is validated again
    trained_macs = reports.host_macs * (1 + outcome.added_compute)
    validation_flops = validation_macs.double() * validation_rows * FORWARD_FLOPS
    committed = reports.stage == SeedStage.FOSSILIZED
    return ArmOutcome(
        validation=outcome.accuracy.double(),
        test=torch.full_like(validation_flops, torch.nan),
        host_params=reports.host_params.double(),
        added_params=outcome.added_params.double(),
        params=(reports.host_params + outcome.added_params).double(),
        macs=(reports.host_macs + (reports.seed_macs * committed).sum(dim=-1)).double(),
        compute_charge=(reports.compute_price * outcome.added_compute).double(),
        training_flops=trained_macs.double() * training_rows * TRAINING_FLOPS + validation_flops,
        rolled_back=rolled_back,
        blueprint=torch.where(committed, reports.blueprint, -1),
        style=torch.where(committed, environment.host_batch.states.style, 0),
        alpha=torch.where(committed, reports.alpha, 0.0),
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Hosts, candidates and training of an evaluation; the counts set its duration."""

    rents: tuple[float, ...] = (0.03, 0.08, 0.20)  # every arm is scored at each
    num_widths: int = 8  # held-out architectures to compare arms on
    repeats: int = 8  # hosts per architecture and variant; with 4 variants 256 hosts per arm
    training_widths: int = 6  # training architectures to search constant plans on
    training_repeats: int = 2  # hosts per training architecture and variant
    num_plans: int = 64  # constant plans searched
    finalists: int = 4  # plans per rent that run on other hosts before one is chosen
    # training of hosts, except their number; None: as in the controller's training
    host_batch: HostBatchConfig | None = HostBatchConfig(minibatches=40, validation_rows=800)
    max_macs: float = 5e7  # of one row through all hosts that train in parallel: 8,000 of MNIST-1D
    rng_seed: int = 0  # samples the plans to try

    def __post_init__(self) -> None:
        counts = ("num_widths", "training_widths", "training_repeats", "num_plans", "finalists")
        require_at_least(self, 1, *counts)
        require_at_least(self, 2, "repeats")
        require_positive(self, "max_macs")
        if not self.rents or min(self.rents) < 0:
            raise ValueError(f"rents={self.rents}; use one or more numbers of 0 or above")
        if self.finalists > self.num_plans:
            raise ValueError(f"finalists={self.finalists}; use 1 to num_plans={self.num_plans}")


PRESETS: dict[str, EvaluationConfig] = {
    # two CPU cores, about a minute, 36 hosts per arm: only large differences show
    "quick": EvaluationConfig(
        rents=(0.05, 0.15),
        num_widths=4,
        repeats=3,
        training_widths=2,
        training_repeats=1,
        num_plans=5,
        finalists=1,
        host_batch=None,
    ),
    # one GPU, some minutes, 256 hosts per arm
    "full": EvaluationConfig(),
}
