"""What episodes are drawn from: the gardens that a config describes, to train in or held out."""

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
from esper.tolaria.environment import Garden, GrowthEnvironment
from esper.tolaria.garden import PopulationGarden
from esper.tolaria.optimizers import AdamW
from esper.tolaria.oracle import HOST_ACCURACY, KnownGains
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


def training_garden(config: TrainConfig) -> Garden:
    """The hosts and data that a controller learns on."""
    if config.task == "known_gains":
        return KnownGains(config.num_envs)
    task = load_task(config, config.variants)
    return PopulationGarden(
        load_hosts(config, task, config.training_widths),
        load_menu(config, task),
        task,
        config.garden,
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


def start_score(garden: Garden) -> float:
    """What a network scores that has learned nothing."""
    if isinstance(garden, PopulationGarden):
        return 1.0 / garden.task.num_classes
    return HOST_ACCURACY


def host_names(garden: Garden) -> list[str]:
    """The architecture in each env of this episode, by its widths."""
    if not isinstance(garden, PopulationGarden):
        return ["known gains"] * garden.num_envs
    names = [widths_name(tuple(site.width for site in host.sites)) for host in garden.types]
    return [name for name in names for _ in range(garden.config.envs_per_type)]


def variant_names(config: TrainConfig, garden: Garden) -> list[str]:
    """The variant of the data in each env of this episode."""
    views = garden.view_ids if isinstance(garden, PopulationGarden) else _first_view(garden)
    return [config.variants[view] for view in views.tolist()]


def choice_names(environment: GrowthEnvironment) -> dict[str, list[str]]:
    """What the choices of each head are called."""
    garden = environment.garden
    if isinstance(garden, PopulationGarden):
        blueprints = [blueprint.name for blueprint in garden.menu]
    else:
        blueprints = [f"seed {number}" for number in range(garden.num_blueprints)]
    return {
        "op": [op.name for op in LifecycleOp],
        "slot": [f"slot {number}" for number in range(garden.num_slots)],
        "blueprint": blueprints,
        "style": [style.name for style in BlendStyle],
        "tempo": [f"{steps} steps" for steps in TEMPO_STEPS],
        "alpha_target": [str(target) for target in ALPHA_TARGETS],
        "alpha_speed": [f"{steps} steps" for steps in ALPHA_SPEED_STEPS],
        "alpha_curve": [curve.name for curve in AlphaCurve],
    }


def describe_garden(config: TrainConfig, garden: Garden) -> str:
    """What is trained on, on what, and what is held out."""
    if not isinstance(garden, PopulationGarden):
        return f"{config.task}: no networks, what every seed gains is known"
    names = ", ".join(blueprint.name for blueprint in garden.menu)
    return (
        f"{config.task} on {garden.task.device}, {garden.kernels} kernels; "
        f"seeds: {names}\n"
        f"trained on {len(config.training_widths)} {config.host} hosts with "
        f"{config.num_layers} layers of {', '.join(map(str, config.widths))} and "
        f"{', '.join(config.variants)}\n"
        f"held out: {', '.join(config.held_out_widths)} and {', '.join(config.held_out_variants)}"
    )


def _first_view(garden: Garden) -> Tensor:
    return torch.zeros(garden.num_envs, dtype=torch.int64)


def _variant(task: Task, name: str) -> Task:
    kind, _, value = name.partition(":")
    if kind == "permuted":
        return permuted(task, rng_seed=int(value))
    if kind == "rows":
        return few_rows(task, int(value))
    if kind == "noise":
        return noisy(task, float(value), rng_seed=_NOISE_RNG_SEED)
    return task
