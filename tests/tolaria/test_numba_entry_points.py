"""Entry points of numba kernels run the code that is on disk, also in the first process."""

import os
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
from numba.core.errors import TypingError

from esper.kernels import numba_entry_points

SOURCE = """
from esper.kernels.numba_entry_points import entry_point

@entry_point(error_model="numpy")
def total(x):
    return x.sum()

@entry_point()
def wrong(x):
    return x.no_such_thing
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"kernels_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    # the process that compiles knows the path of the time when it was started
    numba_entry_points._compiler.cache_clear()
    yield import_module(name)
    del sys.modules[name]


def test_another_process_compiles(module):
    for dtype in (np.float32, np.float64):
        assert module.total(np.ones(5, dtype)) == 5
    assert sum(module.total.stats.cache_hits.values()) == 2
    assert not module.total.stats.cache_misses


def test_it_is_compiled_here_if_no_process_can_be_started(module, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert module.total(np.ones(5)) == 5
    assert sum(module.total.stats.cache_misses.values()) == 1


def test_no_place_for_a_cache_only_costs_a_compilation(tmp_path):
    (tmp_path / "kernels_without_cache.py").write_text(SOURCE)
    blocked = tmp_path / "a file, not a folder"
    blocked.touch()
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(blocked / "cache"),
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",  # look nowhere else
    }
    code = "import numpy, kernels_without_cache as k; assert k.total(numpy.ones(5)) == 5"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)


def test_errors_are_seen_here(module):
    with pytest.raises(TypingError, match="no_such_thing"):
        module.wrong(np.ones(5))
    assert module.total(np.ones(5)) == 5
