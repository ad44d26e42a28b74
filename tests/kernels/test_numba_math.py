"""The functions that kernels write out are exact for every float32, infinite and NaN too."""

import pytest
import torch

from esper.kernels import numba_math

SIZES = [0.0, 1e-30, 1e-7, 1e-3, 0.1, 0.3, 0.5, 1.0, 5.0, 20.0, 80.0]
EXTREMES = [90.0, 1e4, torch.inf, torch.nan]


def values_of(function, inputs):
    return torch.tensor([function(x) for x in inputs.numpy()], dtype=torch.float64)


@pytest.mark.parametrize(
    ("written_out", "exact"), [(numba_math.sigmoid, torch.sigmoid), (numba_math.tanh, torch.tanh)]
)
def test_the_gates_of_an_lstm_take_any_input(written_out, exact):
    inputs = torch.tensor(SIZES + EXTREMES)
    inputs = torch.cat([inputs, -inputs])
    got = values_of(written_out, inputs)
    torch.testing.assert_close(got, exact(inputs.double()), rtol=0, atol=1.5e-7, equal_nan=True)


def test_exp_and_log1p_are_right_to_a_few_roundings():
    inputs = torch.tensor(SIZES)
    inputs = torch.cat([inputs, -inputs])
    got = values_of(numba_math.exp, inputs)
    torch.testing.assert_close(got, inputs.double().exp(), rtol=4e-7, atol=0)
    shares = torch.linspace(0, 1, 1001)
    got = values_of(numba_math.log1p_of_share, shares)
    torch.testing.assert_close(got, shares.double().log1p(), rtol=4e-7, atol=0)
    assert values_of(numba_math.exp, torch.tensor([torch.nan])).isnan()
