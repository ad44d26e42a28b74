"""Reports as one float32 vector per env, `[N, F]`, laid out by one table.

A feature is one row of `FEATURES`: its name, its block, where it comes from and how it is scaled.
The vector is

    env | slot 0 | ... | slot S-1 | (slot 0, blueprint 0) | ... | (slot S-1, blueprint B-1)

All slot blocks have one layout and all blueprint blocks another. Nothing else depends on the order
of slots or blueprints, so that permuting them permutes blocks and changes nothing else. Evidence
that is missing is 0, with its flag beside it; a slot that does not exist and a blueprint that does
not fit are all 0. Scales bring values near [-1, 1]; exact normalisation is the learner's business.

Features with the same kind of scale are scaled together, so that a new row costs next to nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, SiteKind
from esper.leyline.device_constant import DeviceConstant
from esper.leyline.reports import ACCURACY_HISTORY, Reports
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tamiyo.policy.action_masks import affordable_blueprints


@dataclass(frozen=True)
class Linear:
    """factor * x."""

    factor: float = 1.0

    def __str__(self) -> str:
        return "x" if self.factor == 1 else f"{self.factor:g} x"


@dataclass(frozen=True)
class Flag(Linear):
    """0 or 1, or a one-hot: as it is, and best left so by whatever normalises features."""

    def __str__(self) -> str:
        return "flag"


@dataclass(frozen=True)
class Log:
    """factor * log(1 + x / unit); the unit is a number or one of an env's amounts."""

    unit: str = "1"
    factor: float = 1.0
    times_rent: bool = False

    def __str__(self) -> str:
        factors = f"{self.factor:.3g} " * (self.factor != 1) + "rent " * self.times_rent
        return f"{factors}log(1 + x{f' / {self.unit}' * (self.unit != '1')})"


@dataclass(frozen=True)
class Feature:
    """One row of the layout.

    `source` is a field of the reports or a function of them, of shape `[*block]`; a feature wider
    than 1 is a function that gives `[*block, width]`, scaled already.
    """

    name: str
    block: str  # "env" [N], "slot" [N, S] or "blueprint" [N, S, B]
    source: str | Callable[[Reports], Tensor]
    scale: Linear | Log = Linear()
    width: int = 1
    known: str | None = None  # the flag in the reports without which it is 0
    note: str = ""  # for `describe`

    def read(self, reports: Reports) -> Tensor:
        if isinstance(self.source, str):
            value: Tensor = getattr(reports, self.source)
            return value
        return self.source(reports)


@dataclass(frozen=True)
class FeatureLayout:
    """Where everything lies in a feature vector for this many slots and blueprints."""

    num_slots: int
    num_blueprints: int

    @property
    def env_width(self) -> int:
        """E."""
        return _ENV.width

    @property
    def slot_width(self) -> int:
        """K, of each slot."""
        return _SLOT.width

    @property
    def blueprint_width(self) -> int:
        """D, of each blueprint in each slot."""
        return _BLUEPRINT.width

    @property
    def width(self) -> int:
        """F."""
        per_slot = self.slot_width + self.num_blueprints * self.blueprint_width
        return self.env_width + self.num_slots * per_slot

    def features(self, reports: Reports) -> Tensor:
        """The feature vectors of N envs, float32 `[N, F]`, in a constant number of operations."""
        if (reports.num_slots, reports.num_blueprints) != (self.num_slots, self.num_blueprints):
            raise ValueError(
                f"these reports have {reports.num_slots} slots and {reports.num_blueprints} "
                f"blueprints; the layout is for {self.num_slots} and {self.num_blueprints}"
            )
        exists = reports.slot_exists.unsqueeze(-1)
        units, factors = _log_terms(reports)
        env, slots, blueprints = (
            table.compute(reports, units, factors) for table in (_ENV, _SLOT, _BLUEPRINT)
        )
        zero = _ZERO.on(reports.device)
        slots = torch.where(exists, slots, zero)
        blueprints = torch.where((reports.fits & exists).unsqueeze(-1), blueprints, zero)
        return torch.cat((env, slots.flatten(1), blueprints.flatten(1)), dim=-1)

    def split(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Env `[..., E]`, slots `[..., S, K]` and blueprints `[..., S, B, D]`, without a copy."""
        if features.shape[-1] != self.width:
            raise ValueError(
                f"got features of width {features.shape[-1]}, expected {self.width} for "
                f"{self.num_slots} slots and {self.num_blueprints} blueprints"
            )
        slots_end = self.env_width + self.num_slots * self.slot_width
        slots = features[..., self.env_width : slots_end]
        blueprints = features[..., slots_end:]
        shape = (*features.shape[:-1], self.num_slots)
        return (
            features[..., : self.env_width],
            slots.view(*shape, self.slot_width),
            blueprints.view(*shape, self.num_blueprints, self.blueprint_width),
        )

    def slot_exists(self, slots: Tensor) -> Tensor:
        """Which of the slots `[..., S, K]` exist, bool `[..., S]`."""
        start, _ = _SLOT.positions["exists"]
        return slots[..., start] > 0.5

    def positions(self, block: str) -> dict[str, tuple[int, int]]:
        """Where each feature of a block lies in it, and how wide it is, by name."""
        tables = {table.block: table for table in (_ENV, _SLOT, _BLUEPRINT)}
        return tables[block].positions

    def is_flag(self) -> Tensor:
        """Which of the F features are flags, bool `[F]`: a normaliser should leave them alone."""
        env, slot, blueprint = (
            [isinstance(row.scale, Flag) for row in table.rows for _ in range(row.width)]
            for table in (_ENV, _SLOT, _BLUEPRINT)
        )
        slots, choices = self.num_slots, self.num_slots * self.num_blueprints
        return torch.tensor(env + slots * slot + choices * blueprint)

    def describe(self) -> str:
        """The layout as a table: each block's features, where they lie in it, and their scale."""
        copies = (
            (_ENV, "once"),
            (_SLOT, f"for each of {self.num_slots} slots"),
            (_BLUEPRINT, f"for each of {self.num_slots} x {self.num_blueprints} blueprints"),
        )
        lines = [f"{self.width} features per env"]
        for table, often in copies:
            lines.append(f"\n{table.block}: {table.width} features, {often}")
            for row in table.rows:
                start, width = table.positions[row.name]
                what = row.note or str(row.scale)
                unless = f", 0 unless {row.known}" if row.known else ""
                lines.append(f"  {start:3} +{width}  {row.name:22}{what}{unless}")
        return "\n".join(lines)


# sources that are more than a field


def _one_hot(index: Tensor, size: int) -> Tensor:
    return index.unsqueeze(-1) == torch.arange(size, device=index.device)


def _accuracy_gains(r: Reports) -> Tensor:
    known = r.accuracy_history_known[:, 1:] & r.accuracy_history_known[:, :-1]
    gains = 10 * (r.accuracy_history[:, :-1] - r.accuracy_history[:, 1:])
    return torch.where(known, gains, _ZERO.on(r.device))


def _last_op(r: Reports) -> Tensor:
    return _one_hot(r.last_action[:, 0], len(LifecycleOp)) & r.last_action_known.unsqueeze(-1)


def _last_action_here(r: Reports) -> Tensor:
    # int: compiled code takes a tensor and an enum member for unequal, whatever their values
    chose_a_slot = r.last_action_known & (r.last_action[:, 0] != int(LifecycleOp.WAIT))
    return _one_hot(r.last_action[:, 1], r.num_slots) & chose_a_slot.unsqueeze(-1)


def _seed_growth(r: Reports) -> Tensor:
    """A seed against all else in its network: log(1 + this) is what rent is charged on for it."""
    without = r.params.unsqueeze(-1) - r.seed_params
    return r.seed_params / without.clamp(min=1)


_STEPS = Log(factor=1 / math.log1p(DEFAULT_EPISODE_LENGTH))

FEATURES: tuple[Feature, ...] = (
    Feature("progress", "env", "progress"),
    Feature("validation_known", "env", "validation_known", Flag()),
    Feature("validation_accuracy", "env", "validation_accuracy", known="validation_known"),
    Feature("last_action_succeeded", "env", "last_action_succeeded", Flag(), known="last_action_known"),
    Feature("steps_left", "env", "steps_left", _STEPS),
    Feature("validation_loss", "env", "validation_loss", Log(), known="validation_known"),
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
    Feature("accuracy_gains", "env", _accuracy_gains, width=ACCURACY_HISTORY - 1,
            note="10 x, the latest first, 0 where unknown"),
    Feature("accuracy_known", "env", lambda r: r.accuracy_history_known, Flag(), width=ACCURACY_HISTORY),
    Feature("last_op", "env", _last_op, Flag(), width=len(LifecycleOp), note="one-hot, 0 on the first step"),
    Feature("exists", "slot", "slot_exists", Flag()),
    Feature("alpha", "slot", "alpha"),
    Feature("alpha_target", "slot", "alpha_target"),
    Feature("site_depth", "slot", "site_depth"),
    Feature("gradient_known", "slot", "gradient_known", Flag()),
    Feature("contribution_known", "slot", "contribution_known", Flag()),
    Feature("contribution", "slot", "contribution", Linear(10), known="contribution_known"),
    Feature("contribution_error", "slot", "contribution_error", Linear(100), known="contribution_known"),
    Feature("last_action_here", "slot", _last_action_here, Flag()),
    Feature("stage_age", "slot", "stage_age", _STEPS),
    Feature("total_age", "slot", "total_age", _STEPS),
    Feature("contribution_age", "slot", "contribution_age", _STEPS, known="contribution_known"),
    Feature("seed_params", "slot", "seed_params", Log("host_params")),
    Feature("seed_macs", "slot", "seed_macs", Log("host_macs")),
    Feature("seed_rent", "slot", _seed_growth, Log(factor=10, times_rent=True)),
    Feature("site_width", "slot", "site_width", Log(factor=0.2)),
    Feature("gradient_norm", "slot", "gradient_norm", Log("0.0001", 0.25), known="gradient_known"),
    Feature("stage", "slot", lambda r: _one_hot(r.stage, len(SeedStage)), Flag(), width=len(SeedStage), note="one-hot"),
    Feature("site_kind", "slot", lambda r: _one_hot(r.site_kind, len(SiteKind)), Flag(), width=len(SiteKind), note="one-hot"),
    Feature("fits", "blueprint", "fits", Flag()),
    Feature("is_affordable", "blueprint", affordable_blueprints, Flag()),
    Feature("is_growing", "blueprint", lambda r: _one_hot(r.blueprint, r.num_blueprints), Flag(),
            note="flag of the slot's present seed"),
    Feature("reach", "blueprint", "reach"),
    Feature("depth", "blueprint", "depth", Linear(0.25)),
    Feature("cost_params", "blueprint", "cost_params", Log("host_params")),
    Feature("cost_macs", "blueprint", "cost_macs", Log("host_macs")),
    Feature("cost_rent", "blueprint", "cost_params", Log("params", 10, times_rent=True)),
    Feature("params_share", "blueprint", "cost_params", Log("params_left")),
    Feature("macs_share", "blueprint", "cost_macs", Log("macs_left")),
)  # fmt: skip

# how a table of features is computed


_AMOUNTS = ("host_params", "host_macs", "params", "params_left", "macs_left")  # units of an env
_ZERO = DeviceConstant(torch.tensor(0.0))


class _BlockTable:
    """The rows of one block: linear ones first, then logarithmic, then those wider than 1."""

    def __init__(self, block: str, log_start: int):
        rows = [row for row in FEATURES if row.block == block]
        narrow = [row for row in rows if row.width == 1]
        linear = [row for row in narrow if isinstance(row.scale, Linear)]
        logs = [row for row in narrow if isinstance(row.scale, Log)]
        self.linear, self.logs = tuple(linear), tuple(logs)
        self.wide = tuple(row for row in rows if row.width > 1)
        self.block = block
        self.rows = self.linear + self.logs + self.wide
        ends = list(accumulate(row.width for row in self.rows))
        self.width = ends[-1]
        self.positions = {
            row.name: (end - row.width, row.width) for row, end in zip(self.rows, ends, strict=True)
        }
        self.log_part = slice(log_start, log_start + len(logs))
        self.factors = DeviceConstant(torch.tensor([row.scale.factor for row in linear]))
        flags = [row.known for row in linear + logs]
        self.known = tuple(sorted({flag for flag in flags if flag}))
        order = [1 + self.known.index(flag) if flag else 0 for flag in flags]
        self.flag_of = DeviceConstant(torch.tensor(order))

    def compute(self, reports: Reports, units: Tensor, factors: Tensor) -> Tensor:
        """All features of the block side by side, `[*block, width]`."""
        linear = torch.stack([row.read(reports).float() for row in self.linear], dim=-1)
        linear = linear * self.factors.on(reports.device)
        amounts = torch.stack([row.read(reports).float() for row in self.logs], dim=-1)
        shape = (-1, *([1] * (amounts.dim() - 2)), len(self.logs))
        ratios = amounts * units[:, self.log_part].view(shape)
        logs = ratios.clamp(0, 1e9).log1p() * factors[:, self.log_part].view(shape)
        narrow = torch.cat((linear, logs), dim=-1)
        if self.known:
            narrow = torch.where(self._flags(reports), narrow, _ZERO.on(reports.device))
        return torch.cat((narrow, *(row.read(reports) for row in self.wide)), dim=-1)

    def _flags(self, reports: Reports) -> Tensor:
        """Whether each feature of width 1 is known."""
        flags = [getattr(reports, name) for name in self.known]
        every = torch.stack((torch.ones_like(flags[0]), *flags), dim=-1)
        return every.index_select(-1, self.flag_of.on(reports.device))


def _log_terms(reports: Reports) -> tuple[Tensor, Tensor]:
    """1 / unit and factor of every logarithmic feature, both `[N, their number]`."""
    device, one = reports.device, torch.ones_like(reports.rent)
    amounts = torch.stack((one, *(getattr(reports, name) for name in _AMOUNTS)), dim=-1)
    inverse = amounts.clamp(min=1).reciprocal().index_select(-1, _UNIT_OF.on(device))
    rents = torch.stack((one, reports.rent), dim=-1).index_select(-1, _RENT_OF.on(device))
    return inverse * _INVERSE_UNITS.on(device), rents * _LOG_FACTORS.on(device)


_ENV = _BlockTable("env", 0)
_SLOT = _BlockTable("slot", _ENV.log_part.stop)
_BLUEPRINT = _BlockTable("blueprint", _SLOT.log_part.stop)
_LOGS = [
    row.scale for row in _ENV.logs + _SLOT.logs + _BLUEPRINT.logs if isinstance(row.scale, Log)
]
_UNIT_OF = DeviceConstant(
    torch.tensor([1 + _AMOUNTS.index(s.unit) if s.unit in _AMOUNTS else 0 for s in _LOGS])
)
_INVERSE_UNITS = DeviceConstant(
    torch.tensor([1.0 if s.unit in _AMOUNTS else 1 / float(s.unit) for s in _LOGS])
)
_RENT_OF = DeviceConstant(torch.tensor([int(s.times_rent) for s in _LOGS]))
_LOG_FACTORS = DeviceConstant(torch.tensor([s.factor for s in _LOGS]))
