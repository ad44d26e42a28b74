"""The recurrence of an LSTM layer over dense sequences as two Triton kernels.

A program runs 16 sequences through all their time steps: the state times the recurrent weights,
then the gates. State and cell stay in registers, and are zeroed where an episode starts. The
recurrent weights do not fit into shared memory; they stream through it from the L2 cache at every
step, a tile at a time.

Products run on tensor cores, each as three products of TF32 parts, so the error is that of float32.
Parity tests: tests/tamiyo/test_recurrence.py.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_SEQUENCES = 16  # per program: the smallest tile of tensor cores


def forward(
    gates: Tensor, starts: Tensor, h: Tensor, c: Tensor, weight: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs `[T, B, hidden]`, and the tensors that `backward` needs.

    `gates` `[T, B, 4 * hidden]` holds the inputs' share and is overwritten with gate values.
    """
    num_steps, num_envs, _ = gates.shape
    hidden = h.shape[1]
    outputs, hs, cs = (gates.new_empty(num_steps, num_envs, hidden) for _ in range(3))
    with torch.cuda.device(gates.device):
        _forward[(triton.cdiv(num_envs, _SEQUENCES),)](
            num_steps,
            num_envs,
            starts.contiguous(),
            h.contiguous(),
            c.contiguous(),
            weight.contiguous(),
            gates,
            hs,
            cs,
            outputs,
            **_sizes(hidden),
        )
    return outputs, (hs, cs)


def backward(
    gates: Tensor, starts: Tensor, kept: Sequence[Tensor], weight: Tensor, grad_outputs: Tensor
) -> Tensor:
    """Gradients of the gates' inputs, `[T, B, 4 * hidden]`."""
    _, cs = kept
    num_steps, num_envs, hidden = cs.shape
    grad_gates = torch.empty_like(gates)
    with torch.cuda.device(gates.device):
        _backward[(triton.cdiv(num_envs, _SEQUENCES),)](
            num_steps,
            num_envs,
            starts.contiguous(),
            weight.t().contiguous(),
            gates,
            cs,
            grad_outputs,
            grad_gates,
            **_sizes(hidden),
        )
    return grad_gates


def _sizes(hidden: int) -> dict[str, int]:
    """Constants of a launch."""
    width = max(triton.next_power_of_2(hidden), 16)
    return {"HIDDEN": hidden, "WIDTH": width, "SEQUENCES": _SEQUENCES, "num_warps": 8}


@triton.jit(do_not_specialize=["num_steps", "num_envs"])  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    num_steps,
    num_envs,
    starts,  # [T, B]: whether an episode starts
    initial_h,  # [B, HIDDEN]
    initial_c,
    weights,  # [4 * HIDDEN, HIDDEN]
    gates,  # [T, B, 4 * HIDDEN]: in: the inputs' share of the gates; out: gate values
    hs,  # [T, B, HIDDEN]: states before each row
    cs,
    outputs,  # [T, B, HIDDEN]: states after it
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,  # HIDDEN rounded up to a power of two
    SEQUENCES: tl.constexpr,
):
    # 64-bit positions: gates may have more than 2^31 entries
    env = tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)[:, None]
    is_env = env < num_envs
    unit = tl.arange(0, WIDTH)[None, :]
    is_unit = unit < HIDDEN
    is_real = is_env & is_unit
    COLUMNS: tl.constexpr = min(WIDTH, 32)  # of a weight tile
    column = tl.arange(0, COLUMNS)
    h = tl.load(initial_h + env * HIDDEN + unit, mask=is_real, other=0.0)
    c = tl.load(initial_c + env * HIDDEN + unit, mask=is_real, other=0.0)
    for step in range(num_steps):
        row = step * num_envs + env
        is_start = tl.load(starts + row, mask=is_env, other=0) != 0
        h = tl.where(is_start, 0.0, h)
        c = tl.where(is_start, 0.0, c)
        at = row * HIDDEN + unit
        tl.store(hs + at, h, mask=is_real)
        tl.store(cs + at, c, mask=is_real)
        # loaded early, used after the products
        gate_at = row * (4 * HIDDEN) + unit
        i = tl.load(gates + gate_at, mask=is_real, other=0.0)
        f = tl.load(gates + gate_at + HIDDEN, mask=is_real, other=0.0)
        z = tl.load(gates + gate_at + 2 * HIDDEN, mask=is_real, other=0.0)
        o = tl.load(gates + gate_at + 3 * HIDDEN, mask=is_real, other=0.0)
        tl.debug_barrier()  # hs is read back by columns below; registers cannot be indexed
        to_i = tl.zeros([SEQUENCES, WIDTH], tl.float32)
        to_f = tl.zeros([SEQUENCES, WIDTH], tl.float32)
        to_z = tl.zeros([SEQUENCES, WIDTH], tl.float32)
        to_o = tl.zeros([SEQUENCES, WIDTH], tl.float32)
        for k in tl.range(0, WIDTH, COLUMNS, num_stages=3):
            source = k + column
            part = tl.load(
                hs + row * HIDDEN + source[None, :],
                mask=is_env & (source < HIDDEN)[None, :],
                other=0.0,
            )
            tile = weights + unit * HIDDEN + source[:, None]
            inside = is_unit & (source < HIDDEN)[:, None]
            to_i = _add_product(to_i, part, tile, inside)
            to_f = _add_product(to_f, part, tile + HIDDEN * HIDDEN, inside)
            to_z = _add_product(to_z, part, tile + 2 * HIDDEN * HIDDEN, inside)
            to_o = _add_product(to_o, part, tile + 3 * HIDDEN * HIDDEN, inside)
        i = tl.sigmoid(i + to_i)
        f = tl.sigmoid(f + to_f)
        z = _tanh(z + to_z)
        o = tl.sigmoid(o + to_o)
        c = f * c + i * z
        h = o * _tanh(c)
        tl.store(gates + gate_at, i, mask=is_real)
        tl.store(gates + gate_at + HIDDEN, f, mask=is_real)
        tl.store(gates + gate_at + 2 * HIDDEN, z, mask=is_real)
        tl.store(gates + gate_at + 3 * HIDDEN, o, mask=is_real)
        tl.store(outputs + at, h, mask=is_real)


@triton.jit(do_not_specialize=["num_steps", "num_envs"])  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    num_steps,
    num_envs,
    starts,
    weights,  # [HIDDEN, 4 * HIDDEN], transposed
    gates,
    cs,
    grad_outputs,  # [T, B, HIDDEN]
    grad_gates,  # [T, B, 4 * HIDDEN]: of the gates' inputs
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    env = tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)[:, None]
    is_env = env < num_envs
    unit = tl.arange(0, WIDTH)[None, :]
    is_unit = unit < HIDDEN
    is_real = is_env & is_unit
    source = tl.arange(0, WIDTH)[:, None]
    tile = weights + unit * (4 * HIDDEN) + source
    inside = is_unit & (source < HIDDEN)
    grad_h = tl.zeros([SEQUENCES, WIDTH], tl.float32)
    grad_c = tl.zeros([SEQUENCES, WIDTH], tl.float32)
    row = (num_steps - 1) * num_envs + env
    gate_at = row * (4 * HIDDEN) + unit
    i = tl.load(gates + gate_at, mask=is_real, other=0.0)
    f = tl.load(gates + gate_at + HIDDEN, mask=is_real, other=0.0)
    z = tl.load(gates + gate_at + 2 * HIDDEN, mask=is_real, other=0.0)
    o = tl.load(gates + gate_at + 3 * HIDDEN, mask=is_real, other=0.0)
    c = tl.load(cs + row * HIDDEN + unit, mask=is_real, other=0.0)
    grad_output = tl.load(grad_outputs + row * HIDDEN + unit, mask=is_real, other=0.0)
    for back in range(num_steps):
        step = num_steps - 1 - back
        is_start = tl.load(starts + row, mask=is_env, other=0) != 0
        grad_h += grad_output
        tanh_c = _tanh(f * c + i * z)
        grad_c += grad_h * o * (1.0 - tanh_c * tanh_c)
        to_i = grad_c * z * i * (1.0 - i)
        to_f = grad_c * c * f * (1.0 - f)
        to_z = grad_c * i * (1.0 - z * z)
        to_o = grad_h * tanh_c * o * (1.0 - o)
        grad_c = tl.where(is_start, 0.0, grad_c * f)
        # load the inputs of the previous step while this step's products run
        row = (step - 1) * num_envs + env
        is_before = (step > 0) & is_real
        gate_at_before = row * (4 * HIDDEN) + unit
        c = tl.load(cs + row * HIDDEN + unit, mask=is_before, other=0.0)
        grad_output = tl.load(grad_outputs + row * HIDDEN + unit, mask=is_before, other=0.0)
        # a separate sum for each product of parts, so that they run independently
        high = tl.zeros([SEQUENCES, WIDTH], tl.float32)
        low = tl.zeros([SEQUENCES, WIDTH], tl.float32)
        lower = tl.zeros([SEQUENCES, WIDTH], tl.float32)
        for gate in tl.range(4, num_stages=3):
            grad = tl.where(gate == 0, to_i, to_f)
            grad = tl.where(gate < 2, grad, tl.where(gate == 2, to_z, to_o))
            tl.store(grad_gates + gate_at + gate * HIDDEN, grad, mask=is_real)
            weight = tl.load(tile + gate * HIDDEN, mask=inside, other=0.0)
            grad_high, grad_low = _tf32_parts(grad)
            weight_high, weight_low = _tf32_parts(weight)
            lower = tl.dot(grad_low, weight_high, lower, input_precision="tf32")
            low = tl.dot(grad_high, weight_low, low, input_precision="tf32")
            high = tl.dot(grad_high, weight_high, high, input_precision="tf32")
            before = tl.load(gates + gate_at_before + gate * HIDDEN, mask=is_before, other=0.0)
            i = tl.where(gate == 0, before, i)
            f = tl.where(gate == 1, before, f)
            z = tl.where(gate == 2, before, z)
            o = tl.where(gate == 3, before, o)
        grad_h = tl.where(is_start, 0.0, high + (low + lower))
        gate_at = gate_at_before


@triton.jit
def _add_product(total, part, tile, inside):  # type: ignore[no-untyped-def]
    weights = tl.load(tile, mask=inside, other=0.0)
    return tl.dot(part, weights, total, input_precision="tf32x3")


@triton.jit
def _tf32_parts(x):  # type: ignore[no-untyped-def]
    """x split into the bits that TF32 keeps, and the rest."""
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0
