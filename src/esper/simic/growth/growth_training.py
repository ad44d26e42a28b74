"""A run in which Tamiyo learns to grow networks: rounds, records, checkpoints.

    training = GrowthTraining(PRESETS["quick"])
    training.run(on_round=lambda record: print(record.round, record.metrics["episode/score"]))
    training.save("checkpoint.pt")
    training.controller().save("controller.pt")

A round is all or nothing: a run saved in the middle of a round collects it again, bit-exact, when
it is resumed.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from esper.leyline.records import RoundRecord
from esper.runtime.files import read_file, write_file
from esper.runtime.plain_config import from_plain, to_plain
from esper.runtime.ranks import ALONE, Ranks
from esper.simic.agent.ppo import PPOAgent
from esper.simic.growth.growth_envs import GrowthEnvs
from esper.simic.growth.hosts_and_data import training_hosts, with_checksum
from esper.simic.growth.train_config import TrainConfig
from esper.simic.trainer import Trainer
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from esper.tolaria.environment import GrowthEnvironment

_KIND, _VERSION = "growth run", 4


class GrowthTraining:
    """The environment, agent and trainer of a config; with several ranks, the part of this one."""

    def __init__(self, config: TrainConfig | None = None, ranks: Ranks = ALONE):
        self.config = config = with_checksum(config or TrainConfig())
        self.ranks = ranks
        ranks.require_same(to_plain(config))
        host_batch = training_hosts(config, ranks)
        self.environment = GrowthEnvironment(host_batch, config.growth, rng_seed=config.rng_seed)
        with torch.random.fork_rng(devices=[]):  # weights depend on rng_seed alone
            torch.manual_seed(config.rng_seed)
            layout = FeatureLayout(host_batch.num_slots, host_batch.num_blueprints)
            policy = tamiyo_policy(layout, config.policy)
        self.agent = PPOAgent(policy.to(config.resolved_device()), config.ppo, ranks)
        self.envs = GrowthEnvs(
            self.environment,
            self.agent.device,
            start_score=host_batch.untrained_accuracy,
            controls=config.host_batch.controls,
            ranks=ranks,
        )
        steps, rng_seed = config.growth.num_steps, config.rng_seed
        self.trainer = Trainer(self.envs, self.agent, horizon=steps, rng_seed=rng_seed)

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
        """Train to the last round, or until `should_stop()`, checked before each step.

        `on_round` is called on rank 0 only, with the hosts of all ranks.
        """
        clock = self.trainer.clock
        clock.start()
        while not self.is_finished:
            metrics = self.trainer.run_round(self.rounds_done / self.config.rounds, should_stop)
            if metrics is None:
                return
            if on_round is not None and (record := self._record(metrics)) is not None:
                on_round(record)
            clock.lap("telemetry")

    def controller(self) -> LearnedController:
        """The current policy, taking its most likely choices."""
        menu = tuple(self.environment.host_batch.blueprint_names)
        return LearnedController(self.agent.policy, menu)

    # -- telemetry ----------------------------------------------------------------------------

    def _record(self, metrics: dict[str, float]) -> RoundRecord | None:
        """The record of all ranks, on rank 0."""
        rollout = self.trainer.buffer.get_batched_sequences()
        host_batch, share = self.environment.host_batch, self.envs.share
        count = math.ceil(self.config.observed_share * share.total)  # envs take turns
        observed = (self.rounds_done * count + torch.arange(count)) % share.total
        own = {
            "hosts": host_batch.host_names,
            "variants": [self.config.variants[view] for view in host_batch.view_ids.tolist()],
            "rollback_reasons": tuple(self.envs.rollback_reasons),
            "probabilities": rollout.log_probs.sum(dim=-1).exp().cpu(),
        }
        names = {"actions": "actions", "legal": "masks", "rewards": "rewards", "values": "values"}
        own |= {key: getattr(rollout, name).to("cpu", copy=True) for key, name in names.items()}
        mine = observed[torch.isin(observed, share.ids)]
        places = share.local(mine).to(rollout.states.device)
        seen = dict(zip(mine.tolist(), rollout.states[places].cpu(), strict=True))
        parts = self.ranks.gather((share.ids, own, seen), to_first=True)
        if not parts:
            return None
        rows = {env: row for *_, part in parts for env, row in part.items()}
        observations = [rows[env] for env in observed.tolist()]
        return RoundRecord(
            round=self.rounds_done,
            metrics=metrics,
            episodes=self.envs.episodes,
            observed_envs=observed,
            observations=torch.stack(observations) if rows else rollout.states[:0].cpu(),
            **share.join([(ids, fields) for ids, fields, _ in parts]),
        )

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the run as it was after its last round."""
        contents = {"config": to_plain(self.config), "trainer": self.trainer.state_dict()}
        write_file(path, _KIND, contents, version=_VERSION)

    @classmethod
    def resume(cls, path: str | Path, ranks: Ranks = ALONE) -> "GrowthTraining":
        """The saved run; it continues bit-exact, as if it had never stopped.

        Any number of ranks resumes it; another number changes the order of sums only.
        """
        saved = read_file(path, _KIND, version=_VERSION)
        training = cls(from_plain(TrainConfig, saved["config"]), ranks)
        training.trainer.load_state_dict(saved["trainer"], path)
        return training
