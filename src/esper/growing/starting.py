"""What a run starts from: arguments that can work, and the seeds that could grow, with costs."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn, optim

from esper.growing.budget import Budget, SeedCost
from esper.growing.measuring import Score, check_loader
from esper.growing.sites import ModelSite
from esper.growing.slots import Slot
from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, blueprint_menu


def check_arguments(
    model: nn.Module,
    optimizer: optim.Optimizer,
    *,
    decisions: int,
    budget: Budget | None,
    rent: float,
    rng_seed: int,
) -> None:
    """Raise for what cannot grow, before anything is touched."""
    _check_model(model)
    _check_optimizer(model, optimizer)
    check_whole(decisions=decisions, rng_seed=rng_seed)
    if budget is not None and not isinstance(budget, Budget):
        raise ValueError(f"budget={budget!r}; give a Budget, such as Budget(params=20_000)")
    if not isinstance(rent, Real) or not 0 <= rent < math.inf:
        raise ValueError(f"rent={rent!r}; use 0 or more, such as 0.02")
    if decisions < 2:
        raise ValueError(f"decisions={decisions}; use 2 or more: the last one only closes the run")


def check_whole(**given: int) -> None:
    """Raise for an argument that is no whole number."""
    for name, number in given.items():
        if not isinstance(number, Integral):
            raise ValueError(f"{name}={number!r}; use a whole number")


def check_measuring(val_loader: Iterable[Any] | None, score: Score | None) -> None:
    """Raise for validation data that growth cannot measure itself by."""
    if (val_loader is None) != (score is None):
        raise ValueError("val_loader and score go together: give both or none")
    if val_loader is not None:
        check_loader(val_loader, "validation")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}; give an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"the model is a {type(model).__name__}; give the nn.Module that torch.jit made it of: "
            "its own modules are no longer called one by one"
        )
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to train")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, which would not carry new weights to "
            "its copies; grow the model inside (model.module) on one device"
        )
    if any(isinstance(h, Slot) for m in model.modules() for h in m._forward_hooks.values()):
        raise ValueError(
            "seeds of another growth sit in this model, perhaps one that failed; make model and "
            "optimizer anew, or grow that growth's plain_model() with an optimizer of its own"
        )


def _check_optimizer(model: nn.Module, optimizer: optim.Optimizer) -> None:
    if not isinstance(optimizer, optim.Optimizer):
        given = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise ValueError(
            f"the optimizer is {given}; give one that is made, such as AdamW(model.parameters())"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [parameter for parameter in model.parameters() if id(parameter) in held]
    if not trained:
        raise ValueError(
            "the optimizer trains none of the model's weights; make it from model.parameters()"
        )
    if not any(parameter.requires_grad for parameter in trained):
        raise ValueError(
            "all weights of the model that the optimizer holds are frozen, so there is nothing to "
            "train while no seed is there; let some of them train, such as the last layer's"
        )


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
