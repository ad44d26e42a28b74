"""The fields of a step: how each is stored in the rollout buffer and checked before that."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.factored_actions import FactoredActionSpace

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# what a field stored in a dtype accepts
_ACCEPTED = {
    torch.float32: ("floating point", _FLOATS),
    torch.int64: ("integers", INTEGERS),
    torch.bool: ("bool", (torch.bool,)),
}


class StepField(NamedTuple):
    """How one field of a `TamiyoRolloutStep` is stored and checked."""

    argument: str  # its name in the step
    name: str  # its name in the buffer
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one env
    letters: str  # names of the axes, for errors
    note: str = ""  # more about the axes, for errors

    def checked(self, given: object, num_rows: int, device: torch.device) -> Tensor:
        """The field of `num_rows` envs, with the dtype and on the device that it is stored in."""
        expected = (num_rows, *self.shape)
        value = as_tensor(self.argument, given)
        if value.shape == expected and value.dtype == self.dtype and value.device == device:
            return value.detach() if value.requires_grad else value
        if tuple(value.shape) != expected:
            raise ValueError(
                f"{self.argument}: got shape {tuple(value.shape)}, expected {expected} = "
                f"[envs{''.join(f', {letter}' for letter in self.letters)}]{self.note}"
            )
        kind, accepted = _ACCEPTED[self.dtype]
        if value.dtype not in accepted:
            raise ValueError(f"{self.argument}: got {value.dtype}, expected {kind}")
        if value.device.type not in ("cpu", device.type):
            raise ValueError(
                f"{self.argument} is on {value.device}, the buffer on {device}; "
                "move it to the CPU or to the buffer's device"
            )
        if value.requires_grad:
            value = value.detach()
        # block for pinned memory: the caller may change it before a non-blocking copy has run
        must_block = value.device != device and value.is_pinned()
        return value.to(device, self.dtype, non_blocking=not must_block)


def step_fields(
    action_space: FactoredActionSpace, state_dim: int, hidden: tuple[int, int]
) -> tuple[StepField, ...]:
    """One row per field of `TamiyoRolloutStep`, in its order."""
    number, flag = torch.float32, torch.bool
    heads = (action_space.num_heads,)
    names = f", heads {', '.join(action_space.names)}"
    sizes = ", ".join(f"{h.name}: {h.size}" for h in action_space)
    return (
        StepField("state", "states", number, (state_dim,), "F"),
        StepField("actions", "actions", action_space.action_dtype, heads, "H", names),
        StepField("log_probs", "log_probs", number, heads, "H", names),
        StepField("masks", "masks", flag, (action_space.num_choices,), "C", f", heads {sizes}"),
        StepField("value", "values", number, (), ""),
        StepField("reward", "rewards", number, (), ""),
        StepField("terminated", "terminated", flag, (), ""),
        StepField("truncated", "truncated", flag, (), ""),
        StepField("bootstrap_value", "bootstrap_values", number, (), ""),
        StepField("hidden_h", "hidden_h", number, hidden, "Lh", ", L layers, h hidden units"),
        StepField("hidden_c", "hidden_c", number, hidden, "Lh", ", L layers, h hidden units"),
    )


def as_tensor(name: str, value: object) -> Tensor:
    """The value as a tensor; raises an error with its name if it is not one."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}: got {type(value).__name__}, expected a tensor or numbers ({error})"
        ) from error
