"""Growing hosts as an environment: what a controller may do to them, and what it gets to see.

    environment = GrowthEnvironment(host_batch, GrowthConfig(), rng_seed=0)
    environment.reset()
    reports = environment.observe()
    outcome = environment.step(actions)

What actually grows is a `HostBatch`: a population of networks, or one whose gains are known.
Slots, budgets, prices, the clock and the reports are the same for both, and are here.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from esper.kasmina.lifecycle import SlotStates, apply
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.protocols import StepOutcome
from esper.leyline.reports import ACCURACY_HISTORY, Reports
from esper.leyline.stages import LifecycleOp, SeedStage


@dataclass(frozen=True, kw_only=True)
class GrowthConfig:
    """An episode's length, prices and limits."""

    num_steps: int = DEFAULT_EPISODE_LENGTH
    """Decisions per episode."""
    min_rent: float = 0.02
    """Rent is drawn log-uniformly per episode from min_rent to max_rent."""
    max_rent: float = 0.30
    """Score charged per unit of log(1 + added params / host params)."""
    compute_price: float = 0.0
    """Score charged for seeds that use as many multiply-adds as the host, all episode long."""
    params_budget: float = math.inf
    """Parameters that may be added, as a share of the host's."""
    macs_budget: float = math.inf
    """Multiply-adds that may be added, as a share of the host's."""
    max_germinations: int = 100
    """Seeds that may be tried in one episode."""
    shadow_training: bool = False
    """New seeds train behind the host before they blend."""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps}; use 1 or more")
        if not 0 < self.min_rent <= self.max_rent:
            raise ValueError(
                f"min_rent={self.min_rent}, max_rent={self.max_rent}; use 0 < min_rent <= max_rent"
            )
        for name in ("compute_price", "params_budget", "macs_budget", "max_germinations"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}; use 0 or more")


class HostFacts(NamedTuple):
    """What is known of the hosts and their data before they train; S slots, B blueprints."""

    host_params: Tensor  # [N], as are the multiply-adds
    host_macs: Tensor
    train_rows: Tensor  # [N], of the data that the host learns from, as is their locality
    locality: Tensor
    site_kind: Tensor  # [N, S], as are the sites' width and depth
    site_width: Tensor
    site_depth: Tensor
    fits: Tensor  # [N, S, B], as are those below
    cost_params: Tensor
    cost_macs: Tensor
    reach: Tensor
    depth: Tensor


class Evidence(NamedTuple):
    """What a step of training showed."""

    loss: Tensor  # [N]
    accuracy: Tensor  # [N]
    contribution: Tensor  # [N, S]
    contribution_error: Tensor  # [N, S]
    contribution_known: Tensor  # [N, S]
    gradient_norm: Tensor  # [N, S]
    gradient_known: Tensor  # [N, S]
    rolled_back: Tensor  # [N]


class HostBatch(Protocol):
    """Hosts that train while seeds grow in their slots."""

    num_envs: int
    num_slots: int
    num_blueprints: int
    siblings: int  # envs in a row whose hosts differ in nothing but what is done to them

    @property
    def states(self) -> SlotStates: ...

    @property
    def host_names(self) -> tuple[str, ...]:
        """The architecture in each env of this episode."""
        ...

    @property
    def view_ids(self) -> Tensor:
        """The view of the data that each env learns from, `[N]`."""
        ...

    @property
    def blueprint_names(self) -> tuple[str, ...]: ...

    @property
    def untrained_accuracy(self) -> float:
        """Accuracy that is expected before any training."""
        ...

    def reset(self, generator: torch.Generator) -> HostFacts:
        """New hosts in every env."""
        ...

    def train_step(self, states: SlotStates) -> Evidence:
        """Take in requested states, train for one step, let timed moves happen, validate."""
        ...

    def committed_accuracy(self) -> Tensor:
        """Validation accuracy `[N]` with every seed removed that is not fossilised."""
        ...


class GrowthEnvironment:
    """N episodes side by side, on the CPU whatever the host_batch uses.

    What slots accept is checked here; budgets and the seed limit are the masks' to enforce.
    """

    def __init__(
        self, host_batch: HostBatch, config: GrowthConfig | None = None, *, rng_seed: int = 0
    ):
        self.host_batch = host_batch
        self.config = config or GrowthConfig()
        self.num_envs, self.siblings = host_batch.num_envs, host_batch.siblings
        self.action_space = tamiyo_action_space(host_batch.num_slots, host_batch.num_blueprints)
        self.generator = torch.Generator().manual_seed(rng_seed)  # of all that episodes draw

    def reset(self) -> None:
        config = self.config
        facts = self.host_batch.reset(self.generator)
        uniform = torch.rand(self.num_envs // self.siblings, generator=self.generator)
        rent = config.min_rent * (config.max_rent / config.min_rent) ** uniform
        self.begin(facts, rent.repeat_interleave(self.siblings))

    def begin(self, facts: HostFacts, rent: Tensor) -> None:
        """Start an episode with the hosts that the host_batch holds, at these rents `[N]`."""
        num_envs = self.num_envs
        self._facts, self._rent = facts, rent
        self._step = 0
        self._is_over = torch.zeros(num_envs, dtype=torch.bool)
        self._germinations = torch.zeros(num_envs, dtype=torch.int64)
        self._compute = torch.zeros(num_envs)
        self._evidence: Evidence | None = None
        self._contribution_age = torch.zeros_like(self._facts.site_kind)
        self._history = torch.zeros(num_envs, ACCURACY_HISTORY)
        self._last_action = torch.zeros(num_envs, self.action_space.num_heads, dtype=torch.int64)

    def step(self, actions: Tensor) -> StepOutcome:
        if self._step == self.config.num_steps:
            raise ValueError(f"the episode is over after {self._step} steps; call reset()")
        actions = actions.cpu() * ~self._is_over.unsqueeze(-1)  # WAIT where nothing goes on
        states = apply(
            self.host_batch.states,
            actions,
            self.action_space,
            shadow_training=self.config.shadow_training,
        )
        self._germinations += actions[:, 0] == LifecycleOp.GERMINATE
        evidence = self.host_batch.train_step(states)
        self._remember(actions, evidence)
        self._step += 1
        is_last = self._step == self.config.num_steps
        seed_params, seed_macs = self._sizes_of_seeds(self.host_batch.states)
        self._compute += seed_macs.sum(dim=-1) / self._facts.host_macs
        outcome = StepOutcome(
            accuracy=self.host_batch.committed_accuracy() if is_last else evidence.accuracy,
            added_params=self._committed_params() if is_last else seed_params.sum(dim=-1),
            added_compute=self._compute / self.config.num_steps,
            terminated=torch.full_like(self._is_over, is_last) | evidence.rolled_back,
            truncated=torch.zeros_like(self._is_over),
            rolled_back=evidence.rolled_back,
        )
        self._is_over = self._is_over | outcome.terminated
        return outcome

    def observe(self) -> Reports:
        facts, states, config = self._facts, self.host_batch.states, self.config
        per_env = (self.num_envs,)
        seed_params, seed_macs = self._sizes_of_seeds(states)
        added, added_macs = seed_params.sum(dim=-1), seed_macs.sum(dim=-1)
        is_known = torch.full(per_env, self._evidence is not None)
        evidence = self._evidence or _no_evidence(facts)
        return Reports(
            step=torch.full(per_env, self._step),
            steps_left=torch.full(per_env, config.num_steps - self._step),
            validation_loss=evidence.loss,
            accuracy_history=self._history,
            accuracy_history_known=(torch.arange(ACCURACY_HISTORY) < self._step).expand_as(
                self._history
            ),
            host_params=facts.host_params,
            host_macs=facts.host_macs,
            params=facts.host_params + added,
            macs=facts.host_macs + added_macs,
            params_left=config.params_budget * facts.host_params - added,
            macs_left=config.macs_budget * facts.host_macs - added_macs,
            seeds_left=config.max_germinations - self._germinations,
            train_rows=facts.train_rows,
            locality=facts.locality,
            rent=self._rent,
            compute_price=torch.full(per_env, config.compute_price),
            last_action=self._last_action,
            last_action_known=is_known,
            stage=states.stage,
            stage_age=states.stage_age,
            total_age=states.total_age,
            alpha=states.alpha.float(),
            alpha_target=states.alpha_target.float(),
            blueprint=states.blueprint,
            seed_params=seed_params,
            seed_macs=seed_macs,
            site_kind=facts.site_kind,
            site_width=facts.site_width,
            site_depth=facts.site_depth,
            gradient_norm=evidence.gradient_norm,
            gradient_known=evidence.gradient_known,
            contribution=evidence.contribution,
            contribution_error=evidence.contribution_error,
            contribution_known=evidence.contribution_known & states.has_seed,
            contribution_age=self._contribution_age,
            fits=facts.fits,
            cost_params=facts.cost_params,
            cost_macs=facts.cost_macs,
            reach=facts.reach,
            depth=facts.depth,
        )

    def _remember(self, actions: Tensor, evidence: Evidence) -> None:
        self._last_action = actions
        self._evidence = evidence
        self._history = torch.cat((evidence.accuracy.unsqueeze(1), self._history[:, :-1]), dim=1)
        older = self._contribution_age + 1
        self._contribution_age = torch.where(evidence.contribution_known, 0, older)

    def _sizes_of_seeds(self, states: SlotStates) -> tuple[Tensor, Tensor]:
        """Parameters and multiply-adds `[N, S]` of the seeds that are there."""
        facts = self._facts
        return _of_seeds(facts.cost_params, states), _of_seeds(facts.cost_macs, states)

    def _committed_params(self) -> Tensor:
        states = self.host_batch.states
        is_committed = states.stage == SeedStage.FOSSILIZED
        return (_of_seeds(self._facts.cost_params, states) * is_committed).sum(dim=-1)


def _of_seeds(per_blueprint: Tensor, states: SlotStates) -> Tensor:
    """The entries `[N, S]` of the seeds that are there, 0 without one; from `[N, S, B]`."""
    chosen = states.blueprint.clamp(min=0).unsqueeze(-1)
    return per_blueprint.gather(-1, chosen).squeeze(-1) * states.has_seed


def _no_evidence(facts: HostFacts) -> Evidence:
    """Before the first step: zeros, all flagged as missing."""
    per_env, per_slot = torch.zeros_like(facts.host_params), torch.zeros_like(facts.site_width)
    missing = torch.zeros_like(facts.site_width, dtype=torch.bool)
    return Evidence(
        per_env, per_env, per_slot, per_slot, missing, per_slot, missing, per_env.bool()
    )
