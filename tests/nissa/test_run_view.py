"""What is shown of a run: curves, hosts with their seeds, summaries and differences."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from esper.cli import main
from esper.nissa.run_view import compare, find_runs, view_run
from esper.nissa.watch_server import health_warnings
from support.training_configs import ORACLE, flags


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two runs that differ in their rng_seed."""
    folder = tmp_path_factory.mktemp("all") / "runs"
    for seed in (0, 1):
        config = flags(replace(ORACLE, rounds=3))
        main(["train", *config, f"--rng-seed={seed}", "--out", str(folder / f"run-{seed}")])
    return folder


def test_runs_are_found_by_name_at_any_level(runs):
    assert list(find_runs(runs)) == ["run-0", "run-1"]
    assert find_runs(runs / "run-0") == {"run-0": runs / "run-0"}
    assert list(find_runs(runs.parent)) == ["runs/run-0", "runs/run-1"]
    with pytest.raises(ValueError, match="there is no run.sqlite; start one with `esper train`"):
        find_runs(runs / "run-0" / "nothing")


def test_a_view_agrees_with_the_database(runs):
    view = view_run(runs / "run-0")
    with closing(sqlite3.connect(runs / "run-0" / "run.sqlite")) as connection:
        scores = connection.execute("SELECT round, score FROM rounds").fetchall()
        seeds = connection.execute(
            "SELECT count(*) FROM decisions WHERE round = 3 AND op = 1"
        ).fetchone()[0]
        first = connection.execute(
            "SELECT probability, value FROM decisions WHERE round = 3 AND env = 2 AND step = 0"
        ).fetchone()
    assert view["curves"]["score"] == [list(row) for row in scores]
    assert (view["rounds"], view["totalRounds"], view["round"]) == (3, 3, 3)
    assert len(view["hosts"]) == ORACLE.num_envs
    assert sum(len(slot) for host in view["hosts"] for slot in host["slots"]) == seeds
    decision = view["hosts"][2]["decisions"][0]
    assert (decision["probability"], decision["value"]) == first
    mean = sum(score for _, score in scores) / 3
    assert view["summary"]["score"] == f"{mean:.1%}"
    assert sum(view["timeShares"].values()) == pytest.approx(1)


def test_seeds_live_from_germination_to_their_end(runs):
    for host in view_run(runs / "run-1", 1)["hosts"]:
        for slot, seeds in enumerate(host["slots"]):
            for seed in seeds:
                born = host["decisions"][seed["born"]]["choices"]
                assert born["op"] == "GERMINATE"
                assert born["slot"] == f"slot {slot}"
                assert born["blueprint"] == seed["blueprint"]
                for name, op in (("committed", "FOSSILIZE"), ("end", "PRUNE")):
                    if seed[name] is not None:
                        assert host["decisions"][seed[name]]["choices"]["op"] == op


def test_two_runs_are_compared_in_the_terminal_and_in_code(runs, capsys):
    one, other = runs / "run-0", runs / "run-1"
    main(["compare", str(one), str(other)])
    printed = capsys.readouterr().out
    rows = compare(view_run(one), view_run(other))
    assert ["rng_seed", "0", "1"] in rows
    assert ["rounds", "3 of 3", "3 of 3"] in rows
    assert all(" ".join(row).split() == line.split() for row, line in
               zip(rows, printed.splitlines()[1:], strict=True))  # fmt: skip


def test_a_run_that_has_just_started_can_be_viewed(runs, tmp_path):
    with closing(sqlite3.connect(runs / "run-0" / "run.sqlite")) as connection:
        connection.execute(f"VACUUM INTO '{tmp_path / 'run.sqlite'}'")
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as connection:
        for table in ("rounds", "episodes", "decisions"):
            connection.execute(f"DELETE FROM {table}")
        connection.commit()
    view = view_run(tmp_path)
    assert view["hosts"] == []
    assert view["summary"]["score"] == "-"
    (tmp_path / "run.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(ValueError, match=r"run.sqlite cannot be read"):
        view_run(tmp_path)


def test_warnings_of_ppo_are_those_of_the_run(runs):
    metrics = view_run(runs / "run-0")["metrics"]
    assert health_warnings(metrics, {}) == []
    stuck = [{**entry, "episode/germinations": 0.0} for entry in metrics * 5]
    (warning,) = health_warnings(stuck, json.loads("{}"))
    assert "no seed has germinated" in warning
