"""Networks that do not grow: hosts of other widths, with and without norm, trained as they are.

Grown networks have to beat two frontiers at their own size. Hosts of one width are the shape that
somebody would choose who is free to; the host itself, all layers made wider alike, is what somebody
has who keeps the shape and does not grow. All of them together are a search over widths: what the
arithmetic that a controller was trained with buys somebody who tries sizes instead.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.hosts import Host
from esper.simic.evaluation.statistics import Frontier
from esper.simic.evaluation.trial import Arm, Cost, Harvest, Seeds, Trial
from esper.simic.rewards import growth_score
from esper.tamiyo.scripted import ConstantPlan

Widths = tuple[int, ...]
FrontierKind = Literal["uniform", "own"]
FrontierLines = Mapping[FrontierKind, tuple[tuple[Widths, ...], ...]]
"""Widths that rise: one line of uniform hosts for all that are judged, and one of its own for each."""


def frontier_lines(
    uniform: Sequence[int], judged: Sequence[Host], factors: Sequence[float]
) -> FrontierLines:
    """Hosts of one width, and each host judged, made wider by the factors."""
    own = [tuple(site.width for site in host.sites) for host in judged]
    return {
        "uniform": (tuple((width,) * len(own[0]) for width in uniform),),
        "own": tuple(widen(widths, factors) for widths in own),
    }


def widen(widths: Widths, factors: Sequence[float]) -> tuple[Widths, ...]:
    """Every layer's width times each factor, to the nearest integer; a half counts as one."""
    wider = tuple(tuple(int(width * factor + 0.5) for width in widths) for factor in factors)
    if len(set(wider)) < len(factors):
        raise ValueError(
            f"widening_factors={tuple(factors)} give a host of widths {widths} the same widths "
            f"twice: {wider}; use factors further apart"
        )
    return wider


@dataclass(frozen=True)
class WidenedHost:
    """A static network by its widths."""

    widths: Widths
    norm: bool


@dataclass(frozen=True, eq=False)
class StaticPool:
    """A static networks on V views, `repeats` of each, trained once."""

    hosts: tuple[WidenedHost, ...]
    lines: FrontierLines
    params: Tensor  # [A], as the multiply-adds
    macs: Tensor
    validation: Tensor  # [A, V, repeats], as those below
    test: Tensor
    training_flops: Tensor
    watching_flops: Tensor

    @property
    def cost(self) -> Cost:
        return Cost(self.test.numel(), float(self.training_flops.sum()))

    def frontier(self, kind: FrontierKind, *, norm: bool, by: str) -> Frontier:
        """Static networks by "params" or "macs"; its groups are (line, view), in this order."""
        place = {host: number for number, host in enumerate(self.hosts)}
        chosen = torch.tensor(
            [[place[WidenedHost(widths, norm)] for widths in line] for line in self.lines[kind]]
        ).T  # [n, lines]
        sizes = (self.params if by == "params" else self.macs)[chosen].double()
        on_views = sizes.repeat_interleave(self.test.shape[1], dim=1)
        return Frontier(on_views.numpy(), self.test[chosen].flatten(1, 2).numpy())


def frontier_groups(kind: FrontierKind, trial: Trial) -> NDArray[np.int64]:
    """The group of a frontier that each host of a trial is compared with, `[H]`."""
    groups: NDArray[np.int64] = (trial.type_of_host if kind == "own" else host_views(trial)).numpy()
    return groups


def train_static(
    trial: Trial, hosts: Sequence[WidenedHost], built: Sequence[Host], lines: FrontierLines
) -> StaticPool:
    """Every host on the trial's views, as often as its repeats say; `lines` are among them."""
    repeats, views = trial.repeats, len(trial.view_ids)
    site = trial.hosts[0].sites[0]
    smallest = min(trial.menu, key=lambda blueprint: blueprint.program(site).num_params)
    growing_nothing = replace(trial, menu=(smallest,))  # no room is kept for other seeds
    harvests = [
        replace(growing_nothing, hosts=part).run([Arm("static", ConstantPlan(()))])[0]
        for part in _side_by_side(built, trial.max_macs / (repeats * views))
    ]

    def gather(field: str) -> Tensor:
        return torch.cat([getattr(h, field)[0] for h in harvests]).view(-1, views, repeats)

    return StaticPool(
        tuple(hosts),
        lines,
        torch.tensor([host.num_params for host in built]),
        torch.tensor([host.macs for host in built]),
        gather("validation"),
        gather("test"),
        gather("training_flops"),
        gather("watching_flops"),
    )


def _side_by_side(hosts: Sequence[Host], max_macs: float) -> list[tuple[Host, ...]]:
    """The hosts in order, cut into parts of no more multiply-adds than given, or single ones."""
    parts, total = [list[Host]()], 0.0
    for host in hosts:
        if parts[-1] and total + host.macs > max_macs:
            parts.append([])
            total = 0.0
        parts[-1].append(host)
        total += host.macs
    return [tuple(part) for part in parts]


def width_search(pool: StaticPool, alone: Harvest, rents: Sequence[float], trial: Trial) -> Harvest:
    """For each host of a trial and rent the network of the best validation score on its view.

    Networks smaller than the host are left out: growing cannot shrink one. `alone` is the host
    itself, trained as it is. Each host is given another repeat of the network chosen for it.
    """
    view, repeat = host_views(trial), torch.arange(trial.num_hosts) % pool.test.shape[2]
    host_params = alone.host_params[0]
    added = pool.params.double().unsqueeze(1) - host_params  # [A, H]
    accuracy = pool.validation.mean(dim=2)[:, view]
    added_macs = pool.macs.double().unsqueeze(1) / alone.macs[0] - 1  # all episode long
    charge = trial.growth.compute_price * added_macs
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
    none = torch.full((*chosen.shape, alone.seeds.blueprint.shape[-1]), -1)
    return Harvest(
        validation=pool.validation[chosen, view, repeat],
        test=pool.test[chosen, view, repeat],
        host_params=host_params.expand(chosen.shape),
        added_params=added.gather(0, chosen),
        params=pool.params[chosen].double(),
        macs=pool.macs[chosen].double(),
        compute_charge=charge.gather(0, chosen),
        training_flops=pool.training_flops[chosen, view, repeat],
        watching_flops=pool.watching_flops[chosen, view, repeat],
        rolled_back=torch.zeros(chosen.shape, dtype=torch.bool),
        seeds=Seeds(none, torch.zeros_like(none), torch.zeros(none.shape)),
    )


def host_views(trial: Trial) -> Tensor:
    """The place of each host's view among the trial's, `[H]`."""
    return torch.arange(trial.num_hosts) // trial.repeats % len(trial.view_ids)


def candidate_widths(
    lines: FrontierLines,
    cost: Callable[[WidenedHost], float],
    budget: float,
    generator: torch.Generator,
) -> tuple[WidenedHost, ...]:
    """The frontiers' hosts; then more of the uniform ones' widths, mixed, in random order, as many
    as a budget pays for beside those. All are there with and without norm."""

    def both(widths: Iterable[Widths]) -> list[WidenedHost]:
        return [WidenedHost(w, norm) for w in widths for norm in (False, True)]

    (uniform,) = lines["uniform"]
    every = both(product(*zip(*uniform, strict=True)))
    hosts = dict.fromkeys(both(chain(uniform, *lines["own"])))
    left = budget - sum(map(cost, hosts))
    for number in torch.randperm(len(every), generator=generator).tolist():
        host = every[number]
        if host not in hosts:
            left -= cost(host)
            if left < 0:
                break
            hosts[host] = None
    return tuple(hosts)
