"""The fused kernel on a CPU: its source as C++, all tasks by one thread."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from esper.kernels.hosts import fused, fused_build

SHARED_BYTES = 2**22

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def allow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a population on a CPU have kernels="fused"."""
    on_cuda = {name: getattr(fused, name) for name in ("library", "shared_bytes", "max_blocks")}
    on_cpu = {
        "library": _library,
        "shared_bytes": lambda _: SHARED_BYTES,
        "max_blocks": lambda _: 1,
    }
    for name in on_cuda:

        def chosen(device, *arguments, name=name):
            place = on_cpu if device.type == "cpu" else on_cuda
            return place[name](device, *arguments)

        monkeypatch.setattr(fused, name, chosen)


@cache
def _library(_device, dtype, weights_in_shared):
    return CpuLibrary(fused_build.definitions(dtype, weights_in_shared))


class CpuLibrary:
    def __init__(self, definitions: list[str]):
        with tempfile.TemporaryDirectory() as folder:
            source, built = Path(folder, "fused.cpp"), Path(folder, "fused.so")
            source.write_text(fused_build.source())
            options = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-DSHARED_BYTES={SHARED_BYTES}"]
            command = ["c++", *options, *definitions, str(source), "-o", str(built)]
            subprocess.run(command, check=True)
            self._kernels = ctypes.CDLL(str(built))

    def launch(self, kernel, arguments, blocks, shared_bytes):
        self._kernels[kernel](arguments)
