"""The run's database: every decision, readable while it is written, whole whatever happens."""

import json
import sqlite3
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.leyline.factored_actions import FactoredActionSpace, Head
from esper.leyline.records import Episodes, RoundRecord
from esper.nissa.database import RunDatabase

SPACE = FactoredActionSpace((Head("op", 3), Head("slot", 2, given=("op",))))
CHOICES = {"op": ["WAIT", "GERMINATE", "PRUNE"], "slot": ["slot 0", "slot 1"]}


def make_record(number, num_envs=3, num_steps=4, num_features=5):
    rng = torch.Generator().manual_seed(number)

    def draw(*shape):
        return torch.rand(shape, generator=rng)

    legal = draw(num_envs, num_steps, 5) < 0.6
    legal[..., 0] = True  # WAIT
    return RoundRecord(
        round=number,
        metrics={"episode/score": 0.5 + number, "episode/accuracy": 0.75, "ppo/x": float("nan")},
        hosts=[f"4-{env}" for env in range(num_envs)],
        variants=["plain"] * num_envs,
        rollback_reasons=(None, "diverged", None),
        episodes=Episodes(
            scores=draw(num_envs),
            rent=draw(num_envs),
            host_params=torch.full((num_envs,), 858.0),
            lengths=torch.tensor([4, 2, 4]),
            rolled_back=torch.tensor([False, True, False]),
            accuracy=draw(num_envs, num_steps),
            added_params=torch.randint(900, (num_envs, num_steps), generator=rng).float(),
            cost_params=torch.randint(300, (num_envs, num_steps), generator=rng).float(),
        ),
        actions=torch.randint(2, (num_envs, num_steps, 2), generator=rng),
        legal=legal,
        rewards=draw(num_envs, num_steps),
        values=draw(num_envs, num_steps),
        probabilities=draw(num_envs, num_steps),
        observed_envs=torch.tensor([1, 2]),
        observations=draw(2, num_steps, num_features),
    )


def open_database(path, **settings):
    return RunDatabase(path, SPACE, choices=CHOICES, details={"device": "cpu"}, **settings)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.sqlite"


def read(path, query, *values):
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    rows = [dict(row) for row in connection.execute(query, values)]
    connection.close()
    return rows


def test_there_is_a_row_for_each_decision_that_was_made(path):
    record = make_record(1)
    with open_database(path) as database:
        database.add(record)
    rows = read(path, "SELECT * FROM decisions ORDER BY env, step")
    made = [(env, step) for env in range(3) for step in range([4, 2, 4][env])]
    assert [(row["env"], row["step"]) for row in rows] == made
    for row in rows:
        at = row["env"], row["step"]
        legal = record.legal[at].tolist()
        for head, part, index in (("op", legal[:3], 0), ("slot", legal[3:], 1)):
            assert row[f"legal_{head}"] == sum(2**c for c, is_legal in enumerate(part) if is_legal)
            assert row[head] == (record.actions[at][index].item() if any(part) else None)
        before = record.episodes.accuracy[at[0], at[1] - 1].item() if at[1] else None
        assert row["accuracy_before"] == before
        assert row["accuracy"] == record.episodes.accuracy[at].item()
        assert row["reward"] == record.rewards[at].item()
        assert row["value"] == record.values[at].item()
        assert row["probability"] == record.probabilities[at].item()
        assert row["cost_params"] == record.episodes.cost_params[at].item()
        assert row["added_params"] == record.episodes.added_params[at].item()


def test_episodes_end_with_their_last_decision(path):
    record = make_record(1)
    with open_database(path) as database:
        database.add(record)
    for env, row in enumerate(read(path, "SELECT * FROM episodes ORDER BY env")):
        last = [3, 1, 3][env]
        assert row["host"] == f"4-{env}"
        assert row["rolled_back"] == (env == 1)
        assert row["rollback_reason"] == ("diverged" if env == 1 else None)
        assert row["steps"] == last + 1
        assert row["accuracy"] == record.episodes.accuracy[env, last].item()
        assert row["added_params"] == record.episodes.added_params[env, last].item()
        assert row["score"] == record.episodes.scores[env].item()
        assert row["rent"] == record.episodes.rent[env].item()


def test_observations_are_float32_of_the_sampled_envs(path):
    record = make_record(1)
    with open_database(path) as database:
        database.add(record)
    rows = read(path, "SELECT * FROM observations ORDER BY env, step")
    assert [(r["env"], r["step"]) for r in rows] == [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
    features = np.frombuffer(rows[3]["features"], np.float32)
    assert np.array_equal(features, record.observations[1, 1].numpy())


def test_rounds_and_runs_are_told_with_their_names(path):
    with open_database(path) as database:
        database.add(make_record(1))
    (row,) = read(path, "SELECT * FROM rounds")
    assert (row["round"], row["score"], row["accuracy"]) == (1, 1.5, 0.75)
    assert json.loads(row["metrics"]) == {"episode/score": 1.5, "episode/accuracy": 0.75}
    (run,) = read(path, "SELECT * FROM runs")
    assert (run["first_round"], json.loads(run["details"])) == (1, {"device": "cpu"})
    named = read(path, "SELECT name FROM choices WHERE head = 'op' AND choice = 2")
    assert named == [{"name": "PRUNE"}]


def test_it_can_be_read_while_a_run_writes(path):
    with open_database(path) as database:
        reader = sqlite3.connect(path)
        for number in (1, 2, 3):
            database.add(make_record(number))
            database.flush()
            assert reader.execute("SELECT count(*) FROM rounds").fetchone() == (number,)
            assert reader.execute("SELECT count(*) FROM decisions").fetchone() == (10 * number,)
        reader.close()


def test_a_reader_that_stays_holds_no_writer_up(path):
    with open_database(path) as database:
        database.add(make_record(1))
        database.flush()
        reader = sqlite3.connect(path)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM rounds").fetchone()
        database.add(make_record(2))
        database.flush()
        assert reader.execute("SELECT count(*) FROM rounds").fetchone() == (1,)  # its own moment
        reader.rollback()
        assert reader.execute("SELECT count(*) FROM rounds").fetchone() == (2,)
        reader.close()


def test_rounds_after_the_checkpoint_are_forgotten_and_told_again(path):
    with open_database(path) as database:
        for number in (1, 2, 3):
            database.add(make_record(number))
    with open_database(path, rounds_done=1) as database:
        database.add(replace(make_record(2), hosts=["again"] * 3))
    for table in ("rounds", "episodes", "decisions", "observations"):
        rounds = read(path, f"SELECT DISTINCT round FROM {table} ORDER BY round")
        assert [row["round"] for row in rounds] == [1, 2], table
    assert {r["host"] for r in read(path, "SELECT host FROM episodes WHERE round = 2")} == {"again"}
    assert [run["first_round"] for run in read(path, "SELECT * FROM runs")] == [1, 2]


def test_a_full_disk_is_an_error_and_leaves_whole_rounds(path):
    """SQLite's own limit on pages stands in for the disk's."""
    with open_database(path) as database:
        database.add(make_record(1))
        database.flush()
        (pages,) = database._connection.execute("PRAGMA page_count").fetchone()
        database._connection.execute(f"PRAGMA max_page_count = {pages}")
        database.add(make_record(2, num_steps=4, num_features=10_000))
        with pytest.raises(sqlite3.Error, match="full"):
            database.flush()
    assert read(path, "SELECT count(*) AS n FROM rounds") == [{"n": 1}]
    assert read(path, "SELECT count(*) AS n FROM decisions") == [{"n": 10}]
    assert read(path, "PRAGMA integrity_check") == [{"integrity_check": "ok"}]


def test_an_error_reaches_whoever_adds_the_next_round(path):
    database = open_database(path)
    database.add(make_record(1))
    database.add(make_record(1))  # the same round twice
    with pytest.raises(sqlite3.IntegrityError):
        database.add(make_record(2))
    database.__exit__(None, None, None)


def test_an_error_of_the_last_round_is_not_lost(path):
    database = open_database(path)
    database.add(make_record(1))
    database.add(make_record(1))
    with pytest.raises(sqlite3.IntegrityError):
        database.__exit__(None, None, None)


def test_a_head_with_more_choices_than_bits_is_refused(path):
    wide = FactoredActionSpace((Head("slot", 64),))
    with pytest.raises(ValueError, match="'slot': 64.*63 bits"):
        RunDatabase(path, wide, choices={}, details={})
    assert not path.exists()


def test_a_resumed_run_reads_the_details_and_rounds_of_the_run_before(path):
    with open_database(path) as database:
        assert (database.previous_details, database.rounds_found) == ({}, 0)
        database.add(make_record(1))
    with open_database(path, rounds_done=1) as database:
        assert (database.previous_details, database.rounds_found) == ({"device": "cpu"}, 1)


def flip_in_a_page(path):
    contents = bytearray(path.read_bytes())
    contents[4096:4196] = bytes(100)  # the second page
    path.write_bytes(contents)


def change_version(path):
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"not a database" * 100),
        lambda path: path.write_bytes(path.read_bytes()[:6000]),
        flip_in_a_page,
        change_version,
    ],
)
def test_a_damaged_database_is_named_with_the_way_out(path, damage):
    with open_database(path) as database:
        database.add(make_record(1))
    damage(path)
    with pytest.raises(ValueError, match=rf"{path} cannot be used: (.|\n)*mv {path} {path}.old"):
        open_database(path, rounds_done=1)
    path.rename(f"{path}.old")
    with open_database(path, rounds_done=1) as database:
        assert database.rounds_found == 0
