"""An LSTM over sequences in packed order, by whichever exact way is fastest.

In packed order the rows of a time step lie together and the sequences still running are always
the first ones, so a step is a slice and its state the head of the state before it: no padding, no
resets. On a GPU a kernel takes sequences through all their steps in one launch; what it does not
fit (`_fits_kernel`) goes to cuDNN, which launches kernels step by step. (cuDNN's faster kernels
for rectangles round tanh and sigmoid to 2e-5, too coarse for a ratio of old and new log-probs.)
On a CPU oneDNN wants a rectangle and wins while little of it is padding; beyond that a loop over
the steps wins, if a layer is one node for autograd: its backward pass takes five operations per
step and does the rest for all rows at once. docs/decisions/003-scoring-sequences.md has the
figures.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from esper.leyline.sequences import SequenceLayout

_PADDING_LIMIT = 2.0  # rows with padding for each row without, up to which a rectangle wins


def packed_lstm(
    lstm: nn.LSTM, rows: Tensor, layout: SequenceLayout, state: tuple[Tensor, Tensor]
) -> Tensor:
    """The outputs `[R, hidden]` for inputs `[R, inputs]`, from `state`, `[L, episodes, hidden]` each."""
    output: Tensor
    if rows.device.type == "cpu":
        if len(layout.batch_sizes) * layout.num_episodes <= _PADDING_LIMIT * layout.num_rows:
            return _padded_lstm(lstm, rows, layout, state)
        layer: Any = _PackedLayer
    elif _fits_kernel(rows.device, rows.dtype, lstm.hidden_size):
        from esper.tamiyo.policy.kernels.triton_lstm import PackedLayer as layer
    else:
        packed, _ = lstm(PackedSequence(rows, layout.batch_sizes), state)
        output = packed.data
        return output
    output = rows
    for weights, h, c in zip(lstm.all_weights, *state, strict=True):
        output = layer.apply(output, h, c, *weights, layout)
    return output


@cache
def _fits_kernel(device: torch.device, dtype: torch.dtype, hidden: int) -> bool:
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
    places = layout.places_on(rows.device)
    if is_ragged := num_steps * num_episodes > len(rows):
        rows = rows.new_zeros(num_steps * num_episodes, rows.shape[1]).index_copy(0, places, rows)
    outputs: Tensor = lstm(rows.view(num_steps, num_episodes, -1), state)[0].flatten(0, 1)
    return outputs.index_select(0, places) if is_ragged else outputs


class _PackedLayer(torch.autograd.Function):
    """One layer. Gates lie in torch's order: input, forget, cell, output."""

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
    ) -> Tensor:
        num_episodes, hidden = h.shape
        sizes = layout.batch_sizes.tolist()
        gates = torch.addmm(bias_ih + bias_hh, rows, weight_ih.t())
        # states of all steps, those before the first step in front
        hs, cs = (torch.cat((s, s.new_empty(len(rows), hidden))) for s in (h, c))
        tanh_cs = rows.new_empty(len(rows), hidden)
        recurrent = weight_hh.t().contiguous()
        for gate, i_and_f, i, f, z, o, next_h, next_c, tanh_c in _steps(
            sizes,
            gates,
            gates[:, : 2 * hidden],
            *gates.chunk(4, dim=1),
            hs[num_episodes:],
            cs[num_episodes:],
            tanh_cs,
        ):
            size = len(gate)
            if len(h) != size:
                h, c = h[:size], c[:size]
            gate.addmm_(h, recurrent)
            i_and_f.sigmoid_()
            z.tanh_()
            o.sigmoid_()
            torch.mul(f, c, out=next_c).addcmul_(i, z)
            torch.tanh(next_c, out=tanh_c)
            torch.mul(o, tanh_c, out=next_h)
            h, c = next_h, next_c
        ctx.sizes = sizes
        ctx.save_for_backward(rows, weight_ih, weight_hh, gates, hs, cs, tanh_cs)
        return hs[num_episodes:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_ih, weight_hh, gates, hs, cs, tanh_cs = ctx.saved_tensors
        sizes, num_episodes = ctx.sizes, len(hs) - len(rows)
        sizes_before = [num_episodes, *sizes[:-1]]
        before = torch.arange(num_episodes, len(hs)) - torch.tensor(sizes_before).repeat_interleave(
            torch.tensor(sizes)
        )  # where each row's state before the step lies
        i, f, z, o = gates.chunk(4, dim=1)
        # what the gates' inputs do to c (input, forget, cell) and to h (output), for all rows
        slopes = torch.empty_like(gates)
        to_i, to_f, to_z, to_o = slopes.chunk(4, dim=1)
        _sigmoid_slope(z, i, to_i)
        _sigmoid_slope(cs.index_select(0, before), f, to_f)
        torch.ops.aten.tanh_backward.grad_input(i, z, grad_input=to_z)
        _sigmoid_slope(tanh_cs, o, to_o)
        h_to_c = torch.ops.aten.tanh_backward(o, tanh_cs)

        grad_hs = torch.cat((torch.zeros_like(hs[:num_episodes]), grad_output))
        grad_cs = torch.zeros_like(cs)
        by_gate = slopes.view(len(rows), 4, -1)
        steps = _steps(sizes, slopes, by_gate[:, :3], by_gate[:, 3], f, h_to_c)
        grads = _steps([num_episodes, *sizes], grad_hs, grad_cs)
        grad_h, grad_c = grads.pop()
        while steps:
            slope, to_c, to_h, forget, through_h = steps.pop()
            grad_c.addcmul_(grad_h, through_h)
            to_c.mul_(grad_c.unsqueeze(1))
            to_h.mul_(grad_h)
            earlier_h, earlier_c = grads.pop()
            size = len(slope)
            torch.mul(grad_c, forget, out=earlier_c[:size])
            earlier_h[:size].addmm_(slope, weight_hh)
            grad_h, grad_c = earlier_h, earlier_c
        grad_gates = slopes  # each slope has met its gradient
        grad_bias = grad_gates.sum(dim=0)
        return (
            grad_gates @ weight_ih,
            grad_h,
            grad_c,
            grad_gates.t() @ rows,
            grad_gates.t() @ hs.index_select(0, before),
            grad_bias,
            grad_bias,
            None,
        )


def _steps(sizes: list[int], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of each step, of all the tensors."""
    return list(zip(*(torch.split_with_sizes(t, sizes) for t in tensors), strict=True))


def _sigmoid_slope(factor: Tensor, sigmoid: Tensor, out: Tensor) -> None:
    """factor * sigmoid * (1 - sigmoid)."""
    torch.ops.aten.sigmoid_backward.grad_input(factor, sigmoid, grad_input=out)
