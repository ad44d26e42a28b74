"""Static networks: hosts of other widths, with and without norm, trained without growth.

The uniform frontier has one width in all layers and is shared by all hosts. The own frontier is
each host with all layers widened by the same factor. All static networks together are the width
search. All choices use validation rows.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper.kasmina.hosts import Host
from esper.simic.growth.hosts_and_data import load_hosts
from esper.simic.growth.rewards import growth_score
from esper.tamiyo.scripted import ConstantPlan
from growth_evaluation.frontier import Frontier
from growth_evaluation.paired_experiment import Arm, ArmOutcome, PairedExperiment

Widths = tuple[int, ...]
FrontierKind = Literal["uniform", "own"]
Size = Literal["params", "macs"]
FrontierLines = Mapping[FrontierKind, tuple[tuple[Widths, ...], ...]]
"""Rising widths: one line of uniform hosts, and one line for each host that is evaluated."""


class StaticHost(NamedTuple):
    widths: Widths
    norm: bool


def frontier_lines(
    uniform: Sequence[int], own: Sequence[Widths], factors: Sequence[float]
) -> FrontierLines:
    """Hosts of one width, and each of the `own` hosts widened by the factors."""
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
    experiment: PairedExperiment, hosts: Sequence[StaticHost], lines: FrontierLines
) -> StaticPool:
    """Train every host on the experiment's views and repeats; `lines` must be among `hosts`."""
    views, repeats = len(experiment.hosts.view_ids), experiment.hosts.repeats
    site = experiment.architectures[0].sites[0]
    smallest = min(experiment.menu, key=lambda blueprint: blueprint.program(site).num_params)
    trained: list[StaticHost] = []
    outcomes: list[ArmOutcome] = []
    for norm in (False, True):
        # the smallest menu reserves the least memory for seeds
        config = replace(experiment.hosts.config, norm=norm, menu=(smallest.name,))
        built = {host: build(experiment, host) for host in hosts if host.norm == norm}
        for part in _split_by_size(built, experiment.max_macs / (repeats * views)):
            widths = [host.widths for host in part]
            paired = replace(experiment.hosts, config=config, widths=widths)
            outcomes += replace(experiment, hosts=paired).run([Arm("static", ConstantPlan())])
            trained += part
    networks = ArmOutcome.cat([outcome.map(lambda values: values[0]) for outcome in outcomes])
    shaped = networks.map(lambda values: values.view(-1, views, repeats, *values.shape[1:]))
    return StaticPool(tuple(trained), lines, shaped)


def build(experiment: PairedExperiment, host: StaticHost) -> Host:
    config = replace(experiment.hosts.config, norm=host.norm)
    return load_hosts(config, experiment.hosts.task, (host.widths,))[0]


def _split_by_size(hosts: Mapping[StaticHost, Host], max_macs: float) -> list[list[StaticHost]]:
    """The hosts in order, in parts of at most `max_macs` multiply-adds or of a single host."""
    parts: list[list[StaticHost]] = []
    total = math.inf
    for host, built in hosts.items():
        if total + built.macs > max_macs:
            parts.append([])
            total = 0.0
        parts[-1].append(host)
        total += built.macs
    return parts


def width_search(
    pool: StaticPool, alone: ArmOutcome, rents: Sequence[float], experiment: PairedExperiment
) -> ArmOutcome:
    """For each host and rent the static network with the best validation score on its view.

    Networks smaller than the host are left out, since growth cannot shrink a host. `alone` is the
    host without growth, `[1, R, H]`. Hosts of one type get different repeats of a network.
    """
    view = experiment.view_of_host
    repeat = torch.arange(experiment.num_hosts) % experiment.hosts.repeats
    host_params, host_macs = alone.host_params[0, 0], alone.macs[0, 0]
    added = pool.sizes("params").unsqueeze(1) - host_params  # [A, H]
    accuracy = pool.networks.validation.mean(dim=2)[:, view]
    added_macs = pool.sizes("macs").unsqueeze(1) / host_macs - 1  # during all of training
    charge = experiment.hosts.config.growth.compute_price * added_macs
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
