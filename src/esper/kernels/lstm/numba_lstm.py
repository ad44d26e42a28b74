"""The recurrence of an LSTM layer over dense sequences, compiled for one CPU thread.

With few sequences, torch spends its time between operations: here one call runs all sequences
through all their steps. With many, torch multiplies and a call does the rest of a step.
`finish_step` is that rest for one step of acting.

Float32 only. Parity tests: tests/tamiyo/test_recurrence.py.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,call-arg,assignment"

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from esper.kernels.numba_cache import cached_njit
from esper.kernels.numba_math import FAST, compiled, sigmoid, tanh

_entry_point = cached_njit(fastmath=FAST, error_model="numpy")

_ONE = np.float32(1)
MANY_SEQUENCES = 20  # from which torch multiplies faster


def forward(
    gates: Tensor, starts: Tensor, h: Tensor, c: Tensor, weight: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs `[T, B, hidden]`, and the tensors that `backward` needs.

    `gates` `[T, B, 4 * hidden]` holds the inputs' share and is overwritten with gate values.
    """
    num_steps, num_envs, _ = gates.shape
    hidden = h.shape[1]
    outputs = gates.new_empty(num_steps, num_envs, hidden)
    tanh_cs = gates.new_empty(num_steps, num_envs, hidden)
    hs = gates.new_empty(num_steps + 1, num_envs, hidden)  # before each row, and after the last
    cs = gates.new_empty(num_steps + 1, num_envs, hidden)
    hs[0] = h
    cs[0] = c
    recurrent = weight.t().contiguous()
    arrays = [part.numpy() for part in (starts, gates, hs, cs, tanh_cs, outputs)]
    if num_envs < MANY_SEQUENCES:
        _forward(*arrays, recurrent.numpy())
    else:
        for step in range(num_steps):
            _reset(*(array[step] for array in arrays[:1]), hs[step].numpy(), cs[step].numpy())
            gates[step].addmm_(hs[step], recurrent)
            _finish_row(step, *arrays[1:])
    return outputs, (hs[:-1], cs[:-1], tanh_cs)


def backward(
    gates: Tensor, starts: Tensor, kept: Sequence[Tensor], weight: Tensor, grad_outputs: Tensor
) -> Tensor:
    """Gradients of the gates' inputs, `[T, B, 4 * hidden]`."""
    _, cs, tanh_cs = kept
    grad_gates = torch.empty_like(gates)
    grad_h = torch.zeros_like(cs[0])
    grad_c = torch.zeros_like(cs[0])
    parts = (starts, gates, cs, tanh_cs, grad_outputs, grad_gates, grad_h, grad_c)
    arrays = [part.numpy() for part in parts]
    num_steps, num_envs, _ = gates.shape
    if num_envs < MANY_SEQUENCES:
        _backward(*arrays, weight.numpy())
    else:
        for step in range(num_steps - 1, -1, -1):
            _row_gradients(step, *arrays[1:])
            torch.mm(grad_gates[step], weight, out=grad_h)
            _reset(arrays[0][step], *arrays[-2:])
    return grad_gates


def finish_step(layer: int, gates: Tensor, c: Tensor, next_h: Tensor, next_c: Tensor) -> None:
    """A layer's state `[N, L, hidden]` after one step of acting.

    `gates` `[N, 4 * hidden]` hold all products.
    """
    _finish_step(layer, gates.numpy(), c.numpy(), next_h.numpy(), next_c.numpy())


@_entry_point
def _forward(
    starts,  # [T, B]
    gates,  # [T, B, 4 * hidden]: in: the inputs' share of the gates; out: gate values
    hs,  # [T + 1, B, hidden]: states before each row; those of the first are given
    cs,
    tanh_cs,  # [T, B, hidden]: tanh of the cell after each row
    outputs,
    recurrent,  # [hidden, 4 * hidden]
):
    for step in range(gates.shape[0]):
        _reset(starts[step], hs[step], cs[step])
        _add_product(gates[step], hs[step], recurrent)
        _finish_row(step, gates, hs, cs, tanh_cs, outputs)


@_entry_point
def _reset(starts, h, c):
    """Zero the rows where an episode starts."""
    for b in range(starts.size):
        if starts[b]:
            h[b] = 0
            c[b] = 0


@_entry_point
def _finish_row(step, gates, hs, cs, tanh_cs, outputs):
    """The rest of a step, once the states' share is in the gates."""
    for b in range(hs.shape[1]):
        _finish_one(
            gates[step, b], cs[step, b], cs[step + 1, b], tanh_cs[step, b], outputs[step, b]
        )
        hs[step + 1, b, :] = outputs[step, b]


@_entry_point
def _finish_step(layer, gates, cells, next_hs, next_cs):
    for b in range(cells.shape[0]):
        next_h = next_hs[b, layer]
        _finish_one(gates[b], cells[b, layer], next_cs[b, layer], next_h, next_h)


@compiled
def _finish_one(gate, c, next_c, tanh_c, output):
    """One sequence; gates are in torch's order: input, forget, cell, output."""
    hidden = c.size
    _squash(gate, hidden)
    for n in range(hidden):
        next_c[n] = gate[n + hidden] * c[n] + gate[n] * gate[n + 2 * hidden]
    for n in range(hidden):
        tanh_c[n] = tanh(next_c[n])
    for n in range(hidden):
        output[n] = gate[n + 3 * hidden] * tanh_c[n]


@_entry_point
def _backward(
    starts,
    gates,
    cs,
    tanh_cs,
    grad_outputs,
    grad_gates,
    grad_h,  # [B, hidden]: zeros
    grad_c,
    weight,  # [4 * hidden, hidden]
):
    for step in range(gates.shape[0] - 1, -1, -1):
        _row_gradients(step, gates, cs, tanh_cs, grad_outputs, grad_gates, grad_h, grad_c)
        grad_h[:] = 0
        _add_product(grad_h, grad_gates[step], weight)
        _reset(starts[step], grad_h, grad_c)


@_entry_point
def _row_gradients(step, gates, cs, tanh_cs, grad_outputs, grad_gates, grad_h, grad_c):
    """One step back; the caller replaces `grad_h`."""
    for b in range(cs.shape[1]):
        _one_gradient(
            gates[step, b], cs[step, b], tanh_cs[step, b], grad_outputs[step, b],
            grad_gates[step, b], grad_h[b], grad_c[b],
        )  # fmt: skip


@compiled
def _one_gradient(gate, c, tanh_c, grad_output, grad_gate, later_h, later_c):
    # few arrays, indexed by offsets: with one for each gate, LLVM gives up checking that they do
    # not overlap, and the loop is not vector code
    hidden = c.size
    for n in range(hidden):
        i, f, z, o = gate[n], gate[n + hidden], gate[n + 2 * hidden], gate[n + 3 * hidden]
        to_h = later_h[n] + grad_output[n]
        to_c = later_c[n] + to_h * o * (_ONE - tanh_c[n] * tanh_c[n])
        grad_gate[n] = to_c * z * i * (_ONE - i)
        grad_gate[n + hidden] = to_c * c[n] * f * (_ONE - f)
        grad_gate[n + 2 * hidden] = to_c * i * (_ONE - z * z)
        grad_gate[n + 3 * hidden] = to_h * tanh_c[n] * o * (_ONE - o)
        later_c[n] = to_c * f


@compiled
def _add_product(y, x, w):
    """y `[rows, n]` += x `[rows, m]` @ w `[m, n]`, eight rows of w at a time.

    A row of y is read and written once for eight of them, and they stay in the first cache.
    """
    in_eights = w.shape[0] - w.shape[0] % 8
    for k in range(0, in_eights, 8):
        for row in range(y.shape[0]):
            x0, x1, x2, x3 = x[row, k], x[row, k + 1], x[row, k + 2], x[row, k + 3]
            x4, x5, x6, x7 = x[row, k + 4], x[row, k + 5], x[row, k + 6], x[row, k + 7]
            for n in range(y.shape[1]):
                first = x0 * w[k, n] + x1 * w[k + 1, n] + x2 * w[k + 2, n] + x3 * w[k + 3, n]
                last = x4 * w[k + 4, n] + x5 * w[k + 5, n] + x6 * w[k + 6, n] + x7 * w[k + 7, n]
                y[row, n] += first + last
    for k in range(in_eights, w.shape[0]):
        for row in range(y.shape[0]):
            factor = x[row, k]
            for n in range(y.shape[1]):
                y[row, n] += factor * w[k, n]


@compiled
def _squash(gate, hidden):
    """Gate values from their inputs: tanh for the cell gate, the third, else sigmoid."""
    for n in range(2 * hidden):
        gate[n] = sigmoid(gate[n])
    for n in range(2 * hidden, 3 * hidden):
        gate[n] = tanh(gate[n])
    for n in range(3 * hidden, 4 * hidden):
        gate[n] = sigmoid(gate[n])
