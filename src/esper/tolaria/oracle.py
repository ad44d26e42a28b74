"""A garden without networks: what every seed gains is known, and so is the best that can be done.

    accuracy = host accuracy + sum over seeds of alpha * gain[slot, blueprint]

Lifecycle, costs and prices are the real ones, so a learner must find what to grow where at which
rent, blend it in and commit it in time. Gains and costs are the same in every episode; rent is not.
"""

from itertools import product

import torch
from torch import Tensor

from esper.kasmina.lifecycle import SlotStates, begin_step, end_step
from esper.leyline.constants import SiteKind
from esper.leyline.stages import SeedStage
from esper.tolaria.environment import Evidence, GardenPlan

HOST_PARAMS, HOST_MACS = 858.0, 4000.0
HOST_ACCURACY = 0.77
TRAIN_ROWS, LOCALITY = 3200, 0.5  # of data that nobody looks at
SITE_SHARES = (1.0, 0.6, 0.3)  # a seed gains most early in the host
BLUEPRINT_GAINS = (0.020, 0.035, 0.050, 0.075, 0.090, 0.005)  # in the first slot
BLUEPRINT_PARAMS = (64.0, 120.0, 200.0, 416.0, 672.0, 300.0)  # the last one is a dud


class KnownGains:
    """N envs of one host with three slots and a menu of six."""

    num_slots = len(SITE_SHARES)
    num_blueprints = len(BLUEPRINT_GAINS)
    siblings = 1

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.gains = torch.tensor(SITE_SHARES).unsqueeze(1) * torch.tensor(BLUEPRINT_GAINS)
        self._states = SlotStates.dormant(num_envs, self.num_slots)

    @property
    def states(self) -> SlotStates:
        return self._states

    def reset(self, generator: torch.Generator) -> GardenPlan:
        self._states = SlotStates.dormant(self.num_envs, self.num_slots)
        per_env, per_slot = (self.num_envs,), (self.num_envs, self.num_slots)
        per_choice = (*per_slot, self.num_blueprints)
        cost = torch.tensor(BLUEPRINT_PARAMS).expand(per_choice)
        return GardenPlan(
            host_params=torch.full(per_env, HOST_PARAMS),
            host_macs=torch.full(per_env, HOST_MACS),
            train_rows=torch.full(per_env, TRAIN_ROWS),
            locality=torch.full(per_env, LOCALITY),
            slot_exists=torch.ones(per_slot, dtype=torch.bool),
            site_kind=torch.full(per_slot, int(SiteKind.SERIES)),
            site_width=torch.full(per_slot, 8.0),
            site_depth=torch.linspace(0, 1, self.num_slots).expand(per_slot),
            fits=torch.ones(per_choice, dtype=torch.bool),
            cost_params=cost,
            cost_macs=10 * cost,
            reach=torch.linspace(0, 1, self.num_blueprints).expand(per_choice),
            depth=torch.ones(per_choice),
        )

    def grow(self, states: SlotStates) -> Evidence:
        self._states = end_step(begin_step(states))
        effect = self._effect()
        accuracy = HOST_ACCURACY + effect.sum(dim=-1)
        zeros, none = torch.zeros_like(effect), torch.zeros_like(effect, dtype=torch.bool)
        return Evidence(
            loss=1 - accuracy,
            accuracy=accuracy,
            contribution=effect,
            contribution_error=zeros,
            contribution_known=self._states.has_seed,
            gradient_norm=zeros,
            gradient_known=none,
            rolled_back=torch.zeros(self.num_envs, dtype=torch.bool),
        )

    def committed_accuracy(self) -> Tensor:
        is_committed = self._states.stage == SeedStage.FOSSILIZED
        return HOST_ACCURACY + (self._effect() * is_committed).sum(dim=-1)

    def best_scores(self, rent: Tensor) -> Tensor:
        """The score of the best set of seeds at each rent `[N]`, by trying all of them."""
        none = torch.zeros(self.num_slots, 1)
        gains = torch.cat((none, self.gains), dim=1)
        params = torch.tensor((0.0, *BLUEPRINT_PARAMS))
        plans = torch.tensor(list(product(range(len(params)), repeat=self.num_slots)))
        gain = gains[torch.arange(self.num_slots), plans].sum(dim=-1)
        size = torch.log1p(params[plans].sum(dim=-1) / HOST_PARAMS)
        return (HOST_ACCURACY + gain - rent.unsqueeze(-1) * size).amax(dim=-1)

    def _effect(self) -> Tensor:
        chosen = self._states.blueprint.clamp(min=0)
        gain = self.gains[torch.arange(self.num_slots), chosen]
        return gain * self._states.alpha.float() * self._states.has_seed
