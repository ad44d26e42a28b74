"""GAE compiled by numba for one CPU thread, called with raw addresses.

On small rollouts the call dominates: a C function called through ctypes takes a third of the time
of a numba function, which unboxes every array. On large ones memory dominates, and the order of the
loops is that of the memory. Where neighbouring envs are neighbours in memory, as in a rollout
buffer, all envs of a step are one vector loop. Where a row is contiguous, eight envs are accumulated
together, because one env's recurrence is a serial chain. Other strides take a plain loop.

Float32 data are accumulated in float32, as in the reference.

Parity test: `tests/simic/test_gae.py`, against `reference.py`.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]
from torch import Tensor

from esper.kernels.gae import GaeInputs, check_step_counts

_NEIGHBOURS = 8  # envs whose chains run side by side where a row is contiguous


def gae(inputs: GaeInputs, advantages: Tensor, returns: Tensor) -> None:
    rewards, values, terminated, truncated, bootstraps, counts, gamma, gae_lambda = inputs
    num_envs, num_steps = rewards.shape
    env_stride, step_stride = rewards.stride()
    # a name until the call returns: an address alone does not keep a tensor alive
    counts = None if counts is None else counts.contiguous()
    counts_are_valid = _compiled(rewards.dtype)(
        rewards.data_ptr(), values.data_ptr(), terminated.data_ptr(), truncated.data_ptr(),
        bootstraps.data_ptr(), None if counts is None else counts.data_ptr(), counts is not None,
        advantages.data_ptr(), returns.data_ptr(), num_envs, num_steps, env_stride, step_stride,
        gamma, gamma * gae_lambda,
    )  # fmt: skip
    if counts is not None and not counts_are_valid:
        check_step_counts(counts, num_steps)


_REALS: dict[torch.dtype, tuple[Any, Any]] = {
    torch.float32: (types.float32, ctypes.c_float),
    torch.float64: (types.float64, ctypes.c_double),
}


@cache
def _compiled(dtype: torch.dtype) -> Callable[..., bool]:
    """`_gae` for float32 or float64 as a C function, from numba's cache if possible."""
    real, c_real = _REALS[dtype]
    pointer: Any = types.CPointer
    reals, flags, ints = (
        (pointer(kind), ctypes.c_void_p) for kind in (real, types.uint8, types.int64)
    )
    size, number = (types.int64, ctypes.c_int64), (real, c_real)
    inputs = (reals, reals, flags, flags, reals, ints, (types.boolean, ctypes.c_bool))
    arguments: Any = zip(*inputs, reals, reals, size, size, size, size, number, number, strict=True)
    numba_types, c_types = arguments
    signature = types.boolean(*numba_types)
    try:
        compiled: Any = cfunc(signature, cache=True)(_gae)
    except (RuntimeError, OSError):  # no writable cache folder: compile in every process
        compiled = cfunc(signature)(_gae)
    _KEEP_ALIVE.append(compiled)
    return ctypes.CFUNCTYPE(ctypes.c_bool, *c_types)(compiled.address)


_KEEP_ALIVE: list[Any] = []  # numba frees the machine code with its Python object


def _gae(  # type: ignore[no-untyped-def]
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
    env_stride,
    step_stride,
    gamma,
    decay,
):
    """Fill `advantages` and `returns`; False, with nothing written, if a count is out of range."""
    if has_counts:
        for env in range(num_envs):
            if step_counts[env] < 0 or step_counts[env] > num_steps:
                return False
    rows = (rewards, values, terminated, truncated, bootstrap_values)
    strides = (env_stride, step_stride)
    discounts = (gamma, decay)
    if env_stride == 1:
        _by_step(rows, advantages, returns, num_envs, num_steps, step_stride, discounts)
    elif step_stride == 1:
        for first in range(0, num_envs, _NEIGHBOURS):
            end = min(first + _NEIGHBOURS, num_envs)
            _by_env(rows, advantages, returns, first, end, num_steps, env_stride, discounts)
    for env in range(num_envs):
        count = step_counts[env] if has_counts else num_steps
        if count < num_steps or (env_stride != 1 and step_stride != 1):
            _one_env(rows, advantages, returns, env, count, num_steps, strides, discounts)
    return True


@njit
def _by_step(  # type: ignore[no-untyped-def]
    rows, advantages, returns, num_envs, num_steps, stride, discounts
):
    """All envs, step by step, as if every row was stored to the end."""
    gamma, decay = discounts
    zero = type(gamma)(0)
    for step in range(num_steps - 1, -1, -1):
        here = step * stride
        reward, value, is_terminated, is_truncated, bootstrap_value = _arrays(rows, here, num_envs)
        advantage = _array(advantages, here, num_envs)
        returned = _array(returns, here, num_envs)
        if step == num_steps - 1:
            for env in range(num_envs):
                next_value = zero if is_terminated[env] != 0 else bootstrap_value[env]
                advantage[env] = reward[env] + gamma * next_value - value[env]
                returned[env] = advantage[env] + value[env]
            continue
        later_value = _array(rows[1], here + stride, num_envs)
        later_advantage = _array(advantages, here + stride, num_envs)
        for env in range(num_envs):
            # loaded always, so that the loop is branch-free; padding is dropped by selection
            bootstrap = bootstrap_value[env]
            next_value = later_value[env]
            next_value = bootstrap if is_truncated[env] != 0 else next_value
            next_value = zero if is_terminated[env] != 0 else next_value
            carried = decay * later_advantage[env]
            carried = zero if (is_terminated[env] | is_truncated[env]) != 0 else carried
            result = reward[env] + gamma * next_value - value[env] + carried
            advantage[env] = result
            returned[env] = result + value[env]


@njit
def _by_env(  # type: ignore[no-untyped-def]
    rows, advantages, returns, first, end, num_steps, stride, discounts
):
    """Envs `first` to `end`, as if every row was stored to the end; returns hold the decays meanwhile."""
    gamma, decay = discounts
    zero = type(gamma)(0)
    if num_steps == 0:
        return
    last = num_steps - 1
    for env in range(first, end):
        start = env * stride
        reward, value, is_terminated, is_truncated, bootstrap_value = _arrays(
            rows, start, num_steps
        )
        delta = _array(advantages, start, num_steps)
        kept = _array(returns, start, num_steps)
        for step in range(last):
            bootstrap = bootstrap_value[step]
            next_value = value[step + 1]
            next_value = bootstrap if is_truncated[step] != 0 else next_value
            next_value = zero if is_terminated[step] != 0 else next_value
            delta[step] = reward[step] + gamma * next_value - value[step]
            kept[step] = zero if (is_terminated[step] | is_truncated[step]) != 0 else decay
        next_value = zero if is_terminated[last] != 0 else bootstrap_value[last]
        delta[last] = reward[last] + gamma * next_value - value[last]
        kept[last] = zero
    if end - first == _NEIGHBOURS:
        _accumulate_eight(advantages, returns, first * stride, stride, num_steps, zero)
    else:
        for env in range(first, end):
            running = zero
            for i in range(env * stride + last, env * stride - 1, -1):
                running = _carry(advantages, returns, i, running)
    for env in range(first, end):
        start = env * stride
        advantage = _array(advantages, start, num_steps)
        value = _array(rows[1], start, num_steps)
        returned = _array(returns, start, num_steps)
        for step in range(num_steps):
            returned[step] = advantage[step] + value[step]


@njit
def _accumulate_eight(sums, decays, start, stride, num_steps, zero):  # type: ignore[no-untyped-def]
    """Eight neighbouring rows in parallel: eight independent chains."""
    a = b = c = d = e = f = g = h = zero
    for i in range(start + num_steps - 1, start - 1, -1):
        a = _carry(sums, decays, i, a)
        b = _carry(sums, decays, i + stride, b)
        c = _carry(sums, decays, i + 2 * stride, c)
        d = _carry(sums, decays, i + 3 * stride, d)
        e = _carry(sums, decays, i + 4 * stride, e)
        f = _carry(sums, decays, i + 5 * stride, f)
        g = _carry(sums, decays, i + 6 * stride, g)
        h = _carry(sums, decays, i + 7 * stride, h)


@njit
def _carry(sums, decays, i, running):  # type: ignore[no-untyped-def]
    """One step back in time; a decay of 0 drops `running` even if it is NaN."""
    kept = decays[i] * running if decays[i] != 0 else type(running)(0)
    running = sums[i] + kept
    sums[i] = running
    return running


@njit
def _array(pointer, start, length):  # type: ignore[no-untyped-def]
    """Part of the memory as an array: loops over arrays become vector code, over pointers not."""
    return carray(pointer, start + length)[start:]


@njit
def _arrays(pointers, start, length):  # type: ignore[no-untyped-def]
    rewards, values, terminated, truncated, bootstrap_values = pointers
    return (
        _array(rewards, start, length),
        _array(values, start, length),
        _array(terminated, start, length),
        _array(truncated, start, length),
        _array(bootstrap_values, start, length),
    )


@njit
def _one_env(  # type: ignore[no-untyped-def]
    rows, advantages, returns, env, count, num_steps, strides, discounts
):
    """One env with any strides, whose row may end before the rollout: zeros past `count`."""
    rewards, values, terminated, truncated, bootstrap_values = rows
    env_stride, stride = strides
    gamma, decay = discounts
    zero = type(gamma)(0)
    start = env * env_stride
    for step in range(count, num_steps):
        advantages[start + step * stride] = zero
        returns[start + step * stride] = zero
    later = zero
    for step in range(count - 1, -1, -1):
        i = start + step * stride
        is_cut = truncated[i] != 0 or step == count - 1
        next_value = bootstrap_values[i] if is_cut else values[i + stride]
        next_value = zero if terminated[i] != 0 else next_value
        carried = zero if is_cut or terminated[i] != 0 else decay * later
        later = rewards[i] + gamma * next_value - values[i] + carried
        advantages[i] = later
        returns[i] = later + values[i]
