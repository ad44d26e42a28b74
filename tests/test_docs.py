"""What the pages on training say can be done, can be done."""

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

import esper
from esper.cli import main, train
from esper.nissa.database import RunDatabase
from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.hosts_and_data import choice_labels
from support.training_configs import ORACLE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/results/*.md")])
QUERIES = re.findall(r"```sql\n(.*?)```", (DOCS / "training.md").read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The records of a run, and the database that they are in."""
    training, records = GrowthTraining(ORACLE), []
    path = tmp_path_factory.mktemp("run") / "run.sqlite"
    environment = training.environment
    names = choice_labels(environment)
    with RunDatabase(path, environment.action_space, choices=names, details={}) as database:

        def on_round(record):
            records.append(record)
            database.add(record)

        training.run(on_round)
    return records, path


@pytest.mark.parametrize("query", QUERIES)
def test_the_queries_answer(query, finished_run):
    with closing(sqlite3.connect(finished_run[1])) as connection:
        rows = connection.execute(query).fetchall()
    assert rows
    assert any(value is not None for value in rows[0])


def test_every_table_is_described(finished_run):
    page = (DOCS / "training.md").read_text()
    with closing(sqlite3.connect(finished_run[1])) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        for (table,) in tables.fetchall():
            (row,) = re.findall(rf"^\| `{table}` \| (.*) \|$", page, flags=re.MULTILINE)
            for _, column, *_ in connection.execute(f"PRAGMA table_info({table})"):
                assert f"`{column}`" in row or column.startswith("legal_"), (table, column)


def test_every_metric_of_a_growth_run_is_explained(finished_run):
    page = (DOCS / "metrics.md").read_text()
    for name in {name for record in finished_run[0] for name in record.metrics}:
        explained = re.sub(r"(entropy|fraction)/\w+$", r"\1/HEAD", name)
        assert f"`{explained}`" in page, name


BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "training.md").read_text(), re.DOTALL)


def test_the_code_runs():
    block = BLOCKS[-1]
    assert compile(block, "docs/training.md", "exec")
    for line in block.splitlines():
        if line.startswith("from "):
            exec(line, {})


def test_the_example_on_your_data_trains(tmp_path, monkeypatch, capsys, registries):
    """Both blocks and both commands of the section, with the smallest of runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    report = SimpleNamespace(save=lambda folder: None, brief=str, figures=dict)
    monkeypatch.setattr(train, "evaluate_with_bar", lambda *given: report)
    exec(BLOCKS[0], {})
    (tmp_path / "my_module.py").write_text(BLOCKS[1])
    page = (DOCS / "training.md").read_text()
    commands = re.findall(r"^esper (train --(?:data mine.npz|import .*))$", page, re.MULTILINE)
    assert len(commands) == 2
    small = "--rounds=1 --device=cpu --host_batch.minibatches=1 --host_batch.batch-size=8"
    for command in commands:
        main([*command.split(), *small.split()])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{tmp_path / 'mine.npz'} on cpu" in printed
    assert "23 conv2d hosts" in printed
    assert "sensors on cpu" in printed
    assert "23 two_wide hosts" in printed


def anchors(page):
    """The ids that GitHub and MkDocs give the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if not re.match(r"https?://", target):
            there = (page.parent / path) if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


def test_every_page_is_in_the_site_and_every_public_name_in_its_reference():
    site, reference = (ROOT / "mkdocs.yml").read_text(), (DOCS / "api.md").read_text()
    for page in DOCS.rglob("*.md"):
        assert str(page.relative_to(DOCS)) in site, page
    for module, name in esper._PUBLIC.values():
        assert not name or f"::: {module}.{name}\n" in reference, name


def test_the_tutorial_runs_and_prints_what_is_shown(tmp_path):
    page = (DOCS / "tutorial.md").read_text()
    blocks = re.findall(r"```(python|text)\n(.*?)```", page, flags=re.DOTALL)
    code = "".join(text for kind, text in blocks if kind == "python")
    shown = "".join(text for kind, text in blocks if kind == "text")
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    numbers = re.compile(r"[+-]?\d[\d,.]*")
    first, _, rest = shown.partition("\n")
    assert numbers.sub("#", run.stdout).startswith(numbers.sub("#", first)[:15])
    assert run.stdout.endswith(rest[rest.index("run.html") :])
    decision = re.compile(r"\d+ (GERMINATE|FOSSILIZE) at \S+")
    assert all(decision.fullmatch(line) for line in run.stdout.splitlines()[1:-3])


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "esper.grow" in (tmp_path / "tutorial" / "index.html").read_text()


def test_the_version_is_the_same_everywhere():
    assert f"version: {esper.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {esper.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", ["ppo.md", "rollout-buffer.md"])
def test_tests_that_guard_a_detail_exist(page):
    """A page that names the test of each detail names tests that there are."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / page).read_text()))
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing = {name for name in named if f"def {name}(" not in sources}
    assert not missing
