"""The game of `symbol_game.py` played by rsl_rl: its recurrent policy and PPO as they come.

Actor and critic are two networks with an LSTM of 128 each. Actions are Gaussian, eight numbers of which
the largest names the symbol; masks are not known to it. Its checks for NaN are off, its log is not
written.
"""

import contextlib
import io
import time
from typing import Any

import torch
from symbol_game import EPISODE_STEPS, NUM_SYMBOLS, SymbolGame
from tensordict import TensorDict
from torch import Tensor


class RslRlGame:
    """The game as rsl_rl's `VecEnv`."""

    num_actions = NUM_SYMBOLS
    max_episode_length = EPISODE_STEPS
    cfg: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, num_envs: int, device: str):
        self._game = SymbolGame(num_envs, device)
        self.num_envs = num_envs
        self.device = device
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._observation = self._game.reset(seed=0)[0]

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self._observation}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        self._observation, rewards, _, truncated, _ = self._game.step(actions.argmax(dim=1))
        return self.get_observations(), rewards, truncated, {"time_outs": truncated}


def settings(passes: int, horizon: int) -> dict[str, Any]:
    network = {
        "class_name": "RNNModel",
        "hidden_dims": [128],
        "activation": "elu",
        "obs_normalization": True,
        "rnn_type": "lstm",
        "rnn_hidden_dim": 128,
        "rnn_num_layers": 1,
    }
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    return {
        "num_steps_per_env": horizon,
        "save_interval": 10**9,
        "check_for_nan": False,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": gaussian},
        "critic": dict(network),
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": passes,
            "num_mini_batches": 4,
            "gamma": 0.9,
            "lam": 0.9,
            "learning_rate": 2e-3,
            "schedule": "fixed",
            "entropy_coef": 0.0,
            "rnd_cfg": None,
            "symmetry_cfg": None,
        },
    }


def steps_per_second(num_envs: int, passes: int, rounds: int, device: str, horizon: int = 64):
    """Learning included, after three rounds that allocate and choose kernels."""
    from rsl_rl.runners import OnPolicyRunner

    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        env = RslRlGame(num_envs, device)
        runner = OnPolicyRunner(env, settings(passes, horizon), log_dir=None, device=device)
        runner.learn(3)
        torch.cuda.synchronize()
        start = time.perf_counter()
        runner.learn(rounds)
        torch.cuda.synchronize()
    return num_envs * horizon * rounds / (time.perf_counter() - start)
