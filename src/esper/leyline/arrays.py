"""Dataclasses whose fields are tensors, and moving several tensors to a device in one copy."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor

from esper.runtime.devices import same_device

ALIGNMENT = 16  # bytes; Triton compiles a kernel again for pointers that are not aligned to it


class TensorFields:
    """Base of frozen, keyword-only dataclasses whose fields are all tensors."""

    def tensors(self) -> dict[str, Tensor]:
        """Every field by name, without a copy."""
        names: Sequence[Any] = fields(self)  # type: ignore[arg-type]
        return {entry.name: getattr(self, entry.name) for entry in names}

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**{name: change(value) for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> Self:
        """All fields on a device, moved in one copy; `self` if they are there already."""
        device, values = torch.device(device), self.tensors()
        moved = copy_together(list(values.values()), device)
        if moved[0] is next(iter(values.values())):
            return self
        return type(self)(**dict(zip(values, moved, strict=True)))

    def at(self, *index: Tensor) -> Self:
        """Every field at an index of its leading axes."""
        return self.map(lambda value: value[index])

    def put(self, part: Self, *index: Tensor) -> Self:
        """A copy with the values of `part` where `at(*index)` reads."""
        new = part.tensors()
        return type(self)(
            **{name: value.index_put(index, new[name]) for name, value in self.tensors().items()}
        )

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The parts concatenated along the first axis."""
        values = [part.tensors() for part in parts]
        return cls(**{name: torch.cat([part[name] for part in values]) for name in values[0]})


def copy_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on `device`, as views of one buffer: one copy, and no wait for a GPU.

    The tensors must be on one device. If that is `device`, they are returned as they are.
    """
    source = tensors[0].device
    if same_device(device, source):
        return list(tensors)
    to_gpu = device.type == "cuda" and source.type == "cpu"
    padding = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=source)
    parts: list[Tensor] = []
    for tensor in tensors:
        content = tensor.contiguous().flatten().view(torch.uint8)
        parts += [content, padding[: -len(content) % ALIGNMENT]]
    sizes = [len(part) for part in parts]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, device=source, pin_memory=to_gpu)
    torch.cat(parts, out=packed)
    copies = torch.split(packed.to(device, non_blocking=to_gpu), sizes)[::2]  # without padding
    return [
        copy.view(tensor.dtype).view(tensor.shape)
        for copy, tensor in zip(copies, tensors, strict=True)
    ]
