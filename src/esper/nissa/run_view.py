"""What a run's database shows, as JSON values; read while the run writes."""

import json
import math
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

from esper.runtime.plain_config import flat

SMOOTHED_ROUNDS = 10  # hosts, data and rents differ from round to round
_CURVES = {"lead": "episode/lead", "score": "episode/score", "accuracy": "episode/accuracy"}

# row of the comparison -> metric and its text; means of the last rounds
_SUMMARY: dict[str, tuple[str, Callable[[float], str]]] = {
    "lead over ungrown siblings": ("episode/lead", lambda x: f"{100 * x:+.1f} points"),
    "score": ("episode/score", "{:.1%}".format),
    "accuracy": ("episode/accuracy", "{:.1%}".format),
    "added parameters": ("episode/added_params", "{:,.0f}".format),
    "added, share of the host": ("episode/growth", "{:.0%}".format),
    "seeds tried per host": ("episode/germinations", "{:.1f}".format),
    "hosts rolled back": ("episode/rolled_back", "{:.1%}".format),
    "hosts per second": ("time/hosts_per_second", "{:.1f}".format),
    "time in hosts": ("time_share/hosts", "{:.0%}".format),
    "time in updates": ("time_share/update", "{:.0%}".format),
}


def find_runs(path: Path) -> dict[str, Path]:
    """Run folders by name: the folder itself, or those up to two levels below it."""
    levels = ("run.sqlite", "*/run.sqlite", "*/*/run.sqlite")
    found = sorted(file.parent for level in levels for file in path.glob(level))
    if not found:
        raise ValueError(f"no run in {path}: there is no run.sqlite; start one with `esper train`")
    return {str(r.relative_to(path)) if r != path else path.resolve().name: r for r in found}


def view_run(folder: Path, round_number: int | None = None) -> dict[str, Any]:
    """All that is shown of a run; `round_number` is the round whose hosts are shown, or the last."""
    if not (folder / "run.sqlite").exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no run.sqlite")
    try:
        address = (folder / "run.sqlite").resolve().as_uri()  # names may hold # or ?
        with closing(sqlite3.connect(f"{address}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            return _view(connection, folder, round_number)
    except sqlite3.Error as error:
        raise ValueError(f"{folder / 'run.sqlite'} cannot be read: {error}") from error


def _view(connection: sqlite3.Connection, folder: Path, chosen: int | None) -> dict[str, Any]:
    def rows(query: str, *values: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in connection.execute(query, values)]

    rounds = rows("SELECT round, ended, metrics FROM rounds ORDER BY round")
    metrics = [json.loads(entry["metrics"]) for entry in rounds]
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    last = rounds[-1]["round"] if rounds else 0
    shown = min(max(chosen or last, 1), last)
    names = {(r["head"], r["choice"]): r["name"] for r in rows("SELECT * FROM choices")}
    started = rows("SELECT started, details FROM runs ORDER BY rowid DESC LIMIT 1")
    return {
        "name": folder.name,
        "rounds": last,
        "totalRounds": config.get("rounds", last),
        "started": started[0]["started"] if started else "",
        "details": json.loads(started[0]["details"]) if started else {},
        "updated": rounds[-1]["ended"] if rounds else "",
        "config": config,
        "evaluation": _evaluation(folder),
        "curves": {
            name: [[r["round"], m.get(key)] for r, m in zip(rounds, metrics, strict=True)]
            for name, key in _CURVES.items()
        },
        "metrics": metrics,
        "summary": {
            row: "-" if math.isnan(mean := _last_mean(metrics, name)) else show(mean)
            for row, (name, show) in _SUMMARY.items()
        },
        "timeShares": {
            name.removeprefix("time_share/"): _last_mean(metrics, name)
            for name in (metrics[-1] if metrics else {})
            if name.startswith("time_share/")
        },
        "rollbacks": rows(
            "SELECT rollback_reason AS reason, count(*) AS count, max(round) AS last "
            "FROM episodes WHERE rolled_back GROUP BY 1 ORDER BY 2 DESC LIMIT 20"
        ),
        "round": shown,
        "hosts": _hosts(rows, names, shown),
    }


def _hosts(rows: Any, names: Mapping[tuple[str, int], str], number: int) -> list[dict[str, Any]]:
    """The hosts of a round, each with its decisions and with the lives of its seeds by slot."""
    hosts = rows("SELECT * FROM episodes WHERE round = ? ORDER BY env", number)
    heads = dict.fromkeys(head for head, _ in names)
    num_slots = sum(head == "slot" for head, _ in names)
    for host in hosts:
        host["decisions"] = list[dict[str, Any]]()
        host["slots"] = [list[dict[str, Any]]() for _ in range(num_slots)]
    by_env = {host["env"]: host for host in hosts}
    for row in rows("SELECT * FROM decisions WHERE round = ? ORDER BY env, step", number):
        host, step, op = by_env[row["env"]], row["step"], names["op", row["op"]]
        chosen = {head: names.get((head, row[head])) for head in heads if row[head] is not None}
        kept = ("step", "probability", "value", "reward", "accuracy", "added_params", "cost_params")
        host["decisions"].append({**{key: row.get(key) for key in kept}, "choices": chosen})
        seeds = host["slots"][row["slot"]] if row["slot"] is not None else []
        if op == "GERMINATE":
            new = {"blueprint": chosen["blueprint"], "born": step, "committed": None, "end": None}
            seeds.append(new)
        elif op in ("PRUNE", "FOSSILIZE") and seeds:
            seeds[-1]["end" if op == "PRUNE" else "committed"] = step
    return list(hosts)


def _evaluation(folder: Path) -> list[str]:
    """The first lines of the evaluation's report, if there is one."""
    file = folder / "evaluation.md"
    return [line for line in file.read_text().splitlines()[1:6] if line] if file.exists() else []


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[list[str]]:
    """What, and its value in both runs: progress, means of the last rounds, settings that differ."""
    views = one, other
    table = [["rounds", *(f"{view['rounds']} of {view['totalRounds']}" for view in views)]]
    table += [[row, *(view["summary"][row] for view in views)] for row in _SUMMARY]
    settings = [flat(view["config"]) for view in views]
    rows = [[key, *(str(s.get(key, "-")) for s in settings)] for key in settings[0] | settings[1]]
    return table + [row for row in rows if row[1] != row[2]]


def _last_mean(metrics: list[dict[str, float]], name: str) -> float:
    values = [m[name] for m in metrics[-SMOOTHED_ROUNDS:] if name in m]
    return fmean(values) if values else math.nan
