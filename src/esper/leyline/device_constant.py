"""A small constant tensor, at hand on every device that asks for it."""

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
