"""Controllers for growth: the heuristic, a saved policy, or a custom one; and their reports."""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.growing.budget import Budget
from esper.growing.inputs import DataFacts
from esper.growing.network import GrowingNetwork
from esper.growing.pairs import Pair, units_of
from esper.growing.preparation import PreparedModel
from esper.growing.sites import ModelSite
from esper.leyline.factored_actions import ActionMasks, tamiyo_action_space
from esper.leyline.protocols import Controller
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleError
from esper.tamiyo.evidence import EvidenceController
from esper.tamiyo.learned import LearnedController
from esper.tolaria.reports import History, HostFacts, build_reports, seed_costs, site_facts


@runtime_checkable
class StatefulController(Protocol):
    """A controller whose state can be saved and restored."""

    def memory(self) -> dict[str, Tensor]: ...

    def recall(self, memory: dict[str, Tensor]) -> None: ...


@runtime_checkable
class ExplainingController(Protocol):
    """A controller that gives reasons for its decisions."""

    def reasons(self, reports: Reports, masks: ActionMasks, actions: Tensor) -> list[str]:
        """One text per env; empty for no reason."""
        ...


@runtime_checkable
class TimedController(Protocol):
    """A controller that grows nothing in a run with fewer steps than `least_steps`."""

    @property
    def least_steps(self) -> int: ...


@runtime_checkable
class EvidenceReader(Protocol):
    """A controller that decides by evidence; see `evidence.py`."""

    def wants_evidence(self, progress: float) -> bool:
        """Whether evidence is needed for a decision at this progress, 0 to 1."""
        ...

    def see(self, gain: Tensor) -> None:
        """Expected gain of each slot and blueprint, `[S, B]`."""
        ...

    def judges(self, stage: Tensor, stage_age: Tensor) -> Tensor:
        """Whose contribution it needs now; each argument is `[N, S]`, before the step ends."""
        ...


def check_time(controller: Controller, steps: int) -> None:
    """Raise if the run is too short for the controller to grow anything."""
    if isinstance(controller, TimedController) and steps < controller.least_steps:
        missing = controller.least_steps - steps
        raise ValueError(
            f"the controller needs {controller.least_steps} decisions to grow, judge and commit a "
            f"seed, and there are {steps} before the last one: nothing would grow; give it {missing} "
            f"more decision{'' if missing == 1 else 's'}"
        )


def make_controller(controller: str | Path | Controller) -> Controller:
    """The controller for "heuristic", the path of a saved policy, or a controller."""
    if controller == "heuristic":
        return EvidenceController()
    if isinstance(controller, Controller) and not isinstance(controller, type):
        return controller
    if not isinstance(controller, str | Path):
        raise ValueError(
            f"controller={controller!r} has no methods begin and decide; give 'heuristic', the path "
            "of a saved policy, or a controller"
        )
    if not Path(controller).is_file():
        raise ValueError(
            f"controller={str(controller)!r} is neither 'heuristic' nor a file; give the path of a "
            "saved policy, or a controller"
        )
    return LearnedController.load(controller)


def blueprints_for(controller: Controller, names: Sequence[str] | None) -> Sequence[str] | None:
    """The blueprints to offer: those named, or those that a learned controller was trained with.

    It has learned nothing about others, so naming them warns.
    """
    known = getattr(controller, "menu", ())
    if names is None or not known:
        return known or names
    if others := [name for name in names if name not in known]:
        warnings.warn(
            f"the controller was trained with the blueprints {list(known)}, not with {others}: its "
            "choices among them mean nothing. Leave them out, or train a controller with them",
            stacklevel=4,
        )
    return names


def controller_name(controller: object) -> str:
    if isinstance(controller, str | Path):
        return str(controller)
    return type(controller).__name__


def reason_of(controller: Controller, reports: Reports, masks: ActionMasks, actions: Tensor) -> str:
    """The controller's reason for its decision; empty if it gives none."""
    return (
        controller.reasons(reports, masks, actions)[0]
        if isinstance(controller, ExplainingController)
        else ""
    )


def check_legal(actions: Tensor, masks: ActionMasks) -> None:
    """Raise for a choice that the masks forbid; a custom controller may ignore them."""
    space = masks.action_space
    if tuple(actions.shape) != (1, space.num_heads):
        raise ValueError(
            f"the controller gave actions of shape {tuple(actions.shape)}; "
            f"expected (1, {space.num_heads})"
        )
    for index, head in enumerate(space):
        row, choice = masks.row(index, actions)[0], int(actions[0, index])
        if bool(row.any()) and not (0 <= choice < head.size and bool(row[choice])):
            raise LifecycleError(
                f"the controller chose {choice} for {head.name!r}; legal now: "
                f"{row.nonzero().flatten().tolist()}"
            )


class Reporter:
    """Makes reports about one model; facts that hold for the whole run are computed once."""

    def __init__(
        self,
        network: GrowingNetwork,
        budget: Budget,
        prepared: PreparedModel,
        *,
        data: DataFacts,
        rent: float,
        max_germinations: int,
    ):
        self._network, self._budget = network, budget
        self.model_params, self.model_macs = prepared.params, prepared.macs
        self.data = data
        self._rent, self._max_germinations = rent, max_germinations
        self.action_space = tamiyo_action_space(len(prepared.sites), len(prepared.menu))
        of_sites = site_facts(
            [site.seed_site for site in prepared.sites],
            prepared.menu,
            [site.tokens for site in prepared.sites],
        )
        of_sites["site_kind"] = torch.tensor([int(site.kind) for site in prepared.sites])
        sites, self._links = prepared.sites, _links(prepared.sites)
        self._inside = [
            (pair, site)
            for pair, owner in enumerate(sites)
            for site, other in enumerate(sites)
            if owner.part is not None and other.name in owner.part.inside
        ]
        self._units = torch.tensor(
            [[units_of(s.seed_site, b) for b in prepared.menu] for s in sites]
        )
        self._facts = HostFacts(
            host_params=torch.tensor([prepared.params]),
            host_macs=torch.tensor([prepared.macs]),
            train_rows=torch.tensor([data.train_rows]),
            locality=torch.tensor([data.locality]),
            **{name: fact.unsqueeze(0) for name, fact in of_sites.items()},
        )

    @property
    def params(self) -> int:
        """Parameters of the model and every seed in it."""
        return self.model_params + int(seed_costs(self._facts_now(), self._network.states)[0].sum())

    @property
    def macs(self) -> int:
        """Multiply-adds per example, likewise."""
        return self.model_macs + int(seed_costs(self._facts_now(), self._network.states)[1].sum())

    def _facts_now(self) -> HostFacts:
        """The facts with the costs and fits that depend on the seeds in the network.

        Neighbouring pairs share a layer: it also gets weights between the new units of both. A seed
        inside a pair has the width of its layer, so only one of the two can grow.
        """
        facts, states = self._facts, self._network.states
        has_seed, chosen = states.has_seed[0], states.blueprint[0].clamp(min=0)
        live = self._units.gather(1, chosen.unsqueeze(1)).squeeze(1) * has_seed
        params, macs, fits = (
            table.clone() for table in (facts.cost_params, facts.cost_macs, facts.fits)
        )
        for first, second, cross, cross_macs in self._links:
            for pair, other in ((first, second), (second, first)):
                if pair > other or not has_seed[pair]:  # count it once
                    shared = self._units[pair] * live[other]
                    params[0, pair] += shared * cross
                    macs[0, pair] += (shared * cross_macs).round().long()
        for pair, site in self._inside:
            fits[0, site] &= ~has_seed[pair]
            fits[0, pair] &= ~has_seed[site]
        return facts._replace(cost_params=params, cost_macs=macs, fits=fits)

    def may_grow(self) -> Tensor:
        """Which seeds fit into the network and the budget now, `[S, B]`."""
        facts = self._facts_now()
        fits = facts.fits & ~self._network.states.has_seed.unsqueeze(-1)
        for cost, limit, used in (
            (facts.cost_params, self._budget.params, self.params),
            (facts.cost_macs, self._budget.macs, self.macs),
        ):
            fits = fits if limit is None else fits & (cost <= limit - used)
        return fits[0]

    def observe(self, step: int, steps_left: int, history: History) -> Reports:
        data = self.data  # a checkpoint may have replaced it
        facts = self._facts_now()._replace(
            train_rows=torch.tensor([data.train_rows]),
            locality=torch.tensor([data.locality], dtype=torch.float32),
        )
        return build_reports(
            facts,
            self._network.states,
            history,
            step=step,
            steps_left=steps_left,
            params_left=_left(self._budget.params, self.params),
            macs_left=_left(self._budget.macs, self.macs),
            max_germinations=self._max_germinations,
            rent=torch.tensor([self._rent], dtype=torch.float32),
            compute_price=0.0,
        )


def _links(sites: Sequence[ModelSite]) -> list[tuple[int, int, int, float]]:
    """Pairs whose last layer is the first of another, and the costs of one unit in both."""
    pairs = {i: site.part for i, site in enumerate(sites) if isinstance(site.part, Pair)}
    return [
        (a, b, first.cross, first.cross_macs)
        for a, first in pairs.items()
        for b, second in pairs.items()
        if first.last == second.first
    ]


def add_measured_seeds(
    history: History,
    contributions: Mapping[int, tuple[float, float]],
    gradient_norms: Mapping[int, Tensor],
) -> None:
    """Add contributions with their standard errors, and gradient norms, each by slot."""
    mean, error, norm = torch.zeros(3, *history.contribution.shape).unbind()
    is_measured, has_gradient = torch.zeros(2, *mean.shape, dtype=torch.bool).unbind()
    for slot, contribution in contributions.items():
        mean[0, slot], error[0, slot] = contribution
        is_measured[0, slot] = True
    for slot, value in gradient_norms.items():
        norm[0, slot], has_gradient[0, slot] = value.float().cpu(), True
    history.add_contributions(mean, error, is_measured)
    history.add_gradients(norm, has_gradient)


def _left(limit: int | None, used: int) -> Tensor:
    """What a limit leaves `[1]`, as a float32 that is never more."""
    if limit is None:
        return torch.tensor([math.inf])
    left = torch.tensor([float(limit - used)])
    return left if left.double() <= limit - used else left.nextafter(torch.tensor(-math.inf))
