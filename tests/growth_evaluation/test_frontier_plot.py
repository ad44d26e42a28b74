"""The picture of an evaluation shows every line and arm, and tells them apart."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from growth_evaluation.frontier_plot import draw_frontier

LINES = [
    {
        "label": label, "params": [100, 200, 400], "macs": [1e3, 3e3, 9e3],
        "accuracy": [0.5 + shift, 0.6 + shift, 0.7 + shift], "low": [0.4] * 3, "high": [0.9] * 3,
    }
    for label, shift in (("plain", 0.0), ("norm", 0.1), ("own plain", 0.02), ("own norm", 0.13))
]  # fmt: skip
POINTS = [
    {
        "label": label, "rent": rent, "params": 150 + 1000 * rent, "macs": 2e3, "accuracy": 0.6,
        "low": 0.5, "high": 0.7,
    }
    for label in ("learned", "host alone")
    for rent in (0.1, 0.2)
]  # fmt: skip


@pytest.fixture
def figure(tmp_path, monkeypatch):
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **options: drawn.append(self) or save(self, *args)
    )
    path = draw_frontier({"lines": LINES, "points": POINTS}, tmp_path / "frontier.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    return drawn[0]


def test_lines_of_the_two_frontiers_are_solid_and_dashed(figure):
    for axes, size in zip(figure.axes, ("params", "macs"), strict=True):
        lines = {line.get_label(): line for line in axes.get_lines()}
        for drawn, kind in zip(LINES, ("-", "-", "--", "--"), strict=True):
            line = lines[drawn["label"]]
            assert line.get_linestyle() == kind
            assert list(line.get_xdata()) == drawn[size]
            assert list(line.get_ydata()) == drawn["accuracy"]
        looks = {(line.get_linestyle(), line.get_color()) for line in list(lines.values())[:4]}
        assert len(looks) == 4


def test_the_legend_names_all_and_every_mean_is_in_the_picture(figure):
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["plain", "norm", "own plain", "own norm", "host alone", "learned"]
    low, high = figure.axes[0].get_ylim()
    assert low < 0.5
    assert high > 0.83


def test_a_plot_that_cannot_be_drawn_leaves_the_last_one(tmp_path, monkeypatch):
    path = draw_frontier({"lines": LINES, "points": POINTS}, tmp_path / "frontier.png")
    before = path.read_bytes()

    def fail(_figure, file, **_options):
        if isinstance(file, Path):
            file.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="No space"):
        draw_frontier({"lines": LINES, "points": POINTS}, path)
    assert path.read_bytes() == before
