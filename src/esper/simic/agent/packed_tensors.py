"""Persistent storage for several tensors in one allocation."""

import math
from typing import Any

import torch
from torch import Tensor

from esper.leyline.devices import same_device


class PackedTensors:
    """One zeroed allocation that holds several named tensors, each contiguous.

    The fields are written in place and moved without packing them first. Tensors that already
    exist elsewhere are moved by `leyline.arrays.copy_together`.
    """

    ALIGNMENT = 64  # bytes: a cache line, and more than any dtype or vector load asks for

    def __init__(
        self, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ):
        self._fields = fields
        self._offsets: list[int] = []
        size = 0
        for dtype, shape in fields.values():
            self._offsets.append(size)
            num_bytes = math.prod(shape) * dtype.itemsize
            size += -(-num_bytes // self.ALIGNMENT) * self.ALIGNMENT
        # Pinned memory is copied to a GPU faster, but pinning starts CUDA: not before the caller does,
        # because a process that uses CUDA cannot fork.
        pinned = device.type == "cpu" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._storage = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.views = self._views_of(self._storage)

    def views_on(self, device: torch.device) -> dict[str, Any]:
        """The fields on `device`, after at most one copy."""
        if same_device(device, self._storage.device):
            return self.views
        # blocking: the caller may write to this storage right after
        return self._views_of(self._storage.to(device))

    def _views_of(self, storage: Tensor) -> dict[str, Any]:
        views = {}
        for (name, (dtype, shape)), offset in zip(self._fields.items(), self._offsets, strict=True):
            num_bytes = math.prod(shape) * dtype.itemsize
            views[name] = storage[offset : offset + num_bytes].view(dtype).view(shape)
        return views
