"""Training of one change against torch's own optimiser and schedule."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.adapting.fitting import fit
from support.fits import HEAD, RATE, STEPS, assert_same, by_torch, problem


def fitted(start, loss, **options):
    change = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    fit(change, lambda step: loss(change, step), rate=RATE, steps=STEPS, **options)
    return change


def test_fit_is_adam_with_a_cosine():
    start, loss = problem()
    found = fitted(start, loss)
    assert_same(found, by_torch(start, loss, [([*start], STEPS)]), rtol=1e-9, atol=1e-11)
    assert (found["body"] - start["body"]).abs().max() > 0.05
    assert not any(tensor.grad is not None for tensor in found.values())


def test_what_comes_first_trains_alone_for_half_of_the_steps():
    start, loss = problem()
    reports = []
    found = fitted(start, loss, first=HEAD, report=lambda: reports.append(1))
    phases = [(["head", "bias"], STEPS // 2), ([*start], STEPS - STEPS // 2)]
    assert_same(found, by_torch(start, loss, phases), rtol=1e-9, atol=1e-11)
    assert len(reports) == STEPS


def test_the_loss_knows_which_tensors_train():
    start, loss = problem()
    change = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    training = []

    def loss_at(step):
        training.append({name for name, tensor in change.items() if tensor.requires_grad})
        return loss(change, step)

    fit(change, loss_at, rate=RATE, steps=STEPS, first=HEAD)
    assert training == [{*HEAD}] * (STEPS // 2) + [{*change}] * (STEPS - STEPS // 2)


def test_a_weight_that_the_loss_does_not_use_stays():
    start, loss = problem()
    start["unused"] = torch.ones(2, dtype=torch.float64)
    found = fitted(start, loss)
    assert torch.equal(found["unused"], start["unused"])


def test_other_weights_get_no_gradient():
    model = nn.Linear(3, 2)
    change = {"scale": nn.Parameter(torch.ones(2))}
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    fit(change, lambda step: F.cross_entropy(model(x) * change["scale"], y), rate=RATE, steps=3)
    assert not torch.equal(change["scale"], torch.ones(2))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_a_change_nothing_is_trained():
    fit({}, lambda step: pytest.fail("there is no loss"), rate=RATE, steps=STEPS)


def filtered(weight, layout):
    """The filters of a convolution, stored in a memory format, after training."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, 6, 6, generator=rng).to(weight), torch.arange(16) % 4
    change = {"weight": nn.Parameter(weight.clone(memory_format=layout))}

    def loss_at(step):
        return F.cross_entropy(F.conv2d(x, change["weight"]).mean((2, 3)).float(), y)

    fit(change, loss_at, rate=RATE, steps=STEPS)
    return change["weight"].detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_any_memory_format_learn_alike(dtype):
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = [filtered(weight, f) for f in (torch.contiguous_format, torch.channels_last)]
    assert not torch.equal(found[0], weight)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
