"""The main result: train controllers and judge the claims about them.

    python -m growth_evaluation --out runs/full                  # GPU: three controllers, three tasks
    python -m growth_evaluation --tasks --rng-seeds 2            # train one, evaluate none
    python -m growth_evaluation --controllers runs/growth/*.pt   # evaluate existing controllers
    python -m growth_evaluation --runs runs/a runs/b             # the same, from run folders
    python -m growth_evaluation --quick                          # smoke test

Controllers from files must have been trained with `--preset`; runs may differ only in `rng_seed`.
The task they trained on is evaluated with that preset; other tasks with fewer hosts and smaller
searches.

Needs only torch, numpy, scipy and the data: MNIST-1D as data/mnist1d_5000_42.npz if its package is
missing, Fashion-MNIST as four idx files. Writes one report per task to OUT. Draw a plot from its
JSON with `growth_evaluation.frontier_plot.draw_frontier`, which needs matplotlib.

Several trainings share a GPU well, one process per rng seed (with NVIDIA's MPS running):

    for seed in 0 1 2; do python -m growth_evaluation --tasks --rng-seeds $seed & done; wait
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from esper.cli import one_line_errors
from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.run_folder import RunFiles
from esper.simic.growth.train_config import PRESETS, TrainConfig
from esper.tamiyo.learned import LearnedController
from growth_evaluation.evaluation import evaluate_fully
from growth_evaluation.report import Report
from growth_evaluation.settings import SIZES, TRAINED_ON, Sizes

MOST_SECONDS = 180.0  # to train one controller
MOST_OVERHEAD = 0.15  # of that which is not host training


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m growth_evaluation", description=__doc__.splitlines()[0]
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--runs", nargs="+", type=Path, help="run folders to evaluate")
    source.add_argument("--controllers", nargs="+", type=Path, help="controller files to evaluate")
    parser.add_argument("--preset", choices=("quick", "full"), default="full")
    parser.add_argument(
        "--rng-seeds", nargs="+", type=int, default=[0, 1, 2], help="of controllers to train"
    )
    parser.add_argument("--tasks", nargs="*", default=["mnist1d", "digits", "fashion_mnist"])
    parser.add_argument("--out", type=Path, default=Path("runs") / "growth")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    tasks, sizes = asked.tasks, SIZES[asked.preset]
    config, rng_seeds = PRESETS[asked.preset], asked.rng_seeds
    if asked.quick:
        settings, search = SIZES["quick"]
        fewest = replace(settings, num_widths=1, repeats=2, num_plans=2)
        tasks, sizes = [TRAINED_ON], (fewest, replace(search, learning_rates=(2e-2,)))
        config, rng_seeds = replace(PRESETS["quick"], rounds=1), [0]
    bars: dict[str, dict[str, object]] = {}
    files = asked.controllers or []
    if asked.runs:
        config = shared_config(asked.runs)
        files = [RunFiles(path).controller for path in asked.runs]
    device = config.resolved_device()
    if files:
        controllers = [LearnedController.load(path, device) for path in files]
    else:
        controllers = [train(config, seed, asked.out, bars) for seed in rng_seeds]
    for task in tasks:
        of_task = sizes if task == config.task else SIZES[task]
        report = evaluate(controllers, config, task, of_task, asked.out)
        bars |= bars_of(report, task)
    print(json.dumps({"benchmark": "growth", "device": str(device), "bars": bars}))


def shared_config(runs: list[Path]) -> TrainConfig:
    """The config of runs that differ only in `rng_seed`."""
    first, *others = (RunFiles(path).read_config() for path in runs)
    if any(replace(other, rng_seed=first.rng_seed) != first for other in others):
        raise ValueError(
            f"the runs {list(map(str, runs))} differ in more than their rng_seed; evaluate them "
            "separately"
        )
    return first


def train(
    config: TrainConfig, rng_seed: int, out: Path, bars: dict[str, dict[str, object]]
) -> LearnedController:
    """Train one controller, save it to OUT, and check its time against the bars."""
    training = GrowthTraining(replace(config, rng_seed=rng_seed))
    rounds: list[Mapping[str, float]] = []
    begun = time.perf_counter()
    training.run(lambda record: rounds.append(record.metrics))
    seconds = time.perf_counter() - begun
    shares = {
        name.removeprefix("time_share/"): sum(metrics[name] for metrics in rounds) / len(rounds)
        for name in rounds[0]
        if name.startswith("time_share/")
    }
    overhead = 1 - shares.pop("hosts")
    phases = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    print(f"controller {rng_seed}: {config.rounds} rounds in {seconds:.0f} s, {overhead:.1%} of it "
          f"not host training: {phases}", flush=True)  # fmt: skip
    bars[f"train_seconds_{rng_seed}"] = _bar(seconds, MOST_SECONDS, seconds <= MOST_SECONDS)
    bars[f"overhead_{rng_seed}"] = _bar(overhead, MOST_OVERHEAD, overhead <= MOST_OVERHEAD)
    out.mkdir(parents=True, exist_ok=True)
    training.controller().save(out / f"controller_{rng_seed}.pt")
    return training.controller()


def evaluate(
    controllers: list[LearnedController],
    config: TrainConfig,
    task: str,
    sizes: Sizes,
    out: Path,
) -> Report:
    """Evaluate on a task; the report is saved to OUT."""
    begun = time.perf_counter()

    def say(text: str) -> None:
        print(f"- {task}, {time.perf_counter() - begun:6.1f} s: {text}", flush=True)

    report = evaluate_fully(controllers, config, *sizes, task=task, say=say)
    report.save(out)
    print(report.markdown(), flush=True)
    return report


def bars_of(report: Report, task: str) -> dict[str, dict[str, object]]:
    """Every claim at every rent: the lead, its margin, and whether it holds."""
    return {
        f"{task}: ({verdict.claim.letter}) {verdict.claim.rival}, rent {verdict.rent:g}": _bar(
            verdict.lead.mean, verdict.claim.margin, verdict.decision == "holds"
        )
        for verdict in report.verdicts
    }


def _bar(value: object, bar: float, met: bool) -> dict[str, object]:
    return {"value": value, "bar": bar, "met": met}


if __name__ == "__main__":
    with one_line_errors():
        main()
