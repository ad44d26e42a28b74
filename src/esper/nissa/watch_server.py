"""The server behind `esper watch`: one page, and the runs it shows as JSON."""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from esper.nissa.health import HealthMonitor
from esper.nissa.run_view import compare, find_runs, view_run

_SAFE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_SAFE += "; connect-src 'self'"


def make_server(path: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server for this machine alone; browsers keep idle connections, so each has its thread."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, path))


_ONE_AT_A_TIME = Lock()


class _Handler(BaseHTTPRequestHandler):
    """`/` is the page, `/runs` their names, `/run?name=...&round=...&with=...` all of a run."""

    def __init__(self, path: Path, *arguments: Any):
        self.runs_path = path
        super().__init__(*arguments)

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").partition(":")[0]
        url = urlsplit(self.path)
        asked = {key: values[-1] for key, values in parse_qs(url.query).items()}
        if host not in ("127.0.0.1", "localhost"):  # another site's name that leads here
            self._answer(403, "text/plain", "use http://127.0.0.1")
        elif url.path == "/":
            page = resources.files("esper.nissa").joinpath("watch.html").read_text(encoding="utf-8")
            self._answer(200, "text/html", page)
        elif url.path in ("/runs", "/run"):
            try:
                runs = find_runs(self.runs_path)
                with _ONE_AT_A_TIME:  # warnings are caught, which is the whole process's business
                    found = list(runs) if url.path == "/runs" else _view_of(runs, asked)
                self._answer(200, "application/json", json.dumps(found))
            except (KeyError, ValueError) as error:
                self._answer(404, "text/plain", str(error))
        else:
            self._answer(404, "text/plain", "no such page")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        headers |= {"Content-Security-Policy": _SAFE, "Cache-Control": "no-store"}
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing for each request."""


def _view_of(runs: Mapping[str, Path], asked: Mapping[str, str]) -> Any:
    view = view_run(runs[asked["name"]], int(asked.get("round") or 0))
    view["warnings"] = health_warnings(view["metrics"], view["config"])
    if asked.get("with"):
        other = view_run(runs[asked["with"]])
        view["other"] = {"name": other["name"], "curves": other["curves"]}
        view["comparison"] = compare(view, other)
    view["metrics"] = view["metrics"][-1:]
    return json.loads(json.dumps(view), parse_constant=lambda _: None)  # JSON has no NaN


def health_warnings(metrics: list[dict[str, float]], config: Mapping[str, Any]) -> list[str]:
    """What the run has warned about, in its own words."""
    monitor = HealthMonitor(config.get("ppo", {}).get("ppo_epochs", 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for entry in metrics:
            monitor.check(defaultdict(lambda: math.nan, entry))
    return [str(warning.message) for warning in caught]
