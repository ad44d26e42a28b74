"""Where tensors lie."""

import torch


def same_device(asked: torch.device, have: torch.device) -> bool:
    """Whether "cuda" asks for the "cuda:0" we have."""
    return asked.type == have.type and asked.index in (None, have.index)
