"""A small evaluation: what was trained, its settings, and untrained controllers that act."""

import torch

from esper.simic.growth.train_config import TrainConfig
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic, PolicyConfig
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from esper.tolaria.environment import GrowthConfig
from esper.tolaria.host_batch import HostBatchConfig
from growth_evaluation.settings import EvaluationConfig

STEPS = 6
MENU = ("conv", "conv_conv", "separable")
TRAINED = TrainConfig(
    variants=("plain",),
    held_out_variants=("permuted:3", "rows:500"),
    widths=(4, 8),
    held_out_widths=("4-8-8", "8-4-4"),
    menu=MENU,
    growth=GrowthConfig(num_steps=STEPS),
    host_batch=HostBatchConfig(
        num_types=2, envs_per_type=4, episode_steps=STEPS, minibatches=4, validation_rows=100
    ),
    policy=PolicyConfig(lstm_hidden_dim=8),
    device="cpu",
)
SMALL = EvaluationConfig(
    rents=(0.05, 0.2),
    num_widths=2,
    repeats=2,
    training_widths=2,
    training_repeats=1,
    num_plans=4,
    finalists=2,
)


class RestlessPolicy(FactoredRecurrentActorCritic):
    """An untrained policy that always samples; its most likely action would be to wait."""

    rng = torch.Generator().manual_seed(0)

    def act(self, *inputs, generator=None, deterministic=False):
        return super().act(*inputs, generator=self.rng)


def make_controller(rng_seed, kind=FactoredRecurrentActorCritic):
    with torch.random.fork_rng():
        torch.manual_seed(rng_seed)
        made = tamiyo_policy(FeatureLayout(3, 3), PolicyConfig(lstm_hidden_dim=8))
        policy = kind(made.action_space, made.heads, made.config)
    policy.load_state_dict(made.state_dict())
    return LearnedController(policy)
