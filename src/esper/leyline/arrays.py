"""Moving several tensors to a device in one copy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.leyline.devices import same_device

ALIGNMENT = 16  # bytes; Triton compiles a kernel again for pointers that are not aligned to it


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
