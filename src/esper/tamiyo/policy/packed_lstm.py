"""An LSTM over sequences in packed order, computed the fastest way that is exact to float32.

In packed order the rows of a time step are contiguous, and the sequences still running are the
first ones. A step is a slice, and its state is the head of the previous state: no padding and no
resets.

| device | sequences | way |
|---|---|---|
| CPU | of nearly one length, or not float32 | padded to a rectangle, oneDNN |
| CPU | otherwise | numba kernel |
| GPU | float32, up to 128 units | Triton kernel, all steps in one call |
| GPU | otherwise | cuDNN, packed |

cuDNN's faster kernels for rectangles round tanh and sigmoid to 2e-5, too coarse for a ratio of old
and new probabilities. docs/decisions/003-scoring-sequences.md has figures.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from esper.leyline.sequences import SequenceLayout

_PADDING_LIMIT = 1.2  # padded rows per real row up to which a rectangle is fastest


def packed_lstm(
    lstm: nn.LSTM, rows: Tensor, layout: SequenceLayout, state: tuple[Tensor, Tensor]
) -> Tensor:
    """Outputs `[R, hidden]` for inputs `[R, inputs]`; `state` is h and c, `[L, episodes, hidden]`."""
    kernel: Any
    output: Tensor = rows
    if rows.device.type == "cpu":
        num_steps = len(layout.batch_sizes)
        padded = num_steps * layout.num_episodes
        if padded <= _PADDING_LIMIT * layout.num_rows or rows.dtype != torch.float32:
            return _padded_lstm(lstm, rows, layout, state)
        from esper.kernels.lstm import numba_lstm as kernel
    elif _fits_triton(rows.device, rows.dtype, lstm.hidden_size):
        from esper.kernels.lstm import triton_lstm as kernel
    else:
        packed, _ = lstm(PackedSequence(rows, layout.batch_sizes), state)
        output = packed.data
        return output
    for weights, h, c in zip(lstm.all_weights, *state, strict=True):
        output = _PackedLayer.apply(output, h, c, *weights, layout, kernel)  # type: ignore[no-untyped-call]
    return output


@cache
def _fits_triton(device: torch.device, dtype: torch.dtype, hidden: int) -> bool:
    """Whether the Triton kernel can run: its weight tiles have to fit into shared memory."""
    if device.type != "cuda" or dtype != torch.float32 or hidden > 128 or not find_spec("triton"):
        return False
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= 160 * 1024)


def _padded_lstm(
    lstm: nn.LSTM, rows: Tensor, layout: SequenceLayout, state: tuple[Tensor, Tensor]
) -> Tensor:
    """Pad every sequence to the longest, on a CPU; sequences of one length need no copy."""
    num_steps, num_episodes = len(layout.batch_sizes), layout.num_episodes
    padded_index = layout.padded_index
    if is_ragged := num_steps * num_episodes > len(rows):
        rows = rows.new_zeros(num_steps * num_episodes, rows.shape[1]).index_copy(
            0, padded_index, rows
        )
    outputs: Tensor = lstm(rows.view(num_steps, num_episodes, -1), state)[0].flatten(0, 1)
    return outputs.index_select(0, padded_index) if is_ragged else outputs


class _PackedLayer(torch.autograd.Function):
    """One layer; gates are in torch's order: input, forget, cell, output.

    Products with the inputs need no recurrence: they are one matrix product for all rows. The
    kernel computes only the recurrence.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, h: Tensor, c: Tensor, *others: Any) -> Tensor:
        weight_ih, weight_hh, bias_ih, bias_hh, layout, kernel = others
        gates = torch.addmm(bias_ih + bias_hh, rows, weight_ih.t())
        outputs: Tensor
        outputs, kept = kernel.forward(layout, gates, h, c, weight_hh.detach())
        ctx.layout, ctx.kernel = layout, kernel
        ctx.save_for_backward(rows, weight_ih, weight_hh, gates, *kept)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_ih, weight_hh, gates, *kept = ctx.saved_tensors
        grad_gates, grad_h, grad_c = ctx.kernel.backward(
            ctx.layout, gates, kept, weight_hh.detach(), grad_output.contiguous()
        )
        states_before, grad_bias = kept[0], grad_gates.sum(dim=0)
        of_weights = (grad_gates.t() @ rows, grad_gates.t() @ states_before, grad_bias, grad_bias)
        return grad_gates @ weight_ih, grad_h, grad_c, *of_weights, None, None
