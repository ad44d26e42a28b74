"""What a run starts from: arguments that can work, and the seeds that could grow with their costs."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn, optim

from esper.grow.budget import SeedCost
from esper.grow.measuring import Score, check_loader
from esper.grow.sites import ModelSite
from esper.grow.slots import Slot
from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, blueprint_menu


def check_arguments(
    model: nn.Module,
    optimizer: optim.Optimizer,
    decisions: int,
    val_loader: Iterable[Any] | None,
    score: Score | None,
) -> None:
    """Raise for what cannot grow, before anything is touched."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, which would not carry new weights to "
            "its copies; grow the model inside (model.module) on one device"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise ValueError(
            "the optimizer trains none of the model's weights; make it from model.parameters()"
        )
    if any(isinstance(h, Slot) for m in model.modules() for h in m._forward_hooks.values()):
        raise ValueError(
            "seeds of another growth sit in this model; grow its plain_model() instead, with an "
            "optimizer of its own"
        )
    if decisions < 2:
        raise ValueError(f"decisions={decisions}; use 2 or more: the last one only closes the run")
    if (val_loader is None) != (score is None):
        raise ValueError("val_loader and score go together: give both or none")
    if val_loader is not None:
        check_loader(val_loader, "validation")


def fitting_menu(sites: Sequence[ModelSite], names: Sequence[str] | None) -> tuple[Blueprint, ...]:
    """The blueprints by name, or all that fit somewhere."""
    menu = tuple(BLUEPRINTS.values()) if names is None else blueprint_menu(*names)
    fitting = tuple(b for b in menu if any(b.fits(site.seed_site) for site in sites))
    if not fitting:
        kinds = sorted({site.kind.name for site in sites})
        raise ValueError(f"none of the blueprints {names} fits a site; there are {kinds} sites")
    return fitting


def seed_costs(sites: Sequence[ModelSite], menu: Sequence[Blueprint]) -> list[SeedCost]:
    """Of every seed that could grow."""
    return [
        SeedCost(f"{b.name} at {site.name!r}", site.params_of(b), site.macs_of(b))
        for site in sites
        for b in menu
        if b.fits(site.seed_site)
    ]
