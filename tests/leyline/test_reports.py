"""Reports check their shapes and types, and can be moved, selected and read for the step."""

from dataclasses import fields, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline.reports import Reports
from support.random_reports import random_reports, report_shapes


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("alpha", torch.zeros(4, 2)),
        ("stage", torch.zeros(4, 3)),  # float
        ("cost_params", torch.zeros(4, 3, 6)),
    ],
)
def test_a_wrong_shape_or_type_is_noticed(name: str, wrong: torch.Tensor) -> None:
    reports = random_reports(4, num_slots=3, num_blueprints=5)
    with pytest.raises(AssertionError, match=name):
        replace(reports, **{name: wrong})


def test_selected_reports_are_those_of_the_envs_in_their_order() -> None:
    reports = random_reports(5)
    some = reports.at(torch.tensor([3, 0]))
    assert some.num_envs == 2
    for entry in fields(Reports):
        selected, whole = getattr(some, entry.name), getattr(reports, entry.name)
        assert torch.equal(selected.nan_to_num(), whole[[3, 0]].nan_to_num()), entry.name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_move_keeps_every_value(device: str) -> None:
    reports = random_reports(3)
    there = reports.to(device)
    assert there.device.type == device
    moved = there.to("cpu")
    assert moved.device == torch.device("cpu")
    assert all(
        torch.equal(getattr(moved, e.name).nan_to_num(), getattr(reports, e.name).nan_to_num())
        for e in fields(Reports)
    )


def test_a_move_to_another_device_is_one_copy() -> None:
    reports = random_reports(3)
    with CountCopies() as ops:  # the meta device stands for a GPU: same path, no data
        moved = reports.to("meta")
    assert ops.count == 1
    for entry in fields(Reports):
        here, there = getattr(reports, entry.name), getattr(moved, entry.name)
        assert there.device.type == "meta", entry.name
        assert (there.shape, there.dtype) == (here.shape, here.dtype), entry.name


class CountCopies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket == torch.ops.aten._to_copy
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_steps", [1, 7, 25, 1000])
def test_progress_follows_from_the_steps_made_and_left(num_steps: int) -> None:
    steps = torch.arange(num_steps)
    reports = replace(random_reports(num_steps, 1, 1), step=steps, steps_left=num_steps - steps)
    torch.testing.assert_close(reports.progress, steps / num_steps)


def test_every_piece_of_evidence_has_a_flag_or_is_always_there() -> None:
    shapes = report_shapes()
    for value, flag in {
        "accuracy_history": "accuracy_history_known",
        "gradient_norm": "gradient_known",
        "contribution": "contribution_known",
        "contribution_error": "contribution_known",
    }.items():
        assert shapes[value] == shapes[flag]
