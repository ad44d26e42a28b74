"""GAE compiled by numba for one CPU thread, called with raw addresses.

On small rollouts the call dominates: a C function called through ctypes takes a third of the time
of a numba function, which unboxes every array. On large ones memory dominates. Rows are contiguous
along time, so a row's recurrence is a serial chain; eight rows are processed in parallel to hide
its latency.

Float32 data are accumulated in float32, as in the reference.

Parity test: `tests/simic/test_gae.py`, against `reference.py`.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numba import cfunc, njit, types
from torch import Tensor

from esper.kernels.gae import GaeInputs, check_step_counts


def gae(inputs: GaeInputs) -> tuple[Tensor, Tensor]:
    rewards, values, terminated, truncated, bootstraps, counts, gamma, gae_lambda = inputs
    # every tensor keeps a name until the call returns: an address alone does not keep it alive
    rewards, values, bootstraps = rewards.contiguous(), values.contiguous(), bootstraps.contiguous()
    terminated, truncated = terminated.contiguous(), truncated.contiguous()
    counts = None if counts is None else counts.contiguous()
    num_envs, num_steps = rewards.shape
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    counts_are_valid = _compiled(rewards.dtype)(
        rewards.data_ptr(), values.data_ptr(), terminated.data_ptr(), truncated.data_ptr(),
        bootstraps.data_ptr(), None if counts is None else counts.data_ptr(), counts is not None,
        advantages.data_ptr(), returns.data_ptr(), num_envs, num_steps, gamma, gamma * gae_lambda,
    )  # fmt: skip
    if counts is not None and not counts_are_valid:
        check_step_counts(counts, num_steps)
    return advantages, returns


_REALS: dict[torch.dtype, tuple[Any, Any]] = {
    torch.float32: (types.float32, ctypes.c_float),
    torch.float64: (types.float64, ctypes.c_double),
}


@cache
def _compiled(dtype: torch.dtype) -> Callable[..., bool]:
    """`_gae_rows` for float32 or float64 as a C function, from numba's cache if possible."""
    real, c_real = _REALS[dtype]
    pointer: Any = types.CPointer
    reals, flags, ints = (
        (pointer(kind), ctypes.c_void_p) for kind in (real, types.uint8, types.int64)
    )
    size, number = (types.int64, ctypes.c_int64), (real, c_real)
    inputs = (reals, reals, flags, flags, reals, ints, (types.boolean, ctypes.c_bool))
    arguments: Any = zip(*inputs, reals, reals, size, size, number, number, strict=True)
    numba_types, c_types = arguments
    signature = types.boolean(*numba_types)
    try:
        compiled: Any = cfunc(signature, cache=True)(_gae_rows)
    except (RuntimeError, OSError):  # no writable cache folder: compile in every process
        compiled = cfunc(signature)(_gae_rows)
    _KEEP_ALIVE.append(compiled)
    return ctypes.CFUNCTYPE(ctypes.c_bool, *c_types)(compiled.address)


_KEEP_ALIVE: list[Any] = []  # numba frees the machine code with its Python object


def _gae_rows(  # type: ignore[no-untyped-def]
    rewards,
    values,
    terminated,
    truncated,
    bootstrap_values,
    step_counts,
    has_counts,
    advantages,
    returns,
    num_envs,
    num_steps,
    gamma,
    decay,
):
    """Fill `advantages` and `returns`; False, with nothing written, if a count is out of range."""
    if has_counts:
        for env in range(num_envs):
            if step_counts[env] < 0 or step_counts[env] > num_steps:
                return False
    zero = type(gamma)(0)
    rows = (rewards, values, terminated, truncated, bootstrap_values)
    for first in range(0, num_envs, 8):
        end = min(first + 8, num_envs)
        for env in range(first, end):
            count = step_counts[env] if has_counts else num_steps
            start = env * num_steps
            _write_deltas_and_decays(
                rows, advantages, returns, start, count, num_steps, gamma, decay
            )
        if end - first == 8:
            _accumulate_eight_rows(advantages, returns, first * num_steps, num_steps, zero)
        else:
            for env in range(first, end):
                _accumulate_row(advantages, returns, env * num_steps, num_steps, zero)
        for env in range(first, end):
            start = env * num_steps
            count = step_counts[env] if has_counts else num_steps
            for i in range(start, start + count):
                returns[i] = advantages[i] + values[i]
    return True


@njit
def _write_deltas_and_decays(  # type: ignore[no-untyped-def]
    rows, deltas, decays, start, count, num_steps, gamma, decay
):
    """One row's delta and the factor that carries the next advantage into it; 0 past `count`."""
    rewards, values, terminated, truncated, bootstrap_values = rows
    zero = type(gamma)(0)
    last = start + count - 1
    for i in range(start, last):
        bootstrap_value = bootstrap_values[i]  # loaded always, so that the loop is branch-free
        next_value = values[i + 1]
        next_value = bootstrap_value if truncated[i] != 0 else next_value
        next_value = zero if terminated[i] != 0 else next_value
        deltas[i] = rewards[i] + gamma * next_value - values[i]
        decays[i] = zero if (terminated[i] | truncated[i]) != 0 else decay
    if count > 0:
        next_value = zero if terminated[last] != 0 else bootstrap_values[last]
        deltas[last] = rewards[last] + gamma * next_value - values[last]
        decays[last] = zero
    for i in range(last + 1, start + num_steps):
        deltas[i] = zero
        decays[i] = zero


@njit
def _accumulate_row(sums, decays, start, num_steps, zero):  # type: ignore[no-untyped-def]
    running = zero
    for i in range(start + num_steps - 1, start - 1, -1):
        running = _carry(sums, decays, i, running)


@njit
def _accumulate_eight_rows(sums, decays, start, num_steps, zero):  # type: ignore[no-untyped-def]
    """Eight neighbouring rows in parallel: eight independent chains."""
    a = b = c = d = e = f = g = h = zero
    for i in range(start + num_steps - 1, start - 1, -1):
        a = _carry(sums, decays, i, a)
        b = _carry(sums, decays, i + num_steps, b)
        c = _carry(sums, decays, i + 2 * num_steps, c)
        d = _carry(sums, decays, i + 3 * num_steps, d)
        e = _carry(sums, decays, i + 4 * num_steps, e)
        f = _carry(sums, decays, i + 5 * num_steps, f)
        g = _carry(sums, decays, i + 6 * num_steps, g)
        h = _carry(sums, decays, i + 7 * num_steps, h)


@njit
def _carry(sums, decays, i, running):  # type: ignore[no-untyped-def]
    """One step back in time; a decay of 0 drops `running` even if it is NaN."""
    kept = decays[i] * running if decays[i] != 0 else type(running)(0)
    running = sums[i] + kept
    sums[i] = running
    return running
