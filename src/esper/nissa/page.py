"""The ledger as one HTML page that works offline, with its JSON next to it.

    write_page(ledger, "run.html")  # and run.json, the ledger itself
    report = with_page(report, ledger, "run.html", total_steps)  # while it runs

The page is assembled from `page_parts/` and loads nothing else. All it shows comes from
`page_data`; names are inserted as text, never as markup.
"""

import html
import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import esper
from esper.nissa.console import Report, time_since
from esper.nissa.ledger import NO_REASON, DecisionRecord, Ledger, SeedRecord
from esper.runtime.files import atomic_write

_SCRIPTS = ("basics", "chart", "sections", "plans", "network", "start")  # .js, in order
_REWRITE_S = 5.0  # a page of a run that is not over reloads as often


def write_page(ledger: Ledger, path: str | Path, now: str = "") -> Path:
    """Write the page, and the ledger as JSON under the same name; returns the page's path.

    `now` says what a run that is not over is doing.
    """
    page = _file_of(path)
    text = page_html(ledger, now).encode()
    atomic_write(page, lambda file: file.write(text))
    ledger.write(page.with_suffix(".json"))
    return page


def with_page(report: Report, ledger: Ledger, path: str | Path | None, total: int) -> Report:
    """Also write the page when the ledger has a new entry, and every few seconds."""
    started = time.monotonic()
    entries, written = 0, started

    def report_and_write(done: int, status: str) -> None:
        nonlocal entries, written
        report(done, status)
        found, time_now = len(ledger.steps) + len(ledger.trials), time.monotonic()
        if found > entries or time_now > written + _REWRITE_S:
            entries, written = found, time_now
            now = f"{status}; step {done:,} of {total:,}, {time_since(started)} so far"
            try_write_page(ledger, path, now)

    return report if path is None else report_and_write


def try_write_page(ledger: Ledger, path: str | Path | None, now: str = "") -> None:
    """Write the page, if there is one; a full disk does not end the training."""
    try:
        if path is not None:
            write_page(ledger, path, now)
    except OSError as error:
        warnings.warn(f"page={str(path)!r} was not written: {error}", stacklevel=3)


def check_page(path: str | Path | None) -> None:
    """Make the folder of a page; raise, before any training, if the page could not be written."""
    if path is None:
        return
    if not isinstance(path, str | Path) or not Path(path).name:
        raise ValueError(f"page={path!r}; give the name of a file, such as 'run.html'")
    page = _file_of(path)
    with suppress(OSError):
        page.parent.mkdir(parents=True, exist_ok=True)
    if page.is_dir() or not page.parent.is_dir() or not os.access(page.parent, os.W_OK):
        raise ValueError(
            f"page={str(path)!r} is a folder, or {page.parent} is not a folder to write to"
        )


def _file_of(path: str | Path) -> Path:
    page = Path(path)
    return page if page.suffix == ".html" else page.with_name(f"{page.name}.html")


def page_html(ledger: Ledger, now: str = "") -> str:
    """The whole page."""
    parts = {"css": _part("page.css"), "js": "\n".join(_part(f"{name}.js") for name in _SCRIPTS)}
    # "<" would let a name end the script that holds the data
    data = json.dumps(page_data(ledger, now), allow_nan=False, separators=(",", ":"))
    parts["data"] = data.replace("<", "\\u003c")
    done = "adapted" if ledger.trials else "grown"
    parts["title"] = html.escape(f"{ledger.model}, {done}")
    parts["summary"] = html.escape(ledger.summary())
    return re.sub("{{(.*?)}}", lambda key: parts[key[1]], _part("page.html"))


def _part(name: str) -> str:
    return resources.files("esper.nissa").joinpath("page_parts", name).read_text(encoding="utf-8")


def page_data(ledger: Ledger, now: str = "") -> dict[str, Any]:
    """The data that the page shows, with the stages of seeds and the effects of decisions."""
    plain = asdict(ledger)
    shown = ("model", "controller", "facts", "budget", "before", "after", "verdict", "trials")
    return {
        **{name: plain[name] for name in shown},
        "summary": ledger.summary(),
        "metric": {"name": ledger.metric, "isShare": ledger.is_share},
        "written": {
            "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "esper": esper.__version__,
        },
        "time": time.time(),
        "now": now,
        "steps": [
            [r.step, r.metric, r.params, r.macs, r.train_loss, r.optimizer_steps]
            for r in ledger.steps
        ],
        "twin": [[record.step, record.metric] for record in ledger.twin],
        "events": [_event(ledger, entry) for entry in ledger.decisions if entry.op != "WAIT"],
        "waits": sum(entry.op == "WAIT" for entry in ledger.decisions),
        "rollbacks": [[entry.step, entry.to_step, entry.reason] for entry in ledger.rollbacks],
        "seeds": [_seed(ledger, record) for record in ledger.seeds],
    }


def _event(ledger: Ledger, decision: DecisionRecord) -> dict[str, Any]:
    metrics = [(r.step, r.metric) for r in ledger.steps if r.metric is not None]
    return {
        **asdict(decision),
        "legal": {op: len(sites) for op, sites in decision.legal.items()},
        "reason": decision.reason or _no_reason(ledger, decision),
        "before": next((m for step, m in reversed(metrics) if step <= decision.step), None),
        "next": next((m for step, m in metrics if step > decision.step), None),
    }


def _no_reason(ledger: Ledger, decision: DecisionRecord) -> str:
    """Text for a decision without a reason: the seed's last measured gain."""
    states = ledger.states_of(decision.seed) if decision.seed else []
    gains = [
        ledger.show_gain(state.contribution, state.contribution_error)
        for step, state in states
        if step <= decision.step and state.contribution is not None
    ]
    return NO_REASON + (f"; switching the seed off would cost {gains[-1]}" if gains else "")


def _seed(ledger: Ledger, record: SeedRecord) -> dict[str, Any]:
    states, fate = ledger.states_of(record.seed), ledger.fate_of(record.seed)
    measured = ((step, s.contribution, s.contribution_error) for step, s in states)
    return {
        **asdict(record),
        "fate": fate and fate.fate,
        "fateStep": fate and fate.step,
        "why": fate.reason if fate else "",
        "life": ledger.life_of(record.seed),
        "alphas": list(_corners([(record.born, 0.0), *((t, s.alpha) for t, s in states)])),
        "gains": [entry for entry in measured if entry[1] is not None],
    }


def _corners(points: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """The points of a curve, without those inside constant parts."""
    for _, level in groupby(points, key=lambda point: point[1]):
        first, *others = level
        yield from (first, *others[-1:])
