"""A host batch without networks: the gain of every seed is known, and so is the best score.

    accuracy = host accuracy + sum over seeds of alpha * gain[type of data, slot, blueprint]

Lifecycle, costs and prices are the real ones: a learner must find what to grow where at which rent,
blend it in and commit it in time. Gains and costs are the same in every episode; rent is not. With
several types of data, it must also infer from the reports which seeds suit the data.

Importing this module adds a task "known_gains" for `GrowthTraining` and `esper train`: runs in
seconds, in which no network is trained. A config that has the module in its `imports` is read, and
its run resumed, in any process that finds it.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.cli import train
from esper.kasmina.host_reports import HostFacts, StepMeasurements
from esper.kasmina.lifecycle import SlotStates, Transition, begin_step, end_step
from esper.leyline.constants import SiteKind
from esper.leyline.stages import SeedStage
from esper.simic.growth import growth_training
from esper.simic.growth.run_folder import RunFiles
from esper.simic.growth.train_config import TrainConfig
from esper.tolaria.governor import Rollback
from esper.tolaria.tasks import TASKS

HOST_PARAMS, HOST_MACS = 858.0, 4000.0
HOST_ACCURACY = 0.77
SITE_SHARES = (1.0, 0.6, 0.3)  # a seed gains most early in the host
BLUEPRINT_PARAMS = (64.0, 120.0, 200.0, 416.0, 672.0, 300.0)


class DataType(NamedTuple):
    """What reports say about the data, and the gain of each blueprint on them."""

    locality: float
    train_rows: int
    gains: tuple[float, ...]  # in the first slot


PLAIN = DataType(0.5, 3200, (0.020, 0.035, 0.050, 0.075, 0.090, 0.005))  # the last one is useless
FOUR_TYPES = (
    PLAIN._replace(locality=0.8),
    DataType(0.1, 3200, (0.005, 0.005, 0.010, 0.010, 0.020, 0.070)),  # the last one is the best
    DataType(0.8, 450, (0.030, 0.010, 0.000, -0.020, -0.030, -0.010)),  # large seeds overfit
    DataType(0.5, 3200, (0.010, 0.050, 0.030, 0.020, 0.020, 0.010)),
)


class SyntheticHosts:
    """N envs of one host with three slots and a menu of six.

    Types of data alternate between groups of siblings. `noise` is the standard deviation of every
    measured accuracy, sampled for each env and measurement.
    """

    num_slots = len(SITE_SHARES)
    num_blueprints = len(BLUEPRINT_PARAMS)
    blueprint_names = tuple(f"seed {number}" for number in range(len(BLUEPRINT_PARAMS)))
    untrained_accuracy = HOST_ACCURACY
    task = SimpleNamespace(device="no device", site_kind=SiteKind.SERIES)

    def __init__(
        self,
        num_envs: int,
        types: Sequence[DataType] = (PLAIN,),
        *,
        siblings: int = 1,
        noise: float = 0.0,
    ):
        if num_envs % siblings:
            raise ValueError(f"num_envs={num_envs} does not split into siblings={siblings}")
        self.num_envs, self.siblings, self.noise = num_envs, siblings, noise
        self.events: tuple[Rollback, ...] = ()  # synthetic hosts do not break
        self.type_ids = torch.arange(num_envs) // siblings % len(types)
        self.train_rows = torch.tensor([each.train_rows for each in types])
        self.locality = torch.tensor([each.locality for each in types])
        in_first_slot = torch.tensor([each.gains for each in types])
        self.gains = torch.tensor(SITE_SHARES).unsqueeze(1) * in_first_slot.unsqueeze(1)  # by type
        self._states = SlotStates.dormant(num_envs, self.num_slots)

    @property
    def states(self) -> SlotStates:
        return self._states

    @property
    def host_names(self) -> tuple[str, ...]:
        return ("known gains",) * self.num_envs

    @property
    def view_ids(self) -> Tensor:
        return torch.zeros(self.num_envs, dtype=torch.int64)

    def find_kernels(self) -> str:
        return "no"

    def reset(self, generator: torch.Generator) -> HostFacts:
        self._states = SlotStates.dormant(self.num_envs, self.num_slots)
        self._generator = generator
        per_env, per_slot = (self.num_envs,), (self.num_envs, self.num_slots)
        per_choice = (*per_slot, self.num_blueprints)
        cost = torch.tensor(BLUEPRINT_PARAMS).expand(per_choice)
        return HostFacts(
            host_params=torch.full(per_env, HOST_PARAMS),
            host_macs=torch.full(per_env, HOST_MACS),
            train_rows=self.train_rows[self.type_ids],
            locality=self.locality[self.type_ids],
            site_kind=torch.full(per_slot, int(SiteKind.SERIES)),
            site_width=torch.full(per_slot, 8.0),
            site_depth=torch.linspace(0, 1, self.num_slots).expand(per_slot),
            fits=torch.ones(per_choice, dtype=torch.bool),
            cost_params=cost,
            cost_macs=10 * cost,
            reach=torch.linspace(0, 1, self.num_blueprints).expand(per_choice),
            depth=torch.ones(per_choice),
        )

    def train_step(self, transition: Transition) -> StepMeasurements:
        self._states = transition.then(begin_step).then(end_step).states
        effect = self._effect()
        accuracy = self._measured(effect)
        zeros, none = torch.zeros_like(effect), torch.zeros_like(effect, dtype=torch.bool)
        return StepMeasurements(
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
        return self._measured(self._effect() * is_committed)

    def best_scores(self, rent: Tensor) -> Tensor:
        """The score of the best set of seeds for each env's data and rent `[N]`."""
        scores = self.scores_of_all_sets(rent)
        return scores[self.type_ids, torch.arange(len(rent))].amax(dim=-1)

    def share_of_best(self, scores: Tensor, rent: Tensor) -> float:
        """The gain of these scores `[N]` over ungrown hosts, as a share of the best possible gain."""
        possible = (self.best_scores(rent) - HOST_ACCURACY).sum()
        return float((scores - HOST_ACCURACY).sum() / possible)

    def best_blind_scores(self, rent: Tensor) -> Tensor:
        """As `best_scores`, for the set of seeds that is best on average over all types."""
        scores = self.scores_of_all_sets(rent)
        best = scores.mean(dim=0).argmax(dim=-1)
        return scores[self.type_ids, torch.arange(len(rent)), best]

    def scores_of_all_sets(self, rent: Tensor) -> Tensor:
        """The score of every set of seeds on each type of data at each rent, `[types, N, sets]`."""
        gains = torch.cat((torch.zeros_like(self.gains[..., :1]), self.gains), dim=-1)
        params = torch.tensor((0.0, *BLUEPRINT_PARAMS))
        sets = torch.tensor(list(product(range(len(params)), repeat=self.num_slots)))
        gain = gains[:, torch.arange(self.num_slots), sets].sum(dim=-1)
        size = torch.log1p(params[sets].sum(dim=-1) / HOST_PARAMS)
        return HOST_ACCURACY + gain.unsqueeze(1) - rent.unsqueeze(-1) * size

    def _measured(self, effect: Tensor) -> Tensor:
        """The measured accuracy `[N]` for these effects of seeds `[N, S]`."""
        accuracy = HOST_ACCURACY + effect.sum(dim=-1)
        if self.noise:
            accuracy += self.noise * torch.randn(self.num_envs, generator=self._generator)
        return accuracy

    def _effect(self) -> Tensor:
        chosen = self._states.blueprint.clamp(min=0).unsqueeze(-1)
        gain = self.gains[self.type_ids].gather(-1, chosen).squeeze(-1)
        return gain * self._states.alpha.float() * self._states.has_seed


def known_gains() -> None:
    """The task: its hosts read no data."""


def _unless_known_gains(function: Callable[..., Any], otherwise: Callable[..., Any]) -> Any:
    """The function, but `otherwise` for a config of the task "known_gains"."""

    def choose(config: TrainConfig, *arguments: Any) -> Any:
        chosen = otherwise if config.task == "known_gains" else function
        return chosen(config, *arguments)

    return choose


def _evaluate_networks(run: Path, *arguments: Any) -> Any:
    if RunFiles(run).read_config().task != "known_gains":
        return evaluate_with_bar(run, *arguments)
    return SimpleNamespace(save=lambda folder: None, brief=str, figures=dict)


if "known_gains" not in TASKS:
    TASKS["known_gains"] = known_gains
    growth_training.training_hosts = _unless_known_gains(
        growth_training.training_hosts,
        lambda config: SyntheticHosts(config.num_envs, siblings=config.host_batch.siblings),
    )
    train.prepare = _unless_known_gains(train.prepare, lambda *_: None)
    evaluate_with_bar, train.evaluate_with_bar = train.evaluate_with_bar, _evaluate_networks
