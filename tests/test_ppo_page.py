"""The code on the page about PPO runs as it stands."""

import warnings

import pytest

from support.pages import run_page


@pytest.mark.usefixtures("short_updates")
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = run_page("ppo.md", num_blocks=12)
    printed = capsys.readouterr().out
    assert printed.startswith("masks: none found, all actions legal\n")
    assert "'move': " in printed
    assert list((tmp_path / "curves").iterdir())
    assert names["model"].is_finished
