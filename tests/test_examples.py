"""Every example runs as it stands."""

import runpy
import warnings
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.usefixtures("registries", "short_updates")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_there_are_examples():
    assert EXAMPLES
