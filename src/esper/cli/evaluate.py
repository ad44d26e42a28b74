"""`esper evaluate`: was it worth growing? Every honest arm, a verdict per claim, the frontier."""

from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from esper.nissa.frontier_plot import draw_frontier
from esper.simic.evaluation.evaluate import evaluate_run
from esper.simic.evaluation.report import EvaluationReport

PresetName = Literal["quick", "full", "transfer", "transfer_large"]


def evaluate(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    preset: PresetName = "quick",
    task: Literal["mnist1d", "digits", "fashion_mnist"] | None = None,
    out: Path | None = None,
) -> None:
    """Compare what a run has learned with every honest arm, on types it never saw.

    Args:
        runs: folders of runs that differ in their rng_seed alone; their controllers count as one arm
        preset: quick (two CPU cores, a minute or two), full (a GPU), or, for --task, transfer and
            transfer_large (a GPU; the latter for fashion_mnist, whose networks are large)
        task: other data than the runs were trained on
        out: where the report goes; the first run's folder if not given
    """
    if not runs:
        raise ValueError("name the folder of a run: esper evaluate runs/quick-1")
    console = Console()
    report = evaluate_run(runs, preset, task=task, say=lambda text: console.print(f"- {text}"))
    show(report, out or runs[0], console)


def show(report: EvaluationReport, folder: Path, console: Console) -> None:
    """The table, the verdicts, and the paths of what is written."""
    console.print(report.table())
    for verdict in report.verdicts:
        text = f"({verdict.letter}) {verdict.decision}: {verdict.sentence}"
        console.print(text, highlight=False, markup=False)  # intervals are in square brackets
    console.print(report.summary(), highlight=False, markup=False)
    written = [*report.save(folder)]
    written.append(draw_frontier(report.plot(), folder / f"{report.file_name}.png"))
    console.print("written: " + ", ".join(map(str, written)), highlight=False)
