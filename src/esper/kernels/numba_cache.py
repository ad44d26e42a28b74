"""numba's `njit` for the kernels that Python calls; their machine code is kept on disk.

    @cached_njit(fastmath=FAST)
    def train_hosts(...): ...

numba keeps it beside the source file, or else in the user's cache folder; `NUMBA_CACHE_DIR` names
another folder. Without a folder that can be written, every process compiles.
"""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: `njit` with these options, without the GIL, cached on disk if possible."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            dispatcher: Any = njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no folder for numba's cache can be written
            return njit(nogil=True, **options)(function)
        # kernels call functions of other files; numba itself looks at the function's own file
        folders = (Path(__file__).parent, Path(function.__code__.co_filename).parent)
        files = (file for folder in folders for file in sorted(folder.glob("*.py")))
        sources = b"".join(file.read_bytes() for file in files)
        dispatcher._cache._cache_file._source_stamp = sha256(sources).hexdigest()
        return dispatcher

    return compiled
