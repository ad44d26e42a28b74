"""Environment steps per CPU second, learning included, compared with the libraries people use.

    python benchmarks/throughput.py [--quick] [--only like_for_like,...]

One thread, one process; both sides take turns, so that other programs matter little. Times are CPU
times, the figure is the median of the turns' ratios. The same Python environments are on both sides.

| comparison | what it is |
|---|---|
| like_for_like | CartPole without velocities, 8 envs x 128 steps, one LSTM of 128 for actor and critic, 4 passes in 4 minibatches on both sides; sb3-contrib's RecurrentPPO |
| vs_plain_loop | the same against PPO in plain torch, whose LSTM runs from one episode start to the next |
| vs_defaults | the same against RecurrentPPO's defaults (two LSTMs of 256, minibatches of 128 rows), 10 passes |
| no_memory | CartPole, 10 passes; Stable-Baselines3's PPO with its own network |
| dependent_heads | a column that depends on the row, against SB3's PPO on the same two choices without masks |
| box | Pendulum, against SB3's PPO |
| pictures | 7 x 7 x 3 pictures, against SB3's PPO with the same network |

Besides: `act_*` is the time of `act` for other policies, as a multiple of a plain one's, and
`us_per_env_512` what a step costs beyond the bare environment, in 512 envs. A full run also prints
the seconds until a new process has made its first update (`first_update`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hidden_cartpole import hidden_cartpole, hidden_cartpole_envs
from plain_recurrent_ppo import PlainRecurrentPPO

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head
from esper.simic.agent.ppo import PPOConfig
from esper.simic.gym.ppo_model import GYM_GAE_LAMBDA, PPO, GymConfig
from esper.tamiyo.policy.distributions import draw_noise
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.policy.plain_heads import flat_policy

NUM_ENVS, HORIZON = 8, 128
ROWS = NUM_ENVS * HORIZON
SHARED = {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}


class Pictures(gymnasium.Env):
    """Which of four corners of a 7 x 7 picture is lit."""

    observation_space = spaces.Box(0, 255, (7, 7, 3), np.uint8)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 20
        return self._draw(), {}

    def step(self, action):
        reward = float(action == self.corner)
        self.left -= 1
        return self._draw(), reward, False, self.left == 0, {}

    def _draw(self) -> np.ndarray:
        self.corner = int(self.np_random.integers(4))
        picture = np.zeros((7, 7, 3), np.uint8)
        picture[6 * (self.corner // 2), 6 * (self.corner % 2)] = 255
        return picture


class RowThenColumn(gymnasium.Env):
    """Two choices; the right column depends on the row."""

    observation_space = spaces.Box(0, 1, (4,), np.float32)
    action_space = spaces.MultiDiscrete([4, 4])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 20
        return self._draw(), {}

    def step(self, action):
        row, column = action
        reward = float(row == self.row and column == (row + 1) % 4)
        self.left -= 1
        return self._draw(), reward, False, self.left == 0, {}

    def _draw(self) -> np.ndarray:
        self.row = int(self.np_random.integers(4))
        return np.eye(4, dtype=np.float32)[self.row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="finish within 40 seconds")
    parser.add_argument("--only", default="", help="comparisons, by name, comma-separated")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    turns = 2 if arguments.quick else 9
    chosen = [*COMPARISONS, "act", "many_envs"]
    if not arguments.quick:
        chosen.append("first_update")
    if arguments.only:
        chosen = arguments.only.split(",")
    bars = {}
    for name in chosen:
        if name == "act":
            bars |= act_times(50 if arguments.quick else 500)
        elif name == "many_envs":
            bars |= many_envs()
        elif name == "first_update":
            first_update()
        else:
            make_ours, make_rival, bar = COMPARISONS[name]
            ratio = compare(name, make_ours(), make_rival(), turns)
            bars[name] = {"value": round(ratio, 2), "bar": bar, "met": ratio >= bar}
    print(json.dumps({"benchmark": "throughput", "device": "cpu", "bars": bars}))


def compare(name: str, ours: "Ours", rival: Any, turns: int) -> float:
    for side in (ours, rival):
        side.round()  # compile, allocate, fill caches
    ours.seconds.clear()
    times = [(timed(ours.round), timed(rival.round)) for _ in range(turns)]
    print(name)
    for side, seconds in zip(("esper", "rival"), zip(*times, strict=True), strict=True):
        print(f"  {side:12} {ROWS / statistics.median(seconds):8.0f} steps per CPU second")
    ratio = statistics.median(theirs / mine for mine, theirs in times)
    print(f"  ratio        {ratio:8.1f}")
    total = sum(ours.seconds.values())
    phases = sorted(ours.seconds.items(), key=lambda item: -item[1])
    print("  esper's time:", ", ".join(f"{phase} {s / total:.0%}" for phase, s in phases))
    sys.stdout.flush()
    return ratio


def timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class Ours:
    def __init__(self, env: Any, passes: int, *, memory: bool = True, heads: Any = None) -> None:
        config = GymConfig(
            num_envs=NUM_ENVS,
            horizon=HORIZON,
            policy=PolicyConfig(memory=memory),
            ppo=PPOConfig(ppo_epochs=passes, gae_lambda=GYM_GAE_LAMBDA, target_kl=None),
            masks="none",
        )
        self.trainer = PPO(env, heads, config).trainer
        self.seconds: dict[str, float] = defaultdict(float)

    def round(self) -> None:
        self.trainer.clock.start()
        self.trainer.collect()
        for name, value in self.trainer.learn().items():
            if name.startswith("time/") and name != "time/steps_per_second":
                self.seconds[name.removeprefix("time/")] += value


class Rival:
    """A model of Stable-Baselines3 or sb3-contrib."""

    def __init__(
        self, kind: str, policy: str, make: Callable[[], Any], passes: int, **settings: Any
    ) -> None:
        import sb3_contrib
        import stable_baselines3
        from stable_baselines3.common.vec_env import DummyVecEnv

        package = sb3_contrib if kind == "RecurrentPPO" else stable_baselines3
        common = {"n_steps": HORIZON, "n_epochs": passes, "device": "cpu"}
        envs = DummyVecEnv([make] * NUM_ENVS)
        self.model = getattr(package, kind)(policy, envs, **common, **settings)

    def round(self) -> None:
        self.model.learn(ROWS, reset_num_timesteps=False)


def cartpole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


def pendulum() -> gymnasium.Env:
    return gymnasium.make("Pendulum-v1")


def several(make: Callable[[], gymnasium.Env]) -> SyncVectorEnv:
    return SyncVectorEnv([make] * NUM_ENVS)


def small_cnn() -> Any:
    """Our network for pictures of 7 x 7, as a features extractor of SB3."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from torch import nn

    class SmallCnn(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, 128)
            self.layers = nn.Sequential(
                nn.Conv2d(space.shape[0], 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(),
                nn.Flatten(), nn.Linear(32 * 9, 128), nn.ReLU(),
            )  # fmt: skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    return {"features_extractor_class": SmallCnn, "net_arch": [128]}


BATCH = {"batch_size": ROWS // 4}
ROW_COLUMN = (Head("action_0", 4), Head("action_1", 4, given=("action_0",)))
# ours, the rival, bar
COMPARISONS: dict[str, tuple[Callable[[], Ours], Callable[[], Any], float]] = {
    "like_for_like": (
        lambda: Ours(hidden_cartpole_envs(NUM_ENVS), 4),
        lambda: Rival(
            "RecurrentPPO", "MlpLstmPolicy", hidden_cartpole, 4, **BATCH, policy_kwargs=SHARED
        ),
        4.0,
    ),
    "vs_plain_loop": (
        lambda: Ours(hidden_cartpole_envs(NUM_ENVS), 4),
        lambda: PlainRecurrentPPO([hidden_cartpole] * NUM_ENVS, HORIZON, passes=4),
        3.5,
    ),
    "vs_defaults": (
        lambda: Ours(hidden_cartpole_envs(NUM_ENVS), 10),
        lambda: Rival("RecurrentPPO", "MlpLstmPolicy", hidden_cartpole, 10),
        10.0,
    ),
    "no_memory": (
        lambda: Ours(several(cartpole), 10, memory=False),
        lambda: Rival("PPO", "MlpPolicy", cartpole, 10, **BATCH),
        2.0,
    ),
    "dependent_heads": (
        lambda: Ours(several(RowThenColumn), 10, memory=False, heads=ROW_COLUMN),
        lambda: Rival("PPO", "MlpPolicy", RowThenColumn, 10, **BATCH),
        1.0,
    ),
    "box": (
        lambda: Ours(several(pendulum), 10, memory=False),
        lambda: Rival("PPO", "MlpPolicy", pendulum, 10, **BATCH),
        1.0,
    ),
    "pictures": (
        lambda: Ours(several(Pictures), 10, memory=False),
        lambda: Rival("PPO", "CnnPolicy", Pictures, 10, **BATCH, policy_kwargs=small_cnn()),
        1.0,
    ),
}


def act_times(repeats: int) -> dict[str, Any]:
    """The time of `act` in 8 envs, as a multiple of that of a policy with one plain head."""
    plain = (Head("action", 4),)
    policies = {
        "plain": (plain, True),
        "dependent": ((Head("row", 4), Head("column", 4, given=("row",))), True),
        "box": ((Head("force", continuous=True),), True),
    }
    times = {}
    for name, (heads, memory) in policies.items():
        space = FactoredActionSpace(heads)
        policy = flat_policy(space, 17, PolicyConfig(memory=memory))
        features = torch.randn(NUM_ENVS, 17)
        masks = ActionMasks.all_legal(space, NUM_ENVS)
        state = policy.initial_state(NUM_ENVS)
        noise = draw_noise(space, (NUM_ENVS,), policy.device)

        def act(policy=policy, features=features, masks=masks, state=state, noise=noise):
            policy.act(features, masks, state, noise=noise)

        act()
        times[name] = min(
            timed(lambda act=act: [act() for _ in range(repeats)]) / repeats for _ in range(5)
        )
        print(f"act, {name}: {times[name] * 1e6:.0f} us")
    return {
        f"act_{name}": {
            "value": round(times[name] / times["plain"], 2),
            "bar": 2.0,
            "met": times[name] <= 2.0 * times["plain"],
        }
        for name in ("dependent", "box")
    }


def many_envs(num_envs: int = 512, horizon: int = 16) -> dict[str, Any]:
    """What a step of 512 envs costs beyond the bare environments, in us per env and step."""
    config = GymConfig(horizon=horizon, masks="none")
    trainer = PPO(hidden_cartpole_envs(num_envs), config=config).trainer
    trainer.collect()
    trainer.learn()
    envs = [hidden_cartpole() for _ in range(num_envs)]
    for env in envs:
        env.reset(seed=0)
    steps = num_envs * horizon

    def bare() -> None:
        for _ in range(horizon):
            for env in envs:
                *_, terminated, truncated, _ = env.step(int(env.np_random.integers(2)))
                if terminated or truncated:
                    env.reset()

    pairs = []
    for _ in range(5):
        collecting = timed(trainer.collect)
        trainer.learn()
        pairs.append((collecting, timed(bare)))
    ours, environment = (
        statistics.median(times) / steps * 1e6 for times in zip(*pairs, strict=True)
    )
    print(f"512 envs: {ours:.1f} us per env and step, the bare environment {environment:.1f}")
    value = ours - environment
    return {"us_per_env_512": {"value": round(value, 1), "bar": 6.0, "met": value <= 6.0}}


FIRST_UPDATE = "import esper; esper.PPO('CartPole-v1').learn(1)"


def first_update() -> None:
    """Print the seconds that a new process takes, until its first update is done."""
    with tempfile.TemporaryDirectory() as folder:
        for kernels in ("compiled", "read from disk"):
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", FIRST_UPDATE],
                env=os.environ | {"NUMBA_CACHE_DIR": folder},
                check=True,
                capture_output=True,
            )
            seconds = time.perf_counter() - start
            print(f"first update, kernels {kernels}: {seconds:.1f} s after the start", flush=True)


if __name__ == "__main__":
    main()
