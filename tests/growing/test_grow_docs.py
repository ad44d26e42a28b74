"""The code on the page about growing one's own model runs as it stands."""

from support.pages import run_page


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_page("grow.md", num_blocks=5)
    shown = capsys.readouterr().out
    assert "at most 1,000 grown" in shown
    assert "ReLU    VECTOR  (8,)" in shown
    assert "ReLU    SERIES  (4, any)" in shown
    growth = names["growth"]
    assert growth.is_closed
    assert "GERMINATE" in {decision.op for decision in growth.ledger.decisions}
