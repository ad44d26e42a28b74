"""Sums and products of rows of examples, compiled by numba: what `numba_layers` is made of.

Sums may be reordered (`reassoc`) so that they are vectorised; infinities and NaN keep their
meaning.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numba import njit

FAST = {"reassoc", "contract", "nsz", "arcp"}
compiled = njit(fastmath=FAST, error_model="numpy")
# inline thin functions: numba optimises every level of calls again, with all levels below it
inlined = njit(fastmath=FAST, error_model="numpy", inline="always")


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
