"""Tensors that travel together, dataclasses of tensors, and tables that are made once."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline.arrays import ALIGNMENT, TensorFields, copy_together

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair(TensorFields):
    a: torch.Tensor
    b: torch.Tensor


def test_a_part_that_is_put_back_where_it_was_read_changes_nothing_else():
    pair = Pair(a=torch.arange(6).view(3, 2), b=torch.arange(3.0))
    rows = torch.tensor([2, 0])
    part = pair.at(rows)
    assert part.a.tolist() == [[4, 5], [0, 1]]
    assert part.b.tolist() == [2.0, 0.0]
    changed = pair.put(part.map(lambda value: value + 10), rows)
    assert changed.a.tolist() == [[10, 11], [2, 3], [14, 15]]
    assert changed.b.tolist() == [10.0, 1.0, 12.0]
    assert pair.b.tolist() == [0.0, 1.0, 2.0]
    assert Pair.cat([pair, part]).b.tolist() == [0.0, 1.0, 2.0, 2.0, 0.0]
    assert pair.to("cpu") is pair
