"""The fields of a rollout: how each is stored, and checked when a step is added."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.factored_actions import FactoredActionSpace

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_ACCEPTED = {  # by a field that is stored in a dtype
    torch.float32: ("numbers", _FLOATS + INTEGERS),
    torch.int64: ("integers", INTEGERS),
    torch.bool: ("bool", (torch.bool,)),
    torch.uint8: ("torch.uint8, 0 to 255", (torch.uint8,)),
}


class RolloutField(NamedTuple):
    """How a field of the rollout is stored, and checked when a step is added."""

    name: str  # in the buffer
    argument: str  # in a `TamiyoRolloutStep`
    dtype: torch.dtype
    shape: tuple[int, ...] = ()  # of one env
    axes: str = "[envs]"  # for errors

    def checked(self, given: object, num_rows: int, device: torch.device) -> Tensor:
        """The field of `num_rows` envs, with the dtype and on the device that it is stored in."""
        expected = (num_rows, *self.shape)
        value = as_tensor(self.argument, given)
        if value.requires_grad:
            value = value.detach()
        if value.shape != expected:
            raise ValueError(
                f"{self.argument}: got shape {tuple(value.shape)}, expected {expected} = {self.axes}"
            )
        if value.dtype == self.dtype and value.device == device:
            return value
        kind, accepted = _ACCEPTED[self.dtype]
        if value.dtype not in accepted:
            raise ValueError(f"{self.argument}: got {value.dtype}, expected {kind}")
        if value.device.type not in ("cpu", device.type):
            raise ValueError(
                f"{self.argument} is on {value.device}, the buffer on {device}; "
                "move it to the CPU or to the buffer's device"
            )
        # block for pinned memory: the caller may change it before a non-blocking copy has run
        must_block = value.device != device and value.is_pinned()
        return value.to(device, self.dtype, non_blocking=not must_block)


def rollout_fields(
    action_space: FactoredActionSpace, state_dim: int, frame_size: int, hidden: tuple[int, int]
) -> tuple[RolloutField, ...]:
    """One row for each field of a step, in the order of `TamiyoRolloutStep`."""
    number, flag = torch.float32, torch.bool
    heads, choices = (action_space.num_heads,), (action_space.num_choices,)
    of_heads = f"[envs, H], heads {', '.join(action_space.names)}"
    sizes = ", ".join(f"{head.name}: {head.size}" for head in action_space)
    of_layers = "[envs, L, h], L layers, h hidden units"
    return (
        RolloutField("states", "state", number, (state_dim,), "[envs, F]"),
        RolloutField("actions", "actions", action_space.action_dtype, heads, of_heads),
        RolloutField("log_probs", "log_probs", number, heads, of_heads),
        RolloutField("masks", "masks", flag, choices, f"[envs, C], heads {sizes}"),
        RolloutField("values", "value", number),
        RolloutField("rewards", "reward", number),
        RolloutField("terminated", "terminated", flag),
        RolloutField("truncated", "truncated", flag),
        RolloutField("bootstrap_values", "bootstrap_value", number),
        RolloutField("hidden_h", "hidden_h", number, hidden, of_layers),
        RolloutField("hidden_c", "hidden_c", number, hidden, of_layers),
        RolloutField(
            "frames", "frames", torch.uint8, (frame_size,), "[envs, P], bytes of pictures"
        ),
    )


def as_tensor(name: str, value: object) -> Tensor:
    """The value as a tensor; raises an error with its name if it is not one."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}: got {type(value).__name__}, expected a tensor or numbers ({error})"
        ) from error
