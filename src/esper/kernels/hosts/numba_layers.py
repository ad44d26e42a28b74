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

FAST = {"reassoc", "contract", "nsz", "arcp"}
compiled = njit(fastmath=FAST, error_model="numpy")
# inline thin functions: numba optimises every level of calls again, with all levels below it
inlined = njit(fastmath=FAST, error_model="numpy", inline="always")
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
            s0, s1, s2, s3, s4, s5, s6, s7 = _products(y, _eight_rows(ws, xs, j, n))
            a, left = at + i * step_y + j * step_x, num_x - j
            g[a] += s0
            _add_at(g, a + step_x, s1, left > 1)
            _add_at(g, a + 2 * step_x, s2, left > 2)
            _add_at(g, a + 3 * step_x, s3, left > 3)
            _add_at(g, a + 4 * step_x, s4, left > 4)
            _add_at(g, a + 5 * step_x, s5, left > 5)
            _add_at(g, a + 6 * step_x, s6, left > 6)
            _add_at(g, a + 7 * step_x, s7, left > 7)


@inlined
def _add_at(g, at, value, exists):
    if exists:
        g[at] += value


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
def _strided_rows(rows, count, first, step):
    """Rows that lie `step` apart."""
    for k in range(count):
        rows[k] = first + k * step
    _fill_up(rows, count)


@inlined
def _fill_up(rows, count):
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
def _add_product(y, a, b):
    for i in range(y.size):
        y[i] += a[i] * b[i]


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
    _fill_up(xs, count)


@inlined
def _output_rows(row, y, i, j, n, ys):
    """Where output (i, j) of each channel lies."""
    step = row[OUT_HEIGHT] * row[OUT_WIDTH] * n
    _strided_rows(ys, row[OUT_CHANNELS], y + (i * row[OUT_WIDTH] + j) * n, step)


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
    _fill_up(xs, count)


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
        _strided_rows(xs, length, x + c * length * n, n)
        _strided_rows(ys, length, y + c * length * n, n)
        for m in range(length):
            fill(ws[ys[m] : ys[m] + n], w[bias + m])
        multiply_rows(ws, n, ys, length, xs, length, w, at, length, 1)


@compiled
def mix_backward(row, ws, w, g, at, x, gy, gx, xs, ys, n):
    length = row[WIDTH]
    bias = at + length * length
    for c in range(row[CHANNELS]):
        _strided_rows(ys, length, gy + c * length * n, n)
        _strided_rows(xs, length, x + c * length * n, n)
        dot_rows(ws, n, ys, length, xs, length, g, at, length, 1)
        for m in range(length):
            g[bias + m] += row_sum(ws, ys[m], n)
        _strided_rows(xs, length, gx + c * length * n, n)
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
        _strided_rows(xs, channels, coded + m * n, length * n)
        _strided_rows(ys, 3 * width, projected + m * n, length * n)
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
                _add_product(score, ws[q : q + n], ws[k : k + n])
        _softmax(ws[first : first + length * n], length, n, scale)
        for m in range(length):
            score = ws[first + m * n : first + (m + 1) * n]
            for c in range(width):
                out, v = y + (c * length + i) * n, value + (c * length + m) * n
                _add_product(ws[out : out + n], score, ws[v : v + n])


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
        _strided_rows(ys, 3 * width, scratch + m * n, length * n)
        _strided_rows(xs, channels, coded + m * n, length * n)
        dot_rows(ws, n, ys, 3 * width, xs, channels, g, weight, channels, 1)
        for o in range(3 * width):
            g[bias + o] += row_sum(ws, ys[o], n)
        _strided_rows(xs, channels, gx + m * n, length * n)
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
                _add_product(g_score, ws[out : out + n], ws[projected + v : projected + v + n])
                _add_product(ws[g_projected + v : g_projected + v + n], p, ws[out : out + n])
            _add_product(inner, p, g_score)
        for m in range(length):
            p = ws[share + (i * length + m) * n : share + (i * length + m + 1) * n]
            g_score = ws[g_scores + m * n : g_scores + (m + 1) * n]
            for b in range(n):
                g_score[b] = p[b] * (g_score[b] - inner[b]) * scale
            for c in range(width):
                q, k = (c * length + i) * n, size + (c * length + m) * n
                _add_product(
                    ws[g_projected + q : g_projected + q + n],
                    g_score,
                    ws[projected + k : projected + k + n],
                )
                _add_product(
                    ws[g_projected + k : g_projected + k + n],
                    g_score,
                    ws[projected + q : projected + q + n],
                )
