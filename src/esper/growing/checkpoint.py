"""Checkpoints of growth: one file from which a run resumes bit-exactly, even during a blend."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim

from esper.growing.budget import Budget
from esper.growing.network import NetworkState
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.files import read_file, write_file

_KIND, _VERSION = "growth", 9


def write(path: str | Path, contents: dict[str, Any]) -> None:
    write_file(path, _KIND, contents, version=_VERSION)


def read(path: str | Path) -> dict[str, Any]:
    """The contents; each tensor stays on its device if this machine has a GPU."""
    device = None if torch.cuda.is_available() else "cpu"
    return read_file(path, _KIND, version=_VERSION, device=device, resumes=True)


def check_fit(
    path: str | Path,
    saved: dict[str, Any],
    *,
    signature: dict[str, Any],
    decisions: int,
    budget: Budget,
) -> None:
    """Raise if a run with this signature cannot resume the saved one."""
    for name, then in saved["signature"].items():
        now = signature[name]
        if now != then:
            if isinstance(then, dict):
                then, now = _first_difference(then, now)
            raise ValueError(
                f"{path} is of a run with {name} {then}; this one has {name} {now}: create it like "
                "the saved one"
            )
    step, _, is_closed = saved["counts"]
    if step >= decisions and not is_closed:
        raise ValueError(
            f"{path} has made {step} decisions, and this run has decisions={decisions}; give "
            f"it {step + 1} or more"
        )
    params, macs = saved["size"]
    if any(
        limit is not None and limit < size
        for limit, size in ((budget.params, params), (budget.macs, macs))
    ):
        raise ValueError(
            f"{path} has a network of {params:,} parameters and {macs:,} multiply-adds, more than "
            f"{budget}"
        )


def _first_difference(then: dict[str, Any], now: dict[str, Any]) -> tuple[str, str]:
    """The first entry that differs, as each of them has it."""
    name = next(name for name in (*then, *now) if then.get(name) != now.get(name))
    had, has = (f"{name} {own[name]}" if name in own else f"without {name}" for own in (then, now))
    return had, has


def network_to_dict(state: NetworkState) -> dict[str, Any]:
    slots = {entry.name: getattr(state.slots, entry.name) for entry in fields(SlotStates)}
    return {**vars(state), "slots": slots}


def network_from_dict(data: dict[str, Any]) -> NetworkState:
    return NetworkState(**{**data, "slots": SlotStates(**data["slots"])})


def group_settings(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of each group's settings, such as its learning rate."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]
