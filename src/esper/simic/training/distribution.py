"""What episodes are drawn from: the host batches that a config describes, to train in or held out."""

import torch
from torch import Tensor

from esper.kasmina.blueprints import blueprint_menu, menu_for
from esper.kasmina.blueprints.registry import Blueprint
from esper.kasmina.hosts import Host, build_host
from esper.leyline.constants import (
    ALPHA_SPEED_STEPS,
    ALPHA_TARGETS,
    TEMPO_STEPS,
    AlphaCurve,
    BlendStyle,
)
from esper.leyline.stages import LifecycleOp
from esper.simic.training.config import TrainConfig, widths_name
from esper.tolaria.environment import GrowthEnvironment, HostBatch
from esper.tolaria.host_batch import PopulationBatch
from esper.tolaria.optimizers import AdamW
from esper.tolaria.synthetic_hosts import HOST_ACCURACY, SyntheticHosts
from esper.tolaria.tasks import (
    Task,
    digits,
    fashion_mnist,
    few_rows,
    mnist1d,
    noisy,
    permuted,
    stack,
)

_TASKS = {"mnist1d": mnist1d, "digits": digits, "fashion_mnist": fashion_mnist}
_NOISE_RNG_SEED = 1


def training_hosts(config: TrainConfig) -> HostBatch:
    """The hosts and data that a controller learns on."""
    if config.task == "known_gains":
        return SyntheticHosts(config.num_envs)
    task = load_task(config, config.variants)
    return PopulationBatch(
        load_hosts(config, task, config.training_widths),
        load_menu(config, task),
        task,
        config.host_batch,
        optimizer=AdamW(learning_rate=config.host_learning_rate),
    )


def load_task(config: TrainConfig, variants: tuple[str, ...]) -> Task:
    """Variants of the config's task as the views of one, on its device."""
    base = _TASKS[config.task]()
    return stack([_variant(base, name) for name in variants]).to(config.resolved_device())


def load_hosts(
    config: TrainConfig, task: Task, widths: tuple[tuple[int, ...], ...]
) -> tuple[Host, ...]:
    return tuple(
        build_host(
            config.host,
            input_shape=task.input_shape,
            num_classes=task.num_classes,
            widths=layers,
            norm=config.norm,
        )
        for layers in widths
    )


def load_menu(config: TrainConfig, task: Task) -> tuple[Blueprint, ...]:
    return blueprint_menu(*config.menu) if config.menu else menu_for(task.site_kind)


def start_score(host_batch: HostBatch) -> float:
    """What a network scores that has learned nothing."""
    if isinstance(host_batch, PopulationBatch):
        return 1.0 / host_batch.task.num_classes
    return HOST_ACCURACY


def host_names(host_batch: HostBatch) -> list[str]:
    """The architecture in each env of this episode, by its widths."""
    if not isinstance(host_batch, PopulationBatch):
        return ["known gains"] * host_batch.num_envs
    names = [widths_name(tuple(site.width for site in host.sites)) for host in host_batch.types]
    return [name for name in names for _ in range(host_batch.config.envs_per_type)]


def variant_names(config: TrainConfig, host_batch: HostBatch) -> list[str]:
    """The variant of the data in each env of this episode."""
    views = (
        host_batch.view_ids if isinstance(host_batch, PopulationBatch) else _first_view(host_batch)
    )
    return [config.variants[view] for view in views.tolist()]


def choice_names(environment: GrowthEnvironment) -> dict[str, list[str]]:
    """What the choices of each head are called."""
    host_batch = environment.host_batch
    if isinstance(host_batch, PopulationBatch):
        blueprints = [blueprint.name for blueprint in host_batch.menu]
    else:
        blueprints = [f"seed {number}" for number in range(host_batch.num_blueprints)]
    return {
        "op": [op.name for op in LifecycleOp],
        "slot": [f"slot {number}" for number in range(host_batch.num_slots)],
        "blueprint": blueprints,
        "style": [style.name for style in BlendStyle],
        "tempo": [f"{steps} steps" for steps in TEMPO_STEPS],
        "alpha_target": [str(target) for target in ALPHA_TARGETS],
        "alpha_speed": [f"{steps} steps" for steps in ALPHA_SPEED_STEPS],
        "alpha_curve": [curve.name for curve in AlphaCurve],
    }


def describe_hosts(config: TrainConfig, host_batch: HostBatch) -> str:
    """What is trained on, on what, and what is held out."""
    if not isinstance(host_batch, PopulationBatch):
        return f"{config.task}: no networks, what every seed gains is known"
    names = ", ".join(blueprint.name for blueprint in host_batch.menu)
    return (
        f"{config.task} on {host_batch.task.device}, {host_batch.kernels} kernels; "
        f"seeds: {names}\n"
        f"trained on {len(config.training_widths)} {config.host} hosts with "
        f"{config.num_layers} layers of {', '.join(map(str, config.widths))} and "
        f"{', '.join(config.variants)}\n"
        f"held out: {', '.join(config.held_out_widths)} and {', '.join(config.held_out_variants)}"
    )


def _first_view(host_batch: HostBatch) -> Tensor:
    return torch.zeros(host_batch.num_envs, dtype=torch.int64)


def _variant(task: Task, name: str) -> Task:
    kind, _, value = name.partition(":")
    if kind == "permuted":
        return permuted(task, rng_seed=int(value))
    if kind == "rows":
        return few_rows(task, int(value))
    if kind == "noise":
        return noisy(task, float(value), rng_seed=_NOISE_RNG_SEED)
    return task
