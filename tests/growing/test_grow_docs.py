"""The code on the page about growing one's own model runs as it stands."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "grow.md"


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    shown = capsys.readouterr().out
    assert "at most 1,000 grown" in shown
    assert "ReLU    VECTOR  (8,)" in shown
    growth = names["growth"]
    assert growth.is_closed
    assert "GERMINATE" in {decision.op for decision in growth.ledger.decisions}
