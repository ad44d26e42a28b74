"""Controllers with widening on their menu, against static networks of an earlier run.

    python -m growth_evaluation.widening --out runs/widening      # GPU: train two, judge on three tasks
    python -m growth_evaluation.widening --out runs/widening --train-seconds 0   # judge those in OUT
    python -m growth_evaluation.widening --out runs/plans --train-seconds 0 --tasks mnist1d --repeats 2
    python -m growth_evaluation.widening --quick                  # smoke test

Trains controllers side by side with the preset `full`, then grows the held-out hosts of
`python -m growth_evaluation` with them. The static networks (hosts widened, and the width search that spent what
training a controller spends) are not trained again: they are read from the reports in
`benchmarks/results/growth_h200*.json.gz`, which used the same hosts, data and training. The host alone is
trained again; compare it with the stored one to see whether anything else changed. If OUT has no
controllers, only plans that widen every layer are compared: the last command, for a CPU.
"""

import argparse
import gzip
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from esper.kasmina.blueprints import BLUEPRINTS, WIDENINGS
from esper.simic.growth.comparison import on_task
from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.train_config import PRESETS, TrainConfig
from esper.tamiyo.heuristic import HeuristicController
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.scripted import ConstantPlan
from growth_evaluation import arms
from growth_evaluation.arms import ArmResult, run_arms
from growth_evaluation.claims import (
    FRONTIERS,
    PUBLISHED,
    WIDTH_SEARCH,
    Results,
    Verdict,
    correct_for_number,
    judge,
)
from growth_evaluation.evaluation import prepare, with_test_rows
from growth_evaluation.paired_experiment import Arm, ArmOutcome
from growth_evaluation.report import markdown_table
from growth_evaluation.settings import SIZES, TRAINED_ON
from growth_evaluation.static_hosts import StaticHost, StaticPool, frontier_lines, width_search
from growth_evaluation.tuning import with_learning_rate

STORED = {
    "mnist1d": "growth_h200.json.gz",
    "digits": "growth_h200_digits.json.gz",
    "fashion_mnist": "growth_h200_fashion_mnist.json.gz",
}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# accuracy over the own host widened is asked at every rent, with any lead
CLAIMS = tuple(
    replace(claim, margin=0.0)
    for claim in PUBLISHED
    if claim.rival in (arms.HOST_ALONE, arms.HEURISTIC, WIDTH_SEARCH)
    or FRONTIERS.get(claim.rival, ("", False))[1]
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rng-seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--rounds", type=int, default=PRESETS["full"].rounds)
    parser.add_argument("--train-seconds", type=float, default=1e9, help="stop training then")
    parser.add_argument("--tasks", nargs="+", default=list(STORED), choices=list(STORED))
    parser.add_argument("--out", type=Path, default=Path("runs") / "widening")
    parser.add_argument("--repeats", type=int, help="hosts per type; default: as stored")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("train", "judge"), help="in this process")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    config = replace(PRESETS["full"], rounds=asked.rounds, menu=tuple(BLUEPRINTS))
    if asked.quick:
        config = replace(config, host_batch=replace(config.host_batch, num_types=2, envs_per_type=8,
                         minibatches=1, validation_rows=50), rounds=1)  # fmt: skip
        train(config, 0, asked.train_seconds, asked.out)
        judge_on(TRAINED_ON, config, asked.out, 2, quick=True)
    elif asked.only == "train":
        train(config, asked.rng_seeds[0], asked.train_seconds, asked.out)
    elif asked.only == "judge":
        judge_on(asked.tasks[0], config, asked.out, asked.repeats)
    else:
        options = [f"--out={asked.out}", f"--rounds={asked.rounds}"]
        options += [f"--train-seconds={asked.train_seconds}"]
        options += [f"--repeats={asked.repeats}"] if asked.repeats else []
        if asked.train_seconds > 0:
            side_by_side(
                [["--only=train", f"--rng-seeds={seed}", *options] for seed in asked.rng_seeds]
            )
        side_by_side([["--only=judge", f"--tasks={task}", *options] for task in asked.tasks])
        merged: dict[str, Any] = {}
        for task in asked.tasks:
            merged |= json.loads(gzip.decompress(report_of(asked.out, task).read_bytes()))["bars"]
        print(json.dumps({"benchmark": "growth_widening", "device": "cuda", "bars": merged}))


def side_by_side(commands: list[list[str]]) -> None:
    """Run this module with each list of options, all at the same time; each prints when it is done."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "growth_evaluation.widening", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for options in commands
    ]
    for process in running:
        print(process.communicate()[0], end="", flush=True)


def train(config: TrainConfig, rng_seed: int, most_seconds: float, out: Path) -> None:
    """Train one controller, to the last round or for so many seconds, and save it to OUT."""
    begun = time.perf_counter()
    training = GrowthTraining(replace(config, rng_seed=rng_seed))
    training.run(should_stop=lambda: time.perf_counter() - begun > most_seconds)
    training.controller().save(out / f"controller_{rng_seed}.pt")
    print(f"controller {rng_seed}: {training.rounds_done} of {config.rounds} rounds in "
          f"{time.perf_counter() - begun:.0f} s")  # fmt: skip


def judge_on(
    task: str, config: TrainConfig, out: Path, repeats: int | None = None, quick: bool = False
) -> None:
    """Grow the held-out hosts of a task with the controllers in OUT, and compare."""
    begun = time.perf_counter()
    stored = json.loads(gzip.decompress((RESULTS / STORED[task]).read_bytes()))
    settings, search = SIZES["full" if task == TRAINED_ON else task]
    config = replace(on_task(config, task), menu=config.menu)  # what fits is used
    settings = replace(settings, repeats=repeats or settings.repeats)
    _, held_out = prepare(config, settings)
    statics = stored_statics(stored["statics"])
    lines = frontier_lines(search.frontier_widths, held_out.hosts.widths, search.widening_factors)
    if (held_out.type_names, lines) != (tuple(stored["types"]), statics.lines):
        raise ValueError(f"{STORED[task]} has other hosts or data than {task} has now")
    tried, worth = stored["learning_rates"]["tried"], stored["learning_rates"]["worth"]
    rate = tried[worth.index(max(worth))]["learning_rate"]
    held_out = with_test_rows(with_learning_rate(held_out, rate))
    rents, device = settings.rents, config.resolved_device()
    files = sorted(out.glob("controller_*.pt"))
    controllers = [LearnedController.load(path, device).policy for path in files]
    names = [blueprint.name for blueprint in held_out.menu]
    widened = {f"{name} in all slots": ConstantPlan(0, names.index(name)) for name in WIDENINGS}
    results = run_arms(
        held_out,
        [
            Arm(arms.HOST_ALONE, ConstantPlan()),
            *(Arm(name, plan) for name, plan in widened.items()),
            *([Arm(arms.HEURISTIC, HeuristicController(), rents)] if files else []),
            *(Arm(arms.LEARNED, LearnedController(policy), rents) for policy in controllers),
        ],
        rents,
    )
    searched = width_search(statics, results[arms.HOST_ALONE].outcome, rents, held_out)
    results[WIDTH_SEARCH] = ArmResult.of(WIDTH_SEARCH, rents, [searched], len(statics.hosts))
    found = Results(held_out, results, [], statics)
    verdicts = correct_for_number(
        [
            judge(claim, rent, found.lead(claim, index), found.note(claim, index))
            for claim in (CLAIMS if files else ())
            for index, rent in enumerate(rents)
        ]
    )
    print(f"\n## {task}: {len(files)} controllers, {held_out.num_hosts} hosts an arm, learning rate "
          f"{rate:g}, {time.perf_counter() - begun:.0f} s")  # fmt: skip
    if files:
        print(markdown_table(_lead_rows(verdicts, rents)))
        print("seeds a host:", json.dumps(_seeds(results[arms.LEARNED], names)))
    print(markdown_table(_arm_rows(results, rents)))
    alone = statics.frontier("own", config.norm, "params").accuracies[0]
    print(f"host alone, as stored: {100 * alone.mean():.1f}")
    # what widening a branch is worth: a plan that widens everything, at equal parameters
    frontier, groups = found.frontier(("own", config.norm, "params"))
    for name in widened:
        test, params = (results[name].array(field)[:, 0] for field in ("test", "params"))
        print(f"{name}, over own host widened at equal parameters: "
              f"{frontier.excess(test, params, groups)}")  # fmt: skip
    _save(out, task, results, verdicts)


def stored_statics(stored: dict[str, Any]) -> StaticPool:
    """Static networks from a report; what their training cost is not known."""
    validation, test = (torch.tensor(stored[name]).double() for name in ("validation", "test"))
    params, macs = (
        torch.tensor(stored[name]).double()[:, None, None].expand_as(test)
        for name in ("params", "macs")
    )
    zero = torch.zeros_like(test)
    hosts = tuple(StaticHost(tuple(host["widths"]), host["norm"]) for host in stored["hosts"])
    slots = (*test.shape, len(hosts[0].widths))
    networks = ArmOutcome(
        validation=validation,
        test=test,
        host_params=params,
        added_params=zero,
        params=params,
        macs=macs,
        compute_charge=zero,
        training_flops=zero,
        rolled_back=zero.bool(),
        blueprint=torch.full(slots, -1),
        style=torch.zeros(slots, dtype=torch.int64),
        alpha=torch.zeros(slots),
    )
    lines = {
        kind: tuple(tuple(tuple(widths) for widths in line) for line in of_kind)
        for kind, of_kind in stored["lines"].items()
    }
    return StaticPool(hosts, lines, networks)


def _lead_rows(verdicts: list[Verdict], rents: tuple[float, ...]) -> list[list[str]]:
    cells = [str(verdict) for verdict in verdicts]
    rows = [
        [f"{claim.rival} ({claim.measure})", *cells[k * len(rents) : (k + 1) * len(rents)]]
        for k, claim in enumerate(CLAIMS)
    ]
    return [["learned over", *(f"rent {rent:g}" for rent in rents)], *rows]


def _arm_rows(results: dict[str, ArmResult], rents: tuple[float, ...]) -> list[list[str]]:
    header = ["arm", *(f"score at rent {rent:g}" for rent in rents), "accuracy", "parameters"]
    rows = []
    for name, arm in results.items():
        scores = [f"{100 * score:.1f}" for score in arm.scores.mean((0, 2))]
        accuracy, params = (arm.array(field).mean((0, 2)) for field in ("test", "params"))
        rows.append([name, *scores, " / ".join(f"{100 * a:.1f}" for a in accuracy),
                     " / ".join(f"{p:,.0f}" for p in params)])  # fmt: skip
    return [header, *rows]


def _seeds(learned: ArmResult, names: list[str]) -> dict[str, dict[str, float]]:
    """Committed seeds of a blueprint per host, by rent."""
    blueprint = learned.array("blueprint")  # [K, R, H, S]
    per_host = blueprint.shape[0] * blueprint.shape[2]
    return {
        f"{rent:g}": {
            name: round(float((blueprint[:, index] == number).sum() / per_host), 2)
            for number, name in enumerate(names)
        }
        for index, rent in enumerate(learned.rents)
    }


def _save(out: Path, task: str, results: dict[str, ArmResult], verdicts: list[Verdict]) -> None:
    fields = ("test", "validation", "params", "macs", "blueprint")
    networks = {
        name: {field: arm.array(field).round(5).tolist() for field in fields}
        for name, arm in results.items()
    }
    bars = {
        f"{task}: {verdict.claim.rival}, rent {verdict.rent:g}": {
            "value": round(verdict.lead.mean, 4), "bar": 0.0, "met": verdict.decision == "holds"
        }
        for verdict in verdicts
    }  # fmt: skip
    packed = gzip.compress(json.dumps({"bars": bars, "arms": networks}).encode())
    report_of(out, task).write_bytes(packed)


def report_of(out: Path, task: str) -> Path:
    return out / f"growth_widening_{task}.json.gz"


if __name__ == "__main__":
    main()
