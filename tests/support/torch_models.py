"""Models in environments that give tensors, for all kinds of observations, masks and heads."""

from dataclasses import replace

import torch
from gymnasium.vector import AutoresetMode

from esper.simic.agent.ppo import PPOConfig
from esper.simic.gym.ppo_model import PPO, GymConfig
from esper.tamiyo.policy.network import PolicyConfig
from support.agents import stir
from support.batched_environments import ROW_THEN_COLUMN, Counters

CONFIG = GymConfig(
    horizon=16,
    previous_reward=True,
    policy=PolicyConfig(lstm_hidden_dim=8),
    ppo=PPOConfig(num_minibatches=2, ppo_epochs=2),
)
MASSES = replace(CONFIG, action_bound=1.0)
SAME_STEP, NEXT_STEP, DISABLED = (
    AutoresetMode.SAME_STEP,
    AutoresetMode.NEXT_STEP,
    AutoresetMode.DISABLED,
)
KINDS = {  # what is shown, where masks are, whether heads depend on each other
    "numbers": ("numbers", None, False),
    "masks in info": ("numbers", "info", False),
    "masks in a dict": ("dict", "observation", False),
    "pictures": ("picture", "method", False),
    "dependent heads": ("dict", "info", True),
    "dependent heads in a dict": ("dict", "observation", True),
    "dependent heads by method": ("picture", "method", True),
}


def counters(mode, kind="numbers", xp=torch, device=None):
    show, masks, dependent = KINDS[kind]
    return Counters(mode, show, masks, dependent=dependent, xp=xp, device=device)


def model_of(envs, kind="numbers", config=CONFIG):
    model = PPO(envs, ROW_THEN_COLUMN if KINDS[kind][2] else None, config)
    torch.manual_seed(0)
    stir(model.agent.policy)  # V would be 0
    return model
