"""A run in which Tamiyo learns to grow networks: rounds, records, checkpoints.

    training = GrowthTraining(PRESETS["quick"])
    training.run(on_round=lambda record: print(record.round, record.metrics["episode/score"]))
    training.save("checkpoint.pt")
    training.controller().save("controller.pt")

A round is all or nothing: a run saved in the middle of a round collects it again, bit-exact, when
it is resumed.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from esper.leyline.records import RoundRecord
from esper.runtime.files import read_file, write_file
from esper.runtime.plain_config import from_plain, to_plain
from esper.simic.agent.ppo import PPOAgent
from esper.simic.growth.growth_envs import GrowthEnvs
from esper.simic.growth.hosts_and_data import training_hosts, with_checksum
from esper.simic.growth.train_config import TrainConfig
from esper.simic.trainer import PhaseClock, Trainer
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from esper.tolaria.environment import GrowthEnvironment

_KIND, _VERSION = "growth run", 4


class GrowthTraining:
    """The environment, agent and trainer of a config."""

    def __init__(self, config: TrainConfig | None = None):
        self.config = config = with_checksum(config or TrainConfig())
        host_batch = training_hosts(config)
        self.environment = GrowthEnvironment(host_batch, config.growth, rng_seed=config.rng_seed)
        with torch.random.fork_rng(devices=[]):  # weights depend on rng_seed alone
            torch.manual_seed(config.rng_seed)
            layout = FeatureLayout(host_batch.num_slots, host_batch.num_blueprints)
            policy = tamiyo_policy(layout, config.policy)
        self.agent = PPOAgent(policy.to(config.resolved_device()), config.ppo)
        clock = PhaseClock()
        self.envs = GrowthEnvs(
            self.environment,
            self.agent.device,
            start_score=host_batch.untrained_accuracy,
            controls=config.host_batch.controls,
            clock=clock,
        )
        self.trainer = Trainer(
            self.envs,
            self.agent,
            horizon=config.growth.num_steps,
            rng_seed=config.rng_seed,
            clock=clock,
        )

    @property
    def rounds_done(self) -> int:
        return self.trainer.progress.rounds

    @property
    def is_finished(self) -> bool:
        return self.rounds_done >= self.config.rounds

    def run(
        self,
        on_round: Callable[[RoundRecord], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train to the last round, or until `should_stop()`, checked before each step."""
        clock = self.trainer.clock
        clock.start()
        while not self.is_finished:
            metrics = self.trainer.run_round(self.rounds_done / self.config.rounds, should_stop)
            if metrics is None:
                return
            metrics["time/hosts_per_second"] = self.envs.num_envs / _seconds(metrics)
            if on_round is not None:
                on_round(self._record(metrics))
            clock.lap("telemetry")

    def controller(self) -> LearnedController:
        """The current policy, taking its most likely choices."""
        menu = tuple(self.environment.host_batch.blueprint_names)
        return LearnedController(self.agent.policy, menu)

    # -- telemetry ----------------------------------------------------------------------------

    def _record(self, metrics: dict[str, float]) -> RoundRecord:
        rollout = self.trainer.buffer.get_batched_sequences("cpu")
        host_batch = self.environment.host_batch
        num_envs = self.envs.num_envs
        count = math.ceil(self.config.observed_share * num_envs)  # envs take turns
        observed = (self.rounds_done * count + torch.arange(count)) % num_envs
        return RoundRecord(
            round=self.rounds_done,
            metrics=metrics,
            hosts=host_batch.host_names,
            variants=[self.config.variants[view] for view in host_batch.view_ids.tolist()],
            rollback_reasons=tuple(self.envs.rollback_reasons),
            episodes=self.envs.episodes,
            actions=rollout["actions"].clone(),
            legal=rollout["masks"].clone(),
            rewards=rollout["rewards"].clone(),
            values=rollout["values"].clone(),
            probabilities=rollout["log_probs"].sum(dim=-1).exp(),
            observed_envs=observed,
            observations=rollout["states"][observed],
        )

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the run as it was after its last round."""
        contents = {"config": to_plain(self.config), "trainer": self.trainer.state_dict()}
        write_file(path, _KIND, contents, version=_VERSION)

    @classmethod
    def resume(cls, path: str | Path) -> "GrowthTraining":
        """The saved run; it continues bit-exact, as if it had never stopped."""
        saved = read_file(path, _KIND, version=_VERSION)
        training = cls(from_plain(TrainConfig, saved["config"]))
        training.trainer.load_state_dict(saved["trainer"], path)
        return training


def _seconds(metrics: Mapping[str, float]) -> float:
    """The time of a round, all phases together."""
    return sum(
        value
        for name, value in metrics.items()
        if name.startswith("time/") and name != "time/steps_per_second"
    )
