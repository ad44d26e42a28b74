"""What PPO learns on environments that others wrote, with one set of hyper-parameters.

    python benchmarks/learning.py [--quick] [--only cartpole,taxi] [--rng-seeds 5] [--jobs 2]

Everything runs with the defaults of PPOConfig, PolicyConfig and GymConfig, except what the table
names under "settings". Scores are mean returns of the likeliest actions after the whole budget,
over fresh episodes; the figure of a row is the mean over rng seeds.

POPGym comes from PyPI (popgym 1.0.7); rivals are stable-baselines3 and sb3-contrib.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hidden_cartpole import hidden_cartpole

from esper.leyline.factored_actions import FactoredActionSpace
from esper.simic.agent.ppo import PPOConfig
from esper.simic.gym.evaluation import evaluate
from esper.simic.gym.ppo_model import GYM_GAE_LAMBDA, PPO, GymConfig

sys.path.append(str(Path(__file__).parents[1] / "tests"))

MakeEnv = Callable[[], gymnasium.Env]
FIRST_RNG_SEED = 20  # lower ones were used to choose the defaults
EVALUATION_SEED = 10_000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    make: MakeEnv
    total_steps: int
    num_envs: int = 8
    config: GymConfig = GymConfig()
    settings: str = "defaults"
    heads: FactoredActionSpace | None = None
    bar: float | None = None  # the score asked for; None: a row to compare with
    rng_seeds: int = 5
    eval_episodes: int = 40
    in_quick: bool = False

    def score(self, rng_seed: int) -> float:
        np.random.seed(rng_seed)  # noqa: NPY002 -- sb3's environments draw from the global generator
        config = replace(self.config, rng_seed=rng_seed)
        model = PPO(self.envs(), self.heads, config).learn(self.total_steps)
        result = evaluate(model, self.envs(), self.eval_episodes, rng_seed=EVALUATION_SEED)
        return float(result.returns.mean())

    def envs(self) -> SyncVectorEnv:
        return SyncVectorEnv([self.make] * self.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class RivalRow(Row):
    """sb3-contrib's RecurrentPPO, with the settings of its own test on this environment."""

    def score(self, rng_seed: int) -> float:
        from sb3_contrib import RecurrentPPO
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.evaluation import evaluate_policy
        from stable_baselines3.common.vec_env import VecNormalize

        envs = VecNormalize(make_vec_env(self.make, n_envs=self.num_envs, seed=rng_seed))
        model = RecurrentPPO(
            "MlpLstmPolicy",
            envs,
            n_steps=128,
            batch_size=256,
            n_epochs=10,
            learning_rate=7e-4,
            gae_lambda=0.98,
            max_grad_norm=1,
            policy_kwargs={
                "net_arch": {"pi": [], "vf": [64]},
                "lstm_hidden_size": 64,
                "ortho_init": False,
            },
            seed=rng_seed,
            device="cpu",
        )
        model.learn(self.total_steps)
        fresh = VecNormalize(
            make_vec_env(self.make, n_envs=self.num_envs, seed=EVALUATION_SEED),
            training=False,
            norm_reward=False,
        )
        fresh.obs_rms = envs.obs_rms
        return float(evaluate_policy(model, fresh, self.eval_episodes, warn=False)[0])


def invalid_actions(dims: list[int], num_invalid: int) -> gymnasium.Env:
    from sb3_contrib.common.envs import InvalidActionEnvMultiDiscrete

    env = InvalidActionEnvMultiDiscrete(dims=dims, n_invalid_actions=num_invalid)
    return gymnasium.wrappers.FlattenObservation(env)


def repeat_previous() -> gymnasium.Env:
    from popgym.envs.repeat_previous import RepeatPreviousEasy

    return RepeatPreviousEasy()


def row_then_column(*, conditional: bool) -> gymnasium.Env:
    from support.gym_environments import RowThenColumn

    return RowThenColumn(conditional=conditional)


def rows() -> dict[str, list[Row]]:
    from support.gym_environments import RowThenColumn

    taxi = partial(gymnasium.make, "Taxi-v4")
    short = GymConfig(horizon=16, ppo=PPOConfig(gamma=0.4, gae_lambda=GYM_GAE_LAMBDA))
    # budget and gamma of sb3-contrib's own performance test of these environments
    invalid = {"total_steps": 3_000, "config": short, "settings": "horizon 16, gamma 0.4"}
    cartpole = {"make": hidden_cartpole, "total_steps": 50_000}
    grid = {"total_steps": 20_000, "num_envs": 16, "config": GymConfig(horizon=32)}
    return {
        "cartpole": [
            Row(name="CartPole-v1, velocities hidden", bar=490, **cartpole),
        ],
        "cartpole_sb3": [
            RivalRow(
                name="  sb3-contrib RecurrentPPO", settings="those of its own test", **cartpole
            ),
        ],
        "invalid": [
            Row(
                name="InvalidActionEnvMultiDiscrete [2, 3]",
                make=partial(invalid_actions, [2, 3], 1),
                bar=90,
                in_quick=True,
                **invalid,
            ),
            Row(
                name="  [10, 10], 14 invalid",
                make=partial(invalid_actions, [10, 10], 14),
                **invalid,
            ),
            Row(
                name="  [10, 10], masks ignored",
                make=partial(invalid_actions, [10, 10], 14),
                **invalid | {"config": replace(short, masks="none")},
            ),
        ],
        "popgym": [
            Row(
                name="POPGym RepeatPreviousEasy",
                make=repeat_previous,
                total_steps=500_000,
                num_envs=32,
                settings="32 envs",
                bar=0.9,
                rng_seeds=3,
                eval_episodes=200,
            )
        ],
        "taxi": [
            Row(
                name="Taxi-v4",
                make=taxi,
                total_steps=300_000,
                num_envs=16,
                settings="16 envs",
                rng_seeds=3,
            ),
            Row(
                name="  the same, masks ignored",
                make=taxi,
                total_steps=300_000,
                num_envs=16,
                config=GymConfig(masks="none"),
                settings="16 envs",
                rng_seeds=3,
            ),
        ],
        "conditional": [
            Row(
                name="row, then column (8 is optimal)",
                make=partial(row_then_column, conditional=True),
                heads=RowThenColumn.action_heads,
                settings="16 envs, horizon 32",
                bar=7.99,
                in_quick=True,
                **grid,
            ),
            Row(
                name="  the same, independent masks",
                make=partial(row_then_column, conditional=False),
                settings="16 envs, horizon 32",
                **grid,
            ),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small rows, one rng seed: 40 s")
    parser.add_argument("--only", default="", help="groups of rows, by name, comma-separated")
    parser.add_argument(
        "--rng-seeds", type=int, help="how many per row; as the row says if left out"
    )
    parser.add_argument("--jobs", type=int, default=1, help="rng seeds in parallel, a process each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    groups = rows()
    chosen = arguments.only.split(",") if arguments.only else list(groups)
    bars = {}
    print(
        f"{'':37} {'steps':>9} {'score':>8} {'sd':>7} {'bar':>6} {'seeds':>5} {'s/run':>6}  settings"
    )
    for group in chosen:
        for row in groups[group]:
            if arguments.quick and not row.in_quick:
                continue
            seeds = 1 if arguments.quick else arguments.rng_seeds or row.rng_seeds
            start = time.perf_counter()
            scores = score_all(row, range(FIRST_RNG_SEED, FIRST_RNG_SEED + seeds), arguments.jobs)
            seconds = (time.perf_counter() - start) * min(arguments.jobs, seeds) / seeds
            mean, bar = float(np.mean(scores)), "" if row.bar is None else row.bar
            print(
                f"{row.name:37} {row.total_steps:9,} {mean:8.2f} {np.std(scores):7.2f} {bar:>6} "
                f"{seeds:5} {seconds:6.0f}  {row.settings}; each {np.round(scores, 2).tolist()}",
                flush=True,
            )
            if row.bar is not None:
                bars[group] = {"value": round(mean, 3), "bar": row.bar, "met": mean >= row.bar}
    print(json.dumps({"benchmark": "learning", "device": "cpu", "bars": bars}))


def score_all(row: Row, rng_seeds: range, jobs: int) -> list[float]:
    if jobs == 1:
        return [row.score(rng_seed) for rng_seed in rng_seeds]
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        return list(pool.map(row.score, rng_seeds))


if __name__ == "__main__":
    main()
