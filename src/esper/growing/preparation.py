"""What a run needs to know of the model: its sites, the seeds that fit there, and the costs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from esper.growing.budget import Budget, SeedCost
from esper.growing.plain import check_plain
from esper.growing.sites import ModelSite, SiteTrace, count_macs, count_params, trace_sites
from esper.growing.slots import disable_nested_tensors
from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, blueprint_menu


class PreparedModel(NamedTuple):
    trace: SiteTrace
    sites: list[ModelSite]  # where seeds may grow
    menu: tuple[Blueprint, ...]  # which seeds may grow
    params: int
    macs: int  # multiply-adds per example


def prepare_model(
    model: nn.Module,
    examples: Sequence[Any],
    *,
    sites: Sequence[str] | None,
    exclude: Sequence[str],
    blueprints: Sequence[str] | None,
    budget: Budget,
) -> PreparedModel:
    """Find the sites and seeds for a run; raises if nothing can grow within the budget."""
    trace = trace_sites(model, *examples)
    chosen = trace.choose(sites, exclude)
    disable_nested_tensors(model, chosen)
    check_plain(model, chosen, examples[0])
    params, macs = count_params(model), count_macs(model, examples[0])
    budget.check(params, macs)
    menu = _fitting_menu(chosen, blueprints)
    budget.check_room(params, macs, _seed_costs(chosen, menu))
    return PreparedModel(trace, chosen, menu, params, macs)


def _fitting_menu(sites: Sequence[ModelSite], names: Sequence[str] | None) -> tuple[Blueprint, ...]:
    """The blueprints with these names, or all, that fit at a site."""
    menu = tuple(BLUEPRINTS.values()) if names is None else blueprint_menu(*names)
    fitting = tuple(b for b in menu if any(b.fits(site.seed_site) for site in sites))
    if not fitting:
        kinds = sorted({site.kind.name for site in sites})
        raise ValueError(f"none of the blueprints {names} fits a site; there are {kinds} sites")
    return fitting


def _seed_costs(sites: Sequence[ModelSite], menu: Sequence[Blueprint]) -> list[SeedCost]:
    return [
        SeedCost(f"{b.name} at {site.name!r}", site.params_of(b), site.macs_of(b))
        for site in sites
        for b in menu
        if b.fits(site.seed_site)
    ]
