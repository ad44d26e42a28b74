"""`esper evaluate`: a run's controllers against every honest arm, on types they never saw.

report = evaluate_run("runs/first", "quick")
print(report.markdown())
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import Blueprint
from esper.kasmina.hosts import Host
from esper.simic.evaluation.arms import (
    HOST_ALONE,
    LEARNED,
    WIDTH_SEARCH,
    ArmResult,
    ConstantPlans,
    run_arms,
)
from esper.simic.evaluation.claims import (
    FRONTIER_CLAIMS,
    SEARCH_CLAIM,
    Verdict,
    correct_for_number,
    judge_claims,
    judge_frontier,
    judge_search,
)
from esper.simic.evaluation.plans import candidate_plans
from esper.simic.evaluation.report import EvaluationReport
from esper.simic.evaluation.settings import EvaluationConfig, evaluation_preset
from esper.simic.evaluation.statistics import RandomSearch, estimate
from esper.simic.evaluation.trial import TRAINING_FLOPS, Cost, Trial
from esper.simic.evaluation.tuning import calibrate_heuristic, tune_learning_rate
from esper.simic.evaluation.variants import by_variant
from esper.simic.evaluation.widened import (
    FrontierLines,
    StaticPool,
    WidenedHost,
    candidate_widths,
    frontier_groups,
    frontier_lines,
    train_static,
    width_search,
)
from esper.simic.training.config import TaskName, TrainConfig
from esper.simic.training.distribution import load_hosts, load_menu, load_task
from esper.simic.training.phase_clock import PhaseClock
from esper.simic.training.run_folder import RunFiles
from esper.tamiyo.learned import LearnedController
from esper.tolaria.host_batch import PopulationBatch
from esper.tolaria.optimizers import AdamW
from esper.tolaria.tasks import HeldOut

Say = Callable[[str], None]


def evaluate_run(
    runs: Path | str | Sequence[Path | str],
    preset: str = "quick",
    *,
    task: TaskName | None = None,
    settings: EvaluationConfig | None = None,
    say: Say = lambda text: None,
) -> EvaluationReport:
    """The controller of a run, or those of several runs that differ in their rng seed alone.

    `task` moves the frozen controllers to other data; `settings` replace the preset's.
    """
    paths = [runs] if isinstance(runs, Path | str) else runs
    files = [RunFiles(Path(path)) for path in paths]
    first, *others = configs = [entry.read_config() for entry in files]
    if any(replace(config, rng_seed=first.rng_seed) != first for config in others):
        raise ValueError(
            f"the runs {[str(path) for path in paths]} differ in more than their rng_seed; "
            "evaluate runs of one kind together"
        )
    for entry in files:
        if not entry.controller.exists():
            raise ValueError(f"{entry.path} has no controller yet: its first checkpoint brings one")
    controllers = [
        LearnedController.load(entry.controller, own.resolved_device())
        for entry, own in zip(files, configs, strict=True)
    ]
    settings = settings or evaluation_preset(preset)
    return evaluate_controllers(controllers, first, settings, task=task, say=say)


def evaluate_controllers(
    controllers: Sequence[LearnedController],
    config: TrainConfig,
    settings: EvaluationConfig,
    *,
    task: TaskName | None = None,
    say: Say = lambda text: None,
) -> EvaluationReport:
    """Controllers against every arm, on what `config` held out from their training.

    `task` is other data than that of their training.
    """
    clock = PhaseClock()
    bare_cost = host_training(config)
    config = config if task is None else on_task(config, task)
    training, judged = _trials(config, settings)
    lines = frontier_lines(settings.frontier_widths, judged.hosts, settings.widening_factors)
    clock.lap("loading data")
    say(f"tuning the hosts' learning rate on {training.num_hosts} hosts of types trained on")
    rates = tune_learning_rate(training, settings.learning_rates, rng_seed=2)
    clock.lap("learning rate")
    optimizer = AdamW(learning_rate=rates.best["learning_rate"])
    training, judged = (replace(trial, optimizer=optimizer) for trial in (training, judged))
    say(f"learning rate {optimizer.learning_rate:g}; calibrating the heuristic")
    heuristic = calibrate_heuristic(training, settings.heuristic_scales, settings.rents, rng_seed=3)
    clock.lap("heuristic")
    say(f"searching {settings.num_plans} constant plans")
    constants = _search(training, judged, settings)
    clock.lap("constant plans")
    reference_seed = _reference_seed(settings, judged)
    say(f"growing {judged.num_hosts} hosts in every arm; from the start: {reference_seed.name}")
    results = run_arms(
        judged,
        controllers,
        constants,
        heuristic,
        settings.rents,
        reference_seed=judged.menu.index(reference_seed),
        host_training=bare_cost,
    )
    clock.lap("arms")
    arms = {result.name: result for result in results}
    statics = _statics(config, settings, judged, lines, arms[LEARNED].search.flops, say)
    clock.lap("static hosts")
    searches = constants.random_search(settings.rents)
    arms[WIDTH_SEARCH] = ArmResult(
        WIDTH_SEARCH,
        settings.rents,
        (width_search(statics, arms[HOST_ALONE].harvests[0], settings.rents, judged),),
        statics.cost,
    )
    variants = by_variant(arms, statics, judged)
    verdicts = _verdicts(arms, searches, statics, judged, settings)
    clock.lap("statistics")
    return EvaluationReport(
        config=config,
        settings=settings,
        num_controllers=len(controllers),
        device=str(judged.task.device),
        types=judged.type_names,
        arms=arms,
        learning_rates=rates,
        heuristic=heuristic,
        plans=constants.describe(judged.menu, judged.type_names),
        statics=statics,
        searches=[found.curve() for found in searches],
        verdicts=verdicts,
        variants=variants,
        stages=clock.take(),
    )


def on_task(config: TrainConfig, task: TaskName) -> TrainConfig:
    """The same widths and variants with other data, which the controller never saw."""
    if task == config.task:
        return config
    return replace(config, task=task, host="conv1d" if task == "mnist1d" else "conv2d", menu=())


def host_training(config: TrainConfig) -> Cost:
    """What training a controller took: its hosts alone, without seeds and without validation."""
    if config.task == "known_gains":
        raise ValueError("a run on known_gains has no networks to evaluate")
    hosts = load_hosts(config, load_task(config, config.variants[:1]), config.training_widths)
    networks, host_batch = config.rounds * config.num_envs, config.host_batch
    rows = host_batch.minibatches * host_batch.batch_size * config.growth.num_steps
    macs = sum(host.macs for host in hosts) / len(hosts)
    return Cost(networks, networks * rows * TRAINING_FLOPS * macs)


class Examiner:
    """The test rows of a task: the seal is broken once, every finished network is asked once."""

    def __init__(self, held_out: HeldOut):
        self._x, labels = held_out.open()
        self._labels = labels.to(self._x.device)

    def __call__(self, host_batch: PopulationBatch) -> Tensor:
        return host_batch.accuracy_on(self._x, self._labels)


def _trials(config: TrainConfig, settings: EvaluationConfig) -> tuple[Trial, Trial]:
    """Types that were trained on, to search and tune on, and types held out, to judge on."""
    if not config.held_out_widths and not config.held_out_variants:
        raise ValueError(
            "nothing was held out from the controller's training to judge it on; train with "
            "held_out_widths or held_out_variants"
        )
    seen, unseen = config.variants, config.held_out_variants or config.variants
    task = load_task(config, (*seen, *unseen))
    held_out = [tuple(map(int, name.split("-"))) for name in config.held_out_widths]
    spread = len(config.training_widths) / settings.training_widths
    trained_on = [config.training_widths[int(i * spread)] for i in range(settings.training_widths)]
    host_batch = settings.host_batch or config.host_batch
    rows = min(host_batch.validation_rows, task.validation_y.shape[1])
    steps = config.growth.num_steps
    host_batch = replace(host_batch, validation_rows=rows, episode_steps=steps, siblings=1)
    training = Trial(
        hosts=load_hosts(config, task, tuple(trained_on)),
        view_ids=tuple(range(len(seen))),
        repeats=settings.training_repeats,
        task=task,
        menu=load_menu(config, task),
        host_batch=host_batch,
        growth=config.growth,
        max_macs=settings.max_macs,
    )
    judged = replace(
        training,
        hosts=load_hosts(config, task, tuple((held_out or trained_on)[: settings.num_widths])),
        view_ids=tuple(range(len(seen), len(seen) + len(unseen))),
        repeats=settings.repeats,
        examine=Examiner(task.held_out),
    )
    return training, judged


def _search(training: Trial, judged: Trial, settings: EvaluationConfig) -> ConstantPlans:
    plans = candidate_plans(
        settings.num_plans,
        judged.hosts[0].num_slots,
        len(judged.menu),
        judged.growth.num_steps,
        torch.Generator().manual_seed(settings.rng_seed),
    )
    return ConstantPlans.search(training, judged, plans, settings.rents, settings.finalists)


def _reference_seed(settings: EvaluationConfig, trial: Trial) -> Blueprint:
    """What grows in every slot from the start: a seed of renown, or the menu's largest."""
    by_name = {blueprint.name: blueprint for blueprint in trial.menu}
    known = [by_name[name] for name in settings.reference_seeds if name in by_name]
    site = trial.hosts[0].sites[0]
    return known[0] if known else max(trial.menu, key=lambda b: b.program(site).num_params)


def _statics(
    config: TrainConfig,
    settings: EvaluationConfig,
    judged: Trial,
    lines: FrontierLines,
    controller_flops: float,
    say: Say,
) -> StaticPool:
    def build(host: WidenedHost) -> Host:
        return load_hosts(replace(config, norm=host.norm), judged.task, (host.widths,))[0]

    hosts = candidate_widths(
        lines,
        lambda host: judged.flops_of(build(host)),
        settings.width_search_share * controller_flops,
        torch.Generator().manual_seed(settings.rng_seed),
    )
    say(f"training {len(hosts)} static hosts, {len(judged.view_ids) * judged.repeats} times each")
    return train_static(judged, hosts, [build(host) for host in hosts], lines)


def _verdicts(
    arms: dict[str, ArmResult],
    searches: Sequence[RandomSearch],
    statics: StaticPool,
    judged: Trial,
    settings: EvaluationConfig,
) -> list[Verdict]:
    """Claims about arms, then about the search, then about the frontiers."""
    learned = arms[LEARNED]
    verdicts = judge_claims(arms, settings.rents)
    for index, rent in enumerate(settings.rents):
        search, scores = searches[index], learned.scores[:, index]
        lead = estimate(scores - search.best_of(SEARCH_CLAIM.runs))
        verdicts.append(judge_search(SEARCH_CLAIM, rent, search.runs_to_match(scores), lead))
    for claim in FRONTIER_CLAIMS:
        frontier = statics.frontier(claim.kind, norm=claim.norm, by=claim.size)
        group = frontier_groups(claim.kind, judged)
        for index, rent in enumerate(settings.rents):
            accuracy, size = (learned.array(name)[:, index] for name in ("test", claim.size))
            excess = frontier.excess(accuracy, size, group)
            verdicts.append(judge_frontier(claim, rent, excess, frontier.covers(size, group)))
    return correct_for_number(verdicts)
