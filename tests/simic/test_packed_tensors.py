"""PackedTensors: fields in one allocation."""

import torch

from esper.simic.agent.packed_tensors import PackedTensors

FIELDS = {
    "flags": (torch.bool, (3,)),
    "values": (torch.float32, (2, 5)),
    "steps": (torch.int64, ()),
}


def test_fields_do_not_touch_one_another():
    packed = PackedTensors(FIELDS, torch.device("cpu"))
    for name, view in packed.views.items():
        assert (view.dtype, tuple(view.shape)) == FIELDS[name]
        assert view.data_ptr() % PackedTensors.ALIGNMENT == packed.views["flags"].data_ptr() % 64
        view.fill_(1)
    assert all(bool((view == 1).all()) for view in packed.views.values())
    assert packed.views_on(torch.device("cpu")) is packed.views


def test_memory_is_pinned_only_if_cuda_is_initialised(monkeypatch):
    """Pinning initialises CUDA, and a process that uses CUDA cannot fork."""
    asked = []
    zeros = torch.zeros

    def watched(*shape, pin_memory, **options):
        asked.append(pin_memory)
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", watched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for is_initialized in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda value=is_initialized: value)
        PackedTensors(FIELDS, torch.device("cpu"))
    assert asked == [False, True]
