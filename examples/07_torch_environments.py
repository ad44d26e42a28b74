"""CartPole in torch: all environments in one tensor, on any device, and PPO beside them.

python examples/07_torch_environments.py
python examples/07_torch_environments.py --num-envs 4096 --device cuda --steps 20000000
"""

import argparse

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

import esper


class TorchCartPole(VectorEnv):
    """The physics and the limits of CartPole-v1, for N carts at once."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs, device="cpu", max_steps=500):
        self.num_envs, self.device, self.max_steps = num_envs, device, max_steps
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generator = torch.Generator(device)

    def new_states(self):
        size = (self.num_envs, 4)
        return torch.rand(size, generator=self.generator, device=self.device) * 0.1 - 0.05

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.generator.manual_seed(seed)
        self.states = self.new_states()
        self.ages = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return self.states, {}

    def step(self, actions):
        speed, angle, spin = self.states[:, 1:].unbind(1)
        force = 20.0 * actions - 10.0
        sine, cosine = angle.sin(), angle.cos()
        push = (force + 0.05 * spin**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        thrust = push - 0.05 * turn * cosine / 1.1
        change = torch.stack([speed, thrust, spin, turn], dim=1)
        final = self.states + 0.02 * change
        self.ages = self.ages + 1

        terminated = (final[:, 0].abs() > 2.4) | (final[:, 2].abs() > 12 * torch.pi / 180)
        truncated = (self.ages >= self.max_steps) & ~terminated
        ended = terminated | truncated
        self.states = torch.where(ended.unsqueeze(1), self.new_states(), final)
        self.ages = torch.where(ended, 0, self.ages)
        rewards = torch.ones(self.num_envs, device=self.device)
        return self.states, rewards, terminated, truncated, {"final_obs": final}


def report(steps, metrics):
    if metrics["progress/rounds"] % 10 == 0:
        print(f"{steps:>9} steps, mean return {metrics['episode/return']:.0f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=100_000)
    arguments = parser.parse_args()
    ppo = esper.PPOConfig(gae_lambda=0.95, num_minibatches=4)
    config = esper.GymConfig(horizon=32, ppo=ppo)
    model = esper.PPO(TorchCartPole(arguments.num_envs, arguments.device), config=config)
    model.learn(arguments.steps, callback=report)
    result = esper.evaluate(model, TorchCartPole(16, arguments.device), episodes=16)
    print(f"mean return of 16 episodes: {result.returns.mean():.0f}")


if __name__ == "__main__":
    main()
