"""Before a run: check the arguments, and find the sites, the seeds that fit there and their costs."""

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn, optim

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, blueprint_menu
from esper.leyline.budget import Budget
from esper.runtime.checks import whole_number
from esper.surgery.inputs import tensors
from esper.surgery.plain import check_plain, working_sites
from esper.surgery.sites import ModelSite, SiteTrace, count_macs, count_params, trace_sites
from esper.surgery.slots import Slot, disable_nested_tensors
from esper.surgery.tracing import trace


def check_arguments(
    model: Any, optimizer: Any, decisions: int, budget: Any, rent: float, rng_seed: int
) -> None:
    """Raise a ValueError for arguments that cannot work."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        name = type(model).__name__
        raise ValueError(f"the model is a {name}; give an nn.Module, neither scripted nor traced")
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            "DataParallel does not copy new weights to its replicas; use DistributedDataParallel "
            "under torchrun, or grow model.module on one device"
        )
    if any(isinstance(h, Slot) for m in model.modules() for h in m._forward_hooks.values()):
        raise ValueError(
            "the model has seeds of another growth, perhaps one that failed; create model and "
            "optimizer again, or grow that growth's plain_model() with a new optimizer"
        )
    if not isinstance(optimizer, optim.Optimizer):
        raise ValueError(f"{optimizer=}; give an instance, such as AdamW(model.parameters())")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [parameter for parameter in model.parameters() if id(parameter) in held]
    if not trained:
        raise ValueError(
            "the optimizer trains none of the model's weights; create it from model.parameters()"
        )
    if not any(parameter.requires_grad for parameter in trained):
        raise ValueError("the optimizer has only frozen weights; unfreeze some, such as the head's")
    whole_number("decisions", decisions, 2)  # the last one only closes the run
    whole_number("rng_seed", rng_seed)
    if budget is not None and not isinstance(budget, Budget):
        raise ValueError(f"budget={budget!r}; give a Budget, such as Budget(params=20_000)")
    if not isinstance(rent, Real) or not 0 <= rent < math.inf:
        raise ValueError(f"rent={rent!r}; use 0 or more, such as 0.02")


class PreparedModel(NamedTuple):
    trace: SiteTrace
    sites: list[ModelSite]  # where seeds may grow
    menu: tuple[Blueprint, ...]  # which seeds may grow
    params: int
    macs: int  # multiply-adds per example


def prepare_model(
    model: nn.Module,
    examples: Sequence[Any],
    budget: Budget,
    sites: Sequence[str] | None,
    exclude: Sequence[str],
    kind: Mapping[str, str] | None,
    blueprints: Sequence[str] | None,
    widens: bool,
) -> PreparedModel:
    """Find the sites and seeds for a run; raises if nothing can grow within the budget."""
    try:
        trace = trace_sites(model, *examples, widens=widens, kind=kind)
    except (RuntimeError, TypeError, IndexError) as error:
        given = ", ".join(f"{x.dtype} of shape {tuple(x.shape)}" for x in tensors(examples[0]))
        raise ValueError(
            f"the model does not accept a batch, {given}: {str(error).splitlines()[0]}"
        ) from error
    chosen = trace.choose(sites, exclude)
    disable_nested_tensors(model, chosen)
    chosen = working_sites(model, chosen, examples[0])
    check_plain(model, chosen, examples[0])
    params, macs = count_params(model), count_macs(model, examples[0])
    menu = _fitting_menu(chosen, blueprints)
    seeds = [
        (f"{b.name} at {site.name!r}", site.params_of(b), site.macs_of(b))
        for site in chosen
        for b in menu
        if site.fits(b)
    ]
    budget.check_room(params, macs, seeds)
    return PreparedModel(trace, chosen, menu, params, macs)


def freeze_all_but_head(model: nn.Module, example: Any) -> None:
    """Switch off `requires_grad` for all weights but those of the last layer that has weights."""
    head, modules = trace(model, example).weights, model.named_modules()
    norms = [n for n, m in modules if m.training and getattr(m, "running_mean", None) is not None]
    if norms:
        warnings.warn(
            f"frozen=True, but {norms[0]!r} is in training mode, so its statistics follow the new "
            "data; call model.eval() before every pass to keep them",
            stacklevel=3,
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[0] == head)


def _fitting_menu(sites: Sequence[ModelSite], names: Sequence[str] | None) -> tuple[Blueprint, ...]:
    """The blueprints with these names, or all, that fit at a site."""
    menu = blueprint_menu(*(BLUEPRINTS if names is None else names))
    fitting = tuple(b for b in menu if any(site.fits(b) for site in sites))
    if not fitting:
        kinds = sorted({site.kind.name for site in sites})
        why = ", with other lengths in other batches" if any(s.varies for s in sites) else ""
        raise ValueError(f"none of the blueprints {names} fits; there are {kinds} sites{why}")
    return fitting
