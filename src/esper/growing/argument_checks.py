"""Checks of the arguments of `Growth` and `grow`, made before anything is changed."""

import math
from numbers import Integral, Real

import torch
from torch import nn, optim

from esper.growing.budget import Budget
from esper.growing.slots import Slot


def check_arguments(
    model: nn.Module,
    optimizer: optim.Optimizer,
    *,
    decisions: int,
    budget: Budget | None,
    rent: float,
    rng_seed: int,
) -> None:
    """Raise a ValueError for arguments that cannot work."""
    _check_model(model)
    _check_optimizer(model, optimizer)
    check_whole(decisions=decisions, rng_seed=rng_seed)
    if budget is not None and not isinstance(budget, Budget):
        raise ValueError(f"budget={budget!r}; give a Budget, such as Budget(params=20_000)")
    if not isinstance(rent, Real) or not 0 <= rent < math.inf:
        raise ValueError(f"rent={rent!r}; use 0 or more, such as 0.02")
    if decisions < 2:
        raise ValueError(f"decisions={decisions}; use 2 or more; the last one only closes the run")


def check_whole(**given: int) -> None:
    """Raise for an argument that is not a whole number."""
    for name, number in given.items():
        if not isinstance(number, Integral):
            raise ValueError(f"{name}={number!r}; use a whole number")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}; give an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"the model is a {type(model).__name__}; give the original nn.Module, since "
            "growth needs to call its modules one by one"
        )
    if not any(True for _ in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no parameters; give a model that can be trained"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, which would not copy new weights to "
            "its replicas; grow model.module on one device"
        )
    if any(isinstance(h, Slot) for m in model.modules() for h in m._forward_hooks.values()):
        raise ValueError(
            "the model has seeds of another growth, perhaps one that failed; create model and "
            "optimizer again, or grow that growth's plain_model() with a new optimizer"
        )


def _check_optimizer(model: nn.Module, optimizer: optim.Optimizer) -> None:
    if not isinstance(optimizer, optim.Optimizer):
        given = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise ValueError(
            f"the optimizer is {given}; give an instance, such as AdamW(model.parameters())"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [parameter for parameter in model.parameters() if id(parameter) in held]
    if not trained:
        raise ValueError(
            "the optimizer trains none of the model's weights; create it from model.parameters()"
        )
    if not any(parameter.requires_grad for parameter in trained):
        raise ValueError(
            "all weights of the model that the optimizer holds are frozen, so nothing trains "
            "before the first seed; unfreeze some of them, such as the last layer's"
        )
