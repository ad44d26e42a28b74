"""The config of `esper train`, its presets, and the hosts and data that it describes.

    config = PRESETS["quick"]
    config = replace(config, rng_seed=1, ppo=replace(config.ppo, learning_rate=1e-3))

Hosts and data have the names that the run's database uses: a host its widths, "4-8-16"; a variant
of the data its change, "rows:600".
"""

import re
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from itertools import product

import torch

from esper.leyline.factored_actions import tamiyo_action_space
from esper.runtime.checks import require_at_least, require_fraction, require_positive
from esper.runtime.devices import usable_device
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.tolaria.environment import GrowthConfig
from esper.tolaria.host_batch import HostBatchConfig
from esper.tolaria.tasks import TASKS

_VARIANT = re.compile(  # up to 18 digits: numbers below 2**63
    r"plain|permuted:[0-9]{1,18}|rows:(?!0+$)[0-9]{1,18}|noise:(?=.*[0-9])[0-9]{0,9}[.]?[0-9]{0,9}"
)
MOST_HOSTS = 10_000  # architectures to choose from


_PPO = PPOConfig(
    learning_rate=2e-3,
    gamma=1.0,  # an episode is the task: only its last score counts
    gae_lambda=0.99,
    ppo_epochs=4,
    value_coefficient=0.5,
    entropy_coefficient=0.02,
    entropy_schedule="linear",
    # blueprints most, or only the cheapest seed is tried; all heads, so that each has a flag
    head_entropy_weights=dict.fromkeys(tamiyo_action_space(1, 1).names, 1.0) | {"blueprint": 10.0},
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run in which Tamiyo learns to grow networks."""

    task: str = "mnist1d"
    """mnist1d, digits, fashion_mnist, data (see `data`), or one that a module registers."""
    data: str = ""
    """File or folder of the task's data: .npz with x and y, a folder of IDX or CIFAR-10 files."""
    data_checksum: str = ""
    """Of `data`, recorded when the run starts; other data are refused."""
    imports: tuple[str, ...] = ()
    """Modules with tasks, hosts and blueprints, imported first; also --import."""
    variants: tuple[str, ...] = ("plain", "permuted:1", "permuted:2", "rows:600", "noise:0.3")
    """Of the data; each host samples one: permuted:RNG_SEED, rows:COUNT, noise:SCALE or plain."""
    held_out_variants: tuple[str, ...] = ("permuted:3", "rows:1000", "noise:0.2")
    """Not trained on; controllers are evaluated on them."""
    host: str = "auto"
    """The kind of host, by its name; "auto": conv1d for series, conv2d for images, else mlp."""
    num_layers: int = 3
    """Segments of a host, with a slot after each."""
    norm: bool = False
    """Hosts normalise after every layer."""
    widths: tuple[int, ...] = (4, 8, 12, 16)
    """Each layer of a host samples one."""
    held_out_widths: tuple[str, ...] = (
        "4-8-16", "16-8-4", "12-4-12", "8-8-8", "4-16-8", "16-4-16", "8-12-4", "12-12-16",
    )  # fmt: skip
    """Hosts that are not trained on; controllers are evaluated on them."""
    menu: tuple[str, ...] = ()
    """Blueprints to choose from, by name; those that fit no slot are left out. Default: all but
    those that widen a layer (widen_quarter, widen_half, widen_full)."""
    host_learning_rate: float = 1e-2
    """Learning rate of AdamW in the hosts, before it falls."""
    growth: GrowthConfig = GrowthConfig()
    host_batch: HostBatchConfig = HostBatchConfig()
    policy: PolicyConfig = PolicyConfig(lstm_hidden_dim=64)
    ppo: PPOConfig = _PPO
    rounds: int = 60
    """Updates; each follows one episode in every env."""
    rng_seed: int = 0
    """Seeds the weights, the sampling, the shuffling and the episodes."""
    device: str = "auto"
    """Of hosts and policy: "cpu", "cuda", or "auto" for a GPU if there is one."""
    checkpoint_every: int = 5
    """Rounds between checkpoints."""
    observed_share: float = 0.05
    """Share of the envs whose observations the database keeps; they take turns."""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_layers", "rounds", "checkpoint_every")
        require_fraction(self, "observed_share")
        require_positive(self, "host_learning_rate")
        if not 0 <= self.rng_seed < 2**63:
            raise ValueError(f"rng_seed={self.rng_seed}; use a number from 0 to 2**63 - 1")
        if self.growth.num_steps != self.host_batch.episode_steps:
            raise ValueError(
                f"growth.num_steps={self.growth.num_steps}, but host_batch.episode_steps="
                f"{self.host_batch.episode_steps}; set both to the same number"
            )
        if self.num_envs % self.ppo.num_minibatches:
            raise ValueError(
                f"host_batch.num_types x host_batch.envs_per_type = {self.num_envs} hosts do not split "
                f"into ppo.num_minibatches={self.ppo.num_minibatches}; use a divisor"
            )
        self._check_task()
        self._check_distribution()

    def _check_task(self) -> None:
        for name in self.imports:
            try:
                import_module(name)
            except Exception as error:  # the module is the user's, and may raise any
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f"module {name!r} cannot be imported: {reason}") from error
        if self.task not in TASKS:
            raise ValueError(
                f"no task {self.task!r}; there are {', '.join(TASKS)} and those of --import MODULE"
            )
        try:
            signature(TASKS[self.task]).bind(*filter(None, [self.data]))
        except TypeError as error:
            fault = f"does not read {self.data}: leave out" if self.data else "needs a path: use"
            raise ValueError(f"task {self.task!r} {fault} --data") from error

    def _check_distribution(self) -> None:
        for variant in (*self.variants, *self.held_out_variants):
            if not _VARIANT.fullmatch(variant):
                raise ValueError(
                    f"no variant {variant!r}; use plain, permuted:RNG_SEED, rows:COUNT or noise:SCALE"
                )
        if both := sorted(set(self.variants) & set(self.held_out_variants)):
            raise ValueError(f"variants {both} are both trained on and held out; choose one")
        if not self.variants:
            raise ValueError("variants is empty; name at least one, such as plain")
        if len(self.widths) ** self.num_layers > MOST_HOSTS:
            raise ValueError(
                f"{len(self.widths)} widths in num_layers={self.num_layers} are more than "
                f"{MOST_HOSTS:,} hosts; use fewer widths or layers"
            )
        possible = {widths_name(widths) for widths in product(self.widths, repeat=self.num_layers)}
        if unknown := [name for name in self.held_out_widths if name not in possible]:
            layers = f"widths={self.widths} in {self.num_layers} layers"
            raise ValueError(f"held_out_widths {unknown} cannot occur with {layers}")
        found, types = len(self.training_widths), self.host_batch.num_types
        if found < types:
            raise ValueError(
                f"{found} hosts to choose from, but host_batch.num_types={types}; widen widths or "
                "lower num_types"
            )

    @property
    def num_envs(self) -> int:
        """Hosts that grow in parallel."""
        return self.host_batch.num_types * self.host_batch.envs_per_type

    @property
    def training_widths(self) -> tuple[tuple[int, ...], ...]:
        """The widths of the hosts to train on."""
        every = product(self.widths, repeat=self.num_layers)
        return tuple(w for w in every if widths_name(w) not in self.held_out_widths)

    def resolved_device(self) -> torch.device:
        return usable_device(self.device)


def widths_name(widths: tuple[int, ...]) -> str:
    return "-".join(map(str, widths))


PRESETS: dict[str, TrainConfig] = {
    # two CPU cores, three minutes with its evaluation: small hosts, half the menu, short episodes
    "quick": TrainConfig(
        variants=("plain", "permuted:1", "rows:600", "noise:0.3"),
        widths=(4, 6, 8),
        held_out_widths=("8-8-8", "4-8-6", "6-4-8", "8-6-4"),
        menu=(
            *("depthwise7", "separable", "conv_bottleneck", "conv_conv"),
            *("dense_narrow", "dense", "dense_bottleneck", "dense_dense"),  # fit other slots
        ),
        host_learning_rate=2e-2,
        growth=GrowthConfig(num_steps=12),
        host_batch=HostBatchConfig(
            num_types=6,
            envs_per_type=8,
            siblings=4,
            controls=1,
            minibatches=24,
            batch_size=64,
            validation_rows=300,
            episode_steps=12,
        ),
        ppo=replace(_PPO, learning_rate=5e-3, ppo_epochs=8),  # few rounds, so each learns more
        rounds=32,
        checkpoint_every=8,
    ),
    # one H200, three minutes: hosts train as they do in the evaluation
    "full": TrainConfig(
        variants=(
            *("plain", "permuted:1", "permuted:2", "rows:300", "rows:600"),
            *("noise:0.2", "noise:0.5", "noise:1.0"),
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
}


# -- hosts and data -------------------------------------------------------------------------------
