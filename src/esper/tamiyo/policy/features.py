"""Reports as one float32 vector per env, `[N, F]`, laid out by one table.

A feature is one row of `FEATURES`: its name, block, source and scale.
The vector is

    env | slot 0 | ... | slot S-1 | (slot 0, blueprint 0) | ... | (slot S-1, blueprint B-1)

All slot blocks have one layout and all blueprint blocks another. Nothing else depends on the order
of slots or blueprints: permuting them permutes blocks and changes nothing else. Missing evidence is
0, with a flag next to it; a blueprint that does not fit its slot is all 0. Scales bring values near
[-1, 1]; the policy normalises them exactly (`feature_scales.py`).

Features with the same kind of scale are scaled together, so a new row costs next to nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor

from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, SiteKind
from esper.leyline.reports import ACCURACY_HISTORY, Reports
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.runtime.devices import DeviceConstant


@dataclass(frozen=True)
class Log:
    """factor * log(1 + x / unit); the unit is a number or the name of an env's amount."""

    unit: str = "1"
    factor: float = 1.0
    times_rent: bool = False

    def __str__(self) -> str:
        factors = f"{self.factor:.3g} " * (self.factor != 1) + "rent " * self.times_rent
        return f"{factors}log(1 + x{f' / {self.unit}' * (self.unit != '1')})"


@dataclass(frozen=True)
class Feature:
    """One row of the layout.

    `source` is a field of the reports or a function of them, of shape `[*block]`. A plain feature
    or a flag may be wider than 1: its source is a function that returns `[width, *block]`.
    The policy does not normalise flags (0 or 1, or a one-hot).
    """

    name: str
    block: str  # "env" [N], "slot" [N, S] or "blueprint" [N, S, B]
    source: str | Callable[[Reports], Tensor]
    scale: Log | Literal["x", "flag"] = "x"  # "x": not scaled
    width: int = 1
    known: str | None = None  # a flag of the reports; without it the feature is 0
    note: str = ""  # for `feature_list`, in place of the scale

    def read(self, reports: Reports) -> Tensor:
        """The unscaled value; 0 where it is not known."""
        value: Tensor = (
            getattr(reports, self.source) if isinstance(self.source, str) else self.source(reports)
        )
        if self.known:
            value = torch.where(getattr(reports, self.known), value, _ZERO.on(reports.device))
        return value


# sources that are not a field


def _accuracy_history(r: Reports) -> Tensor:
    return torch.where(r.accuracy_history_known, r.accuracy_history, _ZERO.on(r.device)).T


def _last_op(r: Reports) -> Tensor:
    return (r.last_action[:, 0] == _OPS.on(r.device)) & r.last_action_known


def _last_action_here(r: Reports) -> Tensor:
    # int: compiled code finds a tensor and an enum member unequal for all values
    chose_a_slot = r.last_action_known & (r.last_action[:, 0] != int(LifecycleOp.WAIT))
    is_here = r.last_action[:, 1:2] == torch.arange(r.num_slots, device=r.device)
    return is_here & chose_a_slot.unsqueeze(-1)


def _is_growing(r: Reports) -> Tensor:
    return r.blueprint.unsqueeze(-1) == torch.arange(r.num_blueprints, device=r.device)


def _seed_growth(r: Reports) -> Tensor:
    """Seed parameters per other parameter; rent for the seed is charged on log(1 + this)."""
    without = r.params.unsqueeze(-1) - r.seed_params
    return r.seed_params / without.clamp(min=1)


_ZERO = DeviceConstant(torch.tensor(0.0))
_OPS = DeviceConstant(torch.arange(len(LifecycleOp)).view(-1, 1))
_STAGES = DeviceConstant(torch.arange(len(SeedStage)).view(-1, 1, 1))
_KINDS = DeviceConstant(torch.arange(len(SiteKind)).view(-1, 1, 1))
_STEPS = Log(factor=1 / math.log1p(DEFAULT_EPISODE_LENGTH))

FEATURES: tuple[Feature, ...] = (
    Feature("progress", "env", "progress"),
    Feature("locality", "env", "locality"),
    Feature("steps_left", "env", "steps_left", _STEPS),
    Feature("validation_loss", "env", "validation_loss", Log(), known="validation_known"),
    Feature("train_rows", "env", "train_rows", Log("100", 0.25)),
    Feature("host_params", "env", "host_params", Log(factor=0.1)),
    Feature("host_macs", "env", "host_macs", Log(factor=0.1)),
    Feature("added_params", "env", lambda r: r.params - r.host_params, Log("host_params")),
    Feature("added_macs", "env", lambda r: r.macs - r.host_macs, Log("host_macs")),
    Feature("params_scarcity", "env", "host_params", Log("params_left", 0.25)),
    Feature("macs_scarcity", "env", "host_macs", Log("macs_left", 0.25)),
    Feature("seeds_left", "env", "seeds_left", Log()),
    Feature("rent", "env", "rent", Log("0.02")),
    Feature("rent_charge", "env", lambda r: r.params - r.host_params, Log("host_params", 10, times_rent=True)),
    Feature("compute_price", "env", "compute_price", Log("0.01")),
    Feature("accuracy_history", "env", _accuracy_history, width=ACCURACY_HISTORY,
            note="x, the latest first, 0 where unknown"),
    Feature("accuracy_known", "env", lambda r: r.accuracy_history_known.T, "flag", width=ACCURACY_HISTORY),
    Feature("last_op", "env", _last_op, "flag", width=len(LifecycleOp), note="one-hot, 0 on the first step"),
    Feature("alpha", "slot", "alpha"),
    Feature("alpha_target", "slot", "alpha_target"),
    Feature("site_depth", "slot", "site_depth"),
    Feature("gradient_known", "slot", "gradient_known", "flag"),
    Feature("contribution_known", "slot", "contribution_known", "flag"),
    Feature("contribution", "slot", "contribution", known="contribution_known"),
    Feature("contribution_error", "slot", "contribution_error", known="contribution_known"),
    Feature("last_action_here", "slot", _last_action_here, "flag"),
    Feature("stage_age", "slot", "stage_age", _STEPS),
    Feature("total_age", "slot", "total_age", _STEPS),
    Feature("contribution_age", "slot", "contribution_age", _STEPS, known="contribution_known"),
    Feature("seed_params", "slot", "seed_params", Log("host_params")),
    Feature("seed_macs", "slot", "seed_macs", Log("host_macs")),
    Feature("seed_rent", "slot", _seed_growth, Log(factor=10, times_rent=True)),
    Feature("site_width", "slot", "site_width", Log(factor=0.2)),
    Feature("gradient_norm", "slot", "gradient_norm", Log("0.0001", 0.25), known="gradient_known"),
    Feature("stage", "slot", lambda r: r.stage == _STAGES.on(r.device), "flag", width=len(SeedStage), note="one-hot"),
    Feature("site_kind", "slot", lambda r: r.site_kind == _KINDS.on(r.device), "flag", width=len(SiteKind), note="one-hot"),
    Feature("fits", "blueprint", "fits", "flag"),
    Feature("is_growing", "blueprint", _is_growing, "flag", note="flag of the slot's current seed"),
    Feature("reach", "blueprint", "reach"),
    Feature("depth", "blueprint", "depth"),
    Feature("cost_params", "blueprint", "cost_params", Log("host_params")),
    Feature("cost_macs", "blueprint", "cost_macs", Log("host_macs")),
    Feature("cost_rent", "blueprint", "cost_params", Log("params", 10, times_rent=True)),
)  # fmt: skip

# computing a table of features


# what units and factors are multiples of: 1, or amounts of an env
_AMOUNTS = ("1", "rent", "host_params", "host_macs", "params", "params_left", "macs_left")


class _BlockTable:
    """The rows of one block in order: plain, logarithmic, flags, and those wider than 1."""

    def __init__(self, block: str):
        rows = [row for row in FEATURES if row.block == block]
        plain, flags = ([row for row in rows if row.scale == scale] for scale in ("x", "flag"))
        narrow = [row for row in plain if row.width == 1]
        self.block, self.num_plain = block, len(narrow)
        logged = [(row, row.scale) for row in rows if isinstance(row.scale, Log)]
        units = [
            (_AMOUNTS.index(log.unit), 1.0) if log.unit in _AMOUNTS else (0, float(log.unit))
            for _, log in logged
        ]
        # of logarithms: an amount, and a number times it
        self.terms = units + [(int(log.times_rent), log.factor) for _, log in logged]
        self.scalars = narrow + [row for row, _ in logged]
        self.flags = [row for row in flags if row.width == 1]
        self.wide = [row for row in plain + flags if row.width > 1]
        self.rows = self.scalars + self.flags + self.wide
        ends = list(accumulate(row.width for row in self.rows))
        self.width = ends[-1]
        self.positions = {
            row.name: (end - row.width, row.width) for row, end in zip(self.rows, ends, strict=True)
        }

    def compute(self, reports: Reports, terms: Tensor) -> Tensor:
        """The features of the block, `[width, *block]`, contiguous per feature."""
        scalars = torch.stack([row.read(reports).float() for row in self.scalars])
        logs = scalars[self.num_plain :]
        units, factors = terms.view(2, *logs.shape[:2], *[1] * (logs.dim() - 2)).unbind()
        logs.div_(units).clamp_(0, 1e9).log1p_().mul_(factors)
        flags = (row.read(reports).unsqueeze(0) for row in self.flags)
        return torch.cat((scalars, *flags, *(row.read(reports) for row in self.wide)))


def _log_terms(reports: Reports) -> tuple[Tensor, ...]:
    """Units, then factors of each block's logarithms, `[terms, N]`."""
    device, one = reports.device, torch.ones_like(reports.rent)
    amounts = torch.stack((one, *(getattr(reports, name) for name in _AMOUNTS[1:])))
    at_least_one = torch.maximum(amounts, _LEAST_AMOUNT.on(device))
    terms = at_least_one.index_select(0, _TERM_OF.on(device)) * _TERM_FACTORS.on(device)
    return torch.split(terms, [len(table.terms) for table in _TABLES])


_ENV, _SLOT, _BLUEPRINT = _TABLES = tuple(
    _BlockTable(block) for block in ("env", "slot", "blueprint")
)
_least = [[float(name != "rent")] for name in _AMOUNTS]  # only rent may be below 1
_LEAST_AMOUNT = DeviceConstant(torch.tensor(_least))
_terms = [term for table in _TABLES for term in table.terms]
_TERM_OF = DeviceConstant(torch.tensor([amount for amount, _ in _terms]))
_TERM_FACTORS = DeviceConstant(torch.tensor([[number] for _, number in _terms]))


@dataclass(frozen=True)
class FeatureLayout:
    """Positions in a feature vector for this many slots and blueprints."""

    num_slots: int
    num_blueprints: int

    env_width: ClassVar[int] = _ENV.width  # E
    slot_width: ClassVar[int] = _SLOT.width  # K
    blueprint_width: ClassVar[int] = _BLUEPRINT.width  # D

    @property
    def width(self) -> int:
        """F."""
        per_slot = self.slot_width + self.num_blueprints * self.blueprint_width
        return self.env_width + self.num_slots * per_slot

    def features(self, reports: Reports) -> Tensor:
        """The feature vectors of N envs, float32 `[N, F]`, in a constant number of operations."""
        if (reports.num_slots, reports.num_blueprints) != (self.num_slots, self.num_blueprints):
            raise ValueError(
                f"the reports have {reports.num_slots} slots and {reports.num_blueprints} "
                f"blueprints; the layout is for {self.num_slots} and {self.num_blueprints}"
            )
        env, slots, blueprints = (
            table.compute(reports, terms)
            for table, terms in zip(_TABLES, _log_terms(reports), strict=True)
        )
        blueprints = torch.where(reports.fits, blueprints, _ZERO.on(reports.device))
        features = torch.empty(reports.num_envs, self.width, device=reports.device)
        for part, block in zip(self.split(features), (env, slots, blueprints), strict=True):
            part.copy_(block.movedim(0, -1))
        return features

    def split(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Env `[..., E]`, slots `[..., S, K]` and blueprints `[..., S, B, D]`, without a copy."""
        if features.shape[-1] != self.width:
            raise ValueError(
                f"got features of width {features.shape[-1]}, expected {self.width} for "
                f"{self.num_slots} slots and {self.num_blueprints} blueprints"
            )
        slots_end = self.env_width + self.num_slots * self.slot_width
        env, slots, blueprints = features.tensor_split((self.env_width, slots_end), dim=-1)
        shape = (*features.shape[:-1], self.num_slots)
        menu = (self.num_blueprints, self.blueprint_width)
        return env, slots.view(*shape, self.slot_width), blueprints.view(*shape, *menu)

    def blueprint_fits(self, blueprints: Tensor) -> Tensor:
        """Which of the blueprints `[..., S, B, D]` fit, bool `[..., S, B]`."""
        start, _ = _BLUEPRINT.positions["fits"]
        return blueprints[..., start] > 0.5

    def is_flag(self) -> Tensor:
        """Which of the F features are flags, bool `[F]`; flags are not normalised."""
        env, slot, blueprint = (
            [row.scale == "flag" for row in table.rows for _ in range(row.width)]
            for table in _TABLES
        )
        slots, choices = self.num_slots, self.num_slots * self.num_blueprints
        return torch.tensor(env + slots * slot + choices * blueprint)


def feature_list() -> list[str]:
    """All features with their scales, in order: what a policy is trained on."""
    return [
        f"{table.block} {row.name} [{row.width}]: {row.note or row.scale}"
        for table in _TABLES
        for row in table.rows
    ]
