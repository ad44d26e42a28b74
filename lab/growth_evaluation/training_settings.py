"""What each setting of growth training is worth where types of data want different seeds.

    PYTHONPATH=tests python -m growth_evaluation.training_settings [--quick] [--only NAME ...]

The presets' settings, and the same without one of them at a time, in a host batch whose gains are
known by type of data; it is among what the tests share. Frozen controllers are scored without noise, over all rents: 0 is what the best
constant plan for the rent scores, 1 is the best plan for the rent and the type of data. Growing
nothing scores -0.5.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.stages import LifecycleOp
from esper.simic.agent.ppo import PPOAgent
from esper.simic.growth.growth_envs import GrowthEnvs
from esper.simic.growth.train_config import TrainConfig
from esper.simic.trainer import Trainer
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic
from esper.tamiyo.policy.policy_layers import POLICY_GAIN, linear
from esper.tamiyo.policy.slot_heads import SlotHeads, tamiyo_policy
from esper.tolaria.environment import GrowthEnvironment
from support.synthetic_hosts import FOUR_TYPES, HOST_ACCURACY, SyntheticHosts

CONFIG = TrainConfig()
NUM_ENVS, EVALUATION_ROUNDS = 64, 4
BAR = 0.5  # of what knowing the type is worth
EAGER_PRIOR = {
    LifecycleOp.WAIT: 0.0,
    LifecycleOp.GERMINATE: -0.5,
    LifecycleOp.SET_ALPHA_TARGET: -2.0,
    LifecycleOp.PRUNE: -2.0,
    LifecycleOp.FOSSILIZE: -0.5,
    LifecycleOp.ADVANCE: -2.0,
}


class SumPointer(nn.Module):
    """Scores candidates `[B, K, .]` by a sum with the context `[B, .]` under a tanh."""

    def __init__(self, context_dim: int, candidate_dim: int):
        super().__init__()
        self.context = linear(context_dim, context_dim)
        self.candidate = linear(candidate_dim, context_dim, bias=False)
        self.score = linear(context_dim, 1, gain=POLICY_GAIN, bias=False)

    def forward(self, context: Tensor, candidates: Tensor) -> Tensor:
        mixed = (self.context(context).unsqueeze(1) + self.candidate(candidates)).tanh()
        scores: Tensor = self.score(mixed).squeeze(-1)
        return scores


def with_sums(policy: FactoredRecurrentActorCritic) -> None:
    config, heads = policy.config, policy.heads
    assert isinstance(heads, SlotHeads)
    heads.slot_pointer = SumPointer(config.lstm_hidden_dim, config.slot_dim)  # type: ignore[assignment]
    heads.blueprint_pointer = SumPointer(config.lstm_hidden_dim, config.blueprint_dim)  # type: ignore[assignment]


def with_eager_prior(policy: FactoredRecurrentActorCritic) -> None:
    policy.readout.bias.data[:-1] = torch.tensor([EAGER_PRIOR[op] for op in LifecycleOp])


def trainer_of(
    host_batch: SyntheticHosts,
    rng_seed: int,
    change: Callable[[FactoredRecurrentActorCritic], None] | None = None,
    **ppo: Any,
) -> Trainer:
    """A trainer with the presets' settings, except for what is changed in the policy or in PPO."""
    environment = GrowthEnvironment(host_batch, CONFIG.growth, rng_seed=rng_seed)
    torch.manual_seed(rng_seed)
    layout = FeatureLayout(host_batch.num_slots, host_batch.num_blueprints)
    policy = tamiyo_policy(layout, CONFIG.policy)
    if change:
        change(policy)
    envs = GrowthEnvs(environment, "cpu", start_score=HOST_ACCURACY)
    agent = PPOAgent(policy, replace(CONFIG.ppo, **ppo))
    return Trainer(envs, agent, horizon=CONFIG.growth.num_steps, rng_seed=rng_seed)


SETTINGS: dict[str, Callable[[SyntheticHosts, int], Trainer]] = {
    "as in the presets": trainer_of,
    "features not scaled": partial(trainer_of, normalize_features=False),
    "pointers that add": partial(trainer_of, change=with_sums),
    "no more entropy for blueprints": partial(trainer_of, head_entropy_weights={}),
    "entropy bonus does not fall": partial(trainer_of, entropy_schedule="constant"),
    "op prior that grows and stops": partial(trainer_of, change=with_eager_prior),
}


def measure(
    host_batch: SyntheticHosts, name: str, rng_seed: int, rounds: int
) -> tuple[float, float]:
    """The share of a trained and frozen controller, by most likely and by sampled actions."""
    trainer = SETTINGS[name](host_batch, rng_seed)
    for number in range(rounds):
        trainer.collect()
        trainer.learn(number / rounds)
    noise, host_batch.noise = host_batch.noise, 0.0
    greedy, sampled = (
        share_of_knowing(trainer, host_batch, is_greedy) for is_greedy in (True, False)
    )
    host_batch.noise = noise
    return greedy, sampled


def share_of_knowing(trainer: Trainer, host_batch: SyntheticHosts, is_greedy: bool) -> float:
    """Score over the best constant, as a share of what the best plan per type has over it."""
    gained = worth = 0.0
    for _ in range(EVALUATION_ROUNDS):
        trainer.collect(deterministic=is_greedy)
        assert isinstance(trainer.envs, GrowthEnvs)
        episodes = trainer.envs.episodes
        blind = host_batch.best_blind_scores(episodes.rent)
        gained += float((episodes.scores - blind).sum())
        worth += float((host_batch.best_scores(episodes.rent) - blind).sum())
    return gained / worth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rounds, which teach nothing")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--first", type=int, default=0, help="the first rng seed")
    parser.add_argument("--rng-seeds", type=int, default=2, help="how many")
    parser.add_argument("--siblings", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.0, help="of accuracies while training")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rounds, count = (2, 1) if asked.quick else (CONFIG.rounds, asked.rng_seeds)
    rng_seeds = range(asked.first, asked.first + count)
    host_batch = SyntheticHosts(NUM_ENVS, FOUR_TYPES, siblings=asked.siblings, noise=asked.noise)
    print(f"{rounds} rounds of {NUM_ENVS} episodes, siblings {asked.siblings}, noise {asked.noise}")
    print(f"{'':32}{'greedy':>8}{'sampled':>9}{'s/run':>7}  each, greedy and sampled")
    bars = {}
    for name in asked.only:
        start = time.perf_counter()
        found = [measure(host_batch, name, rng_seed, rounds) for rng_seed in rng_seeds]
        seconds = (time.perf_counter() - start) / count
        greedy, sampled = map(statistics.mean, zip(*found, strict=True))
        each = ", ".join(f"{g:.2f} {s:.2f}" for g, s in found)
        print(f"{name:32}{greedy:8.2f}{sampled:9.2f}{seconds:7.0f}  {each}", flush=True)
        bars[name] = {"value": round(greedy, 3), "bar": BAR, "met": greedy >= BAR}
    print(json.dumps({"benchmark": "growth_settings", "device": "cpu", "bars": bars}))


if __name__ == "__main__":
    main()
