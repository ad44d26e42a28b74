"""One step of a plain recurrent policy with its choices, compiled for one CPU thread.

Encoder, LSTM cell, readout and sampling in one call: for a few envs the calls of torch take longer
than the arithmetic. Parity tests: tests/tamiyo/test_network.py.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

import numpy as np

from esper.kernels.lstm.numba_lstm import _add_product, _compiled, _entry_point, _squash, _tanh


@_entry_point
def step(
    features,  # [N, F]
    center,  # [F], like `scale`
    scale,
    bound,
    encoder,  # weights [inputs, hidden] of each layer, followed by tanh
    encoder_biases,
    cell,  # weights of the input and of the state, [hidden, 4 * hidden]; unused without memory
    cell_bias,
    has_memory,
    h,  # [N, hidden]
    c,
):
    """What the heads read, and the next state."""
    core = np.empty_like(features)
    for n in range(core.shape[0]):
        for f in range(core.shape[1]):
            core[n, f] = min(max((features[n, f] - center[f]) / scale[f], -bound), bound)
    for layer in range(len(encoder)):
        core = _linear(core, encoder[layer], encoder_biases[layer])
        for n in range(core.shape[0]):
            for k in range(core.shape[1]):
                core[n, k] = _tanh(core[n, k])
    if not has_memory:
        return core, h, c
    gates = _linear(core, cell[0], cell_bias)
    _add_product(gates, h, cell[1])
    hidden, next_h, next_c = h.shape[1], np.empty_like(h), np.empty_like(c)
    for n in range(h.shape[0]):
        gate = gates[n]
        _squash(gate, hidden)
        for k in range(hidden):
            next_c[n, k] = gate[hidden + k] * c[n, k] + gate[k] * gate[2 * hidden + k]
            next_h[n, k] = gate[3 * hidden + k] * _tanh(next_c[n, k])
            core[n, k] += next_h[n, k]
    return core, next_h, next_c


@_entry_point
def choose(core, weight, bias, legal, starts, clocks, is_sampled, masked):
    """Choices and log-probs `[N, H]`, values `[N]`, and whether all choices were possible.

    `clocks` `[N, H, M]` are exponential, as in `MaskedFactoredCategorical.sample`. Head i has the
    choices from `starts[i]` to `starts[i + 1]`.
    """
    read = _linear(core, weight, bias)
    num_envs, num_heads, is_ok = len(core), len(starts) - 1, True
    actions = np.empty((num_envs, num_heads), dtype=np.int64)
    log_probs = np.empty((num_envs, num_heads), dtype=np.float32)
    for n in range(num_envs):
        for head in range(num_heads):
            start, end = starts[head], starts[head + 1]
            largest = masked
            for i in range(start, end):
                if not legal[n, i]:
                    read[n, i] = masked
                largest = max(read[n, i], largest)
            total, best, choice = np.float32(0), np.float32(-1), 0
            for i in range(start, end):
                weight_i = np.exp(read[n, i] - largest)
                total += weight_i
                rate = weight_i / clocks[n, head, i - start] if is_sampled else weight_i
                if rate > best:
                    best, choice = rate, i - start
            actions[n, head] = choice
            log_probs[n, head] = read[n, start + choice] - largest - np.log(total)
            # NaN fails both
            is_ok = is_ok and legal[n, start + choice] and total > 0
    return actions, log_probs, read[:, -1].copy(), is_ok


@_compiled
def _linear(x, weight, bias):
    y = np.empty((x.shape[0], weight.shape[1]), dtype=np.float32)
    y[:] = bias
    _add_product(y, x, weight)
    return y
