"""Plot grown and static networks: test accuracy by parameters and by multiply-adds."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.runtime.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AXES = {"params": "parameters", "macs": "multiply-adds of one prediction"}
_LEARNED = "learned"  # drawn last and larger
_LEARNED_COLOUR = "#c1121f"
_LINE_STYLES = (("#8a8a8a", "-"), ("#333333", "-"), ("#8a8a8a", "--"), ("#333333", "--"))
_COLOURS = ("C0", "C1", "C2", "C4", "C5", "C6", "C8", "C9", "#1b4332", "#3a0ca3")
_MARKERS = "osD^vPX<>h"


def draw_frontier(plot: Mapping[str, Any], path: Path | str) -> Path:
    """Draw the "plot" entry of an evaluation's JSON as a PNG; returns its path.

    Each line has a label and the lists "params", "macs", "accuracy", "low" and "high". The first
    two lines are solid, the others dashed. Each point has a label, a rent and the same keys as
    numbers. Points with the same label are joined in order of rent.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)  # no window and no pyplot state
    panels = figure.subplots(1, 2, sharey=True)
    for axes, size in zip(panels, _AXES, strict=True):
        _draw_lines(axes, plot["lines"], size)
        _draw_points(axes, plot["points"], size)
        _label_sizes(axes)
        axes.set_xlabel(_AXES[size])
        axes.grid(alpha=0.25)
    panels[0].set_ylim(*_limits(plot))
    panels[0].set_ylabel("test accuracy, 95 % intervals")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    image, path = io.BytesIO(), Path(path)
    figure.savefig(image, format="png", dpi=130)
    atomic_write(path, lambda file: file.write(image.getbuffer()))
    return path


def _draw_lines(axes: "Axes", lines: Sequence[Mapping[str, Any]], size: str) -> None:
    for line, (colour, dashes) in zip(lines, _LINE_STYLES, strict=False):
        axes.plot(line[size], line["accuracy"], dashes, color=colour, label=line["label"], zorder=1)
        axes.fill_between(line[size], line["low"], line["high"], color=colour, alpha=0.18, lw=0)


def _draw_points(axes: "Axes", points: Sequence[Mapping[str, Any]], size: str) -> None:
    labels = sorted(dict.fromkeys(p["label"] for p in points), key=lambda name: name == _LEARNED)
    for number, label in enumerate(labels):
        own = [point for point in points if point["label"] == label]
        is_learned = label == _LEARNED
        colour = _LEARNED_COLOUR if is_learned else _COLOURS[number % len(_COLOURS)]
        middle = [p["accuracy"] for p in own]
        errors = [
            [p["accuracy"] - p["low"] for p in own],
            [p["high"] - p["accuracy"] for p in own],
        ]
        axes.errorbar(
            [p[size] for p in own],
            middle,
            yerr=errors,
            label=label,
            color=colour,
            marker="*" if is_learned else _MARKERS[number % len(_MARKERS)],
            markersize=15 if is_learned else 7,
            linewidth=1.6 if is_learned else 0.8,
            elinewidth=1,
            capsize=2,
            alpha=1.0 if is_learned else 0.8,
            zorder=3 if is_learned else 2,
        )


def _label_sizes(axes: "Axes") -> None:
    """Logarithmic axis with ticks at 500, 1k, 2k, 5k, ..."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda size, _: f"{size / 1000:g}k" if size >= 1000 else f"{size:g}")
    )
    axes.xaxis.set_minor_formatter(NullFormatter())


def _limits(plot: Mapping[str, Any]) -> tuple[float, float]:
    """A y range that shows every mean; wide intervals may be cut off."""
    means = [point["accuracy"] for point in plot["points"]]
    means += [accuracy for line in plot["lines"] for accuracy in line["accuracy"]]
    margin = max(0.03, 0.15 * (max(means) - min(means)))
    return max(0.0, min(means) - margin), min(1.0, max(means) + margin)
