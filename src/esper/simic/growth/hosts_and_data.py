"""The hosts, the data and the menu that a training config describes."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from esper.kasmina.blueprints import BLUEPRINTS, WIDENINGS, Blueprint, blueprint_menu
from esper.kasmina.hosts import Host, build_host
from esper.leyline.constants import SiteKind
from esper.leyline.factored_actions import choice_names
from esper.simic.growth.train_config import TrainConfig
from esper.tolaria.data_files import checksum
from esper.tolaria.environment import GrowthEnvironment
from esper.tolaria.host_batch import PopulationBatch
from esper.tolaria.host_optimizer import AdamW
from esper.tolaria.tasks import TASKS, Task, few_rows, noisy, permuted, stack

_HOSTS = {SiteKind.VECTOR: "mlp", SiteKind.SERIES: "conv1d", SiteKind.IMAGE: "conv2d"}


_NOISE_RNG_SEED = 1


def training_hosts(config: TrainConfig) -> PopulationBatch:
    """Hosts and data to train a controller on."""
    base = _load_base(config)
    _check_rows(config, base)
    task = load_task(config, config.variants, base)
    optimizer = AdamW(learning_rate=config.host_learning_rate)
    hosts, menu = load_hosts(config, task, config.training_widths), load_menu(config, task)
    return PopulationBatch(hosts, menu, task, config.host_batch, optimizer=optimizer)


def with_checksum(config: TrainConfig) -> TrainConfig:
    """The config of a new run: with the absolute path of its data, and their checksum."""
    if not config.data or config.data_checksum:
        return config
    path = Path(config.data).resolve()
    return replace(config, data=str(path), data_checksum=checksum(path))


def load_task(config: TrainConfig, variants: tuple[str, ...], base: Task | None = None) -> Task:
    """One task with a view per variant, on the config's device."""
    base = base or _load_base(config)
    return stack([_variant(base, name) for name in variants]).to(config.resolved_device())


def _load_base(config: TrainConfig) -> Task:
    if config.data_checksum and checksum(config.data) != config.data_checksum:
        raise ValueError(
            f"{config.data} has changed since the run was started; restore it, or start a new run"
        )
    base = TASKS[config.task](*filter(None, [config.data]))
    if not isinstance(base, Task) or base.num_views != 1:
        raise ValueError(f"task {config.task!r} must return an esper.Task with one view")
    return base


def _check_rows(config: TrainConfig, task: Task) -> None:
    """Raise for data with fewer rows than the settings need, and name flags that fit."""
    rows, validation = int(task.num_rows.min()), task.validation_y.shape[1]
    flags = []
    for field in ("variants", "held_out_variants"):
        given: tuple[str, ...] = getattr(config, field)
        kept = [name for name in given if int(name.partition("rows:")[2] or 1) <= rows]
        if len(kept) < len(given):
            flags += [f"--{field.replace('_', '-')}", *(kept or [f"rows:{rows}"])]
    if config.host_batch.validation_rows > validation:
        flags += ["--host_batch.validation-rows", str(validation)]
    if flags:
        raise ValueError(
            f"{task.names[0]} has {rows} training and {validation} validation rows, fewer than the "
            f"settings need; use these flags: {' '.join(flags)}"
        )


def load_hosts(
    config: TrainConfig, task: Task, widths: tuple[tuple[int, ...], ...]
) -> tuple[Host, ...]:
    build = partial(build_host, input_shape=task.input_shape, num_classes=task.num_classes)
    kind = host_kind(config, task)
    return tuple(build(kind, widths=layers, norm=config.norm) for layers in widths)


def host_kind(config: TrainConfig, task: Task) -> str:
    return _HOSTS[task.site_kind] if config.host == "auto" else config.host


def load_menu(config: TrainConfig, task: Task) -> tuple[Blueprint, ...]:
    """The blueprints of the config, or its default, without those that fit no slot of its hosts."""
    entries = blueprint_menu(*(config.menu or [n for n in BLUEPRINTS if n not in WIDENINGS]))
    (host,) = load_hosts(config, task, config.training_widths[:1])
    menu = tuple(entry for entry in entries if any(map(entry.fits, host.sites)))
    if not menu:
        raise ValueError(f"menu={config.menu}: none fits a slot of {host_kind(config, task)} hosts")
    return menu


def choice_labels(environment: GrowthEnvironment) -> dict[str, list[str]]:
    """What the run's database calls the choices of each head."""
    host_batch = environment.host_batch
    slots = [f"slot {number}" for number in range(host_batch.num_slots)]
    names = choice_names(host_batch.blueprint_names, slots)
    return {
        head: [f"{name} steps" if isinstance(name, int) else str(name) for name in named]
        for head, named in names.items()
    }


def _variant(task: Task, name: str) -> Task:
    kind, _, value = name.partition(":")
    if kind == "permuted":
        return permuted(task, rng_seed=int(value))
    if kind == "rows":
        return few_rows(task, int(value))
    if kind == "noise":
        return noisy(task, float(value), rng_seed=_NOISE_RNG_SEED)
    return task
