"""The choices of one head group for N envs, compiled for one CPU thread.

The plain twin is `choose_group` in `tamiyo/policy/distributions.py`: the same random numbers give the
same choices. Parity test: tests/tamiyo/test_choices.py.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,call-arg"

import math

import numpy as np
from numba import njit

from esper.kernels.numba_cache import cached_njit

_ONE, _ZERO = np.float32(1), np.float32(0)
_LOG_SQRT_2_PI = np.float32(0.5 * math.log(2.0 * math.pi))
_LOG_2 = np.float32(math.log(2.0))
_LARGEST_LOGIT = np.float32(1e29)
START, END, IS_NUMBER, FIRST_STRIDE = 0, 1, 2, 3  # columns of the table of heads


@cached_njit(error_model="numpy")
def choose(
    logits,  # [N, choices of the group]
    legal,  # [N, combinations of the given choices, choices of the group]
    noise,  # [N, C]: exponential clocks; standard normal for numbers
    table,  # [H, 3 + H]: first and last column, whether a number, stride of each head in `legal`
    group,  # first head and end of the group
    log_stds,  # [H]: of numbers
    floor,
    is_sampled,
    actions,  # [N, H]: earlier choices are there; those of the group are written
    log_probs,  # [N, H]
    masks,  # [N, C]: the rows that applied
):
    """Returns whether all log-probs are finite and all heads given no other had a legal choice."""
    are_right = True
    first, end = group
    offset = table[first, START]
    for env in range(len(logits)):
        row = 0
        for earlier in range(first):
            row += table[first, FIRST_STRIDE + earlier] * int(actions[env, earlier])
        for head in range(first, end):
            start, stop = table[head, START], table[head, END]
            masks[env, start:stop] = legal[env, row, start - offset : stop - offset]
            read = logits[env, start - offset : stop - offset]
            is_legal = masks[env, start:stop]
            clocks = noise[env, start:stop]
            if table[head, IS_NUMBER]:
                action, log_prob = _number(
                    read[0], is_legal[0], clocks[0], log_stds[head], is_sampled
                )
            else:
                action, log_prob = _choice(read, is_legal, clocks, floor, is_sampled)
            actions[env, head] = action
            log_probs[env, head] = log_prob
            is_stuck = legal.shape[1] == 1 and not is_legal.any()
            are_right = are_right and np.isfinite(log_prob) and not is_stuck
    return are_right


@njit
def _choice(read, is_legal, clocks, floor, is_sampled):
    """Of exponential clocks with rates p, choice i rings first with probability p_i."""
    largest, count = -_LARGEST_LOGIT, 0
    for i in range(read.size):
        if is_legal[i]:
            count += 1
            largest = max(_bounded(read[i]), largest)  # the logit first: NaN stays NaN
    if count == 0:
        return 0, _ZERO  # nothing to choose
    total = _ZERO
    for i in range(read.size):
        if is_legal[i]:
            total += np.exp(_bounded(read[i]) - largest)
    best, chosen, chosen_share = np.float32(-1), 0, _ZERO
    for i in range(read.size):
        if not is_legal[i]:
            continue
        share = np.exp(_bounded(read[i]) - largest) / total
        share = (_ONE - floor) * share + floor / np.float32(count)
        rate = share / clocks[i] if is_sampled else share
        if rate > best or rate != rate:
            best, chosen, chosen_share = rate, i, share
    if floor > _ZERO:
        return chosen, np.log(chosen_share)
    return chosen, _bounded(read[chosen]) - largest - np.log(total)


@njit
def _number(mean, is_used, normal, log_std, is_sampled):
    """A Gaussian sample before tanh, and the log-density of its tanh."""
    if not is_used:
        return _ZERO, _ZERO
    distance = normal if is_sampled else _ZERO
    mean = _bounded(mean)
    sample = mean + np.exp(log_std) * distance
    size = abs(sample)
    log_slope = np.float32(2) * (_LOG_2 - size - np.log1p(np.exp(np.float32(-2) * size)))
    density = np.float32(-0.5) * distance * distance - log_std - _LOG_SQRT_2_PI
    return sample, density - log_slope


@njit
def _bounded(logit):
    return min(max(logit, -_LARGEST_LOGIT), _LARGEST_LOGIT)
