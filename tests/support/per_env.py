"""Masks and features one env, one slot and one choice at a time, from plain Python values.

Written from the rules in words: the oracle of the batched code, and its rival in the benchmark.
"""

import itertools
import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from esper.leyline.constants import (
    ALPHA_SPEED_STEPS,
    ALPHA_TARGETS,
    DEFAULT_EPISODE_LENGTH,
    MIN_PRUNE_AGE,
    TEMPO_STEPS,
    AlphaCurve,
    BlendStyle,
    SiteKind,
)
from esper.leyline.reports import ACCURACY_HISTORY, Reports
from esper.leyline.stages import LEGAL_MOVES, LifecycleOp, SeedStage

EnvReport = dict[str, Any]  # a report's fields for one env, as numbers and nested lists

CHOICES = {
    "style": len(BlendStyle),
    "tempo": len(TEMPO_STEPS),
    "alpha_target": len(ALPHA_TARGETS),
    "alpha_speed": len(ALPHA_SPEED_STEPS),
    "alpha_curve": len(AlphaCurve),
}


def unpack(reports: Reports) -> list[EnvReport]:
    """The reports as plain Python values, env by env."""
    columns = {entry.name: getattr(reports, entry.name).tolist() for entry in fields(reports)}
    return [
        {name: values[env] for name, values in columns.items()} for env in range(reports.num_envs)
    ]


# masks


def looped_masks(report: EnvReport) -> dict[str, Tensor]:
    """One env's mask of each head, without the batch axis."""
    slots, blueprints = range(len(report["stage"])), range(len(report["fits"][0]))
    takes = {op: [slot_takes(report, slot, op) for slot in slots] for op in LifecycleOp}
    masks = {
        "op": [op == LifecycleOp.WAIT or any(takes[op]) for op in LifecycleOp],
        "slot": [takes[op] for op in LifecycleOp],
        "blueprint": [
            [
                [
                    op == LifecycleOp.GERMINATE and takes[op][slot] and can_grow(report, slot, b)
                    for b in blueprints
                ]
                for slot in slots
            ]
            for op in LifecycleOp
        ],
    }
    for head, size in CHOICES.items():
        masks[head] = [
            [
                [takes[op][slot] and is_offered(report, op, slot, head, c) for c in range(size)]
                for slot in slots
            ]
            for op in LifecycleOp
        ]
    return {head: torch.tensor(mask) for head, mask in masks.items()}


def slot_takes(report: EnvReport, slot: int, op: LifecycleOp) -> bool:
    """What a slot accepts, and what else a germination needs."""
    if (SeedStage(report["stage"][slot]), op) not in LEGAL_MOVES:
        return False
    if op == LifecycleOp.PRUNE:
        return report["total_age"][slot] >= MIN_PRUNE_AGE
    if op == LifecycleOp.GERMINATE:
        return any(can_grow(report, slot, b) for b in range(len(report["fits"][slot])))
    return True


def can_grow(report: EnvReport, slot: int, blueprint: int) -> bool:
    return (
        report["seeds_left"] > 0
        and report["fits"][slot][blueprint]
        and report["cost_params"][slot][blueprint] <= report["params_left"]
        and report["cost_macs"][slot][blueprint] <= report["macs_left"]
    )


def is_offered(report: EnvReport, op: LifecycleOp, slot: int, head: str, choice: int) -> bool:
    """Which op uses which head, and with what values."""
    match head, op:
        case "style" | "tempo" | "alpha_target" | "alpha_curve", LifecycleOp.GERMINATE:
            return True
        case "alpha_target", LifecycleOp.SET_ALPHA_TARGET:
            return abs(report["alpha_target"][slot] - ALPHA_TARGETS[choice]) > 1e-6
        case "alpha_speed" | "alpha_curve", LifecycleOp.SET_ALPHA_TARGET:
            return True
        case "alpha_speed", LifecycleOp.PRUNE:
            return True
    return False


# features


def looped_features(report: EnvReport) -> Tensor:
    """One env's feature vector."""
    slots, blueprints = range(len(report["stage"])), range(len(report["fits"][0]))
    parts = [torch.tensor(env_features(report))]
    parts += [torch.tensor(slot_features(report, slot)) for slot in slots]
    parts += [
        torch.tensor(blueprint_features(report, slot, blueprint))
        for slot, blueprint in itertools.product(slots, blueprints)
    ]
    return torch.cat(parts)


def env_features(r: EnvReport) -> list[float]:
    known = r["accuracy_history_known"][0]
    past, past_known = r["accuracy_history"], r["accuracy_history_known"]
    added, host = r["params"] - r["host_params"], max(r["host_params"], 1.0)
    added_macs, host_macs = r["macs"] - r["host_macs"], max(r["host_macs"], 1.0)
    last_op = r["last_action"][0] if r["last_action_known"] else None
    return [
        r["step"] / (r["step"] + r["steps_left"]),
        r["locality"],
        log_steps(r["steps_left"]),
        math.log1p(min(r["validation_loss"], 1e9)) if known else 0.0,
        math.log1p(r["train_rows"] / 100) / 4,
        math.log1p(r["host_params"]) / 10,
        math.log1p(r["host_macs"]) / 10,
        math.log1p(added / host),
        math.log1p(added_macs / host_macs),
        math.log1p(r["host_params"] / max(r["params_left"], 1.0)) / 4,
        math.log1p(r["host_macs"] / max(r["macs_left"], 1.0)) / 4,
        math.log1p(r["seeds_left"]),
        math.log1p(r["rent"] / 0.02),
        10 * r["rent"] * math.log1p(added / host),
        math.log1p(r["compute_price"] / 0.01),
        *(past[k] if past_known[k] else 0.0 for k in range(ACCURACY_HISTORY)),
        *map(float, past_known),
        *(float(op == last_op) for op in LifecycleOp),
    ]


def slot_features(r: EnvReport, slot: int) -> list[float]:
    host, host_macs = max(r["host_params"], 1.0), max(r["host_macs"], 1.0)
    added, seed = r["params"] - r["host_params"], r["seed_params"][slot]
    known, gradient_known = r["contribution_known"][slot], r["gradient_known"][slot]
    acted = r["last_action_known"] and r["last_action"][0] != LifecycleOp.WAIT
    return [
        r["alpha"][slot],
        r["alpha_target"][slot],
        r["site_depth"][slot],
        r["contribution"][slot] if known else 0.0,
        r["contribution_error"][slot] if known else 0.0,
        log_steps(r["stage_age"][slot]),
        log_steps(r["total_age"][slot]),
        log_steps(r["contribution_age"][slot]) if known else 0.0,
        math.log1p(seed / host),
        math.log1p(r["seed_macs"][slot] / host_macs),
        10 * r["rent"] * (math.log1p(added / host) - math.log1p((added - seed) / host)),
        math.log1p(r["site_width"][slot]) / 5,
        math.log1p(min(r["gradient_norm"][slot] / 1e-4, 1e9)) / 4 if gradient_known else 0.0,
        float(gradient_known),
        float(known),
        float(acted and r["last_action"][1] == slot),
        *(float(r["stage"][slot] == stage) for stage in SeedStage),
        *(float(r["site_kind"][slot] == kind) for kind in SiteKind),
    ]


def blueprint_features(r: EnvReport, slot: int, blueprint: int) -> list[float]:
    if not r["fits"][slot][blueprint]:
        return [0.0] * 7
    host, host_macs = max(r["host_params"], 1.0), max(r["host_macs"], 1.0)
    added = r["params"] - r["host_params"]
    cost, cost_macs = r["cost_params"][slot][blueprint], r["cost_macs"][slot][blueprint]
    extra = math.log1p((added + cost) / host) - math.log1p(added / host)
    return [
        r["reach"][slot][blueprint],
        r["depth"][slot][blueprint],
        math.log1p(cost / host),
        math.log1p(cost_macs / host_macs),
        10 * r["rent"] * extra,
        1.0,
        float(r["blueprint"][slot] == blueprint),
    ]


def log_steps(count: int) -> float:
    return math.log1p(count) / math.log1p(DEFAULT_EPISODE_LENGTH)
