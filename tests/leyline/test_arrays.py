"""copy_together: every tensor keeps its content, and all travel in one copy."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline.arrays import ALIGNMENT, copy_together

TENSORS = [
    torch.tensor([True, False, True]),
    torch.arange(10.0).view(2, 5).t(),  # not contiguous
    torch.tensor(7),
    torch.zeros(0, 3, dtype=torch.int64),
    torch.arange(5, dtype=torch.int16),
]


class CountCopies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket == torch.ops.aten._to_copy
        return func(*args, **(kwargs or {}))


def test_tensors_go_to_another_device_in_one_copy_and_are_aligned():
    with CountCopies() as copies:  # the meta device stands for a GPU: same path, no data
        moved = copy_together(TENSORS, torch.device("meta"))
    assert copies.count == 1
    for tensor, copy in zip(TENSORS, moved, strict=True):
        assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        assert copy.device.type == "meta"
        assert copy.storage_offset() * copy.itemsize % ALIGNMENT == 0


@pytest.mark.gpu
def test_tensors_keep_their_content_on_the_way_to_a_gpu_and_back():
    there = copy_together(TENSORS, torch.device("cuda"))
    assert all(tensor.is_cuda for tensor in there)
    for tensor, copy in zip(TENSORS, copy_together(there, torch.device("cpu")), strict=True):
        assert torch.equal(tensor, copy)


def test_tensors_on_their_device_are_returned_as_they_are():
    for tensor, copy in zip(TENSORS, copy_together(TENSORS, torch.device("cpu")), strict=True):
        assert copy is tensor
