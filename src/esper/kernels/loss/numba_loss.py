"""PPO's loss of a minibatch and its gradients, compiled for one CPU thread.

A row is scored, added to the loss and differentiated while its few numbers are at hand: torch
needs some 100 operations on small tensors for the same.

The plain twin is `plain_loss` in `simic/agent/ppo_loss.py`. Parity test: tests/simic/test_ppo_loss.py.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,call-arg"

import math

import numpy as np

from esper.kernels.numba_cache import cached_njit
from esper.kernels.numba_math import FAST, compiled, exp, log1p_of_share, tanh

_ONE, _HALF, _ZERO = np.float32(1), np.float32(0.5), np.float32(0)
_LOG_SQRT_2_PI = np.float32(0.5 * math.log(2.0 * math.pi))
_LOG_4 = np.float32(math.log(4.0))
_LARGEST_LOGIT = np.float32(1e29)
_IMPOSSIBLE = np.float32(-2.5e29)  # between the log-probs of legal and of masked choices

START, END, IS_NUMBER = 0, 1, 2  # columns of the table of heads
# sums over steps, one column each in `measured`; then those of the heads
LOSS, POLICY_LOSS, KL, CLIPPED, VALUE_LOSS, DECIDED, OF_HEADS = range(7)
SUMS, WEIGHTS = 0, 1


@cached_njit(fastmath=FAST, error_model="numpy")
def loss_and_gradients(
    logits,  # [R, C]
    values,  # [R]
    rows,  # valid [R], masks [R, C], actions [R, H], log-probs [R, H], advantages [R], targets [R]
    table,  # [H, 3 or more]: first and last column, whether a number
    log_stds,  # [H]: of numbers, within their bounds
    nodes,  # [K]: of a standard normal, and their weights
    entropy_weights,  # [H]: of the bonus, with its coefficient
    settings,  # clip, value coefficient, entropy coefficient, floor
    counts_of_whole,  # steps, and those with a choice, if this is a part of a minibatch; else 0
    grad_logits,  # [R, C], like the rest: written
    grad_values,  # [R]
    grad_log_stds,  # [H]
    measured,  # [2, 6 + 3 H]: sums and weights of the metrics
):
    """Returns the largest |ratio - 1|, and whether every stored choice could be scored."""
    valid, masks, actions, old_log_probs, advantages, targets = rows
    clip, value_coefficient, entropy_coefficient, floor = settings
    num_heads = len(table)
    counts = np.empty((len(values), num_heads), dtype=np.int64)
    num_steps, num_decided = _count(valid, masks, table, counts)
    all_steps, all_decided = counts_of_whole
    if all_steps == 0:
        all_steps, all_decided = num_steps, max(num_decided, 1)
    per_step = _ONE / np.float32(all_steps)
    per_decided = _ONE / np.float32(all_decided)

    log_probs = np.zeros(num_heads, dtype=np.float32)
    entropies = np.zeros(num_heads, dtype=np.float32)
    normalized = np.zeros(num_heads, dtype=np.float32)
    shares = np.empty(logits.shape[1], dtype=np.float32)  # probabilities before the floor
    log_shares = np.empty(logits.shape[1], dtype=np.float32)  # log-probs with it
    value_sum = surrogate_sum = bonus_sum = kl_sum = 0.0
    num_clipped = 0
    largest_error = _ZERO
    are_scored = True
    sums = np.zeros(measured.shape[1], dtype=np.float64)
    log_counts = np.log(np.arange(1, logits.shape[1] + 3).astype(np.float32))  # of 1 and more
    log_counts[0] = log_counts[1]  # one legal choice has no entropy: the divisor does not matter
    grad_log_stds[:] = 0
    for row in range(len(values)):
        for column in range(logits.shape[1]):
            grad_logits[row, column] = 0
        grad_values[row] = 0
        if not valid[row]:
            continue
        error = values[row] - targets[row]
        value_sum += error * error
        grad_values[row] = value_coefficient * per_step * error

        log_ratio = _ZERO
        decides = False
        for head in range(num_heads):
            start, stop = table[head, START], table[head, END]
            if table[head, IS_NUMBER]:
                log_probs[head], entropies[head], normalized[head] = _score_number(
                    logits[row, start], masks[row, start], actions[row, head], log_stds[head], nodes
                )
            else:
                log_probs[head], entropies[head] = _score_choice(
                    logits, masks, row, start, stop, actions[row, head], counts[row, head], floor,
                    shares, log_shares,
                )  # fmt: skip
                normalized[head] = entropies[head] / log_counts[max(counts[row, head], 1) - 1]
            are_scored = are_scored and log_probs[head] > _IMPOSSIBLE
            log_ratio += log_probs[head] - old_log_probs[row, head]
            decides = decides or counts[row, head] > 1
        change = np.expm1(log_ratio)
        distance = abs(change)
        if distance > largest_error or distance != distance:
            largest_error = distance
        if not decides:
            continue

        ratio = change + _ONE
        bounded = min(max(ratio, _ONE - clip), _ONE + clip)
        advantage = advantages[row]
        surrogate = min(ratio * advantage, bounded * advantage)
        surrogate_sum += surrogate
        kl_sum += change - log_ratio
        num_clipped += ratio != bounded
        is_cut = (ratio - bounded) * advantage > _ZERO
        to_log_prob = _ZERO if is_cut else -per_decided * ratio * advantage
        for head in range(num_heads):
            if not log_probs[head] > _IMPOSSIBLE:
                continue  # the caller refuses the update: the stored action may be no index
            if counts[row, head] > 1:
                at = OF_HEADS + head
                sums[at] += entropies[head]
                sums[at + num_heads] += normalized[head]
                sums[at + 2 * num_heads] += 1
            weight = entropy_weights[head]
            bonus_sum += weight * normalized[head]
            to_bonus = -entropy_coefficient * per_decided * weight
            start, stop = table[head, START], table[head, END]
            if table[head, IS_NUMBER]:
                to_mean, to_log_std = _number_gradients(
                    logits[row, start], masks[row, start], actions[row, head], log_stds[head],
                    nodes, to_log_prob, to_bonus * normalized[head],
                )  # fmt: skip
                grad_logits[row, start] = to_mean
                grad_log_stds[head] += to_log_std
            elif counts[row, head] > 0:
                to_entropy = to_bonus / log_counts[counts[row, head] - 1]
                _choice_gradients(
                    logits, masks, row, start, stop, int(actions[row, head]), shares, log_shares,
                    floor, to_log_prob, to_entropy, grad_logits,
                )  # fmt: skip

    value_loss = 0.5 * value_sum / all_steps
    policy_loss = -surrogate_sum / all_decided
    bonus = bonus_sum / all_decided
    loss = policy_loss + value_coefficient * value_loss - entropy_coefficient * bonus
    sums[LOSS] = loss * all_steps
    sums[POLICY_LOSS] = policy_loss * all_decided
    sums[KL] = kl_sum
    sums[CLIPPED] = num_clipped
    sums[VALUE_LOSS] = value_loss * all_steps
    sums[DECIDED] = num_decided
    measured[SUMS] = sums
    measured[WEIGHTS, :OF_HEADS] = num_steps
    measured[WEIGHTS, POLICY_LOSS : CLIPPED + 1] = num_decided
    for head in range(num_heads):
        at = OF_HEADS + head
        chosen = sums[at + 2 * num_heads]
        measured[WEIGHTS, at] = measured[WEIGHTS, at + num_heads] = chosen
        measured[WEIGHTS, at + 2 * num_heads] = num_steps
    return largest_error, are_scored


@compiled
def _count(valid, masks, table, counts):
    """Legal choices of each head, 2 for a number that is used; steps, and those with a choice."""
    num_steps = num_decided = 0
    for row in range(len(valid)):
        decides = False
        for head in range(len(table)):
            count = 0
            for column in range(table[head, START], table[head, END]):
                count += masks[row, column]
            if table[head, IS_NUMBER]:
                count *= 2
            counts[row, head] = count
            decides = decides or count > 1
        num_steps += valid[row]
        num_decided += valid[row] and decides
    return num_steps, num_decided


@compiled
def _score_choice(logits, masks, row, start, stop, action, count, floor, shares, log_shares):
    """Log-prob of the stored choice, NaN if it cannot have been made, and the entropy.

    Leaves probabilities before the floor in `shares`, log-probs with it in `log_shares`. Columns are
    indexed in whole arrays: a slice for each row would take longer than its arithmetic.
    """
    if count == 0:
        return (_ZERO if action == 0 else np.float32(np.nan)), _ZERO
    largest = -_LARGEST_LOGIT
    for i in range(start, stop):
        if masks[row, i]:
            largest = max(_bounded(logits[row, i]), largest)  # the logit first: NaN stays NaN
    total = _ZERO
    for i in range(start, stop):
        shares[i] = np.exp(_bounded(logits[row, i]) - largest) if masks[row, i] else _ZERO
        total += shares[i]
    log_total = np.log(total)
    entropy = _ZERO
    for i in range(start, stop):
        if not masks[row, i]:
            continue
        shares[i] /= total
        share = shares[i]
        log_shares[i] = _bounded(logits[row, i]) - largest - log_total
        if floor > _ZERO:
            share = (_ONE - floor) * share + floor / np.float32(count)
            log_shares[i] = np.log(share)
        entropy -= share * log_shares[i]
    chosen = start + int(action)
    if not start <= chosen < stop or not masks[row, chosen]:
        return np.float32(np.nan), entropy
    return log_shares[chosen], entropy


@compiled
def _choice_gradients(
    logits, masks, row, start, stop, action, shares, log_shares, floor, to_log_prob, to_entropy,
    gradients,
):  # fmt: skip
    """Writes the gradients of log-prob and entropy, times those of the loss for them.

    With shares s and the floor f: d log p'[a] / dz[i] = (1 - f) s[a] / p'[a] ((i == a) - s[i]), and
    dH / dz[i] = (1 - f) s[i] (mean of log p' under s - log p'[i]).
    """
    mean_log = _ZERO
    for i in range(start, stop):
        if masks[row, i]:
            mean_log += shares[i] * log_shares[i]
    chosen = start + action
    kept = _ONE - floor
    of_chosen = to_log_prob
    if floor > _ZERO:
        of_chosen *= kept * shares[chosen] / np.exp(log_shares[chosen])
    for i in range(start, stop):
        if masks[row, i] and abs(logits[row, i]) < _LARGEST_LOGIT:
            one = _ONE if i == chosen else _ZERO
            gradients[row, i] = of_chosen * (one - shares[i])
            gradients[row, i] += to_entropy * kept * shares[i] * (mean_log - log_shares[i])


@compiled
def _score_number(mean, is_used, sample, log_std, nodes):
    """Log-density of the tanh of a stored sample, its entropy, and that as a share of (-1, 1)."""
    if not is_used:
        return (_ZERO if np.isfinite(sample) else np.float32(np.nan)), _ZERO, _ZERO
    mean, std = _bounded(mean), np.exp(log_std)
    distance = (sample - mean) / std
    log_prob = -_HALF * distance * distance - log_std - _LOG_SQRT_2_PI - _log_slope(sample)
    slope = _ZERO
    for k in range(nodes.shape[1]):
        slope += nodes[1, k] * _log_slope(mean + std * nodes[0, k])
    entropy = log_std + _HALF + _LOG_SQRT_2_PI + slope
    return log_prob, entropy, _HALF * np.exp(entropy)


@compiled
def _number_gradients(mean, is_used, sample, log_std, nodes, to_log_prob, to_entropy):
    """Gradients for the mean and the log of the standard deviation.

    The slope of log(1 - tanh(u)^2) is -2 tanh(u).
    """
    if not is_used:
        return _ZERO, _ZERO
    std = np.exp(log_std)
    distance = (sample - _bounded(mean)) / std
    to_mean = to_log_prob * distance / std
    to_log_std = to_log_prob * (distance * distance - _ONE)
    if to_entropy != _ZERO:
        by_mean = by_log_std = _ZERO
        for k in range(nodes.shape[1]):
            spread = std * nodes[0, k]
            bend = np.float32(-2) * nodes[1, k] * tanh(_bounded(mean) + spread)
            by_mean += bend
            by_log_std += bend * spread
        to_mean += to_entropy * by_mean
        to_log_std += to_entropy * (_ONE + by_log_std)
    if not abs(mean) < _LARGEST_LOGIT:
        to_mean = _ZERO
    return to_mean, to_log_std


@compiled
def _log_slope(u):
    """log(1 - tanh(u)^2), without overflow for large u."""
    size = abs(u)
    return (
        _LOG_4 - np.float32(2) * size - np.float32(2) * log1p_of_share(exp(np.float32(-2) * size))
    )


@compiled
def _bounded(logit):
    return min(max(logit, -_LARGEST_LOGIT), _LARGEST_LOGIT)
