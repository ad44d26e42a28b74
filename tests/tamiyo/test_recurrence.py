"""Every way through an LSTM with episode starts, against one nn.LSTM call per episode in float64."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from esper.kernels.lstm import numba_lstm
from esper.tamiyo.policy import recurrence
from esper.tamiyo.policy.network import full_precision
from esper.tamiyo.policy.recurrence import fits_triton, lstm_over_rollout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_starts(num_steps, num_envs, share=0.2):
    starts = torch.rand(num_steps, num_envs) < share
    if num_steps > 2:
        starts[1:3, 0] = True  # an episode of one step
    return starts


def episode_by_episode(lstm, inputs, starts, state):
    """Outputs `[T, B, hidden]`, by a call of nn.LSTM for each episode."""
    num_steps, num_envs, _ = inputs.shape
    columns = []
    for env in range(num_envs):
        edges = [0, *starts[1:, env].nonzero()[:, 0].add(1).tolist(), num_steps]
        outputs = []
        for first, end in pairwise(edges):
            keeps = 1.0 if first == 0 and not starts[0, env] else 0.0
            before = tuple(keeps * part[:, env].contiguous() for part in state)
            outputs.append(lstm(inputs[first:end, env], before)[0])
        columns.append(torch.cat(outputs))
    return torch.stack(columns, dim=1)


def differentiated(function, lstm, inputs, weights):
    """Outputs, and the gradients of inputs and LSTM weights."""
    inputs = inputs.detach().requires_grad_()
    outputs = function(inputs)
    gradients = torch.autograd.grad((weights * outputs).sum(), [inputs, *lstm.parameters()])
    return outputs.detach(), gradients


@pytest.mark.parametrize(("num_steps", "num_envs"), [(1, 3), (70, 1), (33, 3), (17, 25)])
@pytest.mark.parametrize(("hidden", "layers"), [(6, 2), (64, 1), (100, 2), (128, 1)])
@pytest.mark.parametrize(
    ("device", "way"), [("cpu", "kernel"), ("cpu", "loop"),
                        pytest.param("cuda", "kernel", marks=pytest.mark.gpu)],
)  # fmt: skip
def test_every_way_is_exact_to_float32(
    monkeypatch, device, way, hidden, layers, num_steps, num_envs
):
    torch.manual_seed(0)
    exact = nn.LSTM(5, hidden, layers).double()
    for name, weight in exact.named_parameters():
        if name.startswith("weight_hh"):
            nn.init.orthogonal_(weight, gain=2.0)  # products that matter, memory that lasts
    starts = random_starts(num_steps, num_envs)
    starts[0, 0] = True
    inputs = torch.randn(num_steps, num_envs, 5).double()
    state = tuple(torch.randn(layers, num_envs, hidden).double() for _ in "hc")
    weights = torch.randn(num_steps, num_envs, hidden).double()
    expected, wanted = differentiated(
        lambda rows: episode_by_episode(exact, rows, starts, state), exact, inputs, weights
    )

    lstm = nn.LSTM(5, hidden, layers)
    lstm.load_state_dict(exact.state_dict())
    lstm = lstm.to(device)
    if way == "loop":
        monkeypatch.setattr(recurrence, "_kernel", lambda *_: None)
    else:
        kernel = recurrence._kernel(torch.device(device), torch.float32, hidden)
        assert kernel is not None
    inputs, weights, *state = (part.float().to(device) for part in (inputs, weights, *state))
    with full_precision(torch.device(device)):
        outputs, gradients = differentiated(
            lambda rows: lstm_over_rollout(lstm, rows, starts.to(device), tuple(state)),
            lstm,
            inputs,
            weights,
        )
    torch.testing.assert_close(outputs.cpu().double(), expected, rtol=0, atol=3e-6)
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert (mine.cpu() - theirs).norm() < 3e-6 * theirs.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_the_plain_loop_is_exact_in_float64(device):
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 6, 2).to(device, torch.float64)
    starts = random_starts(9, 4).to(device)
    exact = dict(dtype=torch.float64, device=device)
    inputs = torch.randn(9, 4, 3, **exact)
    state = tuple(torch.randn(2, 4, 6, **exact) for _ in "hc")
    weights = torch.randn(9, 4, 6, **exact)
    found, expected = (
        differentiated(lambda rows, way=way: way(lstm, rows, starts, state), lstm, inputs, weights)
        for way in (lstm_over_rollout, episode_by_episode)
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_envs", [3, 25])
def test_a_rectangle_without_starts_is_one_call_of_torch(monkeypatch, num_envs):
    calls = []
    forward = numba_lstm.forward
    monkeypatch.setattr(numba_lstm, "forward", lambda *given: calls.append(1) or forward(*given))
    lstm = nn.LSTM(3, 6, 2)
    inputs = torch.randn(9, num_envs, 3)
    state = tuple(torch.randn(2, num_envs, 6) for _ in "hc")
    starts = torch.zeros(9, num_envs, dtype=torch.bool)
    outputs = lstm_over_rollout(lstm, inputs, starts, state)
    assert torch.equal(outputs, lstm(inputs, state)[0])
    assert not calls

    starts[4, 1] = True
    restarted = lstm_over_rollout(lstm, inputs, starts, state)
    assert len(calls) == 2  # one for each layer
    is_after = torch.zeros_like(starts)
    is_after[4:, 1] = True
    torch.testing.assert_close(restarted[~is_after], outputs[~is_after])
    assert ((restarted - outputs)[is_after].abs().amax(dim=-1) > 1e-4).all()


@pytest.mark.parametrize("num_envs", [4, 25])
@pytest.mark.parametrize("device", DEVICES)
def test_an_env_with_nan_leaves_the_others_alone_and_a_start_ends_it(device, num_envs):
    lstm = nn.LSTM(5, 128).to(device)
    inputs = torch.randn(9, num_envs, 5, device=device)
    starts = random_starts(9, num_envs).to(device)
    starts[:6, 1] = False
    starts[6, 1] = True
    state = tuple(torch.zeros(1, num_envs, 128, device=device) for _ in "hc")
    clean = lstm_over_rollout(lstm, inputs, starts, state)
    inputs[2:6, 1] = torch.nan
    spoilt = lstm_over_rollout(lstm, inputs, starts, state)
    has_nan = torch.zeros_like(starts)
    has_nan[2:6, 1] = True
    assert spoilt[has_nan].isnan().all()
    torch.testing.assert_close(spoilt[~has_nan], clean[~has_nan], rtol=0, atol=0)


def test_what_the_gpu_kernel_does_not_fit_is_left_to_the_loop():
    for device, dtype, hidden in (
        ("cpu", torch.float32, 128),
        ("cuda", torch.float64, 128),
        ("cuda", torch.float32, 129),
    ):
        assert not fits_triton(torch.device(device), dtype, hidden)
