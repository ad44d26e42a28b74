"""Checkpoints of growth: one file from which a run resumes bit-exactly, even during a blend."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim

from esper.growing.controllers import STATEFUL
from esper.growing.eval_mode import random_states, set_random_states
from esper.growing.inputs import DataFacts
from esper.growing.ledger import Ledger
from esper.growing.network import NetworkState, Ramp
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.files import read_file, write_file
from esper.leyline.plain_config import differences

if TYPE_CHECKING:
    from esper.growing.growth import Growth

_KIND, _VERSION = "growth", 11


def save(growth: "Growth", path: str | Path) -> None:
    """Write all that a run needs to resume."""
    network, controller = growth._network, growth.controller
    contents = {
        "signature": _signature(growth),
        "size": (growth.params, growth.macs),
        "data": tuple(growth._reporter.data),
        "network": network_to_dict(network.capture()),
        "settings": group_settings(growth.optimizer),
        "scheduler": None if growth.scheduler is None else growth.scheduler.state_dict(),
        "safe_points": growth._safe_points.to_dict(),
        "history": dict(vars(growth._history)),
        "counts": (growth.step, growth.optimizer_steps, growth.is_closed),
        "ramp": (growth._steps_at_decision, *network.ramp),
        "evidence": growth._evidence.to_dict(),
        "train_losses": growth._train_losses,
        "gradient_norms": growth._gradients.norms,
        "ledger": growth.ledger.to_json(),
        "seed_ids": growth._recorder.seed_ids,
        "controller": controller.memory() if isinstance(controller, STATEFUL) else {},
        "seed_generator": network.generator.get_state(),
        "random": random_states(range(torch.cuda.device_count())),
    }
    if growth.ranks.is_first:
        write_file(path, _KIND, contents, version=_VERSION)


def resume(growth: "Growth", path: str | Path) -> None:
    """Restore a saved run in a new growth."""
    network = growth._network
    device = None if torch.cuda.is_available() else "cpu"  # None: each tensor stays on its device
    saved = read_file(path, _KIND, version=_VERSION, device=device, resumes=True)
    _check_fit(path, saved, growth)
    growth._reporter.data = DataFacts(*saved["data"])  # another example may look different
    network.restore(network_from_dict(saved["network"]))
    for group, settings in zip(growth.optimizer.param_groups, saved["settings"], strict=True):
        group.update(settings)
    if growth.scheduler is not None:
        growth.scheduler.load_state_dict(saved["scheduler"])
    growth._safe_points.load(saved["safe_points"])
    vars(growth._history).update(saved["history"])
    growth.step, growth.optimizer_steps, growth.is_closed = saved["counts"]
    growth._steps_at_decision, *ramp = saved["ramp"]
    network.ramp = Ramp(*ramp)
    network.set_alphas()
    growth._evidence.load(saved["evidence"])
    growth._train_losses, growth._gradients.norms = saved["train_losses"], saved["gradient_norms"]
    growth._recorder.ledger = Ledger.from_json(saved["ledger"])
    growth._recorder.seed_ids.update(saved["seed_ids"])
    if isinstance(growth.controller, STATEFUL):
        growth.controller.recall(saved["controller"])
    network.generator.set_state(saved["seed_generator"])
    set_random_states(saved["random"])


def _signature(growth: "Growth") -> dict[str, Any]:
    """What a resuming run must have in common with the saved one."""
    return {
        "sites": [site.name for site in growth.sites],
        "kinds": [site.kind.name for site in growth.sites],
        "blueprints": [blueprint.name for blueprint in growth._network.menu],
        "optimizer": type(growth.optimizer).__name__,
        **growth._network.made,
        "scheduler": growth.scheduler and type(growth.scheduler).__name__,
    }


def _check_fit(path: str | Path, saved: dict[str, Any], growth: "Growth") -> None:
    """Raise if this growth cannot resume the saved run."""
    if changed := differences(_signature(growth), saved["signature"]):
        raise ValueError(
            f"{path} is of another run: here {'; '.join(changed[:3])}; create this one like it"
        )
    step, _, is_closed = saved["counts"]
    if step >= growth.decisions and not is_closed:
        raise ValueError(f"{path} has made {step} decisions; use decisions={step + 1} or more")
    params, macs = saved["size"]
    if min(growth.budget.left(params, macs)) < 0:
        raise ValueError(
            f"{path} has a network of {params:,} parameters and {macs:,} multiply-adds, more than "
            f"{growth.budget}"
        )


def network_to_dict(state: NetworkState) -> dict[str, Any]:
    return {**vars(state), "slots": state.slots.tensors()}


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
