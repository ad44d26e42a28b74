"""An LSTM over a dense, time-major rollout, whose state is zero before every row that starts an episode.

    outputs = lstm_over_rollout(lstm, inputs, starts, state)     # [T, B, hidden]

Nothing is packed or padded: layouts never change. What runs it:

| device | rows | way |
|---|---|---|
| CPU | no episode starts within them | `nn.LSTM` (oneDNN is 1.3 to 1.4 times as fast there) |
| CPU | float32 | numba kernel |
| GPU | float32, up to 128 units | Triton kernel, all steps in one call |
| anywhere | otherwise | a loop over time: the plain twin of both kernels |

cuDNN's LSTM is not used: it knows no resets, and its fast kernels round tanh and sigmoid to 2e-5, too
coarse for a ratio of old and new probabilities.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def lstm_over_rollout(
    lstm: nn.LSTM, inputs: Tensor, starts: Tensor, state: tuple[Tensor, Tensor]
) -> Tensor:
    """Outputs `[T, B, hidden]` for inputs `[T, B, width]`.

    `starts` `[T, B]` is True where a row begins an episode. `state` is h and c before the first
    row, `[L, B, hidden]`; no gradient flows into it.
    """
    if inputs.device.type == "cpu" and not starts.any():
        full: Tensor = lstm(inputs, state)[0]
        return full
    kernel = _kernel(inputs.device, inputs.dtype, lstm.hidden_size)
    outputs = inputs
    for weights, h, c in zip(lstm.all_weights, *state, strict=True):
        if kernel is None:
            outputs = lstm_loop(outputs, starts, h, c, weights)
        else:
            outputs = _KernelLayer.apply(outputs, starts, h, c, *weights, kernel)  # type: ignore[no-untyped-call]
    return outputs


def lstm_loop(
    inputs: Tensor, starts: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor]
) -> Tensor:
    """One layer, row after row: what the kernels are compared with."""
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    gates = torch.nn.functional.linear(inputs, weight_ih, bias_ih + bias_hh)  # [T, B, 4 * hidden]
    outputs = []
    for step_gates, step_starts in zip(gates, starts, strict=True):
        fresh = step_starts.unsqueeze(-1)
        h = torch.where(fresh, 0.0, h)
        c = torch.where(fresh, 0.0, c)
        h, c = finish_cell(step_gates + h @ weight_hh.t(), c)
        outputs.append(h)
    return torch.stack(outputs)


def finish_cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The state after a step, from the gates' inputs `[B, 4 * hidden]` and the cell before it."""
    i, f, z, o = gates.chunk(4, dim=-1)  # torch's order: input, forget, cell, output
    c = f.sigmoid() * c + i.sigmoid() * z.tanh()
    return o.sigmoid() * c.tanh(), c


def _kernel(device: torch.device, dtype: torch.dtype, hidden: int) -> Any:
    """The module of the kernel for these rows; None: the loop."""
    if device.type == "cpu" and dtype == torch.float32:
        from esper.kernels.lstm import numba_lstm

        return numba_lstm
    if fits_triton(device, dtype, hidden):
        from esper.kernels.lstm import triton_lstm

        return triton_lstm
    return None


@cache
def fits_triton(device: torch.device, dtype: torch.dtype, hidden: int) -> bool:
    """Whether the Triton kernel can run: its weight tiles have to fit into shared memory."""
    if device.type != "cuda" or dtype != torch.float32 or hidden > 128 or not find_spec("triton"):
        return False
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= 160 * 1024)


class _KernelLayer(torch.autograd.Function):
    """One layer; gates are in torch's order: input, forget, cell, output.

    Products with the inputs need no recurrence: they are one matrix product for all rows. The
    kernel computes only the recurrence.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, starts: Tensor, h: Tensor, c: Tensor, *others: Any
    ) -> Tensor:
        weight_ih, weight_hh, bias_ih, bias_hh, kernel = others
        num_steps, num_envs, width = inputs.shape
        rows = inputs.reshape(num_steps * num_envs, width)
        gates = torch.addmm(bias_ih + bias_hh, rows, weight_ih.t())
        gates = gates.view(num_steps, num_envs, -1)  # the kernel overwrites it with gate values
        outputs: Tensor
        outputs, kept = kernel.forward(gates, starts, h, c, weight_hh.detach())
        ctx.kernel = kernel
        ctx.save_for_backward(rows, weight_ih, weight_hh, starts, gates, *kept)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_ih, weight_hh, starts, gates, *kept = ctx.saved_tensors
        grad_gates = ctx.kernel.backward(
            gates, starts, kept, weight_hh.detach(), grad_outputs.contiguous()
        )
        states_before = kept[0].flatten(0, 1)
        flat = grad_gates.flatten(0, 1)  # [T * B, 4 * hidden]
        grad_inputs = (flat @ weight_ih).view(*gates.shape[:2], -1)
        grad_bias = flat.sum(dim=0)
        grad_weights = (flat.t() @ rows, flat.t() @ states_before, grad_bias, grad_bias)
        return grad_inputs, None, None, None, *grad_weights, None
