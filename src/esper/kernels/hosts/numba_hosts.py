"""Whole hosts with their seeds, compiled by numba: logits, and training on minibatches.

Hosts are independent, so each runs all its minibatches before the next one starts; its weights,
moments and activations stay in the processor's cache. What a host runs is read from tables, so
all hosts may differ.

Parity test: `tests/tolaria/test_steps.py`, against `tolaria/batched.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np

from esper.kernels.hosts import numba_layers as layers
from esper.kernels.hosts.layer_table import Kind
from esper.kernels.numba_cache import cached_njit
from esper.kernels.numba_math import compiled
from esper.leyline.constants import BlendStyle

CONV, DEPTHWISE, NORM, RELU, CODE, ATTEND = map(int, Kind)
KIND, PARAMS, WIDTH, RECTIFIES = layers.KIND, layers.PARAMS, layers.WIDTH, layers.RECTIFIES
inlined, copy, fill = layers.inlined, layers.copy, layers.fill
# as arguments; numba compiles a function again for each literal that it is called with
ZERO, YES, NO = np.int64(0), np.bool_(True), np.bool_(False)
ADD, MULTIPLY = int(BlendStyle.ADD), int(BlendStyle.MULTIPLY)

NO_SLOT = -1
NOTHING = np.int64(-1)  # is added


class Tables(NamedTuple):
    """What hosts of one population can run."""

    programs: np.ndarray  # [programs, layers, columns]: segments, head, then seeds
    lengths: np.ndarray  # [programs]: layers of each
    host_starts: np.ndarray  # [S + 1]: where the parameters of segments and head begin
    seed_programs: np.ndarray  # [S, B]: which program a blueprint runs in a slot
    seed_sizes: np.ndarray  # [S, B]: its parameters
    widens: np.ndarray  # [programs]: reads before its segment, is added behind the next layer
    part_starts: np.ndarray  # [S + 2]: where host, seeds and the row itself begin and end
    room: int  # of the workspace, for one example
    widest: int  # rows that a layer works on at a time


class Weights(NamedTuple):
    params: np.ndarray  # [P, D]
    grads: np.ndarray
    moments: np.ndarray  # [2, P, D]
    steps: np.ndarray  # [P, 1 + S]
    rates: np.ndarray  # [P]


class Slots(NamedTuple):
    """`[P, S]` each."""

    alpha: np.ndarray
    alpha_behind: np.ndarray
    style: np.ndarray
    blueprint: np.ndarray
    behind: np.ndarray


class Data(NamedTuple):
    inputs: np.ndarray  # [rows, features]
    labels: np.ndarray  # [rows]
    first_row: np.ndarray  # [P]


class Workspace(NamedTuple):
    ws: np.ndarray  # all activations and their gradients; whatever was in it before
    tape: np.ndarray  # [layers run, 3]: where input, output and what was saved lie
    frame: np.ndarray  # [S, 5]: the same for each slot
    xs: np.ndarray
    ys: np.ndarray


# what a slot's blend leaves for the way back: where things lie in the workspace and on the tape
X, SEED, AUX, SEGMENT_END, SEED_END = range(5)


@cached_njit()
def train_hosts(first, last, tables, memory, weights, slots, data, rows, losses, optimizer):
    """Train hosts `first` to `last - 1` on minibatch rows `[M, P, batch]`; losses `[M, P]`."""
    batch = rows.shape[2]
    n = (batch + 7) // 8 * 8
    work = _workspace(tables, memory)
    shadow = np.zeros_like(weights.params[0])
    ids = np.zeros(batch, dtype=np.int64)
    in_host = np.zeros(len(tables.seed_programs), dtype=np.int64)
    for p in range(first, last):
        w, g = weights.params[p], weights.grads[p]
        _active(slots, p, in_host)
        for step in range(rows.shape[0]):
            _load(work.ws, data, p, rows[step, p], ids, n)
            fill(g, 0)
            losses[step, p] = _gradients(
                tables, w, g, slots.alpha[p], slots.style[p], in_host, work, data.labels, ids, n
            )
            if slots.behind[p].any():
                fill(shadow, 0)
                _gradients(
                    tables, w, shadow, slots.alpha_behind[p], slots.style[p], slots.blueprint[p],
                    work, data.labels, ids, n,
                )  # fmt: skip
                _copy_behind(tables, slots.blueprint[p], slots.behind[p], shadow, g)
            _update_parts(tables, weights, p, slots.blueprint[p], optimizer)


@cached_njit()
def logits_of_hosts(first, last, tables, memory, params, slots, inputs, ablated, out):
    """Logits `[P, classes, copies, batch]` on inputs `[P, features, batch]`.

    Copy 0 has all seeds on; copy 1 + k has those in slot `ablated[k]` off.
    """
    (_, features, n), classes = inputs.shape, out.shape[1]
    work = _workspace(tables, memory)
    in_host, before = np.zeros((2, len(tables.seed_programs)), dtype=np.int64)
    for p in range(first, last):
        w, alpha, style = params[p], slots.alpha[p], slots.style[p]
        _active(slots, p, in_host)
        for f in range(features):
            copy(inputs[p, f], work.ws[f * n : (f + 1) * n])
        logits, top, _ = _forward(
            tables, w, alpha, style, in_host, work, n, 0, NO_SLOT, ZERO, features * n
        )
        copy(work.frame[:, X], before)
        for k in range(1 + len(ablated)):
            again, slot = logits, ablated[k - 1] if k > 0 else NO_SLOT
            if k > 0 and in_host[slot] >= 0:
                again, _, _ = _forward(
                    tables, w, alpha, style, in_host, work, n, slot, slot, before[slot], top
                )
            for c in range(classes):
                copy(work.ws[again + c * n : again + (c + 1) * n], out[p, c, k])


@inlined
def _active(slots, p, in_host):
    """The blueprints of the active seeds of a host, -1 elsewhere."""
    for s in range(len(in_host)):
        in_host[s] = -1 if slots.behind[p, s] else slots.blueprint[p, s]


@inlined
def _workspace(tables, memory):
    num_programs, longest, _ = tables.programs.shape
    return Workspace(
        memory,
        np.zeros((num_programs * longest, 3), dtype=np.int64),
        np.zeros((len(tables.seed_programs), 5), dtype=np.int64),
        np.zeros(tables.widest, dtype=np.int64),
        np.zeros(tables.widest, dtype=np.int64),
    )


@inlined
def _load(ws, data, p, rows, ids, n):
    """A minibatch at the beginning of the workspace, examples last; beyond the batch 0."""
    features = data.inputs.shape[1]
    fill(ws[: features * n], 0)
    for b in range(len(rows)):
        ids[b] = data.first_row[p] + rows[b]
        for f in range(features):
            ws[f * n + b] = data.inputs[ids[b], f]


@compiled
def _gradients(tables, w, g, alpha, style, blueprint, work, labels, ids, n):
    """The mean loss of the minibatch that is loaded; its gradient is added to `g`."""
    classes = _num_outputs(tables, len(alpha))
    top = layers.num_inputs(tables.programs[0, 0]) * n
    logits, top, t = _forward(tables, w, alpha, style, blueprint, work, n, 0, NO_SLOT, ZERO, top)
    loss, grad, top = _cross_entropy(work.ws, logits, labels, ids, n, classes, top)
    _backward(tables, w, g, alpha, style, blueprint, work, n, grad, top, t)
    return loss


@inlined
def _copy_behind(tables, blueprint, behind, shadow, g):
    """Of the shadow pass's gradients, those of the seeds that are behind their host."""
    for s in range(len(behind)):
        if behind[s]:
            start = tables.part_starts[1 + s]
            end = start + tables.seed_sizes[s, blueprint[s]]
            copy(shadow[start:end], g[start:end])


@inlined
def _update_parts(tables, weights, p, blueprint, optimizer):
    """The host and each of its seeds take a step of AdamW."""
    real, rate = weights.params.dtype.type, weights.rates[p]
    _, (beta_mean, beta_square), epsilon, weight_decay = optimizer
    shrink, keep, small = real(1 - rate * weight_decay), real(beta_square), real(epsilon)
    a, b = real(1 - beta_mean), real(1 - beta_square)
    for part in range(1 + len(blueprint)):
        start, end = tables.part_starts[part], tables.part_starts[part + 1]
        if part > 0:
            if blueprint[part - 1] < 0:
                continue
            end = start + tables.seed_sizes[part - 1, blueprint[part - 1]]
        weights.steps[p, part] += 1
        step = weights.steps[p, part]
        mean, square = weights.moments[0, p, start:end], weights.moments[1, p, start:end]
        w, g = weights.params[p, start:end], weights.grads[p, start:end]
        scale = real(rate / (1 - beta_mean**step))
        inverse = real(1 / np.sqrt(1 - beta_square**step))
        for i in range(w.size):
            mean[i] += a * (g[i] - mean[i])
            square[i] = keep * square[i] + b * g[i] * g[i]
            w[i] = shrink * w[i] - scale * mean[i] / (np.sqrt(square[i]) * inverse + small)


@inlined
def _forward(tables, w, alpha, style, blueprint, work, n, slot, off, x, top):
    """A host from slot `slot` on, with the seed in slot `off` switched off.

    `x` is the input at slot 0, or the output of segment `slot` if it is `off` that starts.
    """
    ws, frame = work.ws, work.frame
    num_slots = len(alpha)
    t = ZERO
    before, added = x, NOTHING
    for s in range(slot, num_slots):
        if s != off:
            before = x
            x, top, t = _run_forward(tables, s, w, tables.host_starts[s], x, added, top, t, n, work)
            added = NOTHING
        frame[s, X], frame[s, SEGMENT_END] = x, t
        if blueprint[s] < 0 or s == off:
            continue
        program = tables.seed_programs[s, blueprint[s]]
        start = tables.part_starts[1 + s]
        seen = before if tables.widens[program] else x
        seed, top, t = _run_forward(tables, program, w, start, seen, NOTHING, top, t, n, work)
        frame[s, SEED], frame[s, SEED_END], frame[s, AUX] = seed, t, top
        if tables.widens[program]:
            _scale(ws, seed, seed, _num_outputs(tables, program) * n, ws.dtype.type(alpha[s]))
            added = seed
            continue
        size = _num_outputs(tables, s) * n
        y = top + size
        top = _grown(ws, top, 2 * size)
        _blend(ws, x, seed, y, frame[s, AUX], size, ws.dtype.type(alpha[s]), style[s])
        x = y
    start = tables.host_starts[num_slots]
    return _run_forward(tables, num_slots, w, start, x, added, top, t, n, work)


@inlined
def _backward(tables, w, g, alpha, style, blueprint, work, n, grad, top, t):
    """Adds every gradient of a host and its seeds to `g`."""
    ws, frame = work.ws, work.frame
    num_slots = len(alpha)
    start = tables.host_starts[num_slots]
    # `first` is the gradient of the output of a program's first layer
    grad, first, top = _run_backward(tables, num_slots, w, g, start, grad, top, t, YES, n, work)
    for s in range(num_slots - 1, -1, -1):
        program = tables.seed_programs[s, blueprint[s]] if blueprint[s] >= 0 else NOTHING
        widens = program >= 0 and tables.widens[program]
        start, end, weight = tables.part_starts[1 + s], frame[s, SEED_END], ws.dtype.type(alpha[s])
        if program >= 0 and not widens:
            size, grad_seed = _num_outputs(tables, s) * n, top
            top = _grown(ws, top, size)
            x, seed, aux = frame[s, X], frame[s, SEED], frame[s, AUX]
            _blend_backward(ws, x, seed, aux, grad, grad_seed, size, weight, style[s])
            through, _, top = _run_backward(
                tables, program, w, g, start, grad_seed, top, end, YES, n, work
            )
            _add(ws[grad : grad + size], ws[through : through + size])
        own, t, after = tables.host_starts[s], frame[s, SEGMENT_END], first
        grad, first, top = _run_backward(tables, s, w, g, own, grad, top, t, s > 0, n, work)
        if widens:
            size, grad_seed = _num_outputs(tables, program) * n, top
            top = _grown(ws, top, size)
            _scale(ws, after, grad_seed, size, weight)
            through, _, top = _run_backward(
                tables, program, w, g, start, grad_seed, top, end, s > 0, n, work
            )
            if s > 0:
                size = layers.num_inputs(tables.programs[s, 0]) * n
                _add(ws[grad : grad + size], ws[through : through + size])


@inlined
def _grown(ws, top, size):
    """The workspace's new top with room for `size` more."""
    if top + size > ws.size:
        raise MemoryError("the workspace of a host is too small")
    return top + size


@inlined
def _num_outputs(tables, program):
    return layers.num_outputs(tables.programs[program, tables.lengths[program] - 1])


@compiled
def _run_forward(tables, program, w, base, x, added, top, t, n, work):
    """A program's output, the new top of the workspace and the new end of the tape.

    `added` is added to the first layer's output.
    """
    ws, tape, xs, ys = work.ws, work.tape, work.xs, work.ys
    for number in range(tables.lengths[program]):
        row = tables.programs[program, number]
        at = base + row[PARAMS]
        outputs = layers.num_outputs(row) * n
        y, saved = top, top + outputs
        top = _grown(ws, top, outputs)
        if row[KIND] == CONV or row[KIND] == DEPTHWISE:
            saved = x
            if layers.has_border(row):
                saved = top
                top = _grown(ws, top, layers.padded_size(row, n))
                layers.pad(row, ws, x, n, saved, NO)
            if row[KIND] == CONV:
                layers.conv_forward(row, ws, w, at, saved, y, xs, ys, n)
            else:
                layers.depthwise_forward(row, ws, w, at, saved, y, xs, ys, n)
        elif row[KIND] == NORM:
            top = _grown(ws, top, outputs + 3 * n)
            layers.norm_forward(row, ws, w, at, x, y, saved, saved + outputs, n)
        elif row[KIND] == CODE:
            layers.code_forward(row, ws, w, at, x, y, n)
        elif row[KIND] == ATTEND:
            top = _grown(ws, top, row[WIDTH] * row[WIDTH] * n)
            layers.attend_forward(row, ws, x, y, saved, n)
        else:
            copy(ws[x : x + outputs], ws[y : y + outputs])
        if number == 0 and added >= 0:
            _add(ws[y : y + outputs], ws[added : added + outputs])
        if row[RECTIFIES] or row[KIND] == RELU:
            layers.relu_forward(ws[y : y + outputs])
        tape[t, 0], tape[t, 1], tape[t, 2] = x, y, saved
        x, t = y, t + 1
    return x, top, t


@compiled
def _run_backward(tables, program, w, g, base, grad, top, t, needs_input_grad, n, work):
    """The gradients of a program's input and of its first layer's output, and the new top."""
    ws, tape, xs, ys = work.ws, work.tape, work.xs, work.ys
    first = grad
    for number in range(tables.lengths[program] - 1, -1, -1):
        row = tables.programs[program, number]
        t -= 1
        x, y, saved = tape[t, 0], tape[t, 1], tape[t, 2]
        at = base + row[PARAMS]
        inputs = layers.num_inputs(row) * n
        outputs = layers.num_outputs(row) * n
        grad_x, first = top, grad
        if row[RECTIFIES] or row[KIND] == RELU:
            layers.relu_backward(ws[y : y + outputs], ws[grad : grad + outputs])
        if row[KIND] == RELU:
            grad_x = grad
        elif row[KIND] == CONV:
            wanted = needs_input_grad or number > 0
            padded = top
            if wanted:
                top = _grown(ws, top, layers.padded_size(row, n))
                fill(ws[padded:top], 0)
            layers.conv_backward(row, ws, w, g, at, saved, grad, padded, wanted, xs, ys, n)
            if wanted and layers.has_border(row):
                grad_x = top
                top = _grown(ws, top, inputs)
                layers.pad(row, ws, grad_x, n, padded, YES)
        elif row[KIND] == DEPTHWISE:
            top = _grown(ws, top, inputs)
            padded = top
            top = _grown(ws, top, layers.padded_size(row, n))
            layers.pad(row, ws, grad, n, padded, NO)
            layers.depthwise_backward(row, ws, w, g, at, saved, grad, padded, grad_x, xs, ys, n)
        elif row[KIND] == NORM:
            top = _grown(ws, top, inputs)
            layers.norm_backward(row, ws, w, g, at, saved, saved + outputs, grad, grad_x, n)
        elif row[KIND] == ATTEND:
            top = _grown(ws, top, inputs + row[WIDTH] * n)
            layers.attend_backward(row, ws, x, saved, grad, grad_x, n)
        else:  # a code
            layers.code_backward(row, ws, g, at, grad, n)
            grad_x = grad
        grad = grad_x
    return grad, first, top


@inlined
def _add(y, x):
    for i in range(y.size):
        y[i] += x[i]


@inlined
def _scale(ws, x_at, y_at, size, factor):
    for i in range(size):
        ws[y_at + i] = factor * ws[x_at + i]


@compiled
def _blend(ws, x_at, seed_at, y_at, aux_at, size, alpha, style):
    """x + alpha * change; `aux` keeps tanh(seed) or the gate for the way back."""
    x, seed = ws[x_at : x_at + size], ws[seed_at : seed_at + size]
    y, aux = ws[y_at : y_at + size], ws[aux_at : aux_at + size]
    if style == ADD:
        for i in range(size):
            y[i] = x[i] + alpha * seed[i]
    elif style == MULTIPLY:
        for i in range(size):
            e = layers.exp(-2 * abs(seed[i]))
            th = (1 - e) / (1 + e)
            aux[i] = th if seed[i] >= 0 else -th
            y[i] = x[i] + alpha * x[i] * aux[i]
    else:
        for i in range(size):
            aux[i] = 1 / (1 + layers.exp(-x[i]))
            y[i] = x[i] + alpha * aux[i] * seed[i]


@compiled
def _blend_backward(ws, x_at, seed_at, aux_at, grad_at, grad_seed_at, size, alpha, style):
    """The gradient of y becomes that of x in place; that of the seed is written."""
    x, seed, aux = ws[x_at : x_at + size], ws[seed_at : seed_at + size], ws[aux_at : aux_at + size]
    grad, grad_seed = ws[grad_at : grad_at + size], ws[grad_seed_at : grad_seed_at + size]
    if style == ADD:
        for i in range(size):
            grad_seed[i] = alpha * grad[i]
    elif style == MULTIPLY:
        for i in range(size):
            grad_seed[i] = alpha * grad[i] * x[i] * (1 - aux[i] * aux[i])
            grad[i] *= 1 + alpha * aux[i]
    else:
        for i in range(size):
            grad_seed[i] = alpha * grad[i] * aux[i]
            grad[i] *= 1 + alpha * seed[i] * aux[i] * (1 - aux[i])


@inlined
def _cross_entropy(ws, logits, labels, ids, n, classes, top):
    """Mean loss over the batch, and the gradient of the logits, 0 beyond the batch."""
    batch, grad = len(ids), top
    top = _grown(ws, top, classes * n)
    fill(ws[grad:top], 0)
    loss = 0.0
    for b in range(batch):
        highest = ws[logits + b]
        for k in range(1, classes):
            highest = max(highest, ws[logits + k * n + b])
        total = 0.0
        for k in range(classes):
            e = np.exp(ws[logits + k * n + b] - highest)
            ws[grad + k * n + b] = e
            total += e
        for k in range(classes):
            ws[grad + k * n + b] /= total * batch
        label = labels[ids[b]]
        ws[grad + label * n + b] -= 1 / batch
        loss += np.log(total) + highest - ws[logits + label * n + b]
    return loss / batch, grad, top
