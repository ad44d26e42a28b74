"""An LSTM over sequences in packed order, by whichever exact way is fastest.

In packed order the rows of a time step lie together and the sequences still running are always
the first ones, so a step is a slice and its state the head of the state before it: no padding, no
resets. A kernel takes all sequences through all their steps in one call: Triton's on a GPU,
numba's on a CPU. What Triton's does not fit (`_fits_triton`) goes to cuDNN, which launches kernels
step by step. (cuDNN's faster kernels for rectangles round tanh and sigmoid to 2e-5, too coarse for
a ratio of old and new log-probs.) Sequences of about one length are a rectangle, and on a CPU
oneDNN wins there. docs/decisions/003-scoring-sequences.md
has the figures.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from esper.leyline.sequences import SequenceLayout

_PADDING_LIMIT = 1.2  # rows with padding for each row without, up to which a rectangle wins


def packed_lstm(
    lstm: nn.LSTM, rows: Tensor, layout: SequenceLayout, state: tuple[Tensor, Tensor]
) -> Tensor:
    """The outputs `[R, hidden]` for inputs `[R, inputs]`, from `state`, `[L, episodes, hidden]` each."""
    kernel: Any
    output: Tensor = rows
    if rows.device.type == "cpu":
        padded = len(layout.batch_sizes) * layout.num_episodes
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
    """Whether the Triton kernel takes an LSTM: its tiles of weights have to fit a processor."""
    if device.type != "cuda" or dtype != torch.float32 or hidden > 128 or not find_spec("triton"):
        return False
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= 160 * 1024)


def _padded_lstm(
    lstm: nn.LSTM, rows: Tensor, layout: SequenceLayout, state: tuple[Tensor, Tensor]
) -> Tensor:
    """Every sequence padded to the longest; sequences of one length already are a rectangle."""
    num_steps, num_episodes = len(layout.batch_sizes), layout.num_episodes
    padded_index = layout.padded_index_on(rows.device)
    if is_ragged := num_steps * num_episodes > len(rows):
        rows = rows.new_zeros(num_steps * num_episodes, rows.shape[1]).index_copy(
            0, padded_index, rows
        )
    outputs: Tensor = lstm(rows.view(num_steps, num_episodes, -1), state)[0].flatten(0, 1)
    return outputs.index_select(0, padded_index) if is_ragged else outputs


class _PackedLayer(torch.autograd.Function):
    """One layer. Gates lie in torch's order: input, forget, cell, output.

    Products over the inputs need no recurrence and are one matrix product for all rows, before
    and after; a kernel does only what must go step by step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        h: Tensor,
        c: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias_ih: Tensor,
        bias_hh: Tensor,
        layout: SequenceLayout,
        kernel: Any,
    ) -> Tensor:
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
        states_before = kept[0]
        grad_bias = grad_gates.sum(dim=0)
        return (
            grad_gates @ weight_ih,
            grad_h,
            grad_c,
            grad_gates.t() @ rows,
            grad_gates.t() @ states_before,
            grad_bias,
            grad_bias,
            None,
            None,
        )
