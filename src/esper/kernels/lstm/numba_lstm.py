"""The recurrence of an LSTM layer over sequences in packed order, compiled for one CPU thread.

With few sequences per time step, torch spends its time between operations. Here one call runs all
sequences through all their steps. With many, torch multiplies and a call does the rest of a step.
For a few envs, `step` and `choose` are one step of a plain policy with its choices.

Float32 only; exp is written out, because a library call per element would not be vectorised.
`reassoc` lets sums be reordered into vectors; infinities and NaN keep their meaning.
Parity tests: tests/tamiyo/test_packed_lstm.py and test_network.py.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,call-arg,assignment"

import numpy as np
import torch
from numba import njit
from torch import Tensor

from esper.kernels.numba_cache import cached_njit
from esper.leyline.sequences import SequenceLayout

_FAST = {"reassoc", "contract", "nsz", "arcp"}
_compiled = njit(fastmath=_FAST, error_model="numpy")
_entry_point = cached_njit(fastmath=_FAST, error_model="numpy")

_ONE, _HALF = np.float32(1), np.float32(0.5)
MANY_SEQUENCES = 20  # mean rows per time step from which torch multiplies faster


def forward(
    layout: SequenceLayout, gates: Tensor, h: Tensor, c: Tensor, weight: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs, and the tensors that `backward` needs; `gates` is overwritten with gate values."""
    outputs, hs, cs, tanh_cs = (gates.new_empty(len(gates), h.shape[1]) for _ in range(4))
    hs[: len(h)], cs[: len(c)] = h, c
    recurrent = weight.t().contiguous()
    arrays = [part.numpy() for part in (gates, hs, cs, tanh_cs, outputs)]
    if _is_small(layout):
        _forward(layout.batch_sizes.numpy(), *arrays, recurrent.numpy())
    else:
        for start, end, num_continuing in _spans(layout):
            gates[start:end].addmm_(hs[start:end], recurrent)
            _forward_rows(start, end, num_continuing, *arrays)
    return outputs, (hs, cs, tanh_cs)


def backward(
    layout: SequenceLayout,
    gates: Tensor,
    kept: tuple[Tensor, ...],
    weight: Tensor,
    grad_output: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates' inputs and of the initial states."""
    _, cs, tanh_cs = kept
    grad_gates = torch.empty_like(gates)
    grad_h, grad_c = (cs.new_zeros(layout.num_episodes, cs.shape[1]) for _ in "hc")
    parts = (gates, cs, tanh_cs, grad_output, grad_gates, grad_h, grad_c)
    arrays = [part.numpy() for part in parts]
    if _is_small(layout):
        _backward(layout.batch_sizes.numpy(), *arrays, weight.numpy())
    else:
        for start, end, _ in reversed(_spans(layout)):
            _backward_rows(start, end, *arrays)
            torch.mm(grad_gates[start:end], weight, out=grad_h[: end - start])
    return grad_gates, grad_h, grad_c


def _is_small(layout: SequenceLayout) -> bool:
    """Whether products with a step's few rows are faster here than in torch."""
    return layout.num_rows < MANY_SEQUENCES * len(layout.batch_sizes)


def _spans(layout: SequenceLayout) -> list[tuple[int, int, int]]:
    """First row, end, and sequences that continue, of each step."""
    sizes, starts = layout.batch_sizes.tolist(), layout.step_starts.tolist()
    return [(s, s + n, m) for s, n, m in zip(starts, sizes, [*sizes[1:], 0], strict=True)]


@_entry_point
def _forward(
    sizes,  # [steps]: sequences still running
    gates,  # [R, 4 * hidden]: in: the inputs' share of the gates; out: gate values
    hs,  # [R, hidden]: states before each row; those of the first step are given
    cs,
    tanh_cs,  # [R, hidden]: tanh of the cell after each row
    outputs,
    recurrent,  # [hidden, 4 * hidden]
):
    start = 0
    for step in range(sizes.size):
        end = start + sizes[step]
        _add_product(gates[start:end], hs[start:end], recurrent)
        num_continuing = sizes[step + 1] if step + 1 < sizes.size else 0
        _forward_rows(start, end, num_continuing, gates, hs, cs, tanh_cs, outputs)
        start = end


@_entry_point
def _forward_rows(start, end, num_continuing, gates, hs, cs, tanh_cs, outputs):
    """The rows of one step, once the states' share is in the gates."""
    hidden = hs.shape[1]
    for row in range(start, end):
        gate, c, tanh_c, output = gates[row], cs[row], tanh_cs[row], outputs[row]
        i, f = gate[:hidden], gate[hidden : 2 * hidden]
        z, o = gate[2 * hidden : 3 * hidden], gate[3 * hidden :]
        _squash(gate, hidden)
        for n in range(hidden):
            tanh_c[n] = f[n] * c[n] + i[n] * z[n]  # the cell; tanh follows below
        if row - start < num_continuing:
            cs[end + row - start, :] = tanh_c
        for n in range(hidden):
            tanh_c[n] = _tanh(tanh_c[n])
            output[n] = o[n] * tanh_c[n]
        if row - start < num_continuing:
            hs[end + row - start, :] = output


@_entry_point
def _backward(
    sizes,
    gates,
    cs,
    tanh_cs,
    grad_outputs,
    grad_gates,
    grad_h,  # [sequences, hidden]: in: zeros; out: gradient of the initial state
    grad_c,
    weights,  # [4 * hidden, hidden]
):
    end = gates.shape[0]
    for step in range(sizes.size - 1, -1, -1):
        start = end - sizes[step]
        _backward_rows(start, end, gates, cs, tanh_cs, grad_outputs, grad_gates, grad_h, grad_c)
        grad_h[: end - start] = 0
        _add_product(grad_h[: end - start], grad_gates[start:end], weights)
        end = start


@_entry_point
def _backward_rows(start, end, gates, cs, tanh_cs, grad_outputs, grad_gates, grad_h, grad_c):
    """The rows of one step; the caller replaces `grad_h` of their sequences."""
    hidden = cs.shape[1]
    for row in range(start, end):
        gate, grad_gate = gates[row], grad_gates[row]
        i, f = gate[:hidden], gate[hidden : 2 * hidden]
        z, o = gate[2 * hidden : 3 * hidden], gate[3 * hidden :]
        grad_i, grad_f = grad_gate[:hidden], grad_gate[hidden : 2 * hidden]
        grad_z, grad_o = grad_gate[2 * hidden : 3 * hidden], grad_gate[3 * hidden :]
        c, tanh_c, grad_output = cs[row], tanh_cs[row], grad_outputs[row]
        later_h, later_c = grad_h[row - start], grad_c[row - start]
        for n in range(hidden):
            to_h = later_h[n] + grad_output[n]
            to_c = later_c[n] + to_h * o[n] * (_ONE - tanh_c[n] * tanh_c[n])
            grad_i[n] = to_c * z[n] * i[n] * (_ONE - i[n])
            grad_f[n] = to_c * c[n] * f[n] * (_ONE - f[n])
            grad_z[n] = to_c * i[n] * (_ONE - z[n] * z[n])
            grad_o[n] = to_h * tanh_c[n] * o[n] * (_ONE - o[n])
            later_c[n] = to_c * f[n]


@_entry_point
def step(
    features,  # [N, F]
    center,  # [F], like `scale`
    scale,
    bound,
    encoder,  # weights [inputs, hidden] of each layer, followed by tanh
    encoder_biases,
    cell,  # weights of the input and of the state, [hidden, 4 * hidden]; unused without memory
    cell_bias,
    has_memory,
    h,  # [N, hidden]
    c,
):
    """What the heads read, and the next state."""
    core = np.empty_like(features)
    for n in range(core.shape[0]):
        for f in range(core.shape[1]):
            core[n, f] = min(max((features[n, f] - center[f]) / scale[f], -bound), bound)
    for layer in range(len(encoder)):
        core = _linear(core, encoder[layer], encoder_biases[layer])
        for n in range(core.shape[0]):
            for k in range(core.shape[1]):
                core[n, k] = _tanh(core[n, k])
    if not has_memory:
        return core, h, c
    gates = _linear(core, cell[0], cell_bias)
    _add_product(gates, h, cell[1])
    num_envs, hs, cs = len(h), np.concatenate((h, h)), np.concatenate((c, c))  # now, and next
    _forward_rows(0, num_envs, num_envs, gates, hs, cs, np.empty_like(c), np.empty_like(h))
    return core + hs[num_envs:], hs[num_envs:], cs[num_envs:]


@_entry_point
def choose(core, weight, bias, legal, starts, clocks, is_sampled, masked):
    """Choices and log-probs `[N, H]`, values `[N]`, and whether all choices were possible.

    `clocks` `[N, H, M]` are exponential, as in `MaskedFactoredCategorical.sample`. Head i has the
    choices from `starts[i]` to `starts[i + 1]`.
    """
    read = _linear(core, weight, bias)
    num_envs, num_heads, is_ok = len(core), len(starts) - 1, True
    actions = np.empty((num_envs, num_heads), dtype=np.int64)
    log_probs = np.empty((num_envs, num_heads), dtype=np.float32)
    for n in range(num_envs):
        for head in range(num_heads):
            start, end = starts[head], starts[head + 1]
            largest = masked
            for i in range(start, end):
                if not legal[n, i]:
                    read[n, i] = masked
                largest = max(read[n, i], largest)
            total, best, choice = np.float32(0), np.float32(-1), 0
            for i in range(start, end):
                weight_i = np.exp(read[n, i] - largest)
                total += weight_i
                rate = weight_i / clocks[n, head, i - start] if is_sampled else weight_i
                if rate > best:
                    best, choice = rate, i - start
            actions[n, head] = choice
            log_probs[n, head] = read[n, start + choice] - largest - np.log(total)
            # NaN fails both
            is_ok = is_ok and legal[n, start + choice] and total > 0
    return actions, log_probs, read[:, -1].copy(), is_ok


@_compiled
def _linear(x, weight, bias):
    y = np.empty((x.shape[0], weight.shape[1]), dtype=np.float32)
    y[:] = bias
    _add_product(y, x, weight)
    return y


@_compiled
def _add_product(y, x, w):
    """y `[rows, n]` += x `[rows, m]` @ w `[m, n]`, two rows of y and four of w at a time."""
    rows, in_fours = y.shape[0], w.shape[0] - w.shape[0] % 4
    for k in range(0, in_fours, 4):
        w0, w1, w2, w3 = w[k], w[k + 1], w[k + 2], w[k + 3]
        for row in range(0, rows - 1, 2):
            _add_four(y[row], y[row + 1], x[row, k : k + 4], x[row + 1, k : k + 4], w0, w1, w2, w3)
        if rows % 2:
            last, x_last = y[rows - 1], x[rows - 1]
            x0, x1, x2, x3 = x_last[k], x_last[k + 1], x_last[k + 2], x_last[k + 3]
            for n in range(last.size):
                last[n] += x0 * w0[n] + x1 * w1[n] + x2 * w2[n] + x3 * w3[n]
    for k in range(in_fours, w.shape[0]):
        for row in range(rows):
            for n in range(y.shape[1]):
                y[row, n] += x[row, k] * w[k, n]


@_compiled
def _add_four(y, z, for_y, for_z, w0, w1, w2, w3):
    y0, y1, y2, y3 = for_y[0], for_y[1], for_y[2], for_y[3]
    z0, z1, z2, z3 = for_z[0], for_z[1], for_z[2], for_z[3]
    for n in range(y.size):
        a, b, c, d = w0[n], w1[n], w2[n], w3[n]
        y[n] += y0 * a + y1 * b + y2 * c + y3 * d
        z[n] += z0 * a + z1 * b + z2 * c + z3 * d


@_compiled
def _squash(gate, hidden):
    """Gate values from their inputs: tanh for the cell gate, the third, else sigmoid."""
    for n in range(2 * hidden):
        gate[n] = _sigmoid(gate[n])
    for n in range(2 * hidden, 3 * hidden):
        gate[n] = _tanh(gate[n])
    for n in range(3 * hidden, 4 * hidden):
        gate[n] = _sigmoid(gate[n])


@_compiled
def _sigmoid(x):
    return _ONE / (_ONE + _exp(-x))


@_compiled
def _tanh(x):
    e = _exp(np.float32(-2) * abs(x))
    y = (_ONE - e) / (_ONE + e)
    return y if x >= 0 else -y


@_compiled
def _exp(x):
    """e^x = 2^k e^r with |r| <= log(2) / 2; relative error 2e-7."""
    x = min(max(x, np.float32(-87)), np.float32(87))  # x is the first argument, so NaN stays NaN
    k = np.floor(x * np.float32(1.44269504) + _HALF)
    r = x - k * np.float32(0.693359375)
    r = r + k * np.float32(2.12194440e-4)  # the rest of log(2)
    p = (np.float32(1 / 5040) * r + np.float32(1 / 720)) * r + np.float32(1 / 120)
    p = ((p * r + np.float32(1 / 24)) * r + np.float32(1 / 6)) * r + _HALF
    p = (p * r + _ONE) * r + _ONE
    return p * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
