"""A run's rounds, episodes and decisions in SQLite, readable while the run is writing.

    with RunDatabase(path, action_space, choices=names, details={...}) as database:
        database.add(record)            # one round, written in the background in one transaction
        database.flush()                # wait until it is on disk

| table | one row per |
|---|---|
| `runs` | start or resume of the run |
| `rounds` | round: its metrics as JSON |
| `episodes` | grown host |
| `decisions` | decision: the choice, the legal choices, its cost and the result |
| `observations` | observed decision: its features, float32 |
| `choices` | choice of a head: its name |

A head without legal choices is NULL. `legal_HEAD` has bit c set if choice c was legal.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from itertools import repeat
from pathlib import Path
from typing import Any, Self

import torch

from esper.leyline.factored_actions import FactoredActionSpace
from esper.leyline.records import RoundRecord

Rows = Iterator[tuple[Any, ...]]
_VERSION = 3  # raise it when a table changes
_MOST_BITS = 63  # a SQLite integer without its sign bit
_BUSY_TIMEOUT_S = 30.0  # a reader can delay a WAL checkpoint, never a write

_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    started TEXT NOT NULL, first_round INTEGER NOT NULL, details TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS choices (
    head TEXT NOT NULL, choice INTEGER NOT NULL, name TEXT NOT NULL, PRIMARY KEY (head, choice)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, ended TEXT NOT NULL, score REAL, accuracy REAL, metrics TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS episodes (
    round INTEGER, env INTEGER, host TEXT, variant TEXT, rent REAL, host_params INTEGER,
    steps INTEGER, rolled_back INTEGER, rollback_reason TEXT, accuracy REAL, added_params INTEGER,
    score REAL,
    PRIMARY KEY (round, env)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS observations (
    round INTEGER, env INTEGER, step INTEGER, features BLOB, PRIMARY KEY (round, env, step)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS decisions (
    round INTEGER, env INTEGER, step INTEGER, {heads}, {legal},
    cost_params INTEGER, accuracy_before REAL, accuracy REAL, added_params INTEGER,
    reward REAL, value REAL, probability REAL, PRIMARY KEY (round, env, step)
) WITHOUT ROWID;
"""


class RunDatabase:
    """The database of one run; a resumed run opens it again."""

    def __init__(
        self,
        path: str | Path,
        action_space: FactoredActionSpace,
        *,
        choices: Mapping[str, Sequence[str]],
        details: Mapping[str, Any],
        rounds_done: int = 0,
    ):
        """`choices` names each head's choices; rounds after `rounds_done` are deleted.

        A file that is damaged, or of another version, raises a ValueError.
        """
        if max(action_space.sizes) > _MOST_BITS:
            raise ValueError(
                f"heads of {action_space.sizes_by_name} choices; legal choices are stored in "
                f"{_MOST_BITS} bits, so use at most {_MOST_BITS}"
            )
        self._space = action_space
        self._connection = sqlite3.connect(
            path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        try:
            self._open(choices, details, rounds_done)
        except (sqlite3.DatabaseError, ValueError) as error:
            self._connection.close()
            code = getattr(error, "sqlite_errorcode", None)
            if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY):
                raise
            raise ValueError(
                f"{path} cannot be used: {error}. Move it away with\n  mv {path} {path}.old\nand "
                f"resume: a new one then starts at round {rounds_done + 1}"
            ) from error

    def _open(
        self, choices: Mapping[str, Sequence[str]], details: Mapping[str, Any], rounds_done: int
    ) -> None:
        execute = self._connection.execute
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")  # a flushed round survives a power loss
        (version,) = execute("PRAGMA user_version").fetchone()
        (tables,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and version != _VERSION:
            raise ValueError("another version of Esper wrote it")
        (damage,) = execute("PRAGMA quick_check(1)").fetchone()
        if damage != "ok":
            raise ValueError(f"it is damaged ({damage})")
        with self._connection:  # commits, or rolls back
            execute("BEGIN IMMEDIATE")
            names = self._space.names
            heads, legal = (", ".join(f"{k}{n} INTEGER" for n in names) for k in ("", "legal_"))
            for statement in _TABLES.format(heads=heads, legal=legal).split(";\n"):
                execute(statement)
            execute(f"PRAGMA user_version = {_VERSION}")
            last = execute("SELECT details FROM runs ORDER BY rowid DESC LIMIT 1").fetchone()
            self.previous_details: dict[str, Any] = json.loads(last[0]) if last else {}
            for table in ("rounds", "episodes", "decisions", "observations"):
                execute(f"DELETE FROM {table} WHERE round > ?", (rounds_done,))
            self.rounds_found: int = execute("SELECT count(*) FROM rounds").fetchone()[0]
            run = _now(), rounds_done + 1, json.dumps(details)
            execute("INSERT INTO runs VALUES (?, ?, ?)", run)
            named = [(head, c, name) for head in choices for c, name in enumerate(choices[head])]
            self._connection.executemany("INSERT OR REPLACE INTO choices VALUES (?, ?, ?)", named)

    def add(self, record: RoundRecord) -> None:
        """Write a round in the background; raises if the round before it failed."""
        self.flush()
        self._writing = self._writer.submit(self._write, record)

    def flush(self) -> None:
        """Wait until every added round is on disk; raises if one failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, record: RoundRecord) -> None:
        """Write a round in one transaction."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._insert("rounds", iter([_round_row(record)]))
            self._insert("episodes", _episode_rows(record))
            self._insert("decisions", self._decision_rows(record))
            self._insert("observations", _observation_rows(record))

    def _decision_rows(self, record: RoundRecord) -> Rows:
        episodes = record.episodes
        is_stored = torch.arange(episodes.accuracy.shape[1]) < episodes.lengths.unsqueeze(1)
        envs, steps = stored = is_stored.nonzero(as_tuple=True)
        actions, legal = record.actions[stored], record.legal[stored]
        choices, legal_bits = [], []
        for index, part in enumerate(self._space.split(legal).values()):
            bits = (part * 2 ** torch.arange(part.shape[-1])).sum(dim=-1)
            chosen = actions[:, index].numpy().astype(object)
            chosen[bits.numpy() == 0] = None
            choices.append(chosen.tolist())
            legal_bits.append(bits.tolist())
        before = episodes.accuracy.roll(1, dims=1)
        before[:, 0] = torch.nan
        numbers = (
            *(episodes.cost_params.long(), before, episodes.accuracy, episodes.added_params.long()),
            *(record.rewards, record.values, record.probabilities),
        )
        columns = [column[stored].tolist() for column in numbers]
        heads = (*choices, *legal_bits)
        return zip(repeat(record.round), envs.tolist(), steps.tolist(), *heads, *columns)

    def _insert(self, table: str, rows: Rows) -> None:
        columns = self._connection.execute(f"PRAGMA table_info({table})").fetchall()
        marks = ", ".join("?" * len(columns))
        self._connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.shutdown()
        self._connection.close()
        if kind is None:
            self.flush()


def reasons_if_all_rolled_back(path: str | Path) -> str | None:
    """Why the hosts of a run were rolled back, if no episode has a score."""
    kind = "substr(rollback_reason, 1, instr(rollback_reason || ':', ':') - 1)"
    query = f"SELECT count(score), group_concat(DISTINCT {kind}) FROM episodes"
    with closing(sqlite3.connect(path)) as connection:
        num_scores, reasons = connection.execute(query).fetchone()
    return None if num_scores else reasons


def _round_row(record: RoundRecord) -> tuple[Any, ...]:
    metrics = record.metrics
    score, accuracy = metrics.get("episode/score"), metrics.get("episode/accuracy")
    finite = {name: v for name, v in metrics.items() if v == v and abs(v) != float("inf")}
    return record.round, _now(), score, accuracy, json.dumps(finite)


def _episode_rows(record: RoundRecord) -> Rows:
    episodes, envs = record.episodes, torch.arange(len(record.hosts))
    last = episodes.lengths - 1
    return zip(
        repeat(record.round),
        envs.tolist(),
        record.hosts,
        record.variants,
        episodes.rent.tolist(),
        episodes.host_params.long().tolist(),
        episodes.lengths.tolist(),
        [int(reason is not None) for reason in record.rollback_reasons],
        record.rollback_reasons,
        episodes.accuracy[envs, last].tolist(),
        episodes.added_params[envs, last].long().tolist(),
        episodes.scores.tolist(),
        strict=False,
    )


def _observation_rows(record: RoundRecord) -> Rows:
    for row, env in enumerate(record.observed_envs.tolist()):
        for step in range(int(record.episodes.lengths[env])):
            yield record.round, env, step, record.observations[row, step].numpy().tobytes()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
