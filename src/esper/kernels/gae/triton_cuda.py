"""GAE as one Triton kernel: a parallel scan along time, one pass over the memory.

The recurrence a[t] = delta[t] + decay[t] * a[t+1] is a composition of maps x -> delta + decay * x,
and composing them is associative: (decay, delta) pairs are scanned from the last step back. A
program processes a few rows in tiles, from the end. It carries the first advantage of a tile into
the tile before it, so a row may have any length.

Bootstraps are loaded only where they are needed: memory sectors without one are never fetched.
Float32 data are accumulated in float32, as in the reference, though in the order of the scan.

Parity test: `tests/simic/test_gae.py`, against `reference.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper.kernels.gae import GaeInputs, counts_on_device


def gae(inputs: GaeInputs, advantages: Tensor, returns: Tensor) -> None:
    rewards = inputs.rewards
    num_envs, num_steps = rewards.shape
    step_counts = counts_on_device(inputs)
    if rewards.numel() == 0:
        return
    env_stride, step_stride = rewards.stride()
    rows, steps, num_warps = tile_shape(num_envs, num_steps, env_stride == 1)
    with torch.cuda.device(rewards.device):
        _gae_tiles[(triton.cdiv(num_envs, rows),)](
            *inputs[:5],
            None if step_counts is None else step_counts.contiguous(),
            advantages,
            returns,
            num_envs,
            num_steps,
            env_stride,
            step_stride,
            float(inputs.gamma),
            float(inputs.gamma * inputs.gae_lambda),
            ROWS=rows,
            STEPS=steps,
            num_warps=num_warps,
        )


def tile_shape(num_envs: int, num_steps: int, is_time_major: bool) -> tuple[int, int, int]:
    """Rows and steps of a program's tile, and its warps; measured on an H200."""
    steps = max(triton.next_power_of_2(num_steps), 16)
    if is_time_major:
        # neighbouring envs are neighbours in memory: a warp loads 32 of them in one access
        return 32, min(steps, 32), 4
    if num_envs >= MANY_ROWS:
        # bound by memory: small tiles, four steps per thread, so that loads are 16 bytes wide
        steps = min(steps, 128)
        return 256 // steps, steps, 2
    # bound by latency: one row per program, in long tiles
    steps = min(steps, 512)
    return 1, steps, min(max(1, steps // 64), 4)


MANY_ROWS = 2048


@triton.jit(do_not_specialize=["num_envs"])  # type: ignore[untyped-decorator]
def _gae_tiles(  # type: ignore[no-untyped-def]
    rewards,
    values,
    terminated,
    truncated,
    bootstrap_values,
    step_counts,
    advantages,
    returns,
    num_envs,
    num_steps,
    env_stride,
    step_stride,
    gamma: tl.float64,
    decay: tl.float64,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    # 64-bit positions: a rollout may have more than 2^31 entries
    env = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    is_env = env < num_envs
    if step_counts is None:
        count = num_steps
    else:
        count = tl.minimum(tl.load(step_counts + env, mask=is_env, other=0), num_steps)
    real = rewards.dtype.element_ty
    gamma_real = tl.cast(gamma, real)
    decay_real = tl.cast(decay, real)

    carry = tl.zeros([ROWS], real)
    num_tiles = tl.cdiv(num_steps, STEPS)
    for tile in range(num_tiles):
        first = (num_tiles - 1 - tile) * STEPS
        step = first + tl.arange(0, STEPS)[None, :]
        at = env * env_stride + step * step_stride
        # loads are masked by the shape alone, so that they stay wide; padding is dropped later
        inside = is_env & (step < num_steps)
        reward = tl.load(rewards + at, mask=inside, other=0)
        value = tl.load(values + at, mask=inside, other=0)
        following = tl.load(
            values + at + step_stride, mask=is_env & (step + 1 < num_steps), other=0
        )
        is_terminated = tl.load(terminated + at, mask=inside, other=0) != 0
        is_truncated = tl.load(truncated + at, mask=inside, other=0) != 0

        stored = is_env & (step < count)
        ended = is_terminated | is_truncated | (step + 1 == count)
        bootstraps = stored & ended & (is_terminated == 0)
        bootstrap_value = tl.load(bootstrap_values + at, mask=bootstraps, other=0)
        next_value = tl.where(ended, bootstrap_value, following)
        delta = tl.where(stored, reward + gamma_real * next_value - value, 0.0).to(real)
        keep = tl.where(stored & (ended == 0), decay_real, 0.0).to(real)

        keeps, sums = tl.associative_scan((keep, delta), 1, _compose, reverse=True)
        advantage = sums + tl.where(keeps == 0, 0.0, keeps * carry[:, None]).to(real)
        carry = tl.sum(tl.where(step == first, advantage, 0.0), axis=1).to(real)

        tl.store(advantages + at, advantage, mask=inside)
        tl.store(returns + at, tl.where(stored, advantage + value, 0.0), mask=inside)


@triton.jit
def _compose(keep_later, sum_later, keep, delta):  # type: ignore[no-untyped-def]
    """A step's map after that of the later steps; a `keep` of 0 drops them even if NaN."""
    return keep * keep_later, delta + tl.where(keep == 0, 0.0, keep * sum_later)
