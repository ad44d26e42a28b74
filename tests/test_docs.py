"""What the pages on training say can be done, can be done."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from esper.cli import main, train
from esper.nissa.database import RunDatabase
from esper.simic.training.distribution import choice_labels
from esper.simic.training.growth_training import GrowthTraining
from support.training_configs import ORACLE

DOCS = Path(__file__).parents[1] / "docs"
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
    report = SimpleNamespace(save=lambda folder: None, brief=lambda: "")
    monkeypatch.setattr(train, "evaluate_with_bar", lambda *given: report)
    exec(BLOCKS[0], {})
    (tmp_path / "my_module.py").write_text(BLOCKS[1])
    page = (DOCS / "training.md").read_text()
    commands = re.findall(r"^esper (train --(?:data mine.npz --|import).*)$", page, re.MULTILINE)
    assert len(commands) == 2
    small = "--rounds=1 --device=cpu --host_batch.minibatches=1 --host_batch.batch-size=8"
    for command in commands:
        main([*command.split(), *small.split()])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{tmp_path / 'mine.npz'} on cpu" in printed
    assert "23 conv2d hosts" in printed
    assert "sensors on cpu" in printed
    assert "23 two_wide hosts" in printed
