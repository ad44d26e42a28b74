"""Growth without training: hosts whose gains per slot and blueprint are known, on real lifecycles.

A seed matures with the steps that it trains at, and seeds share one headroom:

    accuracy = host + headroom * (1 - product over seeds of (1 - alpha * maturity * share))

Shares differ between hosts: which slot pays is drawn per env, and some pay nothing. What a
controller sees of a seed is a noisy counterfactual that overstates it, as a host that has grown
used to its seed does.
"""

import torch
from torch import Tensor

from esper.kasmina.lifecycle import SlotStates, apply, begin_step, end_step
from esper.leyline.constants import SiteKind
from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.protocols import Controller
from esper.leyline.reports import ACCURACY_HISTORY, Reports
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tamiyo.policy.action_masks import compute_batch_masks

HOST_PARAMS, HOST_MACS = 858.0, 4000.0
HOST_ACCURACY, HEADROOM = 0.77, 0.16
SEED_PARAMS = torch.tensor([64.0, 72, 120, 200, 212, 416, 672])
SEED_REACH = torch.tensor([0.35, 0.05, 0.15, 0.15, 0.25, 0.25, 0.45])
SEED_DEPTH = torch.tensor([1.0, 1, 2, 1, 2, 2, 2])
MATURING = 0.3  # share of what it lacks that a seed learns in a step at alpha 1
OVERSTATED, NOISE = 1.5, 0.01


class GrowthSimulator:
    """N hosts with S slots in one episode; `score` is DESIGN.md's, of the committed network."""

    def __init__(
        self,
        num_envs: int,
        rent: float,
        *,
        num_slots: int = 3,
        num_steps: int = 25,
        params_budget: float = torch.inf,
        rng_seed: int = 0,
    ):
        self.num_steps, self.rent, self.params_budget = num_steps, rent, params_budget
        self.generator = torch.Generator().manual_seed(rng_seed)
        self.num_blueprints = len(SEED_PARAMS)
        self.action_space = tamiyo_action_space(num_slots, self.num_blueprints)
        self.states = SlotStates.dormant(num_envs, num_slots)
        self.maturity = torch.zeros(num_envs, num_slots)
        self.step_count = 0
        self.last_action = torch.zeros(num_envs, self.action_space.num_heads, dtype=torch.int64)
        self.accuracies: list[Tensor] = []
        # early sites pay more on average; each host has its own taste, and a dud now and then
        site = torch.linspace(1.0, 0.4, num_slots)
        taste = 0.3 + 1.4 * torch.rand(num_envs, num_slots, generator=self.generator)
        pays = torch.rand(num_envs, num_slots, generator=self.generator) < 0.8
        size = 1 - torch.exp(-SEED_PARAMS / 250)
        self.shares = (0.75 * (site * taste * pays).unsqueeze(-1) * size).clamp(max=0.9)

    def run(self, controller: Controller) -> Tensor:
        """The final scores `[N]` of an episode under a controller."""
        controller.begin(torch.arange(self.states.num_hosts))
        for _ in range(self.num_steps):
            reports = self.observe()
            masks = compute_batch_masks(reports, self.action_space)
            self.step(controller.decide(reports, masks))
        return self.score()

    def step(self, actions: Tensor) -> None:
        self.last_action = actions
        transition = apply(self.states, actions, self.action_space)
        self.states = transition.then(begin_step).states
        self.maturity += self.states.alpha.float() * MATURING * (1 - self.maturity)
        self.maturity *= self.states.has_seed
        self.states = end_step(self.states).states
        self.step_count += 1
        self.accuracies.insert(0, self.accuracy(self.states.has_seed))

    def score(self) -> Tensor:
        committed = self.states.stage == SeedStage.FOSSILIZED
        added = (self.seed_params() * committed).sum(dim=-1)
        return self.accuracy(committed) - self.rent * torch.log1p(added / HOST_PARAMS)

    def accuracy(self, included: Tensor) -> Tensor:
        share = self.shares.gather(-1, self._chosen().unsqueeze(-1)).squeeze(-1)
        effect = share * self.maturity * self.states.alpha.float() * included
        host = HOST_ACCURACY * (1 - 0.9 * 0.8**self.step_count)
        return host + HEADROOM * (1 - (1 - effect).prod(dim=-1))

    def seed_params(self) -> Tensor:
        return SEED_PARAMS[self._chosen()] * self.states.has_seed

    def _chosen(self) -> Tensor:
        return self.states.blueprint.clamp(min=0)

    def _contributions(self) -> Tensor:
        has_seed, num_slots = self.states.has_seed, self.states.num_slots
        whole = self.accuracy(has_seed)
        without = [
            self.accuracy(has_seed & (torch.arange(num_slots) != slot)) for slot in range(num_slots)
        ]
        exact = whole.unsqueeze(-1) - torch.stack(without, dim=-1)
        return OVERSTATED * exact + NOISE * torch.randn(exact.shape, generator=self.generator)

    def observe(self) -> Reports:
        states, num_envs, num_slots = self.states, self.states.num_hosts, self.states.num_slots
        per_env, per_slot = (num_envs,), (num_envs, num_slots)
        per_choice = (num_envs, num_slots, self.num_blueprints)
        seed_params = self.seed_params()
        added = seed_params.sum(dim=-1)
        positions = torch.linspace(18, 5, num_slots)  # that a convolution runs over: fewer later on
        seed_macs = positions * seed_params
        is_measured = states.has_seed & (states.total_age > 0)
        history = torch.zeros(num_envs, ACCURACY_HISTORY)
        for k, accuracy in enumerate(self.accuracies[:ACCURACY_HISTORY]):
            history[:, k] = accuracy
        history_known = torch.arange(ACCURACY_HISTORY) < len(self.accuracies)
        was_validated = torch.full(per_env, self.step_count > 0)
        return Reports(
            step=torch.full(per_env, self.step_count),
            steps_left=torch.full(per_env, self.num_steps - self.step_count),
            validation_loss=1 - history[:, 0],
            accuracy_history=history,
            accuracy_history_known=history_known.expand(num_envs, -1),
            host_params=torch.full(per_env, HOST_PARAMS),
            host_macs=torch.full(per_env, HOST_MACS),
            params=HOST_PARAMS + added,
            macs=HOST_MACS + seed_macs.sum(dim=-1),
            params_left=self.params_budget - added,
            macs_left=torch.full(per_env, torch.inf),
            seeds_left=torch.full(per_env, 100),
            train_rows=torch.full(per_env, 3200),
            locality=torch.full(per_env, 0.5),
            rent=torch.full(per_env, self.rent),
            compute_price=torch.zeros(per_env),
            last_action=self.last_action,
            last_action_known=was_validated,
            stage=states.stage,
            stage_age=states.stage_age,
            total_age=states.total_age,
            alpha=states.alpha.float(),
            alpha_target=states.alpha_target.float(),
            blueprint=states.blueprint,
            seed_params=seed_params,
            seed_macs=seed_macs,
            site_kind=torch.full(per_slot, int(SiteKind.SERIES)),
            site_width=torch.full(per_slot, 8.0),
            site_depth=torch.linspace(0, 1, num_slots).expand(per_slot),
            gradient_norm=torch.zeros(per_slot),
            gradient_known=torch.zeros(per_slot, dtype=torch.bool),
            contribution=torch.where(is_measured, self._contributions(), torch.nan),
            contribution_error=torch.where(is_measured, NOISE, torch.nan),
            contribution_known=is_measured,
            contribution_age=torch.zeros(per_slot, dtype=torch.int64),
            fits=torch.ones(per_choice, dtype=torch.bool),
            cost_params=SEED_PARAMS.expand(per_choice),
            cost_macs=(positions.unsqueeze(-1) * SEED_PARAMS).expand(per_choice),
            reach=SEED_REACH.expand(per_choice),
            depth=SEED_DEPTH.expand(per_choice),
        )


class NoGrowth:
    """Waits."""

    def begin(self, env_ids: Tensor) -> None: ...

    def decide(self, reports: Reports, masks: object) -> Tensor:
        return torch.full_like(reports.last_action, int(LifecycleOp.WAIT))
