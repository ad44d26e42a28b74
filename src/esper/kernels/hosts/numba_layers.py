"""Forward and backward of every layer kind for one network, compiled by numba.

All activations are in one workspace; a tensor is the index of its first element. The layout is
`[channels, height, width, n]` with n examples last, so all work is on rows of n examples or of n
examples at neighbouring positions: a row sums weighted rows, or is multiplied with another row.
Sums may be reordered (`reassoc`) so that they are vectorised; infinities and NaN keep their
meaning. Parity test: `tests/tolaria/test_steps.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import fields

import numpy as np
from numba import njit

from esper.kasmina.layers import NORM_EPSILON
from esper.kernels.hosts.layer_table import Row
from esper.kernels.numba_math import FAST, compiled

# inline thin functions: numba optimises every level of calls again, with all levels below it
inlined = njit(fastmath=FAST, error_model="numpy", inline="always")
ROW_POSITIONS = 8  # in one row of memory; nine rows of them fit a first-level cache

# columns of a layer's row
(
    KIND, CHANNELS, HEIGHT, WIDTH, OUT_CHANNELS, OUT_HEIGHT, OUT_WIDTH,
    KERNEL_HEIGHT, KERNEL_WIDTH, STRIDE, PAD_HEIGHT, PAD_WIDTH,
    CHANNEL_STEP, OUT_CHANNEL_STEP, POSITION_STEP, PARAMS, _, _, _, RECTIFIES,
) = range(len(fields(Row)))  # fmt: skip


@inlined
def num_inputs(row):
    return row[CHANNELS] * row[HEIGHT] * row[WIDTH]


@inlined
def num_outputs(row):
    return row[OUT_CHANNELS] * row[OUT_HEIGHT] * row[OUT_WIDTH]


@inlined
def has_border(row):
    """Whether a convolution reads a copy of its input, not the input itself."""
    return row[PAD_HEIGHT] + row[PAD_WIDTH] > 0 or row[STRIDE] > 1


@inlined
def padded_size(row, n):
    """Of an input with a border, dealt out by columns to as many parts as the stride is long.

    So the columns that neighbouring outputs see through one tap lie side by side.
    """
    height = row[HEIGHT] + 2 * row[PAD_HEIGHT]
    return row[CHANNELS] * height * row[STRIDE] * _part_width(row) * n


@inlined
def _part_width(row):
    return (row[WIDTH] + 2 * row[PAD_WIDTH] + row[STRIDE] - 1) // row[STRIDE]


@inlined
def _padded_at(row, padded, c, i, j, n):
    """Where row i, column j of the bordered channel c lies."""
    if row[POSITION_STEP] > 1:  # it has no border
        return padded + (c * row[CHANNEL_STEP] + j * row[POSITION_STEP]) * n
    height, stride = row[HEIGHT] + 2 * row[PAD_HEIGHT], row[STRIDE]
    part = (c * height + i) * stride + j % stride
    return padded + (part * _part_width(row) + j // stride) * n


@compiled
def pad(row, ws, x, n, padded, back):
    """A copy with a border of zeros; with `back`, from the copy to `x`."""
    if not back:
        fill(ws[padded : padded + padded_size(row, n)], 0)
    for c in range(row[CHANNELS]):
        for i in range(row[HEIGHT]):
            for j in range(row[WIDTH]):
                plain = x + ((c * row[HEIGHT] + i) * row[WIDTH] + j) * n
                inside = _padded_at(row, padded, c, i + row[PAD_HEIGHT], j + row[PAD_WIDTH], n)
                source, target = (inside, plain) if back else (plain, inside)
                copy(ws[source : source + n], ws[target : target + n])


@compiled
def _window_rows(row, padded, first, last, i, j, n, xs):
    """Where the inputs of output (i, j) lie: channels `first` to `last - 1`, each tap by tap."""
    top, left = i * row[STRIDE], j * row[STRIDE]
    count = 0
    for c in range(first, last):
        for ti in range(row[KERNEL_HEIGHT]):
            for tj in range(row[KERNEL_WIDTH]):
                xs[count] = _padded_at(row, padded, c, top + ti, left + tj, n)
                count += 1
    fill_up(xs, count)


@inlined
def _output_rows(row, y, i, j, n, ys):
    """Where output (i, j) of each channel lies."""
    first = y + (i * row[OUT_WIDTH] + j) * row[POSITION_STEP] * n
    strided_rows(ys, row[OUT_CHANNELS], first, row[OUT_CHANNEL_STEP] * n)


@inlined
def _positions(row):
    """Neighbouring positions in one row of memory."""
    return ROW_POSITIONS if row[POSITION_STEP] == 1 else 1


@compiled
def conv_forward(row, ws, w, at, padded, y, xs, ys, n):
    taps = row[CHANNELS] * row[KERNEL_HEIGHT] * row[KERNEL_WIDTH]
    bias, positions = at + row[OUT_CHANNELS] * taps, _positions(row)
    for i in range(row[OUT_HEIGHT]):
        for j in range(0, row[OUT_WIDTH], positions):
            length = min(positions, row[OUT_WIDTH] - j) * n
            _window_rows(row, padded, 0, row[CHANNELS], i, j, n, xs)
            _output_rows(row, y, i, j, n, ys)
            for o in range(row[OUT_CHANNELS]):
                fill(ws[ys[o] : ys[o] + length], w[bias + o])
            multiply_rows(ws, length, ys, row[OUT_CHANNELS], xs, taps, w, at, taps, 1)


@compiled
def conv_backward(row, ws, w, g, at, padded, gy, g_padded, needs_input_grad, xs, ys, n):
    """Adds to `g`, and to `g_padded` what the padded input gets."""
    taps = row[CHANNELS] * row[KERNEL_HEIGHT] * row[KERNEL_WIDTH]
    channels, positions = row[OUT_CHANNELS], _positions(row)
    for i in range(row[OUT_HEIGHT]):
        for j in range(0, row[OUT_WIDTH], positions):
            length = min(positions, row[OUT_WIDTH] - j) * n
            _output_rows(row, gy, i, j, n, ys)
            for o in range(channels):
                g[at + channels * taps + o] += row_sum(ws, ys[o], length)
            _window_rows(row, padded, 0, row[CHANNELS], i, j, n, xs)
            dot_rows(ws, length, ys, channels, xs, taps, g, at, taps, 1)
            if needs_input_grad:
                _window_rows(row, g_padded, 0, row[CHANNELS], i, j, n, xs)
                multiply_rows(ws, length, xs, taps, ys, channels, w, at, 1, taps)


@compiled
def depthwise_forward(row, ws, w, at, padded, y, xs, ys, n):
    taps = row[KERNEL_HEIGHT] * row[KERNEL_WIDTH]
    length = row[OUT_WIDTH] * n
    for c in range(row[CHANNELS]):
        for i in range(row[OUT_HEIGHT]):
            _window_rows(row, padded, c, c + 1, i, 0, n, xs)
            ys[0] = y + (c * row[OUT_HEIGHT] + i) * length
            fill(ws[ys[0] : ys[0] + length], w[at + row[CHANNELS] * taps + c])
            multiply_rows(ws, length, ys, 1, xs, taps, w, at + c * taps, 0, 1)


@compiled
def depthwise_backward(row, ws, w, g, at, padded, gy, gy_padded, gx, xs, ys, n):
    """The input is reached by the same kernel, mirrored, over the padded gradient."""
    taps = row[KERNEL_HEIGHT] * row[KERNEL_WIDTH]
    length = row[OUT_WIDTH] * n
    for c in range(row[CHANNELS]):
        for i in range(row[OUT_HEIGHT]):
            ys[0] = gy + (c * row[OUT_HEIGHT] + i) * length
            _window_rows(row, padded, c, c + 1, i, 0, n, xs)
            dot_rows(ws, length, ys, 1, xs, taps, g, at + c * taps, 0, 1)
            g[at + row[CHANNELS] * taps + c] += row_sum(ws, ys[0], length)
            _window_rows(row, gy_padded, c, c + 1, i, 0, n, xs)
            ys[0] = gx + (c * row[OUT_HEIGHT] + i) * length
            fill(ws[ys[0] : ys[0] + length], 0)
            multiply_rows(ws, length, ys, 1, xs, taps, w, at + (c + 1) * taps - 1, 0, -1)


@compiled
def norm_forward(row, ws, w, at, x, y, normalized, scratch, n):
    """`scratch` is three rows: the inverse deviation, which backward needs, and two more."""
    channels, area = row[CHANNELS], row[HEIGHT] * row[WIDTH]
    count = channels * area
    values, scaled, out = (
        rows_at(ws, x, count, n), rows_at(ws, normalized, count, n), rows_at(ws, y, count, n),
    )  # fmt: skip
    statistics = rows_at(ws, scratch, 3, n)
    inverse, mean = statistics[0], statistics[1]
    fill(mean, 0)
    fill(inverse, 0)
    for r in range(count):
        for b in range(n):
            mean[b] += values[r, b]
    for b in range(n):
        mean[b] /= count
    for r in range(count):
        for b in range(n):
            inverse[b] += (values[r, b] - mean[b]) ** 2
    for b in range(n):
        inverse[b] = 1 / np.sqrt(inverse[b] / count + NORM_EPSILON)
    for r in range(count):
        weight, bias = w[at + r // area], w[at + channels + r // area]
        for b in range(n):
            scaled[r, b] = (values[r, b] - mean[b]) * inverse[b]
            out[r, b] = scaled[r, b] * weight + bias


@compiled
def norm_backward(row, ws, w, g, at, normalized, scratch, gy, gx, n):
    channels, area = row[CHANNELS], row[HEIGHT] * row[WIDTH]
    count = channels * area
    grad, scaled, out = (
        rows_at(ws, gy, count, n), rows_at(ws, normalized, count, n), rows_at(ws, gx, count, n),
    )  # fmt: skip
    statistics = rows_at(ws, scratch, 3, n)
    inverse, mean, mean_product = statistics[0], statistics[1], statistics[2]
    fill(mean, 0)
    fill(mean_product, 0)
    for r in range(count):
        weight = w[at + r // area]
        grad_weight, grad_bias = w.dtype.type(0), w.dtype.type(0)
        for b in range(n):
            grad_weight += grad[r, b] * scaled[r, b]
            grad_bias += grad[r, b]
        for b in range(n):
            mean[b] += weight * grad[r, b]
            mean_product[b] += weight * grad[r, b] * scaled[r, b]
        g[at + r // area] += grad_weight
        g[at + channels + r // area] += grad_bias
    for r in range(count):
        weight = w[at + r // area]
        for b in range(n):
            shift = mean[b] / count + scaled[r, b] * mean_product[b] / count
            out[r, b] = (weight * grad[r, b] - shift) * inverse[b]


@compiled
def relu_forward(x):
    for b in range(x.size):
        x[b] = 0 if x[b] <= 0 else x[b]  # a nan stays


@compiled
def relu_backward(y, gy):
    for b in range(y.size):
        gy[b] = 0 if y[b] <= 0 else gy[b]


@compiled
def code_forward(row, ws, w, at, x, y, n):
    """Adds a number to each channel and position."""
    count = num_inputs(row)
    values, out = rows_at(ws, x, count, n), rows_at(ws, y, count, n)
    for r in range(count):
        code = w[at + r]
        for b in range(n):
            out[r, b] = values[r, b] + code


@compiled
def code_backward(row, ws, g, at, gy, n):
    for r in range(num_inputs(row)):
        g[at + r] += row_sum(ws, gy + r * n, n)


@compiled
def attend_forward(row, ws, x, y, share, n):
    """Softmax over keys of scaled products, in `share [L, L, n]`, then the values so weighted.

    `x` is queries, keys and values, `[3, width, L, n]`.
    """
    length, width = row[WIDTH], row[OUT_CHANNELS]
    parts = rows_at(ws, x, 3 * width * length, n)
    out, scores = rows_at(ws, y, width * length, n), rows_at(ws, share, length * length, n)
    fill(ws[y : y + width * length * n], 0)
    fill(ws[share : share + length * length * n], 0)
    for i in range(length):
        own = scores[i * length : (i + 1) * length]
        for m in range(length):
            for q in range(i, width * length, length):
                add_product(own[m], parts[q], parts[width * length + q - i + m])
        _softmax(own, 1 / np.sqrt(width))
        for m in range(length):
            for q in range(i, width * length, length):
                add_product(out[q], own[m], parts[2 * width * length + q - i + m])


@compiled
def _softmax(scores, scale):
    """In place over the rows of `scores`, times `scale`."""
    top, total = scores[0].copy(), np.zeros_like(scores[0])
    count, n = scores.shape
    for m in range(1, count):
        for b in range(n):
            top[b] = max(top[b], scores[m, b])
    for m in range(count):
        for b in range(n):
            scores[m, b] = exp((scores[m, b] - top[b]) * scale)
            total[b] += scores[m, b]
    for m in range(count):
        for b in range(n):
            scores[m, b] /= total[b]


@compiled
def attend_backward(row, ws, x, share, gy, gx, n):
    """`gx` has room for a row of scores `[L, n]` behind it."""
    length, width = row[WIDTH], row[OUT_CHANNELS]
    size, scale = width * length, 1 / np.sqrt(width)
    fill(ws[gx : gx + 3 * size * n], 0)
    parts, g_parts = rows_at(ws, x, 3 * size, n), rows_at(ws, gx, 3 * size, n)
    grad, g_scores = rows_at(ws, gy, size, n), rows_at(ws, gx + 3 * size * n, length, n)
    inner = np.zeros(n, dtype=ws.dtype)
    for i in range(length):
        own = rows_at(ws, share + i * length * n, length, n)
        fill(inner, 0)
        for m in range(length):
            fill(g_scores[m], 0)
            for q in range(i, size, length):
                v = 2 * size + q - i + m
                add_product(g_scores[m], grad[q], parts[v])
                add_product(g_parts[v], own[m], grad[q])
            add_product(inner, own[m], g_scores[m])
        for m in range(length):
            for b in range(n):
                g_scores[m, b] = own[m, b] * (g_scores[m, b] - inner[b]) * scale
            for q in range(i, size, length):
                k = size + q - i + m
                add_product(g_parts[q], g_scores[m], parts[k])
                add_product(g_parts[k], g_scores[m], parts[q])


@compiled
def exp(x):
    """e^x in vectors (math.exp is a call for each element), to 1e-14."""
    x = min(max(x, -708.0), 708.0)
    k = np.floor(x * 1.4426950408889634 + 0.5)
    r = x - k * 0.693147180369123816490
    r = r - k * 1.90821492927058770002e-10
    p = ((1.0 / 39916800 * r + 1.0 / 3628800) * r + 1.0 / 362880) * r + 1.0 / 40320
    p = (((p * r + 1.0 / 5040) * r + 1.0 / 720) * r + 1.0 / 120) * r + 1.0 / 24
    p = (((p * r + 1.0 / 6) * r + 0.5) * r + 1.0) * r + 1.0
    return p * np.int64((np.int64(k) + 1023) << 52).view(np.float64)


@compiled
def fill(y, value):
    for i in range(y.size):
        y[i] = value


@compiled
def copy(x, y):
    for i in range(y.size):
        y[i] = x[i]


@inlined
def rows_at(ws, at, count, n):
    """The rows `[count, n]` that begin at a place."""
    return ws[at : at + count * n].reshape(count, n)


@compiled
def multiply_rows(ws, n, ys, num_y, xs, num_x, w, at, step_y, step_x):
    """Row ys[i] += sum over j of w[at + i * step_y + j * step_x] * row xs[j].

    `xs` has room for a multiple of eight; what is beyond `num_x` must be a row that exists.
    """
    for i in range(num_y):
        y = ws[ys[i] : ys[i] + n]
        for j in range(0, num_x, 8):
            _add_weighted(y, _eight_rows(ws, xs, j, n), w, at + i * step_y, step_x, j, num_x)


@compiled
def _add_weighted(y, rows, w, at, step, j, num_x):
    x0, x1, x2, x3, x4, x5, x6, x7 = rows
    w0, w1 = _weight(w, at, step, j, num_x), _weight(w, at, step, j + 1, num_x)
    w2, w3 = _weight(w, at, step, j + 2, num_x), _weight(w, at, step, j + 3, num_x)
    w4, w5 = _weight(w, at, step, j + 4, num_x), _weight(w, at, step, j + 5, num_x)
    w6, w7 = _weight(w, at, step, j + 6, num_x), _weight(w, at, step, j + 7, num_x)
    for b in range(y.size):
        y[b] += (
            w0 * x0[b] + w1 * x1[b] + w2 * x2[b] + w3 * x3[b]
            + w4 * x4[b] + w5 * x5[b] + w6 * x6[b] + w7 * x7[b]
        )  # fmt: skip


@inlined
def _weight(w, at, step, j, num_x):
    return w[at + j * step] if j < num_x else w.dtype.type(0)


@compiled
def dot_rows(ws, n, ys, num_y, xs, num_x, g, at, step_y, step_x):
    """g[at + i * step_y + j * step_x] += row ys[i] . row xs[j]; `xs` as in `multiply_rows`."""
    for i in range(num_y):
        y = ws[ys[i] : ys[i] + n]
        for j in range(0, num_x, 8):
            sums = _products(y, _eight_rows(ws, xs, j, n))
            for k in range(min(8, num_x - j)):
                g[at + i * step_y + (j + k) * step_x] += sums[k]


@compiled
def _products(y, rows):
    x0, x1, x2, x3, x4, x5, x6, x7 = rows
    zero = y.dtype.type(0)
    s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
    for b in range(y.size):
        v = y[b]
        s0 += v * x0[b]
        s1 += v * x1[b]
        s2 += v * x2[b]
        s3 += v * x3[b]
        s4 += v * x4[b]
        s5 += v * x5[b]
        s6 += v * x6[b]
        s7 += v * x7[b]
    return s0, s1, s2, s3, s4, s5, s6, s7


@inlined
def _eight_rows(ws, xs, j, n):
    x0, x1, x2, x3 = xs[j], xs[j + 1], xs[j + 2], xs[j + 3]
    x4, x5, x6, x7 = xs[j + 4], xs[j + 5], xs[j + 6], xs[j + 7]
    return (
        ws[x0 : x0 + n], ws[x1 : x1 + n], ws[x2 : x2 + n], ws[x3 : x3 + n],
        ws[x4 : x4 + n], ws[x5 : x5 + n], ws[x6 : x6 + n], ws[x7 : x7 + n],
    )  # fmt: skip


@inlined
def strided_rows(rows, count, first, step):
    """Rows that lie `step` apart."""
    for k in range(count):
        rows[k] = first + k * step
    fill_up(rows, count)


@inlined
def fill_up(rows, count):
    """Rows beyond `count`, up to a multiple of eight, repeat the first one."""
    for j in range(count, (count + 7) // 8 * 8):
        rows[j] = rows[0]


@compiled
def row_sum(ws, at, n):
    total = ws.dtype.type(0)
    for v in ws[at : at + n]:
        total += v
    return total


@compiled
def add_product(y, a, b):
    for i in range(y.size):
        y[i] += a[i] * b[i]
