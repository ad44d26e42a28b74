"""A run in which Tamiyo learns to grow networks: rounds, checkpoints, exact resumption.

    training = GrowthTraining(PRESETS["quick"])
    training.run(on_round=lambda record: print(record.round, record.metrics["episode/score"]))
    training.save("checkpoint.pt")
    training.controller().save("controller.pt")

A round is all or nothing: a run that is saved in the middle of one is resumed at its beginning,
and collects it again as it was.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline.files import read_file, require_same_layout, write_file
from esper.leyline.plain_config import from_plain, to_plain
from esper.leyline.records import RoundRecord
from esper.simic.agent.ppo import PPOAgent, TrainingFailed
from esper.simic.training.config import TrainConfig
from esper.simic.training.distribution import (
    host_names,
    start_score,
    training_hosts,
    variant_names,
)
from esper.simic.training.vectorized import Episodes, VectorizedTrainer
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic
from esper.tolaria.environment import GrowthEnvironment

RecordCallback = Callable[[RoundRecord], None]


class GrowthTraining:
    """Environment, agent and trainer of a config, and how many rounds they have been through."""

    def __init__(self, config: TrainConfig | None = None):
        self.config = config = config or TrainConfig()
        host_batch = training_hosts(config)
        self.environment = GrowthEnvironment(host_batch, config.growth, rng_seed=config.rng_seed)
        self.agent = _new_agent(self.environment, config)
        self.trainer = VectorizedTrainer(
            self.environment,
            self.agent,
            max_steps=config.growth.num_steps,
            start_score=start_score(host_batch),
            rng_seed=config.rng_seed,
        )
        self.rounds_done = 0
        self._rng_states = self._current_rng_states()

    @property
    def is_finished(self) -> bool:
        return self.rounds_done >= self.config.rounds

    def run(
        self,
        on_round: RecordCallback | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train to the last round, or until `should_stop()`, asked before each step."""
        clock = self.trainer.clock
        clock.start()
        while not self.is_finished:
            episodes = self.trainer.collect(should_stop=should_stop)
            if episodes is None:
                return
            learned = self.trainer.learn(self.rounds_done / self.config.rounds)
            self.rounds_done += 1
            self._rng_states = self._current_rng_states()
            if on_round is not None:
                on_round(self._record(episodes, learned))
            clock.lap("telemetry")

    def controller(self) -> LearnedController:
        """The policy as it is now, taking its likeliest choices."""
        return LearnedController(self.agent.policy)

    # -- telemetry ----------------------------------------------------------------------------

    def _record(self, episodes: Episodes, learned: dict[str, float]) -> RoundRecord:
        rollout = self.trainer.buffer.get_batched_sequences()
        host_batch, observed = self.environment.host_batch, self._observed_envs()
        return RoundRecord(
            round=self.rounds_done,
            metrics=self._metrics(episodes, learned),
            hosts=host_names(host_batch),
            variants=variant_names(self.config, host_batch),
            rent=episodes.rent,
            host_params=episodes.host_params,
            scores=episodes.scores,
            rolled_back=episodes.rolled_back,
            step_counts=self.trainer.buffer.step_counts.clone(),
            actions=rollout.actions.to("cpu", copy=True),
            legal=rollout.masks.to("cpu", copy=True),
            cost_params=episodes.cost_params,
            accuracy=episodes.accuracy,
            added_params=episodes.added_params,
            rewards=rollout.rewards.to("cpu", copy=True),
            values=rollout.values.to("cpu", copy=True),
            observed_envs=observed,
            observations=rollout.states[observed.to(rollout.states.device)].cpu(),
        )

    def _metrics(self, episodes: Episodes, learned: dict[str, float]) -> dict[str, float]:
        """By the names in docs/metrics.md."""
        finished = ~episodes.rolled_back
        last = self.trainer.buffer.step_counts - 1
        at_the_end = (torch.arange(len(last)), last)
        growth = episodes.added_params[at_the_end] / episodes.host_params
        seconds = self.trainer.clock.take()
        total = sum(seconds.values())
        return {
            "episode/score": _mean(episodes.scores[finished]),
            "episode/accuracy": _mean(episodes.accuracy[at_the_end][finished]),
            "episode/added_params": _mean(episodes.added_params[at_the_end][finished]),
            "episode/growth": _mean(growth[finished]),
            "episode/germinations": _mean((episodes.cost_params > 0).float().sum(dim=1)),
            "episode/rolled_back": _mean(episodes.rolled_back.float()),
            **{f"ppo/{name}": value for name, value in learned.items()},
            **{f"time/{phase}": s for phase, s in seconds.items()},
            **{f"time_share/{phase}": s / total for phase, s in seconds.items()},
            "time/hosts_per_second": len(last) / total,
            "progress/rounds": self.rounds_done,
            "progress/episodes": self.rounds_done * len(last),
        }

    def _observed_envs(self) -> Tensor:
        """The envs whose observations are kept this round: they take turns."""
        num_envs = self.environment.num_envs
        count = math.ceil(self.config.observed_share * num_envs)
        return (self.rounds_done * count + torch.arange(count)) % num_envs

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write all of the run as it was after its last round."""
        for name, weight in self.agent.policy.state_dict().items():
            if not weight.isfinite().all():
                raise TrainingFailed(f"the policy's {name} is not finite: it is not saved")
        contents = {
            "config": to_plain(self.config),
            "rounds_done": self.rounds_done,
            "agent": self.agent.state_dict(),
            "rng_states": self._rng_states,
        }
        write_file(path, _KIND, contents, version=_VERSION)

    @classmethod
    def resume(cls, path: str | Path) -> "GrowthTraining":
        """The run as it was saved; it goes on as if it had never stopped."""
        saved = read_file(path, _KIND, version=_VERSION)
        training = cls(from_plain(TrainConfig, saved["config"]))
        training._load(saved, path)
        return training

    def _load(self, saved: dict[str, Any], path: str | Path) -> None:
        # what the optimiser remembers of each weight is there only once it has been used
        expected = self.agent.state_dict() | {"optimizer": saved["agent"]["optimizer"]}
        require_same_layout(saved["agent"], expected, path)
        self.agent.load_state_dict(saved["agent"])
        for name, generator in self._generators().items():
            generator.set_state(saved["rng_states"][name])
        self.rounds_done = saved["rounds_done"]
        self._rng_states = self._current_rng_states()

    def _generators(self) -> dict[str, torch.Generator]:
        return {
            "episodes": self.environment.generator,
            "actions": self.trainer.rng,
            "shuffling": self.trainer.shuffle,
        }

    def _current_rng_states(self) -> dict[str, Tensor]:
        return {name: rng.get_state() for name, rng in self._generators().items()}


_KIND, _VERSION = "growth run", 2


def _new_agent(environment: GrowthEnvironment, config: TrainConfig) -> PPOAgent:
    space, host_batch = environment.action_space, environment.host_batch
    layout = FeatureLayout(host_batch.num_slots, host_batch.num_blueprints)
    with torch.random.fork_rng(devices=[]):  # weights depend on rng_seed alone
        torch.manual_seed(config.rng_seed)
        policy = FactoredRecurrentActorCritic(space, layout, config.policy)
    return PPOAgent(policy.to(config.resolved_device()), config.ppo)


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else math.nan
