"""What memory adds: POPGym's tasks with and without it, and those of stable-baselines3.

    python benchmarks/memory.py [--quick] [--workers 14] [--seconds 520] [--out memory.json]

Every task gets the same number of environment steps and one thread. Settings are those of
`SETTINGS`; ours are the defaults. Returns are means over the last 100 training episodes, so they
are of sampled actions. "equal time" is a rival's return after the CPU time that ours took: one thread
each, so other programs do not matter.
Needs popgym 1.0.7, stable-baselines3 and sb3-contrib.
"""

import argparse
import json
import multiprocessing
import os
import time
import traceback
import warnings
from collections import defaultdict, deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper.simic.gym.ppo_model import PPO, GymConfig
from esper.tamiyo.policy.network import PolicyConfig

NUM_ENVS, STEPS, FIRST_RNG_SEED = 8, 150_000, 20  # lower rng seeds were used to choose the defaults
# task: whether memory is expected to show within the budget
TASKS = {
    "RepeatPreviousEasy": True,
    "RepeatFirstEasy": True,
    "CountRecallEasy": True,
    "AutoencodeEasy": True,
    "PositionOnlyCartPoleEasy": True,
    "PositionOnlyPendulumEasy": True,
    "HigherLowerEasy": False,
    "ConcentrationEasy": False,
    "RepeatFirstMedium": True,
}
SETTINGS = {
    "esper": "esper.PPO, defaults, 8 envs",
    "esper_no_memory": "esper.PPO, PolicyConfig(memory=False, encoder_layers=2), 8 envs",
    "recurrent_ppo": "sb3-contrib RecurrentPPO, 8 envs, n_steps=128, batch_size=256, n_epochs=10, "
    "one LSTM of 128 for actor and critic; the rest are its defaults",
    "feed_forward": "MaskablePPO without masks (PPO for Box actions), 8 envs, n_steps=128, "
    "batch_size=256, n_epochs=10; the rest are its defaults",
}
CONTROLS = {  # what the previous action and reward are worth; with --arms
    "esper_reward": "esper.PPO, previous_reward=True",
    "esper_observation": "esper.PPO, previous_action=False",
    "recurrent_ppo_previous": "recurrent_ppo, previous action and reward in the observation",
}


@dataclass(frozen=True)
class Job:
    """One training run."""

    arm: str
    task: str
    rng_seed: int
    steps: int
    until: float  # time at which it stops early


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two tasks, few steps: 40 seconds")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop unfinished runs after")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rng-seeds", type=int, default=3)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--arms", default=",".join(SETTINGS))
    parser.add_argument(
        "--out", type=Path, help="file for the results; the table gets the same name with .md"
    )
    arguments = parser.parse_args()
    tasks, steps, rng_seeds = arguments.tasks.split(","), arguments.steps, arguments.rng_seeds
    if arguments.quick:
        tasks, steps, rng_seeds = ["RepeatPreviousEasy", "PositionOnlyPendulumEasy"], 2_000, 1
    until = time.time() + arguments.seconds
    order = ["recurrent_ppo", "recurrent_ppo_previous", *SETTINGS, *CONTROLS]  # slowest first
    arms = sorted(arguments.arms.split(","), key=order.index)
    jobs = [
        Job(arm, task, FIRST_RNG_SEED + i, steps, until)
        for i in range(rng_seeds)
        for arm in arms
        for task in tasks
    ]
    train(
        Job("esper", tasks[0], 0, 1_000, until)
    )  # compile into the cache of kernels before others start
    results: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        for future in as_completed([pool.submit(train, job) for job in jobs]):
            results.append(future.result())
            print(summary(results[-1]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(results))
    lines = table(results, tasks, arms)
    print("\n".join(lines))
    if arguments.out:
        arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(json.dumps({"benchmark": "memory", "device": "cpu", "bars": bars(results, tasks)}))


# -- runs -----------------------------------------------------------------------------------------


def train(job: Job) -> dict[str, Any]:
    """The learning curve of a run: steps, seconds and the mean return of the last 100 episodes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    result: dict[str, Any] = {
        "arm": job.arm,
        "task": job.task,
        "rng_seed": job.rng_seed,
        "curve": [],
    }
    learn = _learn_ours if job.arm.startswith("esper") else _learn_rival
    try:
        np.random.seed(job.rng_seed)  # noqa: NPY002 -- some tasks draw from the global generator
        if time.time() < job.until:
            learn(job, result["curve"])
    except Exception:
        result["error"] = traceback.format_exc()
    curve = result["curve"]
    result["is_complete"] = bool(curve) and curve[-1][0] >= job.steps
    return result


def _learn_ours(job: Job, curve: list[tuple[int, float, float]]) -> None:
    policy = PolicyConfig()
    if job.arm == "esper_no_memory":
        policy = PolicyConfig(memory=False, encoder_layers=2)
    envs = SyncVectorEnv(
        [partial(make, job.task)] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP
    )
    config = GymConfig(
        rng_seed=job.rng_seed,
        policy=policy,
        previous_action=job.arm != "esper_observation",
        previous_reward=job.arm == "esper_reward",
    )
    model = PPO(envs, config=config)
    start = time.process_time()

    def note(steps: int, metrics: dict[str, float]) -> bool:
        mean = metrics.get("episode/return", float("nan"))
        curve.append((steps, time.process_time() - start, mean))
        return time.time() < job.until

    model.learn(job.steps, note)


def _learn_rival(job: Job, curve: list[tuple[int, float, float]]) -> None:
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from stable_baselines3 import PPO as FeedForwardPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    previous = job.arm == "recurrent_ppo_previous"
    envs = make_vec_env(partial(flat, job.task, previous), NUM_ENVS, seed=job.rng_seed)
    common = {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "seed": job.rng_seed}
    options: dict[str, Any] = {}
    if job.arm.startswith("recurrent_ppo"):
        sizes = {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}
        model: Any = RecurrentPPO(
            "MlpLstmPolicy", envs, policy_kwargs=sizes, device="cpu", **common
        )
    elif isinstance(envs.action_space, gymnasium.spaces.Discrete):
        model, options = MaskablePPO("MlpPolicy", envs, device="cpu", **common), {"use_masking": 0}
    else:
        model = FeedForwardPPO("MlpPolicy", envs, device="cpu", **common)

    returns: deque[float] = deque(maxlen=100)

    class Note(BaseCallback):
        def _on_step(self) -> bool:
            infos = self.locals["infos"]
            returns.extend(i["episode"]["r"] for i in infos if "episode" in i)
            return time.time() < job.until

        def _on_rollout_end(self) -> None:
            mean = float(np.mean(returns)) if returns else float("nan")
            curve.append((self.num_timesteps, time.process_time() - start, mean))

    start = time.process_time()
    model.learn(job.steps, Note(), **options)
    # the last update's time counts, as it does for ours
    curve.append((curve[-1][0], time.process_time() - start, curve[-1][2]))


def make(task: str) -> gymnasium.Env:
    import popgym.envs

    env: gymnasium.Env = getattr(popgym.envs, task)()
    return env


def flat(task: str, previous: bool = False) -> gymnasium.Env:
    """One-hot observations: rivals take no Tuple."""
    env = make(task)
    return gymnasium.wrappers.FlattenObservation(Previous(env) if previous else env)


class Previous(gymnasium.Wrapper):
    """Adds the previous action and reward to the observation, and whether there were any."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        reward = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = gymnasium.spaces.Tuple(
            (env.observation_space, env.action_space, reward)
        )

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        action = np.zeros(self.env.action_space.shape, self.env.action_space.dtype)
        return (observation, action, np.zeros(2, np.float32)), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, *rest = self.env.step(action)
        seen = np.array([1.0, reward], np.float32)
        return (observation, np.asarray(action), seen), reward, *rest


# -- tables ---------------------------------------------------------------------------------------


def summary(result: dict[str, Any]) -> str:
    name = f"{result['task']:26} {result['arm']:16} {result['rng_seed']}"
    if "error" in result:
        return f"{name} {result['error']}"
    steps, seconds, mean = result["curve"][-1] if result["curve"] else (0, 0.0, float("nan"))
    return f"{name} {mean:8.3f} after {steps:8,} steps, {seconds:6.1f} s"


def final(result: dict[str, Any], seconds: float = float("inf")) -> float:
    """The mean return at the end, or at a time."""
    reached = [mean for _, at, mean in result["curve"] if at <= seconds]
    return reached[-1] if reached else float("nan")


def by_arm(results: list[dict[str, Any]], task: str) -> dict[str, list[dict[str, Any]]]:
    """The complete runs of a task."""
    runs = defaultdict(list)
    for result in results:
        if result["task"] == task and result["is_complete"]:
            runs[result["arm"]].append(result)
    return runs


def table(results: list[dict[str, Any]], tasks: list[str], arms: list[str]) -> list[str]:
    """Mean and standard deviation over rng seeds at equal steps; rivals also at equal time."""
    lines = [f"- `{arm}`: {(SETTINGS | CONTROLS)[arm]}" for arm in arms]
    lines += ["", "| task | " + " | ".join(arms) + " | equal time | steps/s |"]
    lines += ["|---" * (len(arms) + 3) + "|"]
    for task in tasks:
        runs = by_arm(results, task)
        cells = [spread([final(run) for run in runs[arm]]) for arm in arms]
        ours = [run["curve"][-1][1] for run in runs["esper"]]
        seconds = float(np.mean(ours)) if ours else float("inf")
        rivals = [arm for arm in arms if not arm.startswith("esper")]
        early = [f"{arm} {spread([final(r, seconds) for r in runs[arm]])}" for arm in rivals]
        rates = [
            f"{np.mean([r['curve'][-1][0] / r['curve'][-1][1] for r in runs[arm]]):.0f}"
            for arm in arms
            if runs[arm]
        ]
        lines.append(f"| {task} | {' | '.join(cells)} | {'; '.join(early)} | {' / '.join(rates)} |")
    return lines


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.2f} +- {np.std(values):.2f}" if values else "-"


def bars(results: list[dict[str, Any]], tasks: list[str]) -> dict[str, Any]:
    """On how many tasks memory is ahead of none, and ahead of RecurrentPPO, by over two errors."""
    ahead = {"esper_no_memory": 0, "recurrent_ppo": 0}
    for task in tasks:
        runs = by_arm(results, task)
        for rival in ahead:
            mine, theirs = ([final(r) for r in runs[arm]] for arm in ("esper", rival))
            if mine and theirs:
                error = np.sqrt((np.var(mine) + np.var(theirs)) / max(len(mine) - 1, 1))
                ahead[rival] += bool(np.mean(mine) - np.mean(theirs) > max(2 * error, 0.02))
    return {
        f"tasks_ahead_of_{rival}": {"value": count, "bar": 6, "met": count >= 6}
        for rival, count in ahead.items()
    }


if __name__ == "__main__":
    main()
