"""Evaluate the controllers of one or more runs on types that they did not train on.

report = evaluate_run("runs/first", "quick")
print(report.markdown())
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from esper.runtime.ranks import ALONE, Ranks
from esper.simic.evaluation.arms import plans_for, run_arms, search_plans, standard_arms
from esper.simic.evaluation.claims import judge_claims
from esper.simic.evaluation.experiment import PRESETS, EvaluationConfig, PairedExperiment
from esper.simic.evaluation.report import EvaluationReport
from esper.simic.growth.hosts_and_data import load_hosts, load_menu, load_task, with_checksum
from esper.simic.growth.run_folder import RunFiles
from esper.simic.growth.train_config import TrainConfig
from esper.tamiyo.learned import LearnedController
from esper.tolaria.optimizers import AdamW

OnStep = Callable[[str, int, int], None]  # phase, and its steps that are done and in all


def evaluate_run(
    runs: Path | str | Sequence[Path | str],
    preset: str = "quick",
    *,
    task: str | None = None,
    data: str = "",
    settings: EvaluationConfig | None = None,
    on_step: OnStep = lambda *_: None,
    ranks: Ranks = ALONE,
) -> EvaluationReport:
    """Evaluate the controller of a run, or those of several runs that differ only in `rng_seed`.

    `task` and `data` evaluate on other data than the controllers trained on. `settings` replaces
    `preset`. Networks are split over `ranks`; all return the report.
    """
    paths = [runs] if isinstance(runs, Path | str) else runs
    files = [RunFiles(Path(path)) for path in paths]
    first, *others = (entry.read_config() for entry in files)
    if any(replace(config, rng_seed=first.rng_seed) != first for config in others):
        raise ValueError(
            f"the runs {list(map(str, paths))} differ in more than their rng_seed; evaluate them "
            "separately"
        )
    if missing := [str(entry.path) for entry in files if not entry.controller.exists()]:
        raise ValueError(f"{missing[0]} has no controller yet; the first checkpoint will write it")
    device = first.resolved_device()
    controllers = [LearnedController.load(entry.controller, device) for entry in files]
    if settings is None and preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; use one of {list(PRESETS)}")
    config = on_task(first, task or "data", data) if task or data else first
    return evaluate_controllers(controllers, config, settings or PRESETS[preset], on_step, ranks)


def evaluate_controllers(
    controllers: Sequence[LearnedController],
    config: TrainConfig,
    settings: EvaluationConfig,
    on_step: OnStep = lambda *_: None,
    ranks: Ranks = ALONE,
) -> EvaluationReport:
    """Compare controllers with every arm on the types that `config` held out from training."""
    started = time.perf_counter()
    training, held_out = prepare(config, settings)
    phase = f"searching {settings.num_plans} constant plans on {training.num_hosts} training hosts"
    training = replace(training, ranks=ranks, on_step=partial(on_step, phase))
    phase = f"growing {held_out.num_hosts} hosts in every arm"
    held_out = replace(held_out, ranks=ranks, on_step=partial(on_step, phase))
    plans = plans_for(held_out, settings)
    found = search_plans(training, plans, settings.rents, num_types=1, finalists=settings.finalists)
    networks = config.rounds * config.num_envs
    arms = standard_arms(controllers, found, held_out.num_hosts, settings.rents, networks)
    results = run_arms(with_test_rows(held_out), arms, settings.rents)
    return EvaluationReport(
        config=config,
        settings=settings,
        experiment=held_out,
        arms=results,
        verdicts=judge_claims(results, settings.rents),
        seconds=time.perf_counter() - started,
    )


def on_task(config: TrainConfig, task: str, data: str = "") -> TrainConfig:
    """The same widths and variants on other data."""
    if task == config.task and not data:
        return config
    config = replace(config, host="auto", menu=())
    return with_checksum(replace(config, task=task, data=data, data_checksum=""))


def prepare(
    config: TrainConfig, settings: EvaluationConfig
) -> tuple[PairedExperiment, PairedExperiment]:
    """Training types to search plans on, and held-out types to compare arms on.

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
    host_batch = replace(host_batch, siblings=1, controls=0)
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
        optimizer=AdamW(learning_rate=config.host_learning_rate),
        max_macs=settings.max_macs,
    )
    on_held_out = replace(
        training,
        hosts=load_hosts(config, task, tuple((held_out or trained_on)[: settings.num_widths])),
        view_ids=tuple(range(len(seen), len(seen) + len(unseen))),
        repeats=settings.repeats,
    )
    return training, on_held_out


def with_test_rows(experiment: PairedExperiment) -> PairedExperiment:
    """Open the test rows, once per evaluation; each finished network is measured on them once."""
    x, labels = experiment.task.held_out.open()
    labels = labels.to(x.device)
    return replace(experiment, measure_test=lambda hosts: hosts.accuracy_on(x, labels))
