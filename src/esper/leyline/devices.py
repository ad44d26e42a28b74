"""Where tensors lie."""

import torch


def usable_device(name: str) -> torch.device:
    """The device of this name; one that torch cannot use on this machine is refused."""
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name} cannot be used here ({reason}); use cpu") from error
    return torch.device(name)


def same_device(asked: torch.device, have: torch.device) -> bool:
    """Whether "cuda" asks for the "cuda:0" we have."""
    return asked.type == have.type and asked.index in (None, have.index)
