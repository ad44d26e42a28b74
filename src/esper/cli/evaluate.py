"""`esper evaluate`: does growing help? One table of a run's controller and its rivals."""

from pathlib import Path
from typing import Literal

import tyro

from esper.nissa.console import ProgressSink
from esper.simic.growth.comparison import NUM_PHASES, PRESETS, Comparison, evaluate_run

PresetName = Literal["quick", "full"]


def evaluate(
    run: tyro.conf.Positional[Path],
    preset: PresetName = "quick",
    task: str = "",
    data: str = "",
    out: Path | None = None,
) -> None:
    """Compare a learned controller with its rivals on hosts and data held out from training.

    Args:
        run: the run's folder
        preset: quick (two CPU cores, half a minute) or full (GPU)
        task: evaluate on other data than the run was trained on: mnist1d, digits, fashion_mnist
            or a task that it imports
        data: the file or folder of such data; without --task, as in `esper train --data`
        out: folder for the report; default: the run's folder
    """
    comparison = evaluate_with_bar(run, preset, task, data)
    print(comparison.markdown())
    print(f"written: {comparison.save(out or run)}")


def evaluate_with_bar(run: Path, preset: PresetName, task: str = "", data: str = "") -> Comparison:
    with ProgressSink(NUM_PHASES, unit="phases") as bar:
        comparison = evaluate_run(run, PRESETS[preset], task, data, bar.update)
        bar.update(NUM_PHASES, "compared")
    return comparison
