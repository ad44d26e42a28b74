"""Reports as one float32 vector per env, `[N, F]`, laid out by one table.

A feature is one row of `FEATURES`: its name, its block, its width, how it is scaled, and the
function that computes it for the whole batch. The vector is

    env | slot 0 | ... | slot S-1 | (slot 0, blueprint 0) | ... | (slot S-1, blueprint B-1)

All slot blocks have one layout and all blueprint blocks another. Nothing else depends on the order
of slots or blueprints, so that permuting them permutes blocks and changes nothing else. Evidence
that is missing is 0, with its flag beside it; a slot that does not exist and a blueprint that does
not fit are all 0. Scales bring values near [-1, 1]; exact normalisation is the learner's business.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, SiteKind
from esper.leyline.reports import ACCURACY_HISTORY, Reports
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tamiyo.policy.action_masks import affordable_blueprints


@dataclass(frozen=True)
class Feature:
    """One row of the layout: `compute` gives `[*block, width]`, or `[*block]` where width is 1."""

    name: str
    block: str  # "env" [N], "slot" [N, S] or "blueprint" [N, S, B]
    width: int
    scale: str  # how it is scaled, in words
    compute: Callable[[Reports], Tensor]


@dataclass(frozen=True)
class FeatureLayout:
    """Where everything lies in a feature vector for this many slots and blueprints."""

    num_slots: int
    num_blueprints: int

    @property
    def env_width(self) -> int:
        """E."""
        return _WIDTHS["env"]

    @property
    def slot_width(self) -> int:
        """K, of each slot."""
        return _WIDTHS["slot"]

    @property
    def blueprint_width(self) -> int:
        """D, of each blueprint in each slot."""
        return _WIDTHS["blueprint"]

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
        env = _block(reports, "env")
        slots = torch.where(exists, _block(reports, "slot"), 0.0)
        is_choice = (reports.fits & exists).unsqueeze(-1)
        blueprints = torch.where(is_choice, _block(reports, "blueprint"), 0.0)
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
        return slots[..., _start("slot", "exists")] > 0.5

    def describe(self) -> str:
        """The layout as a table: each block's features, where they lie in it, and their scale."""
        copies = {
            "env": "once",
            "slot": f"for each of {self.num_slots} slots",
            "blueprint": f"for each of {self.num_slots} x {self.num_blueprints} blueprints",
        }
        lines = [f"{self.width} features per env"]
        for block, often in copies.items():
            lines.append(f"\n{block}: {_WIDTHS[block]} features, {often}")
            start = 0
            for row in _ROWS[block]:
                lines.append(f"  {start:3} +{row.width}  {row.name:22}{row.scale}")
                start += row.width
        return "\n".join(lines)


def _start(block: str, name: str) -> int:
    """Where a feature begins in its block."""
    names = [row.name for row in _ROWS[block]]
    return sum(row.width for row in _ROWS[block][: names.index(name)])


def _block(reports: Reports, block: str) -> Tensor:
    """All features of a block side by side, `[*block, width]`."""
    columns = []
    for row in _ROWS[block]:
        values = row.compute(reports).float()
        columns.append(values.unsqueeze(-1) if row.width == 1 else values)
    return torch.cat(columns, dim=-1)


# scales


def _if_known(values: Tensor, known: Tensor) -> Tensor:
    return torch.where(known, values, 0.0)


def _one_hot(index: Tensor, size: int) -> Tensor:
    return index.unsqueeze(-1) == torch.arange(size, device=index.device)


def _steps(count: Tensor) -> Tensor:
    return torch.log1p(count.float()) * (1 / math.log1p(DEFAULT_EPISODE_LENGTH))


def _relative(amount: Tensor, host: Tensor) -> Tensor:
    """log(1 + amount / host): the unit that rent is charged in. `host` is `[N]`."""
    return torch.log1p(amount / _per_env(host.clamp(min=1), amount))


def _room(left: Tensor, host: Tensor) -> Tensor:
    """What a budget still allows, against the host: 0 nothing, 1/2 a host, 1 no limit."""
    return 1 / (1 + host.clamp(min=1) / left.clamp(min=0))


def _extra_rent(reports: Reports, before: Tensor, after: Tensor) -> Tensor:
    """Rent for going from `before` to `after` added parameters."""
    host = reports.host_params
    return _per_env(reports.rent, after) * (_relative(after, host) - _relative(before, host))


def _per_env(values: Tensor, like: Tensor) -> Tensor:
    """`[N]` shaped to broadcast against `like`, `[N, ...]`."""
    return values.view(-1, *([1] * (like.dim() - 1)))


# features that need more than a line


def _accuracy_gains(r: Reports) -> Tensor:
    known = r.accuracy_history_known[:, 1:] & r.accuracy_history_known[:, :-1]
    return _if_known(10 * (r.accuracy_history[:, :-1] - r.accuracy_history[:, 1:]), known)


def _last_op(r: Reports) -> Tensor:
    return _one_hot(r.last_action[:, 0], len(LifecycleOp)) & r.last_action_known.unsqueeze(-1)


def _last_action_here(r: Reports) -> Tensor:
    # int: compiled code takes a tensor and an enum member for unequal, whatever their values
    chose_a_slot = r.last_action_known & (r.last_action[:, 0] != int(LifecycleOp.WAIT))
    return _one_hot(r.last_action[:, 1], r.num_slots) & chose_a_slot.unsqueeze(-1)


def _seed_rent(r: Reports) -> Tensor:
    """What a seed costs: the rent that would be saved without it, `[N, S]`."""
    added = (r.params - r.host_params).unsqueeze(-1)
    return _extra_rent(r, (added - r.seed_params).clamp(min=0), added)


def _growth_rent(r: Reports) -> Tensor:
    """What growing a blueprint would cost: the rent that it adds, `[N, S, B]`."""
    added = (r.params - r.host_params).view(-1, 1, 1)
    return _extra_rent(r, added, added + r.cost_params)


def _gradient_health(r: Reports) -> Tensor:
    exponent = r.gradient_norm.clamp(1e-8, 1e8).log10()
    return _if_known(exponent / 4 + 1, r.gradient_known)


def _params_share(r: Reports) -> Tensor:
    return r.cost_params / (r.cost_params + _per_env(r.params_left.clamp(min=1), r.cost_params))


def _macs_share(r: Reports) -> Tensor:
    return r.cost_macs / (r.cost_macs + _per_env(r.macs_left.clamp(min=1), r.cost_macs))


FEATURES: tuple[Feature, ...] = (
    Feature("progress", "env", 1, "share of the episode", lambda r: r.progress),
    Feature("steps_left", "env", 1, "log steps", lambda r: _steps(r.steps_left)),
    Feature("validation_known", "env", 1, "flag", lambda r: r.validation_known),
    Feature("validation_loss", "env", 1, "log(1 + loss)",
            lambda r: _if_known(r.validation_loss.clamp(max=1e4).log1p(), r.validation_known)),
    Feature("validation_accuracy", "env", 1, "0 to 1",
            lambda r: _if_known(r.validation_accuracy, r.validation_known)),
    Feature("accuracy_gains", "env", ACCURACY_HISTORY - 1, "tenths, the latest first", _accuracy_gains),
    Feature("accuracy_known", "env", ACCURACY_HISTORY, "flags", lambda r: r.accuracy_history_known),
    Feature("host_params", "env", 1, "log10 / 6", lambda r: r.host_params.clamp(min=1).log10() / 6),
    Feature("host_macs", "env", 1, "log10 / 8", lambda r: r.host_macs.clamp(min=1).log10() / 8),
    Feature("added_params", "env", 1, "log(1 + added / host)",
            lambda r: _relative(r.params - r.host_params, r.host_params)),
    Feature("added_macs", "env", 1, "log(1 + added / host)",
            lambda r: _relative(r.macs - r.host_macs, r.host_macs)),
    Feature("params_left", "env", 1, "left / (left + host)", lambda r: _room(r.params_left, r.host_params)),
    Feature("macs_left", "env", 1, "left / (left + host)", lambda r: _room(r.macs_left, r.host_macs)),
    Feature("seeds_left", "env", 1, "left / (left + 1)",
            lambda r: 1 - 1 / (1 + r.seeds_left.clamp(min=0))),
    Feature("rent", "env", 1, "log, 0 at .02 and 1 at .30",
            lambda r: (r.rent.clamp(min=1e-3) / 0.02).log() / math.log(15)),
    Feature("rent_charge", "env", 1, "tenths of accuracy",
            lambda r: 10 * r.rent * _relative(r.params - r.host_params, r.host_params)),
    Feature("compute_price", "env", 1, "log(1 + 100 price)", lambda r: (100 * r.compute_price).log1p()),
    Feature("last_op", "env", len(LifecycleOp), "one-hot, 0 on the first step", _last_op),
    Feature("last_action_succeeded", "env", 1, "flag",
            lambda r: r.last_action_succeeded & r.last_action_known),
    Feature("exists", "slot", 1, "flag", lambda r: r.slot_exists),
    Feature("stage", "slot", len(SeedStage), "one-hot", lambda r: _one_hot(r.stage, len(SeedStage))),
    Feature("stage_age", "slot", 1, "log steps", lambda r: _steps(r.stage_age)),
    Feature("total_age", "slot", 1, "log steps", lambda r: _steps(r.total_age)),
    Feature("alpha", "slot", 1, "0 to 1", lambda r: r.alpha),
    Feature("alpha_target", "slot", 1, "0 to 1", lambda r: r.alpha_target),
    Feature("seed_params", "slot", 1, "log(1 + seed / host)",
            lambda r: _relative(r.seed_params, r.host_params)),
    Feature("seed_macs", "slot", 1, "log(1 + seed / host)", lambda r: _relative(r.seed_macs, r.host_macs)),
    Feature("seed_rent", "slot", 1, "tenths of accuracy", lambda r: 10 * _seed_rent(r)),
    Feature("site_kind", "slot", len(SiteKind), "one-hot", lambda r: _one_hot(r.site_kind, len(SiteKind))),
    Feature("site_width", "slot", 1, "log2 / 10", lambda r: r.site_width.clamp(min=1).log2() / 10),
    Feature("site_depth", "slot", 1, "0 to 1", lambda r: r.site_depth),
    Feature("gradient_known", "slot", 1, "flag", lambda r: r.gradient_known),
    Feature("gradient_norm", "slot", 1, "log10 / 4 + 1", _gradient_health),
    Feature("contribution_known", "slot", 1, "flag", lambda r: r.contribution_known),
    Feature("contribution", "slot", 1, "tenths of accuracy",
            lambda r: _if_known(10 * r.contribution, r.contribution_known)),
    Feature("contribution_error", "slot", 1, "hundredths of accuracy",
            lambda r: _if_known(100 * r.contribution_error, r.contribution_known)),
    Feature("contribution_net", "slot", 1, "tenths of accuracy, less the seed's rent",
            lambda r: _if_known(10 * (r.contribution - _seed_rent(r)), r.contribution_known)),
    Feature("contribution_age", "slot", 1, "log steps",
            lambda r: _if_known(_steps(r.contribution_age), r.contribution_known)),
    Feature("last_action_here", "slot", 1, "flag", _last_action_here),
    Feature("fits", "blueprint", 1, "flag", lambda r: r.fits),
    Feature("affordable", "blueprint", 1, "flag", affordable_blueprints),
    Feature("is_growing", "blueprint", 1, "flag: the slot's present seed",
            lambda r: _one_hot(r.blueprint, r.num_blueprints)),
    Feature("cost_params", "blueprint", 1, "log(1 + cost / host)",
            lambda r: _relative(r.cost_params, r.host_params)),
    Feature("cost_macs", "blueprint", 1, "log(1 + cost / host)",
            lambda r: _relative(r.cost_macs, r.host_macs)),
    Feature("cost_rent", "blueprint", 1, "tenths of accuracy", lambda r: 10 * _growth_rent(r)),
    Feature("params_share", "blueprint", 1, "cost / (cost + left)", _params_share),
    Feature("macs_share", "blueprint", 1, "cost / (cost + left)", _macs_share),
    Feature("reach", "blueprint", 1, "0 to 1", lambda r: r.reach),
    Feature("depth", "blueprint", 1, "layers / 4", lambda r: r.depth / 4),
)  # fmt: skip

_ROWS = {
    block: tuple(row for row in FEATURES if row.block == block)
    for block in ("env", "slot", "blueprint")
}
_WIDTHS = {block: sum(row.width for row in rows) for block, rows in _ROWS.items()}
