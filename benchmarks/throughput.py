"""Environment steps per second, learning included, compared with sb3-contrib's RecurrentPPO.

    python benchmarks/throughput.py [--quick]

CartPole-v1 with its velocities hidden, the same Python environments on both sides, the same
number of envs, horizon, LSTM width, passes over the data and rows per minibatch, one thread, one
process. Both sides take turns; the figure is the median of the turns' ratios.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict

import torch
from hidden_cartpole import hidden_cartpole, hidden_cartpole_envs

from esper.simic.agent.ppo import PPOConfig
from esper.simic.training.ppo_model import PPO, GymConfig
from esper.tamiyo.policy.network import PolicyConfig

NUM_ENVS, HORIZON, HIDDEN, EPOCHS, MINIBATCHES = 8, 128, 128, 4, 4
BAR = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="finish within 40 seconds")
    turns = 3 if parser.parse_args().quick else 9
    torch.set_num_threads(1)

    ours, rival = Ours(), Rival()
    for side in (ours, rival):
        side.round()  # compile, allocate, fill caches
    times = [(timed(ours.round), timed(rival.round)) for _ in range(turns)]
    rows = NUM_ENVS * HORIZON
    for name, seconds in zip(("esper", "sb3-contrib"), zip(*times, strict=True), strict=True):
        print(f"{name:12} {rows / statistics.median(seconds):8.0f} steps/s")
    ratio = statistics.median(theirs / mine for mine, theirs in times)
    print(f"ratio        {ratio:8.1f}\n")
    total = sum(ours.seconds.values())
    print("where esper's time goes")
    for phase, seconds in sorted(ours.seconds.items(), key=lambda item: -item[1]):
        print(
            f"{phase:12} {1e6 * seconds / (rows * (turns + 1)):8.1f} us/step {seconds / total:6.0%}"
        )
    bar = {"value": round(ratio, 2), "bar": BAR, "met": ratio >= BAR}
    print(json.dumps({"benchmark": "throughput", "device": "cpu", "bars": {"vs_sb3": bar}}))


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Ours:
    def __init__(self) -> None:
        config = GymConfig(
            horizon=HORIZON,
            policy=PolicyConfig(lstm_hidden_dim=HIDDEN),
            ppo=PPOConfig(ppo_epochs=EPOCHS, num_minibatches=MINIBATCHES, target_kl=None),
        )
        self.trainer = PPO(hidden_cartpole_envs(NUM_ENVS), config=config).trainer
        self.seconds: dict[str, float] = defaultdict(float)

    def round(self) -> None:
        self.trainer.clock.start()
        self.trainer.collect()
        for name, value in self.trainer.learn().items():
            if name.startswith("time/") and name != "time/steps_per_second":
                self.seconds[name.removeprefix("time/")] += value


class Rival:
    def __init__(self) -> None:
        from sb3_contrib import RecurrentPPO
        from stable_baselines3.common.vec_env import DummyVecEnv

        self.model = RecurrentPPO(
            "MlpLstmPolicy",
            DummyVecEnv([hidden_cartpole] * NUM_ENVS),
            n_steps=HORIZON,
            batch_size=NUM_ENVS * HORIZON // MINIBATCHES,
            n_epochs=EPOCHS,
            policy_kwargs={
                "lstm_hidden_size": HIDDEN,
                "shared_lstm": True,
                "enable_critic_lstm": False,
            },
            device="cpu",
        )

    def round(self) -> None:
        self.model.learn(NUM_ENVS * HORIZON, reset_num_timesteps=False)


if __name__ == "__main__":
    main()
