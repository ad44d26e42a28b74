"""The evaluation behind the published claims: all searches, frontiers and their report."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from esper.simic.growth.comparison import on_task
from esper.simic.growth.comparison import prepare as prepare_hosts
from esper.simic.growth.train_config import TrainConfig
from esper.tamiyo.learned import LearnedController
from growth_evaluation.arms import (
    CONSTANT,
    HEURISTIC,
    HOST_ALONE,
    LEARNED,
    ArmResult,
    run_arms,
    standard_arms,
)
from growth_evaluation.claims import (
    ALL_SEEDS,
    CONSTANT_PER_TYPE,
    FROM_SCRATCH,
    SAMPLED,
    WIDTH_SEARCH,
    Results,
    judge_published,
    leads_by_variant,
)
from growth_evaluation.cost import flops_of, host_flops, host_training_flops, relative_flops
from growth_evaluation.paired_experiment import Arm, PairedExperiment
from growth_evaluation.plan_search import PlanSearch, plan_arm, plans_for, search_plans
from growth_evaluation.preset_seeds import all_seeds, reference_seed, train_with_seeds
from growth_evaluation.random_search import RandomSearch
from growth_evaluation.report import Report
from growth_evaluation.settings import EvaluationConfig, SearchConfig
from growth_evaluation.static_hosts import (
    FrontierLines,
    StaticPool,
    build,
    candidate_widths,
    frontier_lines,
    train_static,
    width_search,
)
from growth_evaluation.tuning import (
    Sweep,
    heuristic_with,
    tune_heuristic,
    tune_learning_rate,
    with_learning_rate,
)

Say = Callable[[str], None]


def evaluate_fully(
    controllers: Sequence[LearnedController],
    config: TrainConfig,
    settings: EvaluationConfig,
    search: SearchConfig,
    *,
    task: str | None = None,
    say: Say = lambda text: None,
) -> Report:
    """Compare controllers with every arm on the types that `config` held out from training."""
    started = time.perf_counter()
    bare_flops = host_training_flops(config)
    config = config if task is None else on_task(config, task)
    training, held_out = prepare(config, settings)
    lines = frontier_lines(search.frontier_widths, held_out.hosts.widths, search.widening_factors)
    held_out = with_test_rows(held_out)
    say(f"tuning the learning rate on {training.num_hosts} hosts of training types")
    rates = tune_learning_rate(training, search.learning_rates, rng_seed=2)
    rate = rates.best["learning_rate"]
    training, held_out = (with_learning_rate(each, rate) for each in (training, held_out))
    say(f"learning rate {rate:g}; tuning the heuristic")
    heuristic = tune_heuristic(training, search.heuristic_scales, settings.rents, rng_seed=3)
    say(f"searching {settings.num_plans} constant plans")
    plan_for_all, plan_per_type = _search_plans(training, held_out, settings)
    say(f"growing {held_out.num_hosts} hosts in every arm")
    networks = config.rounds * config.num_envs
    usual = standard_arms(
        controllers, plan_for_all, held_out.num_hosts, settings.rents, controller_networks=networks
    )
    arms = run_arms(
        held_out,
        [
            *(arm for arm in usual if arm.name != HEURISTIC),
            _tuned_heuristic(heuristic, settings.rents),
            _plan_of_each_type(plan_per_type, held_out, settings.rents),
            *_sampled(controllers, settings.rents, networks),
        ],
        settings.rents,
    )
    factor = relative_flops(arms[SAMPLED].outcome, held_out)
    arms |= _with_preset_seeds(held_out, search, settings.rents, arms[LEARNED], say)
    statics = _train_static(search, held_out, lines, factor * bare_flops, settings, say)
    found = width_search(statics, arms[HOST_ALONE].outcome, settings.rents, held_out)
    arms[WIDTH_SEARCH] = ArmResult.of(
        WIDTH_SEARCH, settings.rents, [found], statics.networks.validation.numel()
    )
    results = Results(held_out, arms, _random_searches(plan_per_type, settings.rents), statics)
    return Report(
        config=config,
        settings=settings,
        results=results,
        learning_rates=rates,
        heuristic=heuristic,
        verdicts=judge_published(results, settings.rents),
        variants=leads_by_variant(results, settings.rents),
        search_flops={
            LEARNED: factor * bare_flops,
            HEURISTIC: flops_of(heuristic.trained),
            CONSTANT: flops_of(plan_for_all.trained),
            CONSTANT_PER_TYPE: flops_of(plan_per_type.trained),
            WIDTH_SEARCH: flops_of([statics.networks]),
        },
        seconds=time.perf_counter() - started,
    )


def prepare(
    config: TrainConfig, settings: EvaluationConfig
) -> tuple[PairedExperiment, PairedExperiment]:
    """Training types to search plans on, and held-out types to compare arms on."""
    training, held_out = prepare_hosts(config, settings)
    available = training.task.validation_y.shape[1]
    rows = min(config.host_batch.validation_rows, available)
    config = replace(config, host_batch=replace(config.host_batch, validation_rows=rows))
    spread = len(config.training_widths) / settings.training_widths
    widths = [config.training_widths[int(i * spread)] for i in range(settings.training_widths)]
    repeats = settings.training_repeats
    training = replace(training, config=config, widths=widths, repeats=repeats)
    held_out = replace(held_out, config=config)
    return (
        PairedExperiment(hosts=training, max_macs=settings.max_macs),
        PairedExperiment(hosts=held_out, max_macs=settings.max_macs),
    )


def with_test_rows(experiment: PairedExperiment) -> PairedExperiment:
    """Open the test rows, once per evaluation; each finished network is measured on them once."""
    return replace(experiment, test_rows=experiment.hosts.task.held_out.open())


def _search_plans(
    training: PairedExperiment, held_out: PairedExperiment, settings: EvaluationConfig
) -> tuple[PlanSearch, PlanSearch]:
    """The best plan for all training types, and for each held-out type."""
    plans = plans_for(held_out, settings)
    search = partial(search_plans, plans=plans, rents=settings.rents, finalists=settings.finalists)
    return search(training, num_types=1), search(held_out, num_types=len(held_out.type_names))


def _tuned_heuristic(heuristic: Sweep, rents: Sequence[float]) -> Arm:
    controller = heuristic_with(heuristic.best)
    return Arm(HEURISTIC, controller, tuple(rents), heuristic.num_networks)


def _plan_of_each_type(
    plan: PlanSearch, experiment: PairedExperiment, rents: Sequence[float]
) -> Arm:
    choice = plan.best[:, experiment.type_of_host]
    return plan_arm(CONSTANT_PER_TYPE, plan.plans, choice, rents, plan.num_networks)


def _sampled(
    controllers: Sequence[LearnedController], rents: Sequence[float], networks: int
) -> list[Arm]:
    """The same policies, sampling their actions."""
    arms = []
    for rng_seed, controller in enumerate(controllers):
        policy = controller.policy
        generator = torch.Generator(policy.device).manual_seed(rng_seed)
        sampling = LearnedController(policy, deterministic=False, generator=generator)
        arms.append(Arm(SAMPLED, sampling, tuple(rents), networks))
    return arms


def _with_preset_seeds(
    experiment: PairedExperiment,
    search: SearchConfig,
    rents: Sequence[float],
    learned: ArmResult,
    say: Say,
) -> dict[str, ArmResult]:
    """Hosts with a seed in every slot, and the grown networks, both trained from scratch."""
    seed = reference_seed(search, experiment)
    say(f"training grown networks from scratch; all seeds from the start: {seed.name}")
    grown = learned.outcome
    again = [
        train_with_seeds(experiment, *seeds, rents)
        for seeds in zip(grown.blueprint, grown.style, grown.alpha, strict=True)
    ]
    networks = learned.search_networks + grown.validation.numel()
    return {
        ALL_SEEDS: ArmResult.of(ALL_SEEDS, rents, [all_seeds(experiment, seed)], 0),
        FROM_SCRATCH: ArmResult.of(FROM_SCRATCH, rents, again, networks),
    }


def _train_static(
    search: SearchConfig,
    experiment: PairedExperiment,
    lines: FrontierLines,
    controller_flops: float,
    settings: EvaluationConfig,
    say: Say,
) -> StaticPool:
    hosts = candidate_widths(
        lines,
        lambda host: host_flops(experiment, build(experiment, host)),
        search.width_search_share * controller_flops,
        torch.Generator().manual_seed(settings.rng_seed),
    )
    copies = len(experiment.hosts.view_ids) * experiment.hosts.repeats
    say(f"training {len(hosts)} static hosts, {copies} networks each")
    return train_static(experiment, hosts, lines)


def _random_searches(plan: PlanSearch, rents: Sequence[float]) -> list[RandomSearch]:
    """Plans tried at random on each host, at each rent."""
    pool = plan.trained[0]
    return [
        RandomSearch(pool.scores([rent], "validation").numpy(), pool.scores([rent]).numpy())
        for rent in rents
    ]
