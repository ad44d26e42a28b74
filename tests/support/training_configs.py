"""Growth runs of seconds: without networks, and with the smallest that train."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from esper.runtime.plain_config import to_plain
from esper.simic.growth.train_config import TrainConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.tolaria.environment import GrowthConfig
from esper.tolaria.host_batch import HostBatchConfig

POLICY = PolicyConfig(lstm_hidden_dim=8, slot_dim=8, blueprint_dim=8)

ORACLE = TrainConfig(
    task="known_gains",
    imports=("support.synthetic_hosts",),
    variants=("plain",),
    held_out_variants=(),
    held_out_widths=(),
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


_FOLDER = TemporaryDirectory()  # removed when the process ends


def flags(config: TrainConfig) -> list[str]:
    """What `esper train` needs to run `config`."""
    path = Path(_FOLDER.name, "config.json")
    path.write_text(json.dumps(to_plain(config)))
    return [f"--config={path}"]
