"""numba's `njit` for the kernels that Python calls; their machine code is kept on disk.

    @cached_njit(fastmath=FAST)
    def train_hosts(...): ...

numba keeps it beside the source file, or else in the user's cache folder; `NUMBA_CACHE_DIR` names
another folder. Without a folder that can be written, every process compiles.
"""

import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import event

_COMPILING = "numba:compile"  # numba's event: not sent for what is read from disk


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: `njit` with these options, without the GIL, cached on disk if possible."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            dispatcher: Any = njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no folder for numba's cache can be written
            _NOTICE.is_kept = False
            return njit(nogil=True, **options)(function)
        # kernels call functions of other files; numba itself looks at the function's own file
        folders = (Path(__file__).parent, Path(function.__code__.co_filename).parent)
        files = (file for folder in folders for file in sorted(folder.glob("*.py")))
        sources = b"".join(file.read_bytes() for file in files)
        dispatcher._cache._cache_file._source_stamp = sha256(sources).hexdigest()
        return dispatcher

    return compiled


@cache
def announce_compilation() -> None:
    """From now on, print a line before the first kernel of Esper that is not read from disk."""
    event.register(_COMPILING, _NOTICE)  # type: ignore[no-untyped-call]


class _Notice(event.Listener):
    """The line; to stderr, because the first run prints the same results as all others."""

    is_kept = True  # on disk

    def __init__(self) -> None:
        self._is_printed = False

    def on_start(self, compiling: event.Event) -> None:
        kernel = compiling.data["dispatcher"].py_func
        if self._is_printed or not kernel.__module__.startswith("esper."):
            return
        self._is_printed = True
        how_often = "once" if self.is_kept else "in every process; set NUMBA_CACHE_DIR to keep them"
        print(f"compiling kernels, up to half a minute ({how_often})", file=sys.stderr, flush=True)

    def on_end(self, compiling: event.Event) -> None: ...


_NOTICE = _Notice()
