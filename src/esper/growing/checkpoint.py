"""One file from which growth goes on, bit for bit, even in the middle of a blend.

It holds the topology (which seed is where), all weights, the optimiser's state and settings, the
stages of the seeds, what was measured, the ledger, what the controller remembers, and the state
of every random generator. Reading it runs no code from it.
"""

import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim

from esper.growing.budget import Budget
from esper.growing.network import NetworkState
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.files import read_file, write_file

_KIND, _VERSION = "growth", 8


def write(path: str | Path, contents: dict[str, Any]) -> None:
    write_file(path, _KIND, contents, version=_VERSION)


def read(path: str | Path) -> dict[str, Any]:
    """The saved contents, each tensor on the device it was on if this machine has one."""
    device = None if torch.cuda.is_available() else "cpu"
    return read_file(path, _KIND, version=_VERSION, device=device)


def check_fit(
    path: str | Path, saved: dict[str, Any], *, made: dict[str, Any], decisions: int, budget: Budget
) -> None:
    """Raise for a run that the saved one cannot go on in."""
    for name, then in saved["made"].items():
        now = made[name]
        if now != then:
            if isinstance(then, dict):
                then, now = _first_difference(then, now)
            raise ValueError(
                f"{path} is of a run with {name} {then}; this one has {name} {now}: make it as "
                "that one was made"
            )
    step, _, is_closed = saved["counts"]
    if step >= decisions and not is_closed:
        raise ValueError(
            f"{path} has made {step} decisions, and this run has decisions={decisions}; give "
            f"it {step + 1} or more"
        )
    params, macs = saved["size"]
    limits = budget.params, budget.macs
    if any(
        limit is not None and limit < own for limit, own in zip(limits, saved["size"], strict=True)
    ):
        raise ValueError(
            f"{path} has a network of {params:,} parameters and {macs:,} multiply-adds, more than "
            f"{budget}"
        )


def _first_difference(then: dict[str, Any], now: dict[str, Any]) -> tuple[str, str]:
    """The first entry that is not the same in both, as each has it."""
    name = next(name for name in (*then, *now) if then.get(name) != now.get(name))
    had, has = (f"{name} {own[name]}" if name in own else f"without {name}" for own in (then, now))
    return had, has


def network_to_dict(state: NetworkState) -> dict[str, Any]:
    slots = {entry.name: getattr(state.slots, entry.name) for entry in fields(SlotStates)}
    return {
        **{entry.name: getattr(state, entry.name) for entry in fields(NetworkState)},
        "slots": slots,
    }


def network_from_dict(data: dict[str, Any]) -> NetworkState:
    return NetworkState(**{**data, "slots": SlotStates(**data["slots"])})


def group_settings(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of learning rates and the like, without the weights."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def random_states() -> dict[str, Any]:
    """Of torch on every device, Python and numpy's own: what the user's code may draw from."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys)), *rest],
    }


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"]):
        torch.cuda.set_rng_state(state, device)
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))  # noqa: NPY002
