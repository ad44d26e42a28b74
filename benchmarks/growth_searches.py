"""The searches behind the published claims of `growth.py`, beyond those of `esper evaluate`.

Learning rate and heuristic are tuned on training types. Static networks (hosts of other widths) and
networks with seeds from the start are trained on the hosts that arms are compared on. All choices
use validation rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Literal, NamedTuple

import torch
from growth_statistics import Frontier
from torch import Tensor

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.hosts import Host
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.stages import SeedStage
from esper.simic.evaluation.experiment import (
    FORWARD_FLOPS,
    TRAINING_FLOPS,
    Arm,
    ArmOutcome,
    EnvLayout,
    PairedExperiment,
)
from esper.simic.growth.hosts_and_data import load_hosts, load_task
from esper.simic.growth.rewards import growth_score
from esper.simic.growth.train_config import TrainConfig
from esper.tamiyo.heuristic import HeuristicConfig, HeuristicController
from esper.tamiyo.scripted import ConstantPlan
from esper.tolaria.optimizers import AdamW


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What is tuned and searched, in addition to an `EvaluationConfig`."""

    learning_rates: tuple[float, ...] = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)  # all arms use the best
    heuristic_scales: tuple[float, ...] = (0.5, 1.0, 2.0)  # tried for gain_scale and crowding
    # widths of static hosts with one width in all layers, with and without norm
    frontier_widths: tuple[int, ...] = (4, 6, 8, 10, 12, 16, 20, 24, 32)
    # factors for all widths of each held-out host, with and without norm; the first is 1
    widening_factors: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 2.5)
    width_search_share: float = 1.0  # budget, as a share of a controller's training FLOPs
    # in the arm with all seeds from the start: the first on the menu, else the menu's largest
    reference_seeds: tuple[str, ...] = ("conv_conv", "dense_dense")


# Cost


def flops_of(outcomes: Sequence[ArmOutcome]) -> float:
    """Floating-point operations to train these networks."""
    return sum(float(outcome.training_flops.sum()) for outcome in outcomes)


def host_training_flops(config: TrainConfig) -> float:
    """FLOPs to train a controller's hosts, without seeds and validation."""
    hosts = load_hosts(config, load_task(config, config.variants[:1]), config.training_widths)
    networks, host_batch = config.rounds * config.num_envs, config.host_batch
    rows = host_batch.minibatches * host_batch.batch_size * config.growth.num_steps
    return networks * rows * TRAINING_FLOPS * sum(host.macs for host in hosts) / len(hosts)


def relative_flops(outcome: ArmOutcome, experiment: PairedExperiment) -> float:
    """Training FLOPs of `[K, R, H]` relative to the bare host (seeds and validation included)."""
    macs = torch.tensor([float(host.macs) for host in experiment.hosts]).repeat_interleave(
        experiment.num_hosts // len(experiment.hosts)
    )
    bare = macs * experiment.training_rows * TRAINING_FLOPS
    return float((outcome.training_flops / bare).mean())


def host_flops(experiment: PairedExperiment, host: Host) -> float:
    """FLOPs to train a host without seeds on every view and repeat, validation included."""
    validation_rows = (1 + experiment.growth.num_steps) * experiment.host_batch.validation_rows
    each = experiment.training_rows * TRAINING_FLOPS + validation_rows * FORWARD_FLOPS
    return float(len(experiment.view_ids) * experiment.repeats * each * host.macs)


def type_of_host(experiment: PairedExperiment) -> Tensor:
    """Index of each host's type (architecture and view), `[H]`."""
    return torch.arange(experiment.num_hosts) // experiment.repeats


def view_of_host(experiment: PairedExperiment) -> Tensor:
    """Index of each host's view in `view_ids`, `[H]`."""
    return type_of_host(experiment) % len(experiment.view_ids)


# Settings tuned before arms are compared


@dataclass(frozen=True, eq=False)
class Sweep:
    """Settings tried, and the validation result of each."""

    tried: tuple[dict[str, float], ...]
    results: tuple[float, ...]
    trained: tuple[ArmOutcome, ...]

    @property
    def num_networks(self) -> int:
        return sum(outcome.validation.numel() for outcome in self.trained)

    @property
    def best(self) -> dict[str, float]:
        return self.tried[self.results.index(max(self.results))]


def tune_learning_rate(
    experiment: PairedExperiment, learning_rates: Sequence[float], *, rng_seed: int
) -> Sweep:
    """Accuracy of hosts without seeds at each learning rate."""
    outcomes = [
        replace(experiment, optimizer=AdamW(learning_rate=rate)).run(
            [Arm("host alone", ConstantPlan())], rng_seed=rng_seed
        )[0]
        for rate in learning_rates
    ]
    return Sweep(
        tuple({"learning_rate": rate} for rate in learning_rates),
        tuple(float(outcome.validation.mean()) for outcome in outcomes),
        tuple(outcomes),
    )


def tune_heuristic(
    experiment: PairedExperiment, scales: Sequence[float], rents: Sequence[float], *, rng_seed: int
) -> Sweep:
    """The heuristic's score with two of its constants scaled: `gain_scale` and `crowding`."""
    usual = HeuristicConfig()
    tried = tuple(
        {"gain_scale": usual.gain_scale * gain, "crowding": usual.crowding * crowding}
        for gain, crowding in product(scales, scales)
    )
    arms = [
        Arm("heuristic", HeuristicController(replace(usual, **settings)), tuple(rents))  # type: ignore[arg-type]
        for settings in tried
    ]
    outcomes = experiment.run(arms, rng_seed=rng_seed)
    scores = tuple(float(outcome.scores(rents, "validation").mean()) for outcome in outcomes)
    return Sweep(tried, scores, tuple(outcomes))


# Seeds that are committed before training starts


def train_with_seeds(
    experiment: PairedExperiment,
    blueprint: Tensor,
    style: Tensor,
    alpha: Tensor,
    rents: Sequence[float] = (0.1,),
) -> ArmOutcome:
    """Networks that have these seeds from the start, each `[lanes, H, S]`; -1 is an empty slot."""
    layout = EnvLayout(
        [Arm("preset", ConstantPlan(), tuple(rents))], experiment.num_hosts, len(experiment.hosts)
    )
    host_batch = experiment.new_hosts(layout)
    (ids,) = layout.env_ids
    states = committed(host_batch.states, ids.flatten(), blueprint, style, alpha)
    host_batch.preset_seeds(states)
    (outcome,) = experiment.play(layout, host_batch)
    return outcome


def committed(
    states: SlotStates, ids: Tensor, blueprint: Tensor, style: Tensor, alpha: Tensor
) -> SlotStates:
    """Dormant `states` with seeds committed in envs `ids` at their blend weights."""
    blueprint = blueprint.flatten(0, 1)
    is_there = blueprint >= 0
    weight = (alpha.flatten(0, 1) * is_there).to(states.alpha.dtype)
    seeds = replace(
        states.at(ids),
        blueprint=blueprint,
        style=style.flatten(0, 1),
        stage=torch.where(is_there, int(SeedStage.FOSSILIZED), int(SeedStage.DORMANT)),
        alpha=weight,
        alpha_target=weight,
    )
    return states.put(seeds, ids)


def all_seeds(experiment: PairedExperiment, blueprint: Blueprint) -> ArmOutcome:
    """Hosts with one blueprint in every slot from the start, `[1, H]`."""
    shape = (1, experiment.num_hosts, experiment.hosts[0].num_slots)
    seeds = torch.full(shape, experiment.menu.index(blueprint))
    return train_with_seeds(experiment, seeds, torch.zeros_like(seeds), torch.ones(shape))


def reference_seed(settings: SearchConfig, experiment: PairedExperiment) -> Blueprint:
    by_name = {blueprint.name: blueprint for blueprint in experiment.menu}
    known = [by_name[name] for name in settings.reference_seeds if name in by_name]
    site = experiment.hosts[0].sites[0]
    return known[0] if known else max(experiment.menu, key=lambda b: b.program(site).num_params)


# Static networks: hosts of other widths, with and without norm, trained without growth. The uniform
# frontier has one width in all layers and is shared by all hosts. The own frontier is each host
# with all layers widened by the same factor. All static networks together are the width search.

Widths = tuple[int, ...]
FrontierKind = Literal["uniform", "own"]
Size = Literal["params", "macs"]
FrontierLines = Mapping[FrontierKind, tuple[tuple[Widths, ...], ...]]
"""Rising widths: one line of uniform hosts, and one line for each host that is evaluated."""


class StaticHost(NamedTuple):
    widths: Widths
    norm: bool


def frontier_lines(
    uniform: Sequence[int], hosts: Sequence[Host], factors: Sequence[float]
) -> FrontierLines:
    """Hosts of one width, and each of `hosts` widened by the factors."""
    own = [tuple(site.width for site in host.sites) for host in hosts]
    return {
        "uniform": (tuple((width,) * len(own[0]) for width in uniform),),
        "own": tuple(widen(widths, factors) for widths in own),
    }


def widen(widths: Widths, factors: Sequence[float]) -> tuple[Widths, ...]:
    """All widths times each factor, rounded to the nearest integer (halves up)."""
    wider = tuple(tuple(int(width * factor + 0.5) for width in widths) for factor in factors)
    if len(set(wider)) < len(factors):
        raise ValueError(
            f"widening_factors={tuple(factors)} give a host of widths {widths} the same widths "
            f"twice: {wider}; use factors further apart"
        )
    return wider


def candidate_widths(
    lines: FrontierLines,
    cost: Callable[[StaticHost], float],
    budget: float,
    generator: torch.Generator,
) -> tuple[StaticHost, ...]:
    """All hosts of the frontiers, then mixed widths in random order until the budget is spent.

    Mixed widths combine those of the uniform frontier. All hosts come with and without norm.
    """

    def both(widths: Iterable[Widths]) -> list[StaticHost]:
        return [StaticHost(w, norm) for w in widths for norm in (False, True)]

    (uniform,) = lines["uniform"]
    mixed = both(product(*zip(*uniform, strict=True)))
    hosts = dict.fromkeys(both(chain(uniform, *lines["own"])))
    left = budget - sum(map(cost, hosts))
    for number in torch.randperm(len(mixed), generator=generator).tolist():
        host = mixed[number]
        if host not in hosts:
            left -= cost(host)
            if left < 0:
                break
            hosts[host] = None
    return tuple(hosts)


@dataclass(frozen=True, eq=False)
class StaticPool:
    """A static networks on V views, `repeats` of each."""

    hosts: tuple[StaticHost, ...]
    lines: FrontierLines
    networks: ArmOutcome  # [A, V, repeats]

    def sizes(self, by: Size) -> Tensor:
        """Parameters or multiply-adds of the networks, `[A]`."""
        size: Tensor = getattr(self.networks, by)[:, 0, 0]
        return size

    def frontier(self, kind: FrontierKind, norm: bool, by: Size) -> Frontier:
        """Accuracy by size; the groups are (line, view), in this order."""
        index = {host: number for number, host in enumerate(self.hosts)}
        chosen = torch.tensor(
            [[index[StaticHost(widths, norm)] for widths in line] for line in self.lines[kind]]
        ).T  # [n, lines]
        test = self.networks.test
        on_views = self.sizes(by)[chosen].repeat_interleave(test.shape[1], dim=1)
        return Frontier(on_views.numpy(), test[chosen].flatten(1, 2).numpy())


def train_static(
    experiment: PairedExperiment,
    hosts: Sequence[StaticHost],
    built: Sequence[Host],
    lines: FrontierLines,
) -> StaticPool:
    """Train every host on the experiment's views and repeats; `lines` must be among `hosts`."""
    views, repeats = len(experiment.view_ids), experiment.repeats
    site = experiment.hosts[0].sites[0]
    smallest = min(experiment.menu, key=lambda blueprint: blueprint.program(site).num_params)
    without_seeds = replace(experiment, menu=(smallest,))  # reserves the least memory for seeds
    outcomes = [
        replace(without_seeds, hosts=part).run([Arm("static", ConstantPlan())])[0]
        for part in _split_by_size(built, experiment.max_macs / (repeats * views))
    ]

    networks = ArmOutcome.cat([outcome.map(lambda values: values[0]) for outcome in outcomes])
    shaped = networks.map(lambda values: values.view(-1, views, repeats, *values.shape[1:]))
    return StaticPool(tuple(hosts), lines, shaped)


def _split_by_size(hosts: Sequence[Host], max_macs: float) -> list[tuple[Host, ...]]:
    """The hosts in order, in parts of at most `max_macs` multiply-adds or of a single host."""
    parts, total = [list[Host]()], 0.0
    for host in hosts:
        if parts[-1] and total + host.macs > max_macs:
            parts.append([])
            total = 0.0
        parts[-1].append(host)
        total += host.macs
    return [tuple(part) for part in parts]


def width_search(
    pool: StaticPool, alone: ArmOutcome, rents: Sequence[float], experiment: PairedExperiment
) -> ArmOutcome:
    """For each host and rent the static network with the best validation score on its view.

    Networks smaller than the host are left out, since growth cannot shrink a host. `alone` is the
    host without growth, `[1, R, H]`. Hosts of one type get different repeats of a network.
    """
    view = view_of_host(experiment)
    repeat = torch.arange(experiment.num_hosts) % experiment.repeats
    host_params, host_macs = alone.host_params[0, 0], alone.macs[0, 0]
    added = pool.sizes("params").unsqueeze(1) - host_params  # [A, H]
    accuracy = pool.networks.validation.mean(dim=2)[:, view]
    added_macs = pool.sizes("macs").unsqueeze(1) / host_macs - 1  # during all of training
    charge = experiment.growth.compute_price * added_macs
    chosen = torch.stack(
        [
            torch.where(
                added >= 0,
                growth_score(accuracy, added, host_params, torch.tensor(rent), charge),
                -torch.inf,
            ).argmax(dim=0)
            for rent in rents
        ]
    )  # [R, H]
    return replace(
        pool.networks.at(chosen, view, repeat),
        host_params=host_params.expand(chosen.shape),
        added_params=added.gather(0, chosen),
        compute_charge=charge.gather(0, chosen),
    )
