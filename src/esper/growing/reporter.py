"""Reports about one growing model, for its controller."""

import math
from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from esper.growing.data_facts import DataFacts
from esper.growing.growing_network import GrowingNetwork
from esper.growing.preparation import PreparedModel
from esper.kasmina.host_reports import History, HostFacts, build_reports, facts_of, seed_costs
from esper.leyline.budget import Budget
from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.reports import Reports


class Reporter:
    """Makes reports about one model; facts that hold for the whole run are computed once."""

    def __init__(
        self, network: GrowingNetwork, budget: Budget, prepared: PreparedModel, data: DataFacts
    ):
        self._network, self._budget = network, budget
        self.model_size = (prepared.params, prepared.macs)
        self.train_rows, self.locality = data
        sites, menu = prepared.sites, prepared.menu
        self.action_space = tamiyo_action_space(len(sites), len(menu))
        seeds = [[site.facts_of(b) if site.fits(b) else None for b in menu] for site in sites]
        of_sites = facts_of([site.kind for site in sites], [site.width for site in sites], seeds)
        self._of_sites = {name: fact.unsqueeze(0) for name, fact in of_sites.items()}
        self._units = torch.tensor([[site.units_of(b) for b in menu] for site in sites])
        # pairs whose last layer is the first of another, and the costs of one unit in both
        pairs = [(i, site.pair) for i, site in enumerate(sites) if site.pair is not None]
        self._links = [
            (a, b, first.cross, first.cross_macs)
            for (a, first), (b, second) in product(pairs, pairs)
            if first.last == second.first
        ]
        self._inside = [
            (index, number)
            for (index, pair), (number, site) in product(pairs, enumerate(sites))
            if site.name in pair.inside
        ]

    @property
    def size(self) -> tuple[int, int]:
        """Parameters and multiply-adds per example of the model and every seed in it."""
        (params, macs), added = self.model_size, seed_costs(self._facts(), self._network.states)
        return params + int(added[0].sum()), macs + int(added[1].sum())

    def _facts(self) -> HostFacts:
        """What is known of the model, with the costs and fits that depend on its seeds.

        Neighbouring pairs share a layer: it also gets weights between the new units of both. A seed
        inside a pair has the width of its layer, so only one of the two can grow.
        """
        known = {name: fact.clone() for name, fact in self._of_sites.items()}
        params, macs, fits = (known[name][0] for name in ("cost_params", "cost_macs", "fits"))
        states = self._network.states
        has_seed, chosen = states.has_seed[0], states.blueprint[0].clamp(min=0)
        live = self._units.gather(1, chosen.unsqueeze(1)).squeeze(1) * has_seed
        for first, second, cross, cross_macs in self._links:
            for pair, other in ((first, second), (second, first)):
                if pair > other or not has_seed[pair]:  # count it once
                    shared = self._units[pair] * live[other]
                    params[pair] += shared * cross
                    macs[pair] += (shared * cross_macs).round().long()
        for pair, site in self._inside:
            fits[site] &= ~has_seed[pair]
            fits[pair] &= ~has_seed[site]
        host_params, host_macs = (torch.tensor([size]) for size in self.model_size)
        rows, locality = torch.tensor([self.train_rows]), torch.tensor([self.locality])
        known |= {"host_params": host_params, "host_macs": host_macs}
        return known | {"train_rows": rows, "locality": locality.float()}

    def may_grow(self) -> Tensor:
        """Which seeds fit into the network and the budget now, `[S, B]`."""
        facts, left = self._facts(), self._budget.left(*self.size)
        fits = facts["fits"] & ~self._network.states.has_seed.unsqueeze(-1)
        return (fits & (facts["cost_params"] <= left[0]) & (facts["cost_macs"] <= left[1]))[0]

    def observe(
        self, step: int, steps_left: int, history: History, max_germinations: int, rent: float
    ) -> Reports:
        params_left, macs_left = map(_rounded_down, self._budget.left(*self.size))
        return build_reports(
            self._facts(),
            self._network.states,
            history,
            step=step,
            steps_left=steps_left,
            params_left=params_left,
            macs_left=macs_left,
            max_germinations=max_germinations,
            rent=torch.tensor([rent], dtype=torch.float32),
            compute_price=0.0,
        )


def add_measured_seeds(
    history: History, contributions: Mapping[int, tuple[float, float]], norms: Mapping[int, Tensor]
) -> None:
    """Add contributions with their standard errors, and gradient norms, each by slot."""
    slots = range(history.contribution.shape[1])
    mean, error = torch.tensor([[contributions.get(s, (0.0, 0.0)) for s in slots]]).unbind(-1)
    norm = torch.tensor([[float(norms[s]) if s in norms else 0.0 for s in slots]])
    history.add_contributions(mean, error, torch.tensor([[s in contributions for s in slots]]))
    history.add_gradients(norm, torch.tensor([[s in norms for s in slots]]))


def _rounded_down(number: float) -> Tensor:
    """The largest float32 that is not above a number, `[1]`."""
    near = torch.tensor([float(number)])
    return near if near.double() <= number else near.nextafter(torch.tensor(-math.inf))
