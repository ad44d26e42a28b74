"""Learning in environments on a GPU: CartPole in torch, the memory game, and a CPU beside a GPU.

    python benchmarks/gpu_learning.py [--device cuda] [--rsl-rl]

| part | what it is |
|---|---|
| cartpole | seconds until the last 100 episodes have a mean return of 475; 4,096 envs, no memory; with `--rsl-rl` beside rsl_rl, which plays the sign of its action |
| lag 4 | the game of `symbol_game.py`: the share of right answers, 0.2 by chance |
| devices | CartPole, 64 envs, five rng seeds on each device: the mean return after each 10 rounds |
"""

import argparse
import contextlib
import importlib.util
import io
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from symbol_game import SymbolGame

import esper
from esper.simic.agent.ppo import PPOConfig
from esper.simic.gym.ppo_model import GymConfig
from esper.tamiyo.policy.network import PolicyConfig

GOAL = 475.0
EXAMPLE = Path(__file__).parent.parent / "examples" / "07_torch_environments.py"


def torch_cartpole() -> Any:
    """The class of the example."""
    spec = importlib.util.spec_from_file_location("torch_environments", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TorchCartPole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rsl-rl", action="store_true")
    parser.add_argument("--quick", action="store_true", help="on the CPU, within 40 seconds")
    arguments = parser.parse_args()
    device = "cpu" if arguments.quick else arguments.device
    num_envs = 64 if arguments.quick else 4096
    bars: dict[str, Any] = {}
    seconds = cartpole_seconds(num_envs, device)
    bars["cartpole_475_s"] = {"value": round(seconds, 1), "bar": 15, "met": seconds < 15}
    if arguments.rsl_rl:
        bars["rsl_rl_cartpole_475_s"] = {
            "value": round(rsl_rl_cartpole_seconds(num_envs, device), 1)
        }
    if not arguments.quick:
        bars["lag_4_correct"] = {"value": round(lag_game(num_envs, device), 2)}
        bars |= both_devices(device)
    print(json.dumps({"benchmark": "gpu_learning", "device": device, "bars": bars}))


def cartpole_config(rng_seed: int = 0) -> GymConfig:
    ppo = PPOConfig(gae_lambda=0.95, learning_rate_schedule="constant")
    return GymConfig(horizon=32, policy=PolicyConfig(memory=False), ppo=ppo, rng_seed=rng_seed)


def cartpole_seconds(num_envs: int, device: str) -> float:
    """Seconds of rounds until the goal, after one that compiles and captures, in new environments."""
    make = torch_cartpole()
    begin = time.perf_counter()
    warm_up = esper.PPO(make(num_envs, device), config=cartpole_config())
    warm_up.learn(2)
    ready = time.perf_counter() - begin
    model = esper.PPO(make(num_envs, device), config=cartpole_config())
    model.trainer.run_round(0.0)  # its own graphs
    start = time.perf_counter()
    mean = 0.0
    while mean < GOAL and time.perf_counter() - start < 60:
        metrics = model.trainer.run_round(0.0)
        assert metrics is not None
        mean = metrics.get("episode/return", 0.0)
    seconds = time.perf_counter() - start
    steps = model.trainer.progress.steps
    print(
        f"cartpole: {mean:.0f} after {seconds:.1f} s and {steps:,} steps; compiling and capturing "
        f"{ready:.1f} s",
        flush=True,
    )
    return seconds


def rsl_rl_cartpole_seconds(num_envs: int, device: str) -> float:
    from rsl_rl.runners import OnPolicyRunner
    from rsl_rl_game import settings
    from tensordict import TensorDict

    game = torch_cartpole()(num_envs, device)
    returns = torch.zeros(num_envs, device=device)
    ended_returns: list[float] = []

    class Env:
        num_actions = 1
        max_episode_length = 500
        cfg: dict[str, Any] = {}  # noqa: RUF012

        def __init__(self) -> None:
            self.num_envs, self.device = num_envs, device
            self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64, device=device)
            self.observation = game.reset(seed=0)[0]

        def get_observations(self) -> TensorDict:
            return TensorDict({"policy": self.observation}, batch_size=[num_envs])

        def step(self, actions):
            choices = (actions[:, 0] > 0).long()
            self.observation, rewards, terminated, truncated, _ = game.step(choices)
            done = terminated | truncated
            returns.add_(rewards)
            ended_returns.extend(returns[done].tolist())
            returns.masked_fill_(done, 0.0)
            return self.get_observations(), rewards, done, {"time_outs": truncated}

    config = settings(10, 32)
    for network in ("actor", "critic"):
        for name in ("rnn_type", "rnn_hidden_dim", "rnn_num_layers"):
            config[network].pop(name)
        config[network] |= {"class_name": "MLPModel", "hidden_dims": [128, 128]}
    config["algorithm"] |= {"gamma": 0.99, "lam": 0.95, "learning_rate": 1e-3}
    config["algorithm"] |= {"schedule": "adaptive", "num_learning_epochs": 5}
    with contextlib.redirect_stdout(io.StringIO()):
        runner = OnPolicyRunner(Env(), config, log_dir=None, device=device)
        runner.learn(1)
        start = time.perf_counter()
        while time.perf_counter() - start < 60:
            runner.learn(1)
            if ended_returns and statistics.mean(ended_returns[-100:]) >= GOAL:
                break
    seconds = time.perf_counter() - start
    print(f"rsl_rl, cartpole: {statistics.mean(ended_returns[-100:]):.0f} after {seconds:.1f} s")
    return seconds


def lag_game(num_envs: int, device: str, rounds: int = 60) -> float:
    """The share of right answers in the last rounds, of those that can be known."""
    game = SymbolGame(num_envs, device)
    # the reward for an answer comes at once: later ones are noise
    ppo = PPOConfig(gamma=0.5, gae_lambda=0.5, target_kl=None, learning_rate_schedule="constant")
    config = GymConfig(horizon=64, ppo=ppo)
    model = esper.PPO(game, config=config)
    start = time.perf_counter()
    for done in range(rounds):
        game.num_correct.zero_()
        model.trainer.run_round(0.0)
        share = float(game.num_correct) / (num_envs * config.horizon)
        if done % 10 == 9:
            print(
                f"lag 4: {share:.2f} correct after {done + 1} rounds, "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return share


def both_devices(device: str, rounds: int = 50) -> dict[str, Any]:
    """Mean returns of five rng seeds on a CPU and on the device."""
    make = torch_cartpole()
    curves: dict[str, list[list[float]]] = {"cpu": [], device: []}
    for kind, of_kind in curves.items():
        for rng_seed in range(5):
            model = esper.PPO(make(64, kind), config=cartpole_config(rng_seed))
            curve = []
            for done in range(rounds):
                metrics = model.trainer.run_round(0.0)
                assert metrics is not None
                if done % 10 == 9:
                    curve.append(metrics["episode/return"])
            of_kind.append(curve)
    bars = {}
    for point, columns in enumerate(
        zip(*(zip(*c, strict=True) for c in curves.values()), strict=True)
    ):
        ranges = [(min(column), max(column)) for column in columns]
        names = [f"{low:.0f} to {high:.0f}" for low, high in ranges]
        print(f"round {10 * (point + 1)}: cpu {names[0]}, {device} {names[1]}")
        (low, high), (other_low, other_high) = ranges
        bars[f"devices_overlap_{10 * (point + 1)}"] = {
            "value": low <= other_high and other_low <= high
        }
    return bars


if __name__ == "__main__":
    main()
