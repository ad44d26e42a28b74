"""Every way through an LSTM, each against one nn.LSTM call per sequence."""

import pytest
import torch
from torch import nn

from esper.kernels.lstm import numba_lstm
from esper.leyline.sequences import SequenceLayout
from esper.tamiyo.policy import packed_lstm as module
from esper.tamiyo.policy.network import full_precision
from esper.tamiyo.policy.packed_lstm import packed_lstm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GPU = pytest.param("cuda", 1000, marks=pytest.mark.gpu)


def layout_of(lengths):
    """One episode per env."""
    num_envs, none = len(lengths), torch.zeros(len(lengths), dtype=torch.int64)
    return SequenceLayout(
        num_envs, max(lengths), torch.arange(num_envs), none, torch.tensor(lengths)
    )


def packed(sequences):
    """Sequences, the longest first, time step by time step."""
    steps = range(len(sequences[0]))
    return torch.stack([s[t] for t in steps for s in sequences if len(s) > t])


def single_outputs(lstm, sequences, h, c):
    """The outputs in packed order, by a call per sequence."""
    return packed(
        [
            lstm(s.unsqueeze(1), (h[:, i : i + 1].contiguous(), c[:, i : i + 1].contiguous()))[0][
                :, 0
            ]
            for i, s in enumerate(sequences)
        ]
    )


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [9, 5, 5, 2, 1, 1]])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_outputs_and_gradients_equal_those_of_single_sequences(lengths, layers, device):
    torch.manual_seed(0)
    exact = {"dtype": torch.float64, "device": device, "requires_grad": True}
    lstm = nn.LSTM(3, 6, layers).to(device, torch.float64)
    sequences = [torch.randn(n, 3, **exact) for n in lengths]
    h, c = (torch.randn(layers, len(lengths), 6, **exact) for _ in "hc")
    inputs = [*sequences, h, c, *lstm.parameters()]
    outputs = packed_lstm(lstm, packed(sequences), layout_of(lengths), (h, c))
    expected = single_outputs(lstm, sequences, h, c)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    got = torch.autograd.grad((weights * outputs).sum(), inputs)
    want = torch.autograd.grad((weights * expected).sum(), inputs)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_only_a_ragged_batch_goes_to_the_kernel(monkeypatch):
    calls = []
    original = numba_lstm.forward
    monkeypatch.setattr(numba_lstm, "forward", lambda *a: calls.append(1) or original(*a))
    lstm = nn.LSTM(3, 6)
    rectangle, ragged, many = [4, 4, 3], [20, 1, 1, 1, 1, 1], [4, *[1] * 600]
    for lengths, num_calls in ((rectangle, 0), (ragged, 1), (many, 2)):
        rows = packed([torch.randn(n, 3) for n in lengths])
        state = torch.zeros(1, len(lengths), 6)
        packed_lstm(lstm, rows, layout_of(lengths), (state, state))
        assert len(calls) == num_calls


@pytest.mark.parametrize("lengths", [[5], [70, 9, 5, 5, 2, 1, 1], [12] * 16 + [7] * 20 + [1]])
@pytest.mark.parametrize("hidden", [6, 64, 100, 128])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("device", "many"), [("cpu", 1000), ("cpu", 0), GPU])
def test_every_way_is_exact_to_float32(monkeypatch, device, many, layers, hidden, lengths):
    monkeypatch.setattr(module, "_PADDING_LIMIT", 0.0)  # no rectangle is good enough
    monkeypatch.setattr(numba_lstm, "MANY_SEQUENCES", many)  # 0: torch multiplies
    assert device == "cpu" or module._fits_triton(torch.device(device), torch.float32, hidden)
    torch.manual_seed(0)
    exact = nn.LSTM(5, hidden, layers).double()
    for name, weights in exact.named_parameters():
        if name.startswith("weight_hh"):
            nn.init.orthogonal_(weights, gain=2.0)  # products that matter, memory that lasts
    sequences = [torch.randn(n, 5).double().requires_grad_() for n in lengths]
    h, c = (torch.randn(layers, len(lengths), hidden).double().requires_grad_() for _ in "hc")
    expected = single_outputs(exact, sequences, h, c)
    weights = torch.randn_like(expected)
    inputs = [*sequences, h, c]
    want = torch.autograd.grad((weights * expected).sum(), [*inputs, *exact.parameters()])

    lstm = nn.LSTM(5, hidden, layers)
    lstm.load_state_dict(exact.state_dict())
    lstm = lstm.to(device)
    *sequences, h, c = (i.detach().float().to(device).requires_grad_() for i in inputs)
    with full_precision(torch.device(device)):
        outputs = packed_lstm(lstm, packed(sequences), layout_of(lengths), (h, c))
        loss = (weights.float().to(device) * outputs).sum()
        got = torch.autograd.grad(loss, [*sequences, h, c, *lstm.parameters()])
    torch.testing.assert_close(outputs.cpu().double(), expected, rtol=0, atol=3e-6)
    for mine, theirs in zip(got, want, strict=True):
        error = (mine.cpu() - theirs).norm() / theirs.norm()
        assert error < 3e-6


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_with_nan_leaves_the_others_alone(device):
    lengths, lstm = [9, 7, 7, 3], nn.LSTM(5, 128).to(device)
    sequences = [torch.randn(n, 5, device=device) for n in lengths]
    state = torch.zeros(1, len(lengths), 128, device=device)
    clean = packed_lstm(lstm, packed(sequences), layout_of(lengths), (state, state))
    sequences[1][:] = torch.nan
    spoilt = packed_lstm(lstm, packed(sequences), layout_of(lengths), (state, state))
    is_spoilt = packed([torch.full((n,), i == 1) for i, n in enumerate(lengths)])
    assert spoilt[is_spoilt].isnan().all()
    torch.testing.assert_close(spoilt[~is_spoilt], clean[~is_spoilt], rtol=0, atol=0)


def test_what_the_gpu_kernel_does_not_fit_is_left_to_cudnn():
    for device, dtype, hidden in (
        ("cpu", torch.float32, 128),
        ("cuda", torch.float64, 128),
        ("cuda", torch.float32, 129),
    ):
        assert not module._fits_triton(torch.device(device), dtype, hidden)


def test_the_gates_take_any_input():
    inputs = torch.tensor([0.0, 1e-7, 0.3, 5.0, 20.0, 90.0, 1e4, torch.inf, torch.nan])
    inputs = torch.cat([inputs, -inputs])
    for compiled, exact in ((numba_lstm._sigmoid, torch.sigmoid), (numba_lstm._tanh, torch.tanh)):
        got = torch.tensor([compiled(x) for x in inputs.numpy()], dtype=torch.float64)
        torch.testing.assert_close(got, exact(inputs.double()), rtol=0, atol=1.5e-7, equal_nan=True)
