"""What growth does on the side draws nothing from the randomness that training uses."""

from contextlib import AbstractContextManager

import torch
from torch import nn


def untouched_randomness(model: nn.Module) -> AbstractContextManager[None]:
    """Torch's generators are afterwards as they were, on the CPU and on the model's devices."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(devices=list(devices))
