"""Devices: which can be used, and small constant tensors kept on each of them."""

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor


def usable_device(name: str) -> torch.device:
    """The device of this name, or a GPU if there is one for "auto"; raises `ValueError` if torch
    cannot use it on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name).item()  # "meta" has no values
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name} cannot be used here ({reason}); use cpu") from error
    return torch.device(name)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that can still be allocated."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def require_memory(needed: Mapping[str, int], device: torch.device, advice: str) -> None:
    """Raise before anything is allocated if a GPU cannot hold it; `needed` is bytes by purpose."""
    total = sum(needed.values())
    free = free_memory(device)
    if total > free:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needed.items())
        raise ValueError(
            f"{device} has {free / 2**30:.1f} GiB free, but this needs {total / 2**30:.1f} "
            f"({parts}); {advice}"
        )


@cache
def _cpu_name() -> str:
    """The model of the CPU, or its architecture where the system does not name the model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine_facts() -> dict[str, str | int]:
    """What the last bits of CPU results depend on: versions, threads and the CPU."""
    return {
        "torch": str(torch.__version__),
        "numba": version("numba"),
        "threads": torch.get_num_threads(),
        "cpu": f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def same_device(asked: torch.device, have: torch.device) -> bool:
    """Whether `have` satisfies `asked`: "cuda" matches "cuda:0"."""
    return asked.type == have.type and asked.index in (None, have.index)


class DeviceConstant:
    """A constant tensor, copied to each device on first use; readable inside compiled code."""

    def __init__(self, values: Tensor):
        self._copies = {values.device: values}
        self._values = values

    def on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            # an ordinary tensor, even if the first caller is in inference mode
            with torch.inference_mode(False):
                self._copies[device] = self._values.to(device)
        return self._copies[device]


@cache  # not evicted: CUDA graphs may read them
def constant(
    values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers as a tensor on a device; shared, so do not write to it."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device, dtype=dtype)
