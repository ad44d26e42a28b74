"""The code on the page about PPO runs as it stands."""

import re
import warnings
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "ppo.md"


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 12
    names: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    assert "'move': " in capsys.readouterr().out
    assert list((tmp_path / "curves").iterdir())
    assert names["model"].is_finished
