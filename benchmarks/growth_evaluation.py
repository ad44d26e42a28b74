"""The full evaluation behind the published claims: all searches, frontiers and their report."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from growth_claims import (
    ALL_SEEDS,
    CONSTANT_PER_TYPE,
    FROM_SCRATCH,
    FRONTIERS,
    PUBLISHED,
    SAMPLED,
    WIDTH_SEARCH,
    Results,
    VariantLeads,
    judge_published,
    leads_by_variant,
)
from growth_searches import (
    FrontierKind,
    FrontierLines,
    SearchConfig,
    StaticHost,
    StaticPool,
    Sweep,
    all_seeds,
    candidate_widths,
    flops_of,
    frontier_lines,
    host_flops,
    host_training_flops,
    reference_seed,
    relative_flops,
    train_static,
    train_with_seeds,
    tune_heuristic,
    tune_learning_rate,
    type_of_host,
    width_search,
)
from growth_statistics import RandomSearch, estimate_over_groups

from esper.kasmina.hosts import Host
from esper.simic.evaluation.arms import (
    CONSTANT,
    HEURISTIC,
    HOST_ALONE,
    LEARNED,
    ArmResult,
    Array,
    PlanSearch,
    plan_arm,
    plans_for,
    run_arms,
    search_plans,
    standard_arms,
)
from esper.simic.evaluation.claims import estimate
from esper.simic.evaluation.evaluate import on_task, prepare, with_test_rows
from esper.simic.evaluation.experiment import Arm, EvaluationConfig, PairedExperiment
from esper.simic.evaluation.report import EvaluationReport, Rows, markdown_table
from esper.simic.growth.hosts_and_data import load_hosts
from esper.simic.growth.train_config import TrainConfig
from esper.tamiyo.heuristic import HeuristicConfig, HeuristicController
from esper.tamiyo.learned import LearnedController
from esper.tolaria.optimizers import AdamW

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class FullReport(EvaluationReport):
    """The report of `esper evaluate` with searches, frontiers and variants of the data."""

    results: Results
    learning_rates: Sweep
    heuristic: Sweep
    variants: list[VariantLeads]
    search_flops: dict[str, float]  # by arm

    def markdown(self) -> str:
        blocks = [
            super().markdown().rstrip(),
            "k: runs a random search needs to match one run. Outside: networks beyond the sizes of "
            "the static hosts. Leads in (d) are points of accuracy.",
            self._costs(),
            "## Lead of the learned controller by data variant",
            markdown_table(self._variant_table()),
            "## Tuned on training types",
            f"Learning rate: {_sweep(self.learning_rates)}",
            f"Heuristic: {_sweep(self.heuristic)}",
        ]
        return "\n\n".join(blocks) + "\n"

    def plain(self) -> dict[str, Any]:
        statics = self.results.statics
        return super().plain() | {
            "search_flops": self.search_flops,
            "learning_rates": _plain_sweep(self.learning_rates),
            "heuristic": _plain_sweep(self.heuristic),
            "variants": [asdict(found) for found in self.variants],
            "statics": {
                "hosts": [host._asdict() for host in statics.hosts],
                "lines": statics.lines,
                "params": statics.sizes("params").tolist(),
                "macs": statics.sizes("macs").tolist(),
                "validation": statics.networks.validation.tolist(),
                "test": statics.networks.test.tolist(),
            },
            "plot": self.plot(),
        }

    def plot(self) -> dict[str, Any]:
        """Frontier lines, and arms as points, for `frontier_plot.py`."""
        names: dict[FrontierKind, str] = {"uniform": "one width", "own": "own host widened"}
        lines = [
            {"label": f"{name}, {'with' if norm else 'without'} norm", **self._line(kind, norm)}
            for kind, name in names.items()
            for norm in (False, True)
        ]
        points = [
            {"label": name, **_point(arm, index)}
            for name, arm in self.arms.items()
            for index in range(len(arm.rents))
        ]
        return {"lines": lines, "points": points}

    def _costs(self) -> str:
        """The cost of searches relative to that of training a controller."""
        controller = self.search_flops[LEARNED]
        grown = self.arms[LEARNED].array("training_flops").mean()
        names = (WIDTH_SEARCH, CONSTANT, CONSTANT_PER_TYPE, HEURISTIC)
        parts = [f"{name} {self.search_flops[name] / controller:.1%}" for name in names]
        return (
            f"Training a controller took {controller / 1e12:,.2f} TFLOP, as much as growing "
            f"{controller / grown:,.0f} networks with it. Searches, relative to that: "
            f"{', '.join(parts)}."
        )

    def _variant_table(self) -> Rows:
        """Leads on each variant, over two arms and the frontiers with the run's norm."""
        shown = [
            claim
            for claim in PUBLISHED
            if claim.rival in self.variants[0].leads
            and FRONTIERS.get(claim.rival, (0, self.config.norm, "params"))[1:]
            == (self.config.norm, "params")
        ]
        header = ["variant", "rent", *(f"{claim.measure} over {claim.rival}" for claim in shown)]
        rows = []
        for found in self.variants:
            cells = [str(found.leads[claim.rival]) for claim in shown]
            rows.append([found.variant, f"{found.rent:g}", *cells])
        return [header, *rows]

    def _line(self, kind: FrontierKind, norm: bool) -> dict[str, list[float]]:
        """Mean accuracy and geometric mean size over a frontier's groups."""
        by_params = self.results.statics.frontier(kind, norm, "params")
        by_macs = self.results.statics.frontier(kind, norm, "macs")
        estimates = [estimate_over_groups(of_size) for of_size in by_params.accuracies]
        return {
            "params": _geometric_mean(by_params.sizes).tolist(),
            "macs": _geometric_mean(by_macs.sizes).tolist(),
            "accuracy": [e.mean for e in estimates],
            "low": [e.low for e in estimates],
            "high": [e.high for e in estimates],
        }


def evaluate_fully(
    controllers: Sequence[LearnedController],
    config: TrainConfig,
    settings: EvaluationConfig,
    search: SearchConfig,
    *,
    task: str | None = None,
    say: Say = lambda text: None,
) -> FullReport:
    """Compare controllers with every arm on the types that `config` held out from training."""
    started = time.perf_counter()
    bare_flops = host_training_flops(config)
    config = config if task is None else on_task(config, task)
    training, held_out = prepare(config, settings)
    lines = frontier_lines(search.frontier_widths, held_out.hosts, search.widening_factors)
    held_out = with_test_rows(held_out)
    say(f"tuning the learning rate on {training.num_hosts} hosts of training types")
    rates = tune_learning_rate(training, search.learning_rates, rng_seed=2)
    optimizer = AdamW(learning_rate=rates.best["learning_rate"])
    training, held_out = (replace(e, optimizer=optimizer) for e in (training, held_out))
    say(f"learning rate {optimizer.learning_rate:g}; tuning the heuristic")
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
    statics = _train_static(config, search, held_out, lines, factor * bare_flops, settings, say)
    found = width_search(statics, arms[HOST_ALONE].outcome, settings.rents, held_out)
    arms[WIDTH_SEARCH] = ArmResult.of(
        WIDTH_SEARCH, settings.rents, [found], statics.networks.validation.numel()
    )
    results = Results(held_out, arms, _random_searches(plan_per_type, settings.rents), statics)
    return FullReport(
        config=config,
        settings=settings,
        experiment=held_out,
        arms=arms,
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


def _search_plans(
    training: PairedExperiment, held_out: PairedExperiment, settings: EvaluationConfig
) -> tuple[PlanSearch, PlanSearch]:
    """The best plan for all training types, and for each held-out type."""
    plans = plans_for(held_out, settings)
    search = partial(search_plans, plans=plans, rents=settings.rents, finalists=settings.finalists)
    return search(training, num_types=1), search(held_out, num_types=len(held_out.type_names))


def _tuned_heuristic(heuristic: Sweep, rents: Sequence[float]) -> Arm:
    controller = HeuristicController(replace(HeuristicConfig(), **heuristic.best))
    return Arm(HEURISTIC, controller, tuple(rents), heuristic.num_networks)


def _plan_of_each_type(
    plan: PlanSearch, experiment: PairedExperiment, rents: Sequence[float]
) -> Arm:
    choice = plan.best[:, type_of_host(experiment)]
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
    config: TrainConfig,
    search: SearchConfig,
    experiment: PairedExperiment,
    lines: FrontierLines,
    controller_flops: float,
    settings: EvaluationConfig,
    say: Say,
) -> StaticPool:
    def build(host: StaticHost) -> Host:
        return load_hosts(replace(config, norm=host.norm), experiment.task, (host.widths,))[0]

    hosts = candidate_widths(
        lines,
        lambda host: host_flops(experiment, build(host)),
        search.width_search_share * controller_flops,
        torch.Generator().manual_seed(settings.rng_seed),
    )
    copies = len(experiment.view_ids) * experiment.repeats
    say(f"training {len(hosts)} static hosts, {copies} networks each")
    return train_static(experiment, hosts, [build(host) for host in hosts], lines)


def _random_searches(plan: PlanSearch, rents: Sequence[float]) -> list[RandomSearch]:
    """Plans tried at random on each host, at each rent."""
    pool = plan.trained[0]
    return [
        RandomSearch(pool.scores([rent], "validation").numpy(), pool.scores([rent]).numpy())
        for rent in rents
    ]


def _point(arm: ArmResult, index: int) -> dict[str, float]:
    """An arm at one rent: mean accuracy and geometric mean sizes over hosts."""
    found = estimate(arm.array("test")[:, index])
    params, macs = (
        float(_geometric_mean(arm.array(name)[:, index].flatten())) for name in ("params", "macs")
    )
    return {
        "rent": arm.rents[index],
        "params": params,
        "macs": macs,
        "accuracy": found.mean,
        "low": found.low,
        "high": found.high,
    }


def _geometric_mean(values: Array) -> Array:
    """Over the last axis."""
    mean: Array = np.exp(np.log(values).mean(-1))
    return mean


def _plain_sweep(sweep: Sweep) -> dict[str, Any]:
    return {"tried": sweep.tried, "results": sweep.results, "networks": sweep.num_networks}


def _sweep(sweep: Sweep) -> str:
    tried = [
        f"{', '.join(f'{name} {value:g}' for name, value in settings.items())}: {100 * result:.1f}"
        for settings, result in zip(sweep.tried, sweep.results, strict=True)
    ]
    return f"{'; '.join(tried)} ({sweep.num_networks:,} networks)."
