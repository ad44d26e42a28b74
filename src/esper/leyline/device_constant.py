"""Small constant tensors, at hand on every device that asks for them."""

from functools import lru_cache

import torch
from torch import Tensor


class DeviceConstant:
    """Copied to a device the first time it is needed there; readable inside compiled code."""

    def __init__(self, values: Tensor):
        self._copies = {values.device: values}
        self._values = values

    def on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            with torch.inference_mode(False):
                self._copies[device] = self._values.to(device)
        return self._copies[device]


@lru_cache(maxsize=64)
def multiples(step: int, count: int, device: torch.device) -> Tensor:
    """0, step, 2 step, ...: where the rows of each env begin when those of all lie together."""
    with torch.inference_mode(False):
        return torch.arange(0, count * step, step, device=device)
