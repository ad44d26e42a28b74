"""What a run of `esper train` does: one config, composed of those beside the code they configure.

    config = PRESETS["quick"]
    config = replace(config, rng_seed=1, ppo=replace(config.ppo, learning_rate=1e-3))

Hosts and data are named as they are in the run's database: a host by its widths, "4-8-16", a
variant of the data by what was done to it, "rows:600".
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from esper.leyline.devices import usable_device
from esper.leyline.factored_actions import tamiyo_action_space
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.tolaria.environment import GrowthConfig
from esper.tolaria.host_batch import HostBatchConfig

TaskName = Literal["mnist1d", "digits", "fashion_mnist", "known_gains"]
VARIANT_KINDS = ("permuted", "rows", "noise")


_PPO = PPOConfig(
    learning_rate=2e-3,
    gamma=1.0,  # an episode is the task: what counts is its last score
    gae_lambda=0.99,
    ppo_epochs=4,
    value_coefficient=0.5,
    entropy_coefficient=0.02,
    entropy_schedule="linear",
    # of blueprints most, or the cheapest seed is all that is tried; every head has its flag
    head_entropy_weights=dict.fromkeys(tamiyo_action_space(1, 1).names, 1.0) | {"blueprint": 10.0},
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run in which Tamiyo learns to grow networks."""

    task: TaskName = "mnist1d"
    """What hosts learn; "known_gains" has no networks: what every seed gains is known."""
    variants: tuple[str, ...] = ("plain", "permuted:1", "permuted:2", "rows:600", "noise:0.3")
    """Of the data, each host draws one: permuted:RNG_SEED, rows:COUNT, noise:SCALE or plain."""
    held_out_variants: tuple[str, ...] = ("permuted:3", "rows:1000", "noise:0.2")
    """Never trained on: what a controller is judged by."""
    host: str = "conv1d"
    """The kind of host, by its name in `kasmina.hosts`."""
    num_layers: int = 3
    """Segments of a host, with a slot after each."""
    norm: bool = False
    """Hosts normalise after every layer."""
    widths: tuple[int, ...] = (4, 8, 12, 16)
    """Each layer of a host draws one."""
    held_out_widths: tuple[str, ...] = (
        "4-8-16", "16-8-4", "12-4-12", "8-8-8", "4-16-8", "16-4-16", "8-12-4", "12-12-16",
    )  # fmt: skip
    """Hosts that are never trained on."""
    menu: tuple[str, ...] = ()
    """Blueprints to choose from, by name; none named: all that fit."""
    host_learning_rate: float = 1e-2
    """AdamW's step size in the hosts, before it falls."""
    growth: GrowthConfig = GrowthConfig()
    host_batch: HostBatchConfig = HostBatchConfig()
    policy: PolicyConfig = PolicyConfig(lstm_hidden_dim=64)
    ppo: PPOConfig = _PPO
    rounds: int = 60
    """Updates; in each, every env lives one episode."""
    rng_seed: int = 0
    """Seeds the weights, the sampling, the shuffling and what episodes draw."""
    device: str = "auto"
    """Where hosts and policy are: "cpu", "cuda" or "auto", a GPU if there is one."""
    checkpoint_every: int = 5
    """Rounds between checkpoints."""
    observed_share: float = 0.05
    """Share of the envs whose observations the database keeps, others every round."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "rounds", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use 1 or more")
        if not 0.0 <= self.observed_share <= 1.0:
            raise ValueError(f"observed_share={self.observed_share}; use a number from 0 to 1")
        if not self.host_learning_rate > 0:
            raise ValueError(f"host_learning_rate={self.host_learning_rate}; use a number above 0")
        if self.growth.num_steps != self.host_batch.episode_steps:
            raise ValueError(
                f"growth.num_steps={self.growth.num_steps}, but host_batch.episode_steps="
                f"{self.host_batch.episode_steps}; an episode has one length, set both"
            )
        if self.num_envs % self.ppo.num_minibatches:
            raise ValueError(
                f"host_batch.num_types x host_batch.envs_per_type = {self.num_envs} hosts do not split "
                f"into ppo.num_minibatches={self.ppo.num_minibatches}; use a divisor"
            )
        self._check_distribution()

    def _check_distribution(self) -> None:
        for variant in (*self.variants, *self.held_out_variants):
            check_variant(variant)
        if both := set(self.variants) & set(self.held_out_variants):
            raise ValueError(f"variants {sorted(both)} are trained on and held out; choose one")
        if not self.variants:
            raise ValueError("variants is empty; name at least one, such as plain")
        drawn = {widths_name(widths) for widths in product(self.widths, repeat=self.num_layers)}
        if strange := [name for name in self.held_out_widths if name not in drawn]:
            raise ValueError(
                f"held_out_widths {strange} are never drawn from widths={self.widths} in "
                f"{self.num_layers} layers"
            )
        if self.task != "known_gains" and len(self.training_widths) < self.host_batch.num_types:
            raise ValueError(
                f"{len(self.training_widths)} hosts to draw from, but host_batch.num_types="
                f"{self.host_batch.num_types}; widen widths or lower num_types"
            )

    @property
    def num_envs(self) -> int:
        """Hosts that grow side by side."""
        return self.host_batch.num_types * self.host_batch.envs_per_type

    @property
    def training_widths(self) -> tuple[tuple[int, ...], ...]:
        """The widths of the hosts that are trained on."""
        every = product(self.widths, repeat=self.num_layers)
        return tuple(w for w in every if widths_name(w) not in self.held_out_widths)

    def resolved_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return usable_device(self.device)


def widths_name(widths: tuple[int, ...]) -> str:
    return "-".join(map(str, widths))


def check_variant(name: str) -> None:
    kind, _, value = name.partition(":")
    is_number = value.replace(".", "", kind == "noise").isdecimal()
    if name != "plain" and not (kind in VARIANT_KINDS and is_number):
        raise ValueError(
            f"no variant {name!r}; use plain, permuted:RNG_SEED, rows:COUNT or noise:SCALE"
        )


PRESETS: dict[str, TrainConfig] = {
    # two CPU cores, four minutes with its evaluation: small hosts, half the menu, short episodes
    "quick": TrainConfig(
        variants=("plain", "permuted:1", "rows:600", "noise:0.3"),
        widths=(4, 6, 8),
        held_out_widths=("8-8-8", "4-8-6", "6-4-8", "8-6-4"),
        menu=("depthwise7", "separable", "conv_bottleneck", "conv_conv"),
        host_learning_rate=2e-2,
        growth=GrowthConfig(num_steps=12),
        host_batch=HostBatchConfig(
            num_types=6,
            envs_per_type=8,
            siblings=4,
            minibatches=24,
            batch_size=64,
            validation_rows=300,
            episode_steps=12,
        ),
        ppo=replace(_PPO, learning_rate=5e-3, ppo_epochs=8),  # few rounds: each has to tell
        rounds=50,
        checkpoint_every=10,
    ),
    # one H200, three minutes: hosts train as those that a controller is judged by
    "full": TrainConfig(
        variants=(
            "plain",
            "permuted:1",
            "permuted:2",
            "rows:300",
            "rows:600",
            "noise:0.2",
            "noise:0.5",
            "noise:1.0",
        ),
        held_out_variants=("permuted:3", "rows:450", "noise:0.1", "noise:0.7"),
        norm=True,
        host_learning_rate=2e-2,
        host_batch=HostBatchConfig(
            num_types=8, envs_per_type=64, siblings=8, minibatches=40, validation_rows=800
        ),
        policy=PolicyConfig(lstm_hidden_dim=128),
        ppo=replace(_PPO, learning_rate=4e-3, num_minibatches=8),
        rounds=80,
        checkpoint_every=10,
        observed_share=0.01,
    ),
    # no networks: a minute on one core, and the best that can be reached is known
    "oracle": TrainConfig(
        task="known_gains",
        variants=("plain",),
        held_out_variants=(),
        held_out_widths=(),
        rounds=70,
        checkpoint_every=10,
    ),
}
