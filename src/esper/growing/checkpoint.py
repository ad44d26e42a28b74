"""Checkpoints of growth: one file from which a run resumes bit-exactly, even during a blend."""

from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from esper.growing.controllers import STATEFUL
from esper.growing.seed_groups import group_settings
from esper.nissa.ledger import Ledger
from esper.runtime.files import read_file, write_file
from esper.runtime.plain_config import differences
from esper.surgery.eval_mode import random_states, set_random_states

if TYPE_CHECKING:
    from esper.growing.growth import Growth

_KIND, _VERSION = "growth", 12

# attributes of a growth that are saved as they are
_PLAIN = (
    *("step", "optimizer_steps", "is_closed", "_steps_at_decision", "_train_losses"),
    *("_network.ramp_start", "_network.ramp_steps", "_network.ramp_done", "_gradients.norms"),
    *("_safe_points.last", "_safe_points.best_stable", "_safe_points.best"),
    *("_safe_points.already_restored", "_evidence.step", "_evidence.steps_left"),
    *("_reporter.train_rows", "_reporter.locality"),  # of the example, which may be another one
)


def save(growth: "Growth", path: str | Path) -> None:
    """Write all that a run needs to resume."""
    network, controller = growth._network, growth.controller
    contents = {
        "signature": _signature(growth),
        "size": (growth.params, growth.macs),
        "network": network.capture(),
        "settings": group_settings(growth.optimizer),
        "scheduler": None if growth.scheduler is None else growth.scheduler.state_dict(),
        "history": dict(vars(growth._history)),
        "probes": growth._evidence.measured(),
        "ledger": growth.ledger.to_json(),
        "controller": controller.memory() if isinstance(controller, STATEFUL) else {},
        "seed_generator": network.generator.get_state(),
        "random": random_states(range(torch.cuda.device_count())),
        **{name: attrgetter(name)(growth) for name in _PLAIN},
    }
    if growth.ranks.is_first:
        write_file(path, _KIND, contents, version=_VERSION)


def resume(growth: "Growth", path: str | Path) -> None:
    """Restore a saved run in a new growth."""
    network = growth._network
    device = None if torch.cuda.is_available() else "cpu"  # None: each tensor stays on its device
    saved = read_file(path, _KIND, version=_VERSION, device=device, resumes=True)
    _check_fit(path, saved, growth)
    network.restore(saved["network"])
    for group, settings in zip(growth.optimizer.param_groups, saved["settings"], strict=True):
        group.update(settings)
    if growth.scheduler is not None:
        growth.scheduler.load_state_dict(saved["scheduler"])
    for name in _PLAIN:
        owner, _, attribute = name.rpartition(".")
        setattr(attrgetter(owner)(growth) if owner else growth, attribute, saved[name])
    network.set_alphas()
    vars(growth._history).update(saved["history"])
    growth._evidence.load(saved["probes"])
    growth._recorder.ledger = Ledger.from_json(saved["ledger"])
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
    step = saved["step"]
    if step >= growth.decisions and not saved["is_closed"]:
        raise ValueError(f"{path} has made {step} decisions; use decisions={step + 1} or more")
    params, macs = saved["size"]
    if min(growth.budget.left(params, macs)) < 0:
        raise ValueError(
            f"{path} has a network of {params:,} parameters and {macs:,} multiply-adds, more than "
            f"{growth.budget}"
        )
