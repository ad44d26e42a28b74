"""Curves and blends against their formulas, and the exactness that growth rests on."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina.blending import blend, curve
from esper.leyline.constants import AlphaCurve, BlendStyle

SHAPES = [(6, 4, 5), (6, 4, 5, 7), (6, 4, 3, 5, 5)]  # VECTOR, SERIES, IMAGE
STYLES = torch.tensor([0, 1, 2, 2, 1, 0])


def activations(shape, dtype=torch.float64):
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=rng, dtype=dtype) for _ in range(2)]


def test_curves_by_hand():
    # the sigmoid: a logistic over [-5, 5], stretched so that it starts at 0 and ends at 1
    low, quarter = 1 / (1 + math.e**5), 1 / (1 + math.e**2.5)
    expected = {
        AlphaCurve.LINEAR: [0.0, 0.25, 0.5, 1.0],
        AlphaCurve.COSINE: [0.0, (1 - math.sqrt(0.5)) / 2, 0.5, 1.0],
        AlphaCurve.SIGMOID: [0.0, (quarter - low) / (1 - 2 * low), 0.5, 1.0],
    }
    fraction = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    kinds = torch.tensor(list(expected)).unsqueeze(1)
    actual = curve(kinds, fraction.expand(len(expected), -1))
    torch.testing.assert_close(actual, torch.tensor(list(expected.values()), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", AlphaCurve)
def test_curves_begin_at_0_end_at_1_and_never_turn_back(kind, dtype):
    fraction = torch.linspace(0, 1, 10_001, dtype=dtype)
    along = curve(torch.full((10_001,), kind), fraction)
    assert along[0] == 0.0
    assert along[-1] == 1.0
    assert (along.diff() >= 0).all()
    assert along.dtype == dtype


@pytest.mark.parametrize("shape", SHAPES)
def test_each_host_blends_in_its_own_style(shape):
    x, seed = activations(shape)
    alpha = torch.tensor([0.0, 0.3, 0.5, 0.7, 1.0, 1.0], dtype=torch.float64)
    blended = blend(x, seed, alpha, STYLES)
    for host, (a, style) in enumerate(zip(alpha.tolist(), STYLES.tolist(), strict=True)):
        h, s = x[host], seed[host]
        formula = {
            BlendStyle.ADD: h + a * s,
            BlendStyle.MULTIPLY: h * (1 + a * torch.tanh(s)),
            BlendStyle.GATE: h + a * (1 / (1 + torch.exp(-h))) * s,
        }
        torch.testing.assert_close(blended[host], formula[BlendStyle(style)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_silent_seed_or_a_closed_blend_changes_no_bit(shape, dtype):
    x, seed = activations(shape, dtype)
    alpha = torch.linspace(0.1, 1.0, 6)
    assert torch.equal(blend(x, torch.zeros_like(x), alpha, STYLES), x)
    assert torch.equal(blend(x, seed, torch.zeros(6), STYLES), x)


def test_a_silent_seed_still_learns():
    x, _ = activations(SHAPES[1])
    seed = torch.zeros_like(x, requires_grad=True)
    blend(x, seed, torch.ones(6), STYLES).sum().backward()
    assert (seed.grad != 0).all()


@given(st.integers(0, 10_000))
def test_gradients_reach_host_and_seed_as_the_formula_says(rng_seed):
    rng = torch.Generator().manual_seed(rng_seed)
    x, seed = (
        torch.randn(6, 2, 3, generator=rng, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    alpha = torch.rand(6, generator=rng, dtype=torch.float64)
    torch.autograd.gradcheck(lambda a, b: blend(a, b, alpha, STYLES), (x, seed))


def test_a_host_blends_the_same_whoever_is_beside_it():
    x, seed = activations(SHAPES[1])
    alpha = torch.linspace(0.1, 1.0, 6)
    together = blend(x, seed, alpha, STYLES)
    alone = [
        blend(x[i : i + 1], seed[i : i + 1], alpha[i : i + 1], STYLES[i : i + 1]) for i in range(6)
    ]
    # vectorised and scalar float32 arithmetic may differ in the last bit
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=1e-6)
