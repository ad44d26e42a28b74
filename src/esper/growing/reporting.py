"""What a controller gets to see of a user's growing model: the reports of a single env."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.growing.budget import Budget
from esper.growing.data import DataFacts
from esper.growing.network import GrowingNetwork
from esper.growing.sites import ModelSite
from esper.kasmina.blueprints import Blueprint
from esper.leyline.constants import SiteKind
from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.reports import ACCURACY_HISTORY, Reports


@dataclass
class Evidence:
    """What the run has shown so far; per slot `[S]`."""

    num_slots: int
    metrics: deque[float] = field(default_factory=lambda: deque(maxlen=ACCURACY_HISTORY))
    loss: float = 0.0
    last_action: Tensor | None = None  # [H]
    germinations: int = 0
    contribution: Tensor = field(init=False)
    contribution_error: Tensor = field(init=False)
    contribution_known: Tensor = field(init=False)
    contribution_age: Tensor = field(init=False)
    gradient_norm: Tensor = field(init=False)
    gradient_known: Tensor = field(init=False)

    def __post_init__(self) -> None:
        zeros, no = torch.zeros(self.num_slots), torch.zeros(self.num_slots, dtype=torch.bool)
        self.contribution, self.contribution_error, self.gradient_norm = zeros, zeros, zeros
        self.contribution_known, self.gradient_known = no, no
        self.contribution_age = torch.zeros(self.num_slots, dtype=torch.int64)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "metrics": list(self.metrics)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Evidence":
        evidence = cls(data["num_slots"])
        vars(evidence).update(data, metrics=deque(data["metrics"], maxlen=ACCURACY_HISTORY))
        return evidence

    def take_in(self, contributions: dict[int, tuple[float, float]]) -> None:
        """Contributions and their standard errors, measured just now, by slot."""
        self.contribution_age = self.contribution_age + 1
        for name in ("contribution", "contribution_error", "contribution_known"):
            setattr(self, name, getattr(self, name).clone())
        for slot, (mean, error) in contributions.items():
            self.contribution[slot], self.contribution_error[slot] = mean, error
            self.contribution_known[slot], self.contribution_age[slot] = True, 0

    def note_gradients(self, norms: dict[int, Tensor]) -> None:
        """Root mean squares of the seeds' gradients in the last step, by slot."""
        self.gradient_norm, self.gradient_known = (
            self.gradient_norm.clone(),
            self.gradient_known.clone(),
        )
        for slot, norm in norms.items():
            self.gradient_norm[slot], self.gradient_known[slot] = norm.float().cpu(), True

    def forget(self, without_seed: Tensor) -> None:
        """What was known of seeds that are gone."""
        self.contribution_known = self.contribution_known & ~without_seed
        self.gradient_known = self.gradient_known & ~without_seed


class Reporter:
    """Makes reports; what holds for the whole run is worked out once."""

    def __init__(
        self,
        network: GrowingNetwork,
        budget: Budget,
        *,
        model_params: int,
        model_macs: int,
        data: DataFacts,
        rent: float,
        max_germinations: int,
    ):
        self._network, self._budget = network, budget
        self.model_params, self.model_macs = model_params, model_macs
        self.data = data
        self._rent, self._max_germinations = rent, max_germinations
        self.action_space = tamiyo_action_space(len(network.slots), len(network.menu))
        sites, menu = [slot.site for slot in network.slots], network.menu
        self.fits = torch.tensor([[b.fits(site.seed_site) for b in menu] for site in sites])
        self.cost_params = _per_choice(sites, menu, ModelSite.params_of)
        self.cost_macs = _per_choice(sites, menu, ModelSite.macs_of)
        self._reach = _per_choice(sites, menu, _reach).float()
        self._depth = _per_choice(sites, menu, lambda s, b: b.program(s.seed_site).depth).float()

    @property
    def params(self) -> int:
        """Of the model and every seed in it."""
        return self.model_params + int(self.seed_costs(self.cost_params).sum())

    @property
    def macs(self) -> int:
        return self.model_macs + int(self.seed_costs(self.cost_macs).sum())

    def seed_costs(self, per_choice: Tensor) -> Tensor:
        """Of the seeds that are there `[S]`, 0 without one; from `[S, B]`."""
        states = self._network.states
        chosen = states.blueprint[0].clamp(min=0).unsqueeze(-1)
        return per_choice.gather(-1, chosen).squeeze(-1) * states.has_seed[0]

    def observe(self, step: int, steps_left: int, evidence: Evidence) -> Reports:
        states, slots = self._network.states, self._network.slots
        known = len(evidence.metrics)
        history = torch.zeros(ACCURACY_HISTORY)
        history[:known] = torch.tensor(list(evidence.metrics))
        last_action, acted = evidence.last_action, evidence.last_action is not None
        if last_action is None:
            last_action = torch.zeros(self.action_space.num_heads, dtype=torch.int64)
        exact = {
            "step": step,
            "steps_left": steps_left,
            "train_rows": self.data.train_rows,
            "seeds_left": self._max_germinations - evidence.germinations,
            "last_action_known": acted,
        }
        real = {
            "validation_loss": evidence.loss,
            "host_params": self.model_params,
            "host_macs": self.model_macs,
            "params": self.params,
            "macs": self.macs,
            "params_left": _rounded_down(self._budget.params, self.params),
            "macs_left": _rounded_down(self._budget.macs, self.macs),
            "locality": self.data.locality,
            "rent": self._rent,
            "compute_price": 0.0,
        }
        per_slot = {
            "accuracy_history": history,
            "accuracy_history_known": torch.arange(ACCURACY_HISTORY) < known,
            "last_action": last_action,
            "seed_params": self.seed_costs(self.cost_params).float(),
            "seed_macs": self.seed_costs(self.cost_macs).float(),
            "site_kind": torch.tensor([int(slot.site.kind) for slot in slots]),
            "site_width": torch.tensor([float(slot.site.width) for slot in slots]),
            "site_depth": torch.linspace(0, 1, len(slots)),
            "gradient_norm": evidence.gradient_norm,
            "gradient_known": evidence.gradient_known,
            "contribution": evidence.contribution,
            "contribution_error": evidence.contribution_error,
            "contribution_known": evidence.contribution_known,
            "contribution_age": evidence.contribution_age,
            "fits": self.fits,
            "cost_params": _rounded_up(self.cost_params),
            "cost_macs": _rounded_up(self.cost_macs),
            "reach": self._reach,
            "depth": self._depth,
        }
        return Reports(
            stage=states.stage,
            stage_age=states.stage_age,
            total_age=states.total_age,
            alpha=states.alpha.float(),
            alpha_target=states.alpha_target.float(),
            blueprint=states.blueprint,
            **{name: torch.tensor([value]) for name, value in exact.items()},
            **{name: torch.tensor([value], dtype=torch.float32) for name, value in real.items()},
            **{name: value.unsqueeze(0) for name, value in per_slot.items()},
        )


def _per_choice(
    sites: list[ModelSite],
    menu: tuple[Blueprint, ...],
    describe: Callable[[ModelSite, Blueprint], float],
) -> Tensor:
    """A descriptor `[S, B]` of every blueprint at every site, 0 where it does not fit."""
    return torch.tensor(
        [[describe(s, b) if b.fits(s.seed_site) else 0 for b in menu] for s in sites]
    )


def _reach(site: ModelSite, blueprint: Blueprint) -> float:
    if site.kind == SiteKind.TOKENS:
        return 1 / max(1.0, site.tokens)
    return blueprint.program(site.seed_site).reach


def _rounded_down(limit: int | None, used: int) -> float:
    """What a limit leaves, as a float32 that is never more."""
    if limit is None:
        return math.inf
    left = torch.tensor(float(limit - used))
    return float(left if left.double() <= limit - used else left.nextafter(torch.tensor(-math.inf)))


def _rounded_up(costs: Tensor) -> Tensor:
    """Whole numbers as float32 that are never less."""
    rounded = costs.float()
    up = rounded.nextafter(torch.tensor(math.inf))
    return torch.where(rounded.double() < costs.double(), up, rounded)
