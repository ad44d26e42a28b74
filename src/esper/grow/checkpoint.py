"""One file from which growth goes on, bit for bit, even in the middle of a blend.

It holds the topology (which seed is where), all weights, the optimiser's state and settings, the
stages of the seeds, what was measured, the ledger, what the controller remembers, and the state
of every random generator. Reading it runs no code from it.
"""

import copy
import pickle
import random
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, optim

from esper.grow.budget import Budget
from esper.grow.network import NetworkState
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.whole_files import replace_file

FORMAT = "esper growth 6"


def write(path: str | Path, contents: dict[str, Any]) -> None:
    """The file, replaced at once: a crash leaves the old one, and so does what cannot be read."""

    def write_and_read(file: BinaryIO) -> None:
        try:
            torch.save({"format": FORMAT, **_without_numpy(contents)}, file)
            file.flush()
            torch.load(file.name, map_location="cpu", mmap=True, weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:  # each is pickle's
            raise ValueError(
                f"nothing was saved: {path} could not be read again ({_cause(error)}). Settings of "
                "the optimizer, state of the scheduler and extra state of modules may hold "
                "numbers, text and tensors, in plain dicts, lists and tuples"
            ) from error

    replace_file(Path(path), write_and_read)


def read(path: str | Path) -> dict[str, Any]:
    device = None if torch.cuda.is_available() else "cpu"  # None: where it was
    refusal = f"{path} is not a checkpoint of growth that this version can read"
    try:
        contents = torch.load(path, map_location=device, weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
        raise ValueError(f"{refusal}: {_cause(error)}") from error  # damaged, or something else
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise ValueError(refusal)
    return contents


def _without_numpy(value: Any) -> Any:
    """With Python's numbers for numpy's, which a sweep may have given and no file may hold."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        plain = copy.copy(value)  # a state_dict has attributes too
        plain.clear()
        for key, item in value.items():
            plain[_without_numpy(key)] = _without_numpy(item)
        return plain
    if type(value) in (list, tuple):
        return type(value)(map(_without_numpy, value))
    return value


def _cause(error: Exception) -> str:
    """What went wrong, without torch's advice to trust the file."""
    told = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    return (told.strip() or type(error).__name__).splitlines()[0].partition(". ")[0]


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
