"""`esper evaluate`: does growing help? A table of arms and a verdict per claim."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper.nissa.console import ProgressSink
from esper.runtime.ranks import join_ranks
from esper.simic.evaluation.evaluate import evaluate_run
from esper.simic.evaluation.report import EvaluationReport

PresetName = Literal["quick", "full"]


def evaluate(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    preset: PresetName = "quick",
    task: str | None = None,
    data: str = "",
    out: Path | None = None,
) -> None:
    """Compare a learned controller with its rivals on hosts and data held out from training.

    Args:
        runs: run folders; several must differ only in rng_seed and are evaluated as one arm
        preset: quick (two CPU cores, a minute or two) or full (GPU)
        task: evaluate on other data than the runs were trained on: mnist1d, digits, fashion_mnist
            or a task that they import
        data: the file or folder of such data; without --task, as in `esper train --data`
        out: folder for the report; default: the first run's folder
    """
    if not runs:
        raise ValueError("no run given; name its folder, as in: esper evaluate runs/quick-1")
    report = evaluate_with_bar(runs, preset, task, data)
    if join_ranks().is_first:
        show(report, out or runs[0], Console())


def evaluate_with_bar(
    runs: Sequence[Path], preset: str, task: str | None = None, data: str = ""
) -> EvaluationReport:
    """Evaluate on all ranks; a bar shows each phase."""
    with ExitStack() as stack:
        bars: dict[str, ProgressSink] = {}  # by phase

        def on_step(phase: str, done: int, total: int) -> None:
            if phase not in bars:
                stack.close()  # the bar of the phase before
                bars[phase] = stack.enter_context(ProgressSink(total, text=phase))
            bars[phase].update(done, phase)

        ranks = join_ranks()
        return evaluate_run(runs, preset, task=task, data=data, on_step=on_step, ranks=ranks)


def show(report: EvaluationReport, folder: Path, console: Console) -> None:
    """Print the tables and whether growing helped; write the report."""
    columns = len(report.settings.rents) + 3
    arms = [row[:columns] for row in report.arm_table()]
    console.print(_table("Arms on hosts and data held out from training", arms))
    console.print(_table("Claims", report.claim_table()))
    for text in (report.claim_note(), report.summary(), report.headline()):
        console.print(text, highlight=False, markup=False)  # intervals are in square brackets
    console.print("written: " + ", ".join(map(str, report.save(folder))), highlight=False)


def _table(title: str, rows: list[list[str]]) -> Table:
    table = Table(title=title)
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if number else "left")
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    return table
