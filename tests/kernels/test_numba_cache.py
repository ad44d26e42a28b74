"""What numba compiled stays on disk until a source file changes; a process that compiled can end."""

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest

KERNELS = """
import numpy as np
from neighbour_of_kernels import FACTOR
from esper.kernels.numba_cache import cached_njit

@cached_njit(error_model="numpy")
def scaled_total(x):
    return FACTOR * x.sum()
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """The kernels, imported as a new process does, beside a file with this factor."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("kernels", "neighbour_of_kernels")

    def load_with(factor):
        (tmp_path / "neighbour_of_kernels.py").write_text(f"FACTOR = {factor}")
        importlib.invalidate_caches()
        for name in names:
            sys.modules.pop(name, None)
        return importlib.import_module("kernels").scaled_total

    yield load_with
    for name in names:
        sys.modules.pop(name, None)


def test_a_kernel_is_compiled_once(load):
    assert load(2)(np.ones(5)) == 10
    again = load(2)
    assert again(np.ones(5)) == 10
    assert sum(again.stats.cache_hits.values()) == 1


def test_a_change_of_a_file_beside_a_kernel_compiles_it_again(load):
    assert load(2)(np.ones(5)) == 10
    assert load(100)(np.ones(5)) == 500


def test_no_place_for_a_cache_only_costs_a_compilation(tmp_path):
    blocked = tmp_path / "a file, not a folder"
    blocked.touch()
    environment = {
        "NUMBA_CACHE_DIR": str(blocked / "cache"),
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",  # look nowhere else
    }
    code = "assert kernels.scaled_total(np.ones(5)) == 10"
    run_script(tmp_path, code, environment)


def test_a_process_that_compiled_ends_beside_a_forked_child(tmp_path):
    code = """
import multiprocessing, time
kernels.scaled_total(np.ones(5))
assert sum(kernels.scaled_total.stats.cache_misses.values()) == 1
multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
"""
    run_script(tmp_path, code, {"NUMBA_CACHE_DIR": str(tmp_path / "cache")})


def test_a_model_says_once_that_kernels_are_compiled_and_only_if_they_are(tmp_path):
    code = """
import sys, esper, torch
from numba import njit
from esper.kernels.lstm.numba_lstm import finish_step
for _ in range(2):
    esper.PPO("CartPole-v1", config=esper.GymConfig(masks="none"))
print(njit(lambda x: x + 1)(2), file=sys.stderr, flush=True)  # a user's own is not announced
finish_step(0, torch.zeros(1, 8), *torch.zeros(3, 1, 1, 2))
"""
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    blocked = tmp_path / "a file, not a folder"
    blocked.touch()
    not_kept = {
        "NUMBA_CACHE_DIR": str(blocked / "cache"),
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
    }
    text = "compiling kernels, up to half a minute"
    for environment, expected in (
        (kept, [f"{text} (once)"]),
        (kept, []),
        (not_kept, [f"{text} (in every process; set NUMBA_CACHE_DIR to keep them)"]),
    ):
        assert run_script(tmp_path, code, environment).splitlines() == ["3", *expected]


def run_script(folder, code, environment):
    """Run the code in a new process; returns what it wrote to stderr."""
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "neighbour_of_kernels.py").write_text("FACTOR = 2")
    done = subprocess.run(
        [sys.executable, "-c", f"import numpy as np, kernels\n{code}"],
        env=os.environ | environment,
        cwd=folder,
        timeout=120,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr
