"""Evaluate the controllers of one or more runs on types that they did not train on.

report = evaluate_run("runs/first", "quick")
print(report.markdown())
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.hosts import Host
from esper.simic.evaluation.arms import HOST_ALONE, LEARNED, WIDTH_SEARCH, ArmResult, run_arms
from esper.simic.evaluation.claims import Results, judge_claims, leads_by_variant
from esper.simic.evaluation.experiment import TRAINING_FLOPS, Cost, MeasureTest, PairedExperiment
from esper.simic.evaluation.report import EvaluationReport
from esper.simic.evaluation.searches import (
    FrontierLines,
    PlanSearch,
    StaticHost,
    StaticPool,
    candidate_plans,
    candidate_widths,
    frontier_lines,
    search_plans,
    train_static,
    tune_heuristic,
    tune_learning_rate,
    width_search,
)
from esper.simic.evaluation.settings import EvaluationConfig, evaluation_preset
from esper.simic.training.config import TrainConfig
from esper.simic.training.distribution import load_hosts, load_menu, load_task, with_checksum
from esper.simic.training.run_folder import RunFiles
from esper.tamiyo.learned import LearnedController
from esper.tolaria.augmentation import NO_AUGMENTATION
from esper.tolaria.optimizers import AdamW
from esper.tolaria.tasks import HeldOut

Say = Callable[[str], None]


def evaluate_run(
    runs: Path | str | Sequence[Path | str],
    preset: str = "quick",
    *,
    task: str | None = None,
    data: str = "",
    settings: EvaluationConfig | None = None,
    say: Say = lambda text: None,
) -> EvaluationReport:
    """Evaluate the controller of a run, or those of several runs that differ only in `rng_seed`.

    `task` and `data` evaluate on other data than the controllers trained on. `settings` replaces
    `preset`. `say` receives progress messages.
    """
    paths = [runs] if isinstance(runs, Path | str) else runs
    files = [RunFiles(Path(path)) for path in paths]
    first, *others = configs = [entry.read_config() for entry in files]
    if any(replace(config, rng_seed=first.rng_seed) != first for config in others):
        raise ValueError(
            f"the runs {[str(path) for path in paths]} differ in more than their rng_seed; "
            "evaluate them separately"
        )
    for entry in files:
        if not entry.controller.exists():
            raise ValueError(
                f"{entry.path} has no controller yet; the first checkpoint will write it"
            )
    controllers = [
        LearnedController.load(entry.controller, own.resolved_device())
        for entry, own in zip(files, configs, strict=True)
    ]
    settings = settings or evaluation_preset(preset)
    return evaluate_controllers(controllers, first, settings, task=task, data=data, say=say)


def evaluate_controllers(
    controllers: Sequence[LearnedController],
    config: TrainConfig,
    settings: EvaluationConfig,
    *,
    task: str | None = None,
    data: str = "",
    say: Say = lambda text: None,
) -> EvaluationReport:
    """Compare controllers with every arm on the types that `config` held out from training.

    `task` and `data` evaluate on other data than the controllers trained on.
    """
    started = time.perf_counter()
    controller_cost = host_training_cost(config)
    if task or data:
        config = on_task(config, task or "data", data)
    training, held_out, lines = prepare(config, settings)
    held_out = replace(held_out, measure_test=_open_test_set(held_out.task.held_out))
    say(f"tuning the learning rate on {training.num_hosts} hosts of training types")
    rates = tune_learning_rate(training, settings.learning_rates, rng_seed=2)
    optimizer = AdamW(learning_rate=rates.best["learning_rate"])
    training, held_out = (replace(e, optimizer=optimizer) for e in (training, held_out))
    say(f"learning rate {optimizer.learning_rate:g}; tuning the heuristic")
    heuristic = tune_heuristic(training, settings.heuristic_scales, settings.rents, rng_seed=3)
    say(f"searching {settings.num_plans} constant plans")
    plan_for_all, plan_per_type = _search_plans(training, held_out, settings)
    seed = _reference_seed(settings, held_out)
    say(f"growing {held_out.num_hosts} hosts in every arm; all seeds from the start: {seed.name}")
    grown = run_arms(
        held_out,
        controllers,
        plan_for_all,
        plan_per_type,
        heuristic,
        settings.rents,
        reference_seed=held_out.menu.index(seed),
        controller_cost=controller_cost,
    )
    arms = {result.name: result for result in grown}
    statics = _train_static(config, settings, held_out, lines, arms[LEARNED].search.flops, say)
    found = width_search(statics, arms[HOST_ALONE].outcome, settings.rents, held_out)
    static_cost = Cost.of([statics.networks])
    arms[WIDTH_SEARCH] = ArmResult.of(WIDTH_SEARCH, settings.rents, [found], static_cost)
    searches = [plan_per_type.random_search(rent) for rent in settings.rents]
    results = Results(held_out, arms, searches, statics)
    return EvaluationReport(
        config=config,
        settings=settings,
        results=results,
        learning_rates=rates,
        heuristic=heuristic,
        verdicts=judge_claims(results, settings.rents),
        variants=leads_by_variant(results, settings.rents),
        seconds=time.perf_counter() - started,
    )


def on_task(config: TrainConfig, task: str, data: str = "") -> TrainConfig:
    """The same widths and variants on other data, without augmentation."""
    if task == config.task and not data:
        return config
    host_batch = replace(config.host_batch, augment=NO_AUGMENTATION)
    config = replace(config, host="auto", menu=(), host_batch=host_batch)
    return with_checksum(replace(config, task=task, data=data, data_checksum=""))


def host_training_cost(config: TrainConfig) -> Cost:
    """Cost of training a controller's hosts, without seeds and validation."""
    if config.task == "known_gains":
        raise ValueError("a run on known_gains has no networks to evaluate")
    hosts = load_hosts(config, load_task(config, config.variants[:1]), config.training_widths)
    networks, host_batch = config.rounds * config.num_envs, config.host_batch
    rows = host_batch.minibatches * host_batch.batch_size * config.growth.num_steps
    macs = sum(host.macs for host in hosts) / len(hosts)
    return Cost(networks, networks * rows * TRAINING_FLOPS * macs)


def prepare(
    config: TrainConfig, settings: EvaluationConfig
) -> tuple[PairedExperiment, PairedExperiment, FrontierLines]:
    """Training types to search and tune on, held-out types to compare arms on, and frontiers.

    Raises if the settings cannot be used; `esper train` calls it before it trains.
    """
    if not config.held_out_widths and not config.held_out_variants:
        raise ValueError(
            "nothing was held out from the controller's training; train with held_out_widths or "
            "held_out_variants to evaluate it"
        )
    seen, unseen = config.variants, config.held_out_variants or config.variants
    task = load_task(config, (*seen, *unseen))
    held_out = [tuple(map(int, name.split("-"))) for name in config.held_out_widths]
    spread = len(config.training_widths) / settings.training_widths
    trained_on = [config.training_widths[int(i * spread)] for i in range(settings.training_widths)]
    host_batch = settings.host_batch or config.host_batch
    host_batch = replace(host_batch, siblings=1, augment=config.host_batch.augment)
    rows = min(host_batch.validation_rows, task.validation_y.shape[1])
    steps = config.growth.num_steps
    training = PairedExperiment(
        hosts=load_hosts(config, task, tuple(trained_on)),
        view_ids=tuple(range(len(seen))),
        repeats=settings.training_repeats,
        task=task,
        menu=load_menu(config, task),
        host_batch=replace(host_batch, validation_rows=rows, episode_steps=steps),
        growth=config.growth,
        max_macs=settings.max_macs,
    )
    on_held_out = replace(
        training,
        hosts=load_hosts(config, task, tuple((held_out or trained_on)[: settings.num_widths])),
        view_ids=tuple(range(len(seen), len(seen) + len(unseen))),
        repeats=settings.repeats,
    )
    lines = frontier_lines(settings.frontier_widths, on_held_out.hosts, settings.widening_factors)
    return training, on_held_out, lines


def _open_test_set(held_out: HeldOut) -> MeasureTest:
    """Open the test rows, once per evaluation; each finished network is measured on them once."""
    x, labels = held_out.open()
    labels = labels.to(x.device)
    return lambda host_batch: host_batch.accuracy_on(x, labels)


def _search_plans(
    training: PairedExperiment, held_out: PairedExperiment, settings: EvaluationConfig
) -> tuple[PlanSearch, PlanSearch]:
    """The best plan for all training types, and for each held-out type."""
    plans = candidate_plans(
        settings.num_plans,
        held_out.hosts[0].num_slots,
        len(held_out.menu),
        held_out.growth.num_steps,
        torch.Generator().manual_seed(settings.rng_seed),
    )
    search = partial(search_plans, plans=plans, rents=settings.rents, finalists=settings.finalists)
    return search(training, num_types=1), search(held_out, num_types=len(held_out.type_names))


def _reference_seed(settings: EvaluationConfig, experiment: PairedExperiment) -> Blueprint:
    by_name = {blueprint.name: blueprint for blueprint in experiment.menu}
    known = [by_name[name] for name in settings.reference_seeds if name in by_name]
    site = experiment.hosts[0].sites[0]
    return known[0] if known else max(experiment.menu, key=lambda b: b.program(site).num_params)


def _train_static(
    config: TrainConfig,
    settings: EvaluationConfig,
    experiment: PairedExperiment,
    lines: FrontierLines,
    controller_flops: float,
    say: Say,
) -> StaticPool:
    def build(host: StaticHost) -> Host:
        return load_hosts(replace(config, norm=host.norm), experiment.task, (host.widths,))[0]

    hosts = candidate_widths(
        lines,
        lambda host: experiment.host_flops(build(host)),
        settings.width_search_share * controller_flops,
        torch.Generator().manual_seed(settings.rng_seed),
    )
    copies = len(experiment.view_ids) * experiment.repeats
    say(f"training {len(hosts)} static hosts, {copies} networks each")
    return train_static(experiment, hosts, [build(host) for host in hosts], lines)
