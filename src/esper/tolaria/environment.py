"""Growing hosts as an environment for a controller.

    environment = GrowthEnvironment(host_batch, GrowthConfig(), rng_seed=0)
    environment.reset()
    reports = environment.observe()
    outcome = environment.step(actions)

The host batch trains the hosts. Slots, budgets, prices, steps and reports are here.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.host_reports import History, HostFacts, build_reports, seed_costs
from esper.kasmina.lifecycle import apply
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.protocols import StepOutcome
from esper.leyline.reports import Reports
from esper.leyline.stages import SeedStage
from esper.runtime.checks import require_at_least, require_positive
from esper.tolaria.host_batch import PopulationBatch


@dataclass(frozen=True, kw_only=True)
class GrowthConfig:
    """An episode's length, prices and limits."""

    num_steps: int = DEFAULT_EPISODE_LENGTH
    """Decisions per episode."""
    min_rent: float = 0.02
    """Rent is sampled log-uniformly per episode from min_rent to max_rent."""
    max_rent: float = 0.30
    """Score charged per unit of log(1 + added params / host params)."""
    compute_price: float = 0.0
    """Score charged if the seeds use as many multiply-adds as the host for the whole episode."""
    params_budget: float = math.inf
    """Parameters that may be added, as a share of the host's."""
    macs_budget: float = math.inf
    """Multiply-adds that may be added, as a share of the host's."""
    max_germinations: int = 100
    """Seeds that may be tried in one episode."""
    shadow_training: bool = False
    """New seeds train in the shadow of the host before they blend."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_steps")
        require_at_least(self, 0, "compute_price", "params_budget", "macs_budget")
        require_at_least(self, 0, "max_germinations")
        require_positive(self, "min_rent", "max_rent")
        require_at_least(self, self.min_rent, "max_rent")


class GrowthEnvironment:
    """N parallel episodes. All its tensors are on the CPU, on any device of the hosts.

    An action that a slot does not accept raises; the masks enforce budgets and the seed limit.
    """

    def __init__(
        self, host_batch: PopulationBatch, config: GrowthConfig | None = None, *, rng_seed: int = 0
    ):
        self.host_batch = host_batch
        self.config = config or GrowthConfig()
        self.num_envs, self.siblings = host_batch.num_envs, host_batch.siblings
        self.action_space = tamiyo_action_space(host_batch.num_slots, host_batch.num_blueprints)
        self.generator = torch.Generator().manual_seed(rng_seed)  # of hosts, views and rents

    def reset(self) -> None:
        config = self.config
        facts = self.host_batch.reset(self.generator)
        uniform = torch.rand(self.num_envs // self.siblings, generator=self.generator)
        rent = config.min_rent * (config.max_rent / config.min_rent) ** uniform
        self.begin(facts, rent.repeat_interleave(self.siblings))

    def begin(self, facts: HostFacts, rent: Tensor) -> None:
        """Start an episode with the present hosts, at these rents `[N]`."""
        num_envs = self.num_envs
        self._facts, self._rent = facts, rent
        self._step = 0
        self._is_over = torch.zeros(num_envs, dtype=torch.bool)
        self._compute = torch.zeros(num_envs)
        self._history = History(num_envs, self.host_batch.num_slots, self.action_space.num_heads)

    def step(self, actions: Tensor) -> StepOutcome:
        assert self._step < self.config.num_steps, "the episode is over; call reset()"
        actions = actions.cpu() * ~self._is_over.unsqueeze(-1)  # WAIT where the episode is over
        transition = apply(
            self.host_batch.states,
            actions,
            self.action_space,
            shadow_training=self.config.shadow_training,
        )
        self._history.add_action(actions)
        measured = self.host_batch.train_step(transition)
        states = self.host_batch.states
        self._history.add_step(measured, states.has_seed)
        self._step += 1
        is_last = self._step == self.config.num_steps
        seed_params, seed_macs = seed_costs(self._facts, states)
        self._compute += seed_macs.sum(dim=-1) / self._facts["host_macs"]
        if is_last:
            seed_params = seed_params * (states.stage == SeedStage.FOSSILIZED)
        outcome = StepOutcome(
            accuracy=self.host_batch.committed_accuracy() if is_last else measured.accuracy,
            added_params=seed_params.sum(dim=-1),
            added_compute=self._compute / self.config.num_steps,
            terminated=torch.full_like(self._is_over, is_last) | measured.rolled_back,
            truncated=torch.zeros_like(self._is_over),
            rolled_back=measured.rolled_back,
        )
        self._is_over = self._is_over | outcome.terminated
        return outcome

    @property
    def rollback_reasons(self) -> dict[int, str]:
        """Why hosts were rolled back in the last step, by env."""
        return {e.host: f"{e.breakage.value}: {e.reason}" for e in self.host_batch.events}

    def observe(self) -> Reports:
        config, facts, states = self.config, self._facts, self.host_batch.states
        added_params, added_macs = (costs.sum(dim=-1) for costs in seed_costs(facts, states))
        return build_reports(
            facts,
            states,
            self._history,
            step=self._step,
            steps_left=config.num_steps - self._step,
            params_left=config.params_budget * facts["host_params"] - added_params,
            macs_left=config.macs_budget * facts["host_macs"] - added_macs,
            max_germinations=config.max_germinations,
            rent=self._rent,
            compute_price=config.compute_price,
        )
