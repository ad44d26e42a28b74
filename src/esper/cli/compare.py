"""`esper compare A B`: two runs, one line per figure."""

from pathlib import Path

import tyro

from esper.nissa.run_view import compare as compare_views
from esper.nissa.run_view import view_run


def compare(one: tyro.conf.Positional[Path], other: tyro.conf.Positional[Path]) -> None:
    """Print how two runs differ: means of their last ten rounds, and their settings.

    Args:
        one: a run's folder
        other: another run's folder
    """
    rows = [["", str(one), str(other)], *compare_views(view_run(one), view_run(other))]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
