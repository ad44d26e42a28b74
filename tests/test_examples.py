"""Every example runs as it stands."""

import runpy
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
RECIPES = {"05_grow_in_transformers_trainer": "accelerate", "06_grow_in_lightning": "lightning"}


def example(path):
    """A recipe for another library runs in the slow suite, if the library is installed."""
    library = RECIPES.get(path.stem)
    if library is None:
        return pytest.param(path, id=path.stem)
    is_missing = find_spec(library) is None
    skip = pytest.mark.skipif(is_missing, reason=f"{library} is not installed")
    return pytest.param(path, id=path.stem, marks=[pytest.mark.slow, skip])


@pytest.mark.usefixtures("registries", "short_updates")
@pytest.mark.parametrize("path", [example(path) for path in FILES])
def test_example(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path)])
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    assert path.stem not in RECIPES or "closed" in printed  # by the last of its decisions


def test_there_are_examples():
    assert {path.stem for path in FILES} > set(RECIPES)
