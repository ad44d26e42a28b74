"""Compiles the fused kernel on first use by NVRTC, which comes with torch's CUDA builds.

Its source is C++ too, for one thread of a CPU: the parity test, `tests/tolaria/test_fused.py`,
needs no GPU.
"""

import contextlib
import ctypes
import hashlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from esper.kasmina.layers import NORM_EPSILON
from esper.kernels.hosts.layer_table import Kind
from esper.leyline.constants import BlendStyle
from esper.runtime.files import atomic_write

THREADS = 512  # of a block
NUM_PARTS = 2  # sums of a gradient that warps make side by side
MOST_CHANNELS = 16  # that a task takes
_PARTS = ("threads", "conv", "layers", "hosts")  # of the source, in this order
_REALS = {torch.float32: "float", torch.float64: "double"}


@cache
def library(device: torch.device, dtype: torch.dtype, weights_in_shared: bool) -> "CudaLibrary":
    """Compiled on first use in a process; shared memory is fastest, if the weights fit into it."""
    return CudaLibrary(device, definitions(dtype, weights_in_shared))


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a block can have."""
    value, number = ctypes.c_int(), _MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    torch.cuda.synchronize(device)  # the driver is up
    _check(_driver().cuDeviceGetAttribute(ctypes.byref(value), number, device.index or 0))
    return value.value


def source() -> str:
    """The kernel as CUDA, or as C++ for one thread of a CPU."""
    folder = resources.files("esper.kernels.hosts")
    return "".join((folder / f"fused_{part}.cu").read_text() for part in _PARTS)


def definitions(dtype: torch.dtype, weights_in_shared: bool) -> list[str]:
    """What the source leaves open, as compiler options."""
    numbers = {
        "REAL": _REALS[dtype],
        "WEIGHTS_IN_SHARED": int(weights_in_shared),
        "THREADS": THREADS,
        "NUM_PARTS": NUM_PARTS,
        "MOST_CHANNELS": MOST_CHANNELS,
        "NORM_EPSILON": NORM_EPSILON,
        **{kind.name: kind.value for kind in Kind},
        **{style.name: style.value for style in BlendStyle},
    }
    return [f"-D{name}={value}" for name, value in numbers.items()]


_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97  # a CUdevice_attribute
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # a CUfunction_attribute


class CudaLibrary:
    """A module of machine code for the device it was made on."""

    def __init__(self, device: torch.device, definitions: list[str]):
        properties = torch.cuda.get_device_properties(device)
        self._device = device
        architecture = f"--gpu-architecture=sm_{properties.major}{properties.minor}"
        binary = _kept_binary(source(), [architecture, "--std=c++17", *definitions])
        self._module = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the device's context is there, and current
            _check(_driver().cuModuleLoadData(ctypes.byref(self._module), binary))
        self._kernels = {name: self._kernel(name) for name in ("train", "logits")}

    def launch(
        self, kernel: str, arguments: ctypes.Structure, blocks: int, shared_bytes: int
    ) -> None:
        """Start a kernel behind all that the device was given before."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            _check(
                _driver().cuLaunchKernel(
                    self._kernels[kernel],
                    *(blocks, 1, 1),
                    *(THREADS, 1, 1),
                    shared_bytes,
                    stream,
                    pointers,
                    None,
                )
            )

    def _kernel(self, name: str) -> ctypes.c_void_p:
        kernel, most = ctypes.c_void_p(), shared_bytes(self._device)
        _check(_driver().cuModuleGetFunction(ctypes.byref(kernel), self._module, name.encode()))
        _check(_driver().cuFuncSetAttribute(kernel, _MAX_DYNAMIC_SHARED_SIZE_BYTES, most))
        return kernel


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()}")


def _kept_binary(source: str, options: list[str]) -> bytes:
    """Machine code of a CUDA source, cached next to this file if its folder is writable."""
    key = hashlib.sha256("\n".join((str(torch.version.cuda), *options, source)).encode())
    kept = Path(__file__).parent / "__pycache__" / f"fused-{key.hexdigest()[:16]}.cubin"
    if kept.exists():
        return kept.read_bytes()
    binary = _nvrtc_binary(source, options)
    with contextlib.suppress(OSError):  # an installation that is not ours to write to
        atomic_write(kept, lambda file: file.write(binary))
    return binary


def _nvrtc_binary(source: str, options: list[str]) -> bytes:
    """Machine code of a CUDA source."""
    nvrtc = _load_nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"fused.cu", 0, None, None
    )
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    compiled = created or nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    if compiled:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC could not compile the fused kernel:\n{log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def _load_nvrtc() -> Any:
    """The NVRTC of torch's own CUDA version: in the loader's reach, or among torch's wheels."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    wheels = Path(torch.__file__).parents[1] / "nvidia"
    for place in (name, *map(str, sorted(wheels.glob(f"*/lib/{name}")))):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise RuntimeError(f"{name} was not found; it comes with torch's CUDA builds")
