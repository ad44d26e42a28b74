"""Train several arms on the same hosts.

An *arm* is one way to build networks. It has one *lane* per rent, and every lane trains all H hosts.
Host h is identical in every lane: architecture, initial weights, data and data order.

    experiment = PairedExperiment(hosts=PairedHosts(config, task, widths, view_ids=(0, 1), repeats=4))
    alone, grown = experiment.run([Arm("host alone", ConstantPlan()), Arm("heuristic", heuristic)])
    (grown.validation - alone.validation).mean()
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.hosts import Host
from esper.leyline.arrays import TensorFields
from esper.leyline.factored_actions import ActionMasks
from esper.leyline.protocols import Controller
from esper.leyline.reports import Reports
from esper.leyline.stages import SeedStage
from esper.simic.growth.comparison import PairedHosts, TestRows, play
from esper.simic.growth.hosts_and_data import load_hosts, load_menu
from esper.simic.growth.rewards import growth_score
from esper.tolaria.environment import GrowthEnvironment

FORWARD_FLOPS = 2  # per multiply-add
TRAINING_FLOPS = 3 * FORWARD_FLOPS  # the backward pass costs two forward passes

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
    test: Tensor  # NaN unless the experiment has test rows
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
    """The hosts that all arms grow, and what is measured on them."""

    hosts: PairedHosts
    test_rows: TestRows | None = None  # leave out in experiments that choose something
    max_macs: float = 5e7
    """Multiply-adds of one row through all hosts that train in parallel; other arms train later."""

    @property
    def num_hosts(self) -> int:
        """H."""
        return self.hosts.num_hosts

    @property
    def architectures(self) -> tuple[Host, ...]:
        return load_hosts(self.hosts.config, self.hosts.task, tuple(self.hosts.widths))

    @property
    def menu(self) -> tuple[Blueprint, ...]:
        return load_menu(self.hosts.config, self.hosts.task)

    @property
    def max_lanes(self) -> int:
        """Lanes that train in parallel."""
        copies = self.num_hosts // len(self.hosts.widths)
        macs = copies * sum(host.macs for host in self.architectures)
        return max(1, int(self.max_macs // macs))

    @property
    def type_names(self) -> tuple[str, ...]:
        widths = ["-".join(map(str, widths)) for widths in self.hosts.widths]
        views = [self.hosts.task.names[view] for view in self.hosts.view_ids]
        return tuple(f"{w} on {view}" for w, view in product(widths, views))

    @property
    def training_rows(self) -> int:
        """Examples that each network trains on."""
        host_batch, growth = self.hosts.config.host_batch, self.hosts.config.growth
        return host_batch.minibatches * host_batch.batch_size * growth.num_steps

    @property
    def type_of_host(self) -> Tensor:
        """Index of each host's type (architecture and view), `[H]`."""
        return torch.arange(self.num_hosts) // self.hosts.repeats

    @property
    def view_of_host(self) -> Tensor:
        """Index of each host's view in `view_ids`, `[H]`."""
        return self.type_of_host % len(self.hosts.view_ids)

    def run(self, arms: Sequence[Arm], *, rng_seed: int = 0) -> list[ArmOutcome]:
        """The outcome of every arm; another `rng_seed` gives other hosts of the same types."""
        groups: list[list[Arm]] = [[]]  # that train together
        for arm in arms:
            if groups[-1] and sum(len(a.rents) for a in (*groups[-1], arm)) > self.max_lanes:
                groups.append([])
            groups[-1].append(arm)
        outcomes: list[ArmOutcome] = []
        for group in groups:
            rents = [rent for arm in group for rent in arm.rents]
            outcomes += self.play(group, self.hosts.untrained(rents, rng_seed))
        return outcomes

    def play(self, arms: Sequence[Arm], environment: GrowthEnvironment) -> list[ArmOutcome]:
        """Train untrained hosts to the end, all arms side by side; the outcome of every arm."""
        return play_arms(
            arms,
            environment,
            self.num_hosts,
            training_rows=self.training_rows,
            validation_rows=environment.host_batch.config.validation_rows,
            test_rows=self.test_rows,
        )


def play_arms(
    arms: Sequence[Arm],
    environment: GrowthEnvironment,
    num_hosts: int,
    *,
    training_rows: int,
    validation_rows: int,
    test_rows: TestRows | None = None,
) -> list[ArmOutcome]:
    """Play one episode in which the arms share an environment; the outcome of every arm.

    `training_rows` is the number of examples a network trains on, `validation_rows` that of one
    validation pass.
    """
    controller = SideBySide(arms, num_hosts)
    rolled_back = torch.zeros(environment.num_envs, dtype=torch.bool)
    validation_macs = torch.zeros(environment.num_envs)
    for outcome in play(environment, controller):
        rolled_back |= outcome.rolled_back
        reports = environment.observe()
        ablations = (reports.contribution_known & (reports.contribution_age == 0)).sum(dim=-1)
        validation_macs += reports.macs * (1 + ablations)
    validation_macs += reports.macs  # the final network is validated again
    validation_flops = validation_macs.double() * validation_rows * FORWARD_FLOPS
    trained_macs = reports.host_macs * (1 + outcome.added_compute)
    test = torch.full_like(outcome.accuracy, torch.nan)
    if test_rows is not None:
        x, labels = test_rows
        test = environment.host_batch.accuracy_on(x, labels.to(x.device))
    committed = reports.stage == SeedStage.FOSSILIZED
    networks = ArmOutcome(
        validation=outcome.accuracy.double(),
        test=test.double(),
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
    return [networks.at(envs) for envs in controller.envs]


class SideBySide(Controller):
    """Several arms as one controller: env h * lanes + l is host h in lane l."""

    def __init__(self, arms: Sequence[Arm], num_hosts: int):
        lanes = [len(arm.rents) for arm in arms]
        envs = torch.arange(num_hosts * sum(lanes)).view(num_hosts, -1).T
        self.arms = tuple(arms)
        self.envs = torch.split(envs, lanes)  # [lanes, H] of each arm

    def begin(self, env_ids: Tensor) -> None:
        for arm, envs in zip(self.arms, self.envs, strict=True):
            arm.controller.begin(torch.arange(envs.numel()))

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        space = masks.action_space
        actions = torch.zeros(reports.num_envs, space.num_heads, dtype=torch.int64)
        for arm, envs in zip(self.arms, self.envs, strict=True):
            rows = envs.flatten()
            legal = ActionMasks(space, [group[rows] for group in masks.groups])
            actions[rows] = arm.controller.decide(reports.at(rows), legal).cpu()
        return actions
