"""Reports for a controller, from what is known and what was measured of N hosts.

    history.add_step(measured, states.has_seed)       # after every step of training
    reports = build_reports(facts, states, history, step=3, ...)

Populations (`tolaria/environment.py`) and a user's own model (`growing/reporter.py`) share this builder.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina.blueprints import Blueprint, Site, seed_programs
from esper.kasmina.layers import Program
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.constants import SiteKind
from esper.leyline.reports import ACCURACY_HISTORY, Reports
from esper.leyline.stages import LifecycleOp

# The fields of `Reports` that are known before training, by name; `Reports` describes them. Sizes and
# costs are float32, or int64 where they may be too large for it.
HostFacts = dict[str, Tensor]


class SeedFacts(NamedTuple):
    """What is known of a seed before it is grown."""

    params: int
    macs: int  # per example
    depth: int  # layers that multiply by weights
    reach: float  # share of the positions that one output sees

    @classmethod
    def of(cls, program: Program, tokens: float = 1.0) -> "SeedFacts":
        """`tokens` is how many vectors of an example the seed works on."""
        macs = round(program.macs * tokens)
        reach = program.reach / max(1.0, tokens)
        return cls(program.num_params, macs, program.depth, reach)


def site_facts(sites: Sequence[Site], menu: Sequence[Blueprint]) -> HostFacts:
    """The facts about the sites of one host and the seeds that fit there."""
    seeds = [[SeedFacts.of(p) if p else None for p in row] for row in seed_programs(sites, menu)]
    return facts_of([site.kind for site in sites], [site.width for site in sites], seeds)


def facts_of(
    kinds: Sequence[SiteKind], widths: Sequence[int], seeds: Sequence[Sequence[SeedFacts | None]]
) -> HostFacts:
    """Facts about sites `[S]` and their seeds `[S, B]`, None where one does not fit.

    Costs are int64.
    """

    def per_seed(name: str) -> Tensor:
        return torch.tensor([[getattr(seed, name) if seed else 0 for seed in row] for row in seeds])

    return {
        "site_kind": torch.tensor([int(kind) for kind in kinds]),
        "site_width": torch.tensor([float(width) for width in widths]),
        "site_depth": torch.linspace(0, 1, len(kinds)),
        "fits": torch.tensor([[seed is not None for seed in row] for row in seeds]),
        "cost_params": per_seed("params"),
        "cost_macs": per_seed("macs"),
        "reach": per_seed("reach").float(),
        "depth": per_seed("depth").float(),
    }


class StepMeasurements(NamedTuple):
    """What one step of training measured."""

    loss: Tensor  # [N]
    accuracy: Tensor  # [N]
    contribution: Tensor  # [N, S]
    contribution_error: Tensor  # [N, S]
    contribution_known: Tensor  # [N, S]
    gradient_norm: Tensor  # [N, S]
    gradient_known: Tensor  # [N, S]
    rolled_back: Tensor  # [N]


class History:
    """What the steps of N episodes have shown so far."""

    def __init__(self, num_envs: int, num_slots: int, num_heads: int):
        per_slot = torch.zeros(num_envs, num_slots)
        self.num_validations = 0
        self.loss = torch.zeros(num_envs)
        self.accuracies = torch.zeros(num_envs, ACCURACY_HISTORY)  # the latest first
        self.contribution = self.contribution_error = self.gradient_norm = per_slot
        self.contribution_known = self.gradient_known = per_slot.bool()
        self.contribution_age = per_slot.long()
        self.last_action: Tensor = torch.zeros(num_envs, num_heads, dtype=torch.int64)
        self.has_acted = False
        self.germinations = torch.zeros(num_envs, dtype=torch.int64)

    def add_action(self, actions: Tensor) -> None:
        """Actions `[N, H]` in Tamiyo's eight heads."""
        self.last_action, self.has_acted = actions, True
        self.germinations = self.germinations + (actions[:, 0] == LifecycleOp.GERMINATE)

    def add_step(self, measured: StepMeasurements, has_seed: Tensor) -> None:
        self.add_validation(measured.accuracy, measured.loss)
        self.add_contributions(
            measured.contribution, measured.contribution_error, measured.contribution_known
        )
        self.add_gradients(measured.gradient_norm, measured.gradient_known)
        self.forget(~has_seed)

    def add_validation(self, accuracy: Tensor, loss: Tensor | None = None) -> None:
        """Accuracy `[N]`; without a loss, the last one stays."""
        self.num_validations += 1
        self.accuracies = torch.cat((accuracy.unsqueeze(1), self.accuracies[:, :-1]), dim=1)
        self.loss = self.loss if loss is None else loss

    def add_contributions(self, mean: Tensor, error: Tensor, known: Tensor) -> None:
        """Seeds that were not measured this time keep their values, which are a step older."""
        self.contribution = torch.where(known, mean, self.contribution)
        self.contribution_error = torch.where(known, error, self.contribution_error)
        self.contribution_known = self.contribution_known | known
        self.contribution_age = torch.where(known, 0, self.contribution_age + 1)

    def add_gradients(self, norm: Tensor, known: Tensor) -> None:
        self.gradient_norm = torch.where(known, norm, self.gradient_norm)
        self.gradient_known = self.gradient_known | known

    def forget(self, without_seed: Tensor) -> None:
        """Drop what was measured of seeds in slots `[N, S]` that have none any more."""
        self.contribution = self.contribution.masked_fill(without_seed, 0.0)
        self.contribution_error = self.contribution_error.masked_fill(without_seed, 0.0)
        self.contribution_known = self.contribution_known & ~without_seed
        self.gradient_norm = self.gradient_norm.masked_fill(without_seed, 0.0)
        self.gradient_known = self.gradient_known & ~without_seed


def build_reports(
    facts: HostFacts,
    states: SlotStates,
    history: History,
    *,
    step: int,
    steps_left: int,
    params_left: Tensor,
    macs_left: Tensor,
    max_germinations: int,
    rent: Tensor,
    compute_price: float,
) -> Reports:
    """One report per host; budgets and rent are `[N]`."""
    per_env = (states.num_hosts,)
    seed_params, seed_macs = seed_costs(facts, states)
    accuracies = torch.arange(ACCURACY_HISTORY).expand_as(history.accuracies)
    sizes = {name: facts[name].float() for name in ("host_params", "host_macs")}
    costs = {name: _rounded_up(facts[name]) for name in ("cost_params", "cost_macs")}
    return Reports(
        **facts | sizes | costs,
        step=torch.full(per_env, step),
        steps_left=torch.full(per_env, steps_left),
        validation_loss=history.loss,
        accuracy_history=history.accuracies,
        accuracy_history_known=accuracies < history.num_validations,
        params=(facts["host_params"] + seed_params.sum(dim=-1)).float(),
        macs=(facts["host_macs"] + seed_macs.sum(dim=-1)).float(),
        params_left=params_left,
        macs_left=macs_left,
        seeds_left=max_germinations - history.germinations,
        rent=rent,
        compute_price=torch.full(per_env, compute_price),
        last_action=history.last_action,
        last_action_known=torch.full(per_env, history.has_acted),
        stage=states.stage,
        stage_age=states.stage_age,
        total_age=states.total_age,
        alpha=states.alpha.float(),
        alpha_target=states.alpha_target.float(),
        blueprint=states.blueprint,
        seed_params=seed_params.float(),
        seed_macs=seed_macs.float(),
        gradient_norm=history.gradient_norm,
        gradient_known=history.gradient_known,
        contribution=history.contribution,
        contribution_error=history.contribution_error,
        contribution_known=history.contribution_known & states.has_seed,
        contribution_age=history.contribution_age,
    )


def seed_costs(facts: HostFacts, states: SlotStates) -> tuple[Tensor, Tensor]:
    """Parameters and multiply-adds `[N, S]` of the seeds in the slots, 0 without one."""
    chosen = states.blueprint.clamp(min=0).unsqueeze(-1)
    params, macs = (
        costs.gather(-1, chosen).squeeze(-1) * states.has_seed
        for costs in (facts["cost_params"], facts["cost_macs"])
    )
    return params, macs


def _rounded_up(costs: Tensor) -> Tensor:
    """Costs as float32, never less than they are: a seed that does not fit must not seem to."""
    rounded = costs.float()
    if costs.dtype == rounded.dtype:
        return costs
    up = rounded.nextafter(torch.tensor(math.inf))
    return torch.where(rounded.double() < costs.double(), up, rounded)
