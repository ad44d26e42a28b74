"""`esper watch RUN_OR_FOLDER`: a local page that shows runs while they train."""

import os
import sys
import webbrowser
from pathlib import Path

import tyro

from esper.nissa.run_view import find_runs
from esper.nissa.watch_server import make_server


def watch(
    path: tyro.conf.Positional[Path] = Path("runs"), port: int = 8770, browser: bool = True
) -> None:
    """Show runs on a page of this machine while they train; nothing is sent elsewhere.

    Args:
        path: a run's folder, or a folder of runs
        port: of the page; 0 takes a free one
        browser: open the page
    """
    find_runs(path)  # raises if there is none
    try:
        server = make_server(path, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"port {port} cannot be used ({reason}); try --port 0") from error
    address = f"http://127.0.0.1:{server.server_port}/"
    print(f"{path} is shown at {address}; Ctrl-C ends this", flush=True)
    has_screen = sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)
    if browser and has_screen:  # else a browser in text mode may take the terminal
        webbrowser.open(address)
    with server:
        server.serve_forever()
