"""Forward and backward of every layer kind for one network, compiled by numba.

All activations are in one workspace; a tensor is the index of its first element. The layout is
`[channels, height, width, n]` with n examples last, so all work is on rows of n examples or of n
examples at neighbouring positions: a row sums weighted rows, or is multiplied with another row
(`numba_rows`). Parity test: `tests/tolaria/test_steps.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import fields

import numpy as np

from esper.kasmina.layers import NORM_EPSILON
from esper.kernels.hosts import numba_rows as rows
from esper.kernels.hosts.layer_table import Row

compiled, inlined, exp = rows.compiled, rows.inlined, rows.exp
copy, fill, row_sum, add_product = rows.copy, rows.fill, rows.row_sum, rows.add_product
multiply_rows, dot_rows = rows.multiply_rows, rows.dot_rows
strided_rows, fill_up = rows.strided_rows, rows.fill_up
ROW_POSITIONS = 8  # neighbouring positions in one row; nine rows of them fit a first-level cache

# columns of a layer's row
(
    KIND, CHANNELS, HEIGHT, WIDTH, OUT_CHANNELS, OUT_HEIGHT, OUT_WIDTH,
    KERNEL_HEIGHT, KERNEL_WIDTH, STRIDE, PAD_HEIGHT, PAD_WIDTH,
) = range(12)  # fmt: skip
PARAMS = [entry.name for entry in fields(Row)].index("params")


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
def _window_rows(row, padded, i, j, n, xs):
    """Where the inputs of output (i, j) lie, channel by channel and tap by tap."""
    top, left = i * row[STRIDE], j * row[STRIDE]
    count = 0
    for c in range(row[CHANNELS]):
        for ti in range(row[KERNEL_HEIGHT]):
            for tj in range(row[KERNEL_WIDTH]):
                xs[count] = _padded_at(row, padded, c, top + ti, left + tj, n)
                count += 1
    fill_up(xs, count)


@inlined
def _output_rows(row, y, i, j, n, ys):
    """Where output (i, j) of each channel lies."""
    step = row[OUT_HEIGHT] * row[OUT_WIDTH] * n
    strided_rows(ys, row[OUT_CHANNELS], y + (i * row[OUT_WIDTH] + j) * n, step)


@compiled
def conv_forward(row, ws, w, at, padded, y, xs, ys, n):
    taps = row[CHANNELS] * row[KERNEL_HEIGHT] * row[KERNEL_WIDTH]
    bias = at + row[OUT_CHANNELS] * taps
    for i in range(row[OUT_HEIGHT]):
        for j in range(0, row[OUT_WIDTH], ROW_POSITIONS):
            length = min(ROW_POSITIONS, row[OUT_WIDTH] - j) * n
            _window_rows(row, padded, i, j, n, xs)
            _output_rows(row, y, i, j, n, ys)
            for o in range(row[OUT_CHANNELS]):
                fill(ws[ys[o] : ys[o] + length], w[bias + o])
            multiply_rows(ws, length, ys, row[OUT_CHANNELS], xs, taps, w, at, taps, 1)


@compiled
def conv_backward(row, ws, w, g, at, padded, gy, g_padded, needs_input_grad, xs, ys, n):
    """Adds to `g`, and to `g_padded` what the padded input gets."""
    taps = row[CHANNELS] * row[KERNEL_HEIGHT] * row[KERNEL_WIDTH]
    channels, area = row[OUT_CHANNELS], row[OUT_HEIGHT] * row[OUT_WIDTH] * n
    for o in range(channels):
        g[at + channels * taps + o] += row_sum(ws, gy + o * area, area)
    for i in range(row[OUT_HEIGHT]):
        for j in range(0, row[OUT_WIDTH], ROW_POSITIONS):
            length = min(ROW_POSITIONS, row[OUT_WIDTH] - j) * n
            _output_rows(row, gy, i, j, n, ys)
            _window_rows(row, padded, i, j, n, xs)
            dot_rows(ws, length, ys, channels, xs, taps, g, at, taps, 1)
            if needs_input_grad:
                _window_rows(row, g_padded, i, j, n, xs)
                multiply_rows(ws, length, xs, taps, ys, channels, w, at, 1, taps)


@inlined
def _tap_rows(row, padded, c, i, n, xs):
    """Where the inputs of row i of a channel lie, tap by tap, for a layer of stride 1."""
    height = row[OUT_HEIGHT] + row[KERNEL_HEIGHT] - 1
    width = row[OUT_WIDTH] + row[KERNEL_WIDTH] - 1
    count = 0
    for ti in range(row[KERNEL_HEIGHT]):
        for tj in range(row[KERNEL_WIDTH]):
            xs[count] = padded + ((c * height + i + ti) * width + tj) * n
            count += 1
    fill_up(xs, count)


@compiled
def depthwise_forward(row, ws, w, at, padded, y, xs, ys, n):
    taps = row[KERNEL_HEIGHT] * row[KERNEL_WIDTH]
    length = row[OUT_WIDTH] * n
    for c in range(row[CHANNELS]):
        for i in range(row[OUT_HEIGHT]):
            _tap_rows(row, padded, c, i, n, xs)
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
            _tap_rows(row, padded, c, i, n, xs)
            dot_rows(ws, length, ys, 1, xs, taps, g, at + c * taps, 0, 1)
            g[at + row[CHANNELS] * taps + c] += row_sum(ws, ys[0], length)
            _tap_rows(row, gy_padded, c, i, n, xs)
            ys[0] = gx + (c * row[OUT_HEIGHT] + i) * length
            fill(ws[ys[0] : ys[0] + length], 0)
            multiply_rows(ws, length, ys, 1, xs, taps, w, at + (c + 1) * taps - 1, 0, -1)


@compiled
def norm_forward(row, ws, w, at, x, y, normalized, scratch, n):
    """`scratch` is three rows: the inverse deviation, which backward needs, and two more."""
    area = row[HEIGHT] * row[WIDTH]
    count = row[CHANNELS] * area
    inverse = ws[scratch : scratch + n]
    mean = ws[scratch + n : scratch + 2 * n]
    fill(mean, 0)
    fill(inverse, 0)
    for r in range(count):
        values = ws[x + r * n : x + (r + 1) * n]
        for b in range(n):
            mean[b] += values[b]
    for b in range(n):
        mean[b] /= count
    for r in range(count):
        values = ws[x + r * n : x + (r + 1) * n]
        for b in range(n):
            inverse[b] += (values[b] - mean[b]) ** 2
    for b in range(n):
        inverse[b] = 1 / np.sqrt(inverse[b] / count + NORM_EPSILON)
    for c in range(row[CHANNELS]):
        weight, bias = w[at + c], w[at + row[CHANNELS] + c]
        for r in range(c * area, (c + 1) * area):
            values = ws[x + r * n : x + (r + 1) * n]
            scaled = ws[normalized + r * n : normalized + (r + 1) * n]
            out = ws[y + r * n : y + (r + 1) * n]
            for b in range(n):
                v = (values[b] - mean[b]) * inverse[b]
                scaled[b] = v
                out[b] = v * weight + bias


@compiled
def norm_backward(row, ws, w, g, at, normalized, scratch, gy, gx, n):
    area = row[HEIGHT] * row[WIDTH]
    count = row[CHANNELS] * area
    inverse = ws[scratch : scratch + n]
    mean = ws[scratch + n : scratch + 2 * n]
    mean_product = ws[scratch + 2 * n : scratch + 3 * n]
    fill(mean, 0)
    fill(mean_product, 0)
    for c in range(row[CHANNELS]):
        weight = w[at + c]
        grad_weight, grad_bias = w.dtype.type(0), w.dtype.type(0)
        for r in range(c * area, (c + 1) * area):
            grad = ws[gy + r * n : gy + (r + 1) * n]
            scaled = ws[normalized + r * n : normalized + (r + 1) * n]
            for b in range(n):
                grad_weight += grad[b] * scaled[b]
                grad_bias += grad[b]
            for b in range(n):
                mean[b] += weight * grad[b]
                mean_product[b] += weight * grad[b] * scaled[b]
        g[at + c] += grad_weight
        g[at + row[CHANNELS] + c] += grad_bias
    for c in range(row[CHANNELS]):
        weight = w[at + c]
        for r in range(c * area, (c + 1) * area):
            grad = ws[gy + r * n : gy + (r + 1) * n]
            scaled = ws[normalized + r * n : normalized + (r + 1) * n]
            out = ws[gx + r * n : gx + (r + 1) * n]
            for b in range(n):
                centred = weight * grad[b] - mean[b] / count - scaled[b] * mean_product[b] / count
                out[b] = centred * inverse[b]


@compiled
def relu_forward(x):
    for b in range(x.size):
        x[b] = 0 if x[b] <= 0 else x[b]  # a nan stays


@compiled
def relu_backward(y, gy):
    for b in range(y.size):
        gy[b] = 0 if y[b] <= 0 else gy[b]


@compiled
def mix_forward(row, ws, w, at, x, y, xs, ys, n):
    length = row[WIDTH]
    bias = at + length * length
    for c in range(row[CHANNELS]):
        strided_rows(xs, length, x + c * length * n, n)
        strided_rows(ys, length, y + c * length * n, n)
        for m in range(length):
            fill(ws[ys[m] : ys[m] + n], w[bias + m])
        multiply_rows(ws, n, ys, length, xs, length, w, at, length, 1)


@compiled
def mix_backward(row, ws, w, g, at, x, gy, gx, xs, ys, n):
    length = row[WIDTH]
    bias = at + length * length
    for c in range(row[CHANNELS]):
        strided_rows(ys, length, gy + c * length * n, n)
        strided_rows(xs, length, x + c * length * n, n)
        dot_rows(ws, n, ys, length, xs, length, g, at, length, 1)
        for m in range(length):
            g[bias + m] += row_sum(ws, ys[m], n)
        strided_rows(xs, length, gx + c * length * n, n)
        fill(ws[xs[0] : xs[0] + length * n], 0)
        multiply_rows(ws, n, xs, length, ys, length, w, at, 1, length)


@compiled
def attention_forward(row, ws, w, at, x, y, saved, xs, ys, n):
    """`saved`: the coded input, then queries, keys and values, then attention `[L, L, n]`."""
    channels, length, width = row[CHANNELS], row[WIDTH], row[OUT_CHANNELS]
    coded, projected = saved, saved + channels * length * n
    share = projected + 3 * width * length * n
    weight = at + channels * length
    bias = weight + 3 * width * channels
    for r in range(channels * length):
        values, out = ws[x + r * n : x + (r + 1) * n], ws[coded + r * n : coded + (r + 1) * n]
        code = w[at + r]
        for b in range(n):
            out[b] = values[b] + code
    for m in range(length):
        strided_rows(xs, channels, coded + m * n, length * n)
        strided_rows(ys, 3 * width, projected + m * n, length * n)
        for o in range(3 * width):
            fill(ws[ys[o] : ys[o] + n], w[bias + o])
        multiply_rows(ws, n, ys, 3 * width, xs, channels, w, weight, channels, 1)
    _attend(ws, projected, share, y, width, length, n)


@compiled
def _attend(ws, projected, share, y, width, length, n):
    """Softmax over keys of scaled products, then the values so weighted."""
    scale = 1 / np.sqrt(width)
    key, value = projected + width * length * n, projected + 2 * width * length * n
    fill(ws[y : y + width * length * n], 0)
    fill(ws[share : share + length * length * n], 0)
    for i in range(length):
        first = share + i * length * n
        for m in range(length):
            score = ws[first + m * n : first + (m + 1) * n]
            for c in range(width):
                q, k = projected + (c * length + i) * n, key + (c * length + m) * n
                add_product(score, ws[q : q + n], ws[k : k + n])
        _softmax(ws[first : first + length * n], length, n, scale)
        for m in range(length):
            score = ws[first + m * n : first + (m + 1) * n]
            for c in range(width):
                out, v = y + (c * length + i) * n, value + (c * length + m) * n
                add_product(ws[out : out + n], score, ws[v : v + n])


@compiled
def _softmax(scores, count, n, scale):
    """In place over `count` rows of n."""
    top, total = np.empty(n, dtype=scores.dtype), np.zeros(n, dtype=scores.dtype)
    copy(scores[:n], top)
    for m in range(1, count):
        values = scores[m * n : (m + 1) * n]
        for b in range(n):
            top[b] = max(top[b], values[b])
    for m in range(count):
        values = scores[m * n : (m + 1) * n]
        for b in range(n):
            values[b] = exp((values[b] - top[b]) * scale)
            total[b] += values[b]
    for m in range(count):
        values = scores[m * n : (m + 1) * n]
        for b in range(n):
            values[b] /= total[b]


@compiled
def attention_backward(row, ws, w, g, at, saved, gy, gx, scratch, xs, ys, n):
    """`scratch`: gradients of queries, keys and values, then a row of scores `[L, n]`."""
    channels, length, width = row[CHANNELS], row[WIDTH], row[OUT_CHANNELS]
    coded, projected = saved, saved + channels * length * n
    share = projected + 3 * width * length * n
    weight = at + channels * length
    bias = weight + 3 * width * channels
    _attend_backward(ws, projected, share, gy, scratch, width, length, n)
    fill(ws[gx : gx + channels * length * n], 0)
    for m in range(length):
        strided_rows(ys, 3 * width, scratch + m * n, length * n)
        strided_rows(xs, channels, coded + m * n, length * n)
        dot_rows(ws, n, ys, 3 * width, xs, channels, g, weight, channels, 1)
        for o in range(3 * width):
            g[bias + o] += row_sum(ws, ys[o], n)
        strided_rows(xs, channels, gx + m * n, length * n)
        multiply_rows(ws, n, xs, channels, ys, 3 * width, w, weight, 1, channels)
        for c in range(channels):
            g[at + c * length + m] += row_sum(ws, xs[c], n)


@compiled
def _attend_backward(ws, projected, share, gy, g_projected, width, length, n):
    scale = 1 / np.sqrt(width)
    size = width * length * n
    g_scores = g_projected + 3 * size
    inner = np.zeros(n, dtype=ws.dtype)
    fill(ws[g_projected : g_projected + 3 * size + length * n], 0)
    for i in range(length):
        fill(inner, 0)
        for m in range(length):
            p = ws[share + (i * length + m) * n : share + (i * length + m + 1) * n]
            g_score = ws[g_scores + m * n : g_scores + (m + 1) * n]
            fill(g_score, 0)
            for c in range(width):
                out, v = gy + (c * length + i) * n, 2 * size + (c * length + m) * n
                add_product(g_score, ws[out : out + n], ws[projected + v : projected + v + n])
                add_product(ws[g_projected + v : g_projected + v + n], p, ws[out : out + n])
            add_product(inner, p, g_score)
        for m in range(length):
            p = ws[share + (i * length + m) * n : share + (i * length + m + 1) * n]
            g_score = ws[g_scores + m * n : g_scores + (m + 1) * n]
            for b in range(n):
                g_score[b] = p[b] * (g_score[b] - inner[b]) * scale
            for c in range(width):
                q, k = (c * length + i) * n, size + (c * length + m) * n
                g_q, g_k = g_projected + q, g_projected + k
                query, key = projected + q, projected + k
                add_product(ws[g_q : g_q + n], g_score, ws[key : key + n])
                add_product(ws[g_k : g_k + n], g_score, ws[query : query + n])
