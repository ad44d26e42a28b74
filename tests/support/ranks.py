"""Several ranks on this machine, forked from the test: torch and Esper are loaded already."""

import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.processes import DEADLINE_S, fork


def on_ranks(size: int, work: Callable[[], Any], **variables: str) -> list[Any]:
    """What `work` returns on each of `size` ranks, as torchrun would start them.

    An error on a rank is the result of that rank; a killed rank has none.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": free_port()} | variables
        processes = [
            _fork(work, place | {"RANK": rank, "LOCAL_RANK": rank}, folder / str(rank))
            for rank in range(size)
        ]
        _wait(processes)
        results = (folder / str(rank) for rank in range(size))
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _fork(work: Callable[[], Any], variables: dict[str, Any], result: Path) -> int:
    process = fork()
    if process:
        return process
    try:
        from esper.runtime.ranks import join_ranks

        os.environ |= {name: str(value) for name, value in variables.items()}
        join_ranks.cache_clear()
        try:
            value = work()
        except Exception as error:
            traceback.print_exc()
            value = error
        result.write_bytes(pickle.dumps(value))
    finally:
        os._exit(0)


def _wait(processes: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while processes:
        processes = [p for p in processes if os.waitpid(p, os.WNOHANG) == (0, 0)]
        if time.monotonic() > deadline:
            for process in processes:
                os.kill(process, 9)
            raise AssertionError(f"ranks took longer than {DEADLINE_S} s")
        time.sleep(0.005)
