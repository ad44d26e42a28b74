"""What the README and the map of packages say is so: every snippet runs and prints what is shown."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esper.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAP = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+?) \| .+ \|$", MAP, flags=re.MULTILINE)
SNIPPETS = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", README, flags=re.DOTALL)
(TRAINED,) = re.findall(r"make test.*?```\n```text\n(.*?)```", README, flags=re.DOTALL)


def shape(text):
    """Text without its numbers and verdicts."""
    text = re.sub(
        r"Growing helped|Growing did not help|It is undecided whether .* helped", "V", text
    )
    text = re.sub(r" \(undecided\)", "", text)
    text = re.sub(r"plan: [^,]+", "plan: P", text)
    text = re.sub(r"runs/quick-1|/\S*/run\b|\S*esper watch", "PATH", text)
    return [re.sub(r"[+-]?\d[\d,.]*%?", "#", line).split() for line in text.splitlines()]


@pytest.mark.parametrize(("package", "role", "what"), PACKAGES)
def test_the_map_says_what_the_packages_say(package, role, what):
    docstring = importlib.import_module(f"esper.{package}").__doc__
    assert docstring.strip().splitlines()[0] == f"{package}: {role} -- {what}."


def test_every_package_is_on_the_map():
    folders = {path.parent.name for path in (ROOT / "src" / "esper").glob("*/__init__.py")}
    assert {package for package, _, _ in PACKAGES} == folders


def test_the_readme_is_short():
    assert len(README.split()) <= 900


@pytest.mark.parametrize(("code", "output"), SNIPPETS, ids=["adapt", "ppo"])
def test_a_snippet_runs_as_pasted_and_prints_what_is_shown(code, output, tmp_path):
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert shape(run.stdout) == shape(output)


@pytest.mark.slow
def test_training_ends_with_the_four_lines_that_are_shown(tmp_path, capsys):
    small = "--rounds=1 --host_batch.minibatches=1 --host_batch.validation-rows=20 --device=cpu"
    main(["train", *small.split(), "--out", str(tmp_path / "run")])
    lines = "\n".join(capsys.readouterr().out.splitlines()[-4:])
    lines = re.sub(r"with: .* watch", "with: .venv/bin/esper watch", lines)
    assert shape(lines) == shape(TRAINED)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/ppo.md", "CONTRIBUTING.md"])  # fmt: skip
def test_named_files_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:src|docs|examples|tests|benchmarks)/[\w/.-]+\.(?:py|md))`", text))
    for name in named:
        assert (ROOT / name).exists(), name
