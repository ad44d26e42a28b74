"""Progress without a terminal: some lines with means of the last values."""

from esper.nissa.console import LINES, ProgressSink


def test_metrics_are_means_over_the_window_and_gaps_are_skipped(capsys):
    shown = {"lead": lambda value: f"lead {value:+.1f}", "other": str}
    with ProgressSink(4, shown, window=2, text="compiling") as sink:
        for step, lead in enumerate((1.0, 2.0, float("nan"), 4.0), start=1):
            sink.record(step, {"lead": lead})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiling"
    assert [line.rpartition("lead ")[2] for line in lines[1:]] == ["+1.0", "+1.5", "+1.5", "+3.0"]
    assert "4 / 4 steps  0:00" in lines[-1]


def test_a_long_run_prints_few_lines(capsys):
    with ProgressSink(1000, unit="rounds") as sink:
        for step in range(1, 1001):
            sink.update(step, "")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == LINES
    assert "1,000 / 1,000 rounds" in lines[-1]
