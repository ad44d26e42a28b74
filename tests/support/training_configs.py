"""Growth runs of seconds: without networks, and with the smallest that train."""

from dataclasses import replace

from esper.simic.training.config import PRESETS, TrainConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.tolaria.environment import GrowthConfig
from esper.tolaria.host_batch import HostBatchConfig

POLICY = PolicyConfig(lstm_hidden_dim=8, slot_dim=8, blueprint_dim=8)

ORACLE = replace(
    PRESETS["oracle"],
    host_batch=HostBatchConfig(num_types=2, envs_per_type=4, episode_steps=12),
    growth=GrowthConfig(num_steps=12),
    policy=POLICY,
    rounds=4,
    checkpoint_every=2,
    observed_share=0.3,
    device="cpu",  # runs are compared to the bit
)

NETWORKS = TrainConfig(
    variants=("plain", "rows:50"),
    held_out_variants=(),
    widths=(2, 4),
    held_out_widths=("4-2-4",),
    menu=("depthwise7", "conv"),
    host_batch=HostBatchConfig(
        num_types=3, envs_per_type=4, siblings=2, minibatches=2, batch_size=10, validation_rows=30,
        episode_steps=6,
    ),
    growth=GrowthConfig(num_steps=6),
    policy=POLICY,
    rounds=3,
    device="cpu",
)  # fmt: skip


def flags(config: TrainConfig) -> list[str]:
    """What `esper train --preset oracle` needs to be `ORACLE`, as far as `config` is."""
    return [
        "--preset=oracle", "--device=cpu", f"--rounds={config.rounds}",
        f"--checkpoint-every={config.checkpoint_every}", "--observed-share=0.3",
        "--host_batch.num-types=2", "--host_batch.envs-per-type=4", "--host_batch.episode-steps=12",
        "--growth.num-steps=12", "--policy.lstm-hidden-dim=8", "--policy.slot-dim=8",
        "--policy.blueprint-dim=8",
    ]  # fmt: skip
