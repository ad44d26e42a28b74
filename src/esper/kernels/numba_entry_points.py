"""Numba kernels that Python calls: compiled by another process, and loaded from disk.

    @entry_point(fastmath=FAST)
    def train_hosts(...): ...

In the process that compiles a function, its calls may reach copies of other functions that were
optimised one by one. In the code that is kept on disk they are optimised together, and round
otherwise. So that the first run on a machine is bit-exact with later ones, and resumes exactly, the
code from disk is what always runs. Where there is no disk to keep it on, it is compiled here.
Test: tests/tolaria/test_numba_entry_points.py.
"""

import atexit
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_compiles_here = False  # in the process that compiles for another one


def entry_point(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: numba's `njit` with these options for a function that its module names."""
    from numba import njit  # loaded where it is used

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            dispatcher: Any = njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no folder for numba's cache can be written
            return njit(nogil=True, **options)(function)
        # recompile if any file in the folder has changed; numba watches that of the function alone
        folder = Path(function.__code__.co_filename).parent
        files = [file.stat() for file in sorted(folder.glob("*.py"))]
        stamp = [(file.st_mtime, file.st_size) for file in files]
        dispatcher._cache._cache_file._source_stamp = stamp
        dispatcher._cache = _CompiledApart(dispatcher._cache, function)
        return dispatcher

    return compiled


class _CompiledApart:
    """numba's cache of a function; what is missing in it is compiled by another process."""

    def __init__(self, cache: Any, function: Callable[..., Any]):
        self._cache, self._function = cache, function

    def load_overload(self, signature: Any, context: Any) -> Any:
        found = self._cache.load_overload(signature, context)
        if found is None and not _compiles_here:
            order = self._function.__module__, self._function.__name__, signature
            with suppress(OSError):  # no other process: numba compiles here
                compiler = _compiler(os.getpid())
                compiler.stdin.write(pickle.dumps(order))
                compiler.stdin.flush()
                compiler.stdout.readline()
            found = self._cache.load_overload(signature, context)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@cache
def _compiler(process_id: int) -> Any:
    """A process that compiles for the process of this id until that one ends."""
    command = (
        "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
        "from esper.kernels.numba_entry_points import compile_orders; compile_orders()"
    )
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    compiler = subprocess.Popen(
        [sys.executable, "-c", command], stdin=pipe, stdout=pipe, stderr=nothing
    )
    atexit.register(compiler.communicate)  # it ends when its input does
    assert compiler.stdin is not None
    compiler.stdin.write(pickle.dumps(sys.path))
    return compiler


def compile_orders() -> None:
    """Compile the entry points named on stdin, keep them on disk, and print a line for each."""
    global _compiles_here
    _compiles_here = True
    while True:
        try:
            module, name, signature = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        getattr(import_module(module), name).compile(signature)
        print(flush=True)
