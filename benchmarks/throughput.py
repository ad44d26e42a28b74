"""Environment steps per second, learning included, compared with sb3-contrib's RecurrentPPO.

    python benchmarks/throughput.py [--quick]

CartPole-v1 with its velocities hidden, the same Python environments on both sides, 8 of them, 128
steps per round, one thread, one process. Two comparisons:
- like_for_like: the rival has one LSTM of 128 for actor and critic, as Esper has; 4 passes over the
  data in 4 minibatches on both sides.
- vs_defaults: the rival's defaults (two LSTMs of 256, minibatches of 128 rows) against Esper's
  sizes; 10 passes on both sides.

Both sides take turns. Times are CPU times, so that other programs matter little; the figure is the
median of the turns' ratios.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from hidden_cartpole import hidden_cartpole, hidden_cartpole_envs

from esper.simic.agent.ppo import PPOConfig
from esper.simic.gym.ppo_model import PPO, GymConfig

NUM_ENVS, HORIZON = 8, 128
ROWS = NUM_ENVS * HORIZON
SHARED = {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}
# passes, the rival's settings, bar
COMPARISONS: dict[str, tuple[int, dict[str, Any], float]] = {
    "like_for_like": (4, {"batch_size": ROWS // 4, "policy_kwargs": SHARED}, 6.0),
    "vs_defaults": (10, {}, 10.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="finish within 40 seconds")
    turns = 2 if parser.parse_args().quick else 9
    torch.set_num_threads(1)
    bars = {}
    for name, (passes, settings, bar) in COMPARISONS.items():
        ratio = compare(name, passes, settings, turns)
        bars[name] = {"value": round(ratio, 2), "bar": bar, "met": ratio >= bar}
    print(json.dumps({"benchmark": "throughput", "device": "cpu", "bars": bars}))


def compare(name: str, passes: int, settings: dict[str, Any], turns: int) -> float:
    ours, rival = Ours(passes), Rival(passes, settings)
    for side in (ours, rival):
        side.round()  # compile, allocate, fill caches
    ours.seconds.clear()
    times = [(timed(ours.round), timed(rival.round)) for _ in range(turns)]
    print(f"{name}: {passes} passes; rival {settings or 'defaults'}")
    for side, seconds in zip(("esper", "sb3-contrib"), zip(*times, strict=True), strict=True):
        print(f"{side:12} {ROWS / statistics.median(seconds):8.0f} steps per CPU second")
    ratio = statistics.median(theirs / mine for mine, theirs in times)
    print(f"ratio        {ratio:8.1f}")
    total = sum(ours.seconds.values())
    phases = sorted(ours.seconds.items(), key=lambda item: -item[1])
    print("esper's time:", ", ".join(f"{phase} {s / total:.0%}" for phase, s in phases), "\n")
    return ratio


def timed(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class Ours:
    def __init__(self, passes: int) -> None:
        config = GymConfig(horizon=HORIZON, ppo=PPOConfig(ppo_epochs=passes, target_kl=None))
        self.trainer = PPO(hidden_cartpole_envs(NUM_ENVS), config=config).trainer
        self.seconds: dict[str, float] = defaultdict(float)

    def round(self) -> None:
        self.trainer.clock.start()
        self.trainer.collect()
        for name, value in self.trainer.learn().items():
            if name.startswith("time/") and name != "time/steps_per_second":
                self.seconds[name.removeprefix("time/")] += value


class Rival:
    def __init__(self, passes: int, settings: dict[str, Any]) -> None:
        from sb3_contrib import RecurrentPPO
        from stable_baselines3.common.vec_env import DummyVecEnv

        envs = DummyVecEnv([hidden_cartpole] * NUM_ENVS)
        common = {"n_steps": HORIZON, "n_epochs": passes, "device": "cpu"}
        self.model = RecurrentPPO("MlpLstmPolicy", envs, **common, **settings)

    def round(self) -> None:
        self.model.learn(ROWS, reset_num_timesteps=False)


if __name__ == "__main__":
    main()
