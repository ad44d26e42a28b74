"""Devices: which can be used, and small constant tensors kept on each of them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def usable_device(name: str) -> torch.device:
    """The device of this name; raises `ValueError` if torch cannot use it on this machine."""
    try:
        torch.empty(1, device=name).item()  # "meta" has no values
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name} cannot be used here ({reason}); use cpu") from error
    return torch.device(name)


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


def device_table(
    values: range | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """A range or a tuple of numbers as a tensor `[len(values)]`, made once per device.

    The result is shared: do not write to it.
    """
    key = (values, dtype, device)
    if key not in _TABLES:
        while len(_TABLES) >= MOST_TABLES:  # ranges follow the batch size, which may always differ
            del _TABLES[next(iter(_TABLES))]
        with torch.inference_mode(False):
            if isinstance(values, range):  # torch.tensor would wait for a GPU
                table = torch.arange(values.start, values.stop, values.step, device=device)
                _TABLES[key] = table.to(dtype)
            else:
                _TABLES[key] = torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
    return _TABLES[key]


MOST_TABLES = 256
_TABLES: dict[object, Tensor] = {}
