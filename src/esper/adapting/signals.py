"""Signals about a model and a few shifted rows, from which a controller infers what to change.

All are cheap: one forward pass and two backward passes over at most `MAX_ROWS` rows, without any
training. `measure` returns them for many models at once, `[P, len(SIGNALS)]`.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.adapting.adapted import call_changed
from esper.adapting.plans import SINGLE_PLACES, Place, Places, What
from esper.leyline.constants import SiteKind
from esper.surgery.inputs import arguments

MAX_ROWS = 128
_RIDGE = 0.1  # relative to the mean of the kernel's diagonal
_POOLED = 8  # positions that a probe sees along an axis

GLOBAL_SIGNALS = (
    "rows", "rows_per_class", "classes_seen", "accuracy", "loss", "entropy", "confidence",
    "accuracy_of_seen", "relabelled_accuracy", "relabelling_gain", "probe_accuracy",
    "logit_probe_accuracy", "head_gradient", "head_agreement", "has_source",
)  # fmt: skip
PLACE_SIGNALS = (
    "present", "probe_accuracy", "scale_consistency", "shift_consistency", "sensitivity",
    "relative_gradient", "gradient_agreement", "mean_shift", "spread_shift",
)  # fmt: skip
Call = Callable[..., Any]  # of tensors: weights, rows, what is added to activations

SIGNALS = GLOBAL_SIGNALS + tuple(
    f"{place.name.lower()}.{name}" for place in SINGLE_PLACES for name in PLACE_SIGNALS
)


def measure(
    model: nn.Module,
    places: Places,
    weights: dict[str, Tensor],
    x: Any,
    y: Tensor,
    counts: Tensor,
    source: Any = None,
    over_models: Callable[[Call], Call] = lambda call: partial(_of_one, call),
) -> Tensor:
    """Signals `[P, len(SIGNALS)]` for rows `x` `[P, R, ...]` with labels `y` `[P, R]`.

    Model p has `counts[p]` rows; at most the first `MAX_ROWS` are read. `weights` are the models'
    parameters and buffers, `[P, ...]` each. `source` has rows of the data that the models know.
    Inputs may be a tuple or dict of tensors. `over_models` makes a call of one model one of P models;
    by default there is a single one, which may be any module.
    """
    x = pytree.tree_map_only(Tensor, lambda rows: rows[:, :MAX_ROWS], x)
    y = y[:, :MAX_ROWS]
    position = torch.arange(y.shape[1], device=y.device)
    used = position < counts[:, None]  # [P, R]
    run = over_models(partial(_run, model, places))
    with torch.no_grad():
        _, seen = run(weights, x, {})
        known = {} if source is None else run(weights, source, {})[1]
    added = {p.name: torch.zeros_like(seen[p.name]).requires_grad_() for p in places.sites}
    by_place = places.weights[What.TUNE]
    names = [*chain.from_iterable(by_place.values()), *places.head]
    leaves = {name: weights[name].detach().clone().requires_grad_() for name in names}
    logits, _ = run({**weights, **leaves}, x, added)
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y) * used
    halves = []
    in_first = position % 2 == 0
    for part in (in_first, ~in_first):
        mean_loss = (losses * part / used.sum(1, keepdim=True)).sum()
        grads = torch.autograd.grad(
            mean_loss,
            [*leaves.values(), *added.values()],
            retain_graph=True,
            materialize_grads=True,
        )
        halves.append(dict(zip([*leaves, *added], grads, strict=True)))
    logits, losses = logits.detach(), losses.detach()
    found = _global_signals(logits, losses, seen, y, used, counts)
    zero = torch.zeros_like(found["accuracy"])
    found["has_source"] = zero + float(source is not None)
    if places.head:
        found["head_gradient"], found["head_agreement"] = _gradients(places.head, halves, weights)
    for place, site in places.sites.items():
        total = halves[0][place.name] + halves[1][place.name]
        value, gradient = (_by_channel(part, site.kind) for part in (seen[place.name], total))
        signals = _place_signals(value, gradient, losses, used)
        pooled = F.adaptive_avg_pool1d(value.flatten(0, 1), min(_POOLED, value.shape[-1]))
        pooled = pooled.view(*value.shape[:3], -1)
        signals["probe_accuracy"] = _probe_accuracy(pooled, y, used, logits.shape[-1])
        signals["present"] = zero + 1.0
        if known:
            signals |= _shift_signals(value, used, _by_channel(known[place.name], site.kind))
        if own := by_place.get(place):
            gradients = _gradients(own, halves, weights)
            signals["relative_gradient"], signals["gradient_agreement"] = gradients
        found |= {f"{place.name.lower()}.{name}": signal for name, signal in signals.items()}
    return torch.stack([found.get(name, zero).float() for name in SIGNALS], dim=1)


def _of_one(call: Call, *stacked: Any) -> Any:
    """Call with the tensors of one model, given and returned as `[1, ...]`."""
    one = pytree.tree_map_only(Tensor, lambda tensor: tensor[0], stacked)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.unsqueeze(0), call(*one))


def _run(
    model: nn.Module, places: Places, weights: dict[str, Tensor], x: Any, added: dict[str, Tensor]
) -> Any:
    """Outputs, and activations at the places and before the head, of one model.

    What is `added` at the places has the gradient of the activations.
    """
    seen: dict[str, Tensor] = {}

    def add(place: Place, value: Tensor) -> Tensor:
        seen[place.name] = value
        return value + added[place.name] if place.name in added else value

    def keep_head_input(_module: nn.Module, args: Any) -> None:
        if args:
            seen["HEAD"] = args[0]

    changes = {site.name: partial(add, place) for place, site in places.sites.items()}
    head = model.get_submodule(places.features) if places.head or places.features else None
    with nullcontext() if head is None else head.register_forward_pre_hook(keep_head_input):
        output = call_changed(model, weights, changes, places.argument, *arguments(x))
    return logits_of(output), seen


def logits_of(output: Any) -> Tensor:
    """The classes' scores in a model's output: a tensor, its `logits`, or the first element.

    One logit per row, `[rows]` or `[rows, 1]`, is that of class 1; class 0 has the logit 0.
    """
    found = output.get("logits") if isinstance(output, Mapping) else output
    found = getattr(found, "logits", found)
    found = found[0] if isinstance(found, tuple | list) else found
    if not isinstance(found, Tensor) or found.dim() not in (1, 2) or not found.is_floating_point():
        shown = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"the model returns {shown}; adaptation needs a classifier that returns [rows, classes]"
        )
    if found.dim() == 1 or found.shape[1] == 1:
        one = found.reshape(-1, 1)
        return torch.cat((torch.zeros_like(one), one), dim=1)
    return found


def _global_signals(
    logits: Tensor, losses: Tensor, seen: dict[str, Tensor], y: Tensor, used: Tensor, counts: Tensor
) -> dict[str, Tensor]:
    num_outputs = logits.shape[-1]
    log_outputs = math.log(num_outputs)
    probs = logits.softmax(-1)
    onehot = F.one_hot(y, num_outputs) * used[..., None]
    is_seen = onehot.sum(1) > 0  # [P, C]
    predicted = logits.argmax(-1)
    accuracy = _mean((predicted == y).float(), used)
    of_seen = logits.masked_fill(~is_seen[:, None], -torch.inf).argmax(-1)
    relabelled = _relabelled_accuracy(predicted, y, used, num_outputs)
    number_seen = is_seen.sum(1)
    entropy = -(probs * probs.clamp(min=1e-9).log()).sum(-1)
    features = seen.get("HEAD", logits)
    if features.shape[1] != y.shape[1]:  # a head may read parts of rows
        features = logits
    return {
        "rows": counts.log10(),
        "rows_per_class": (counts / number_seen).log10(),
        "classes_seen": number_seen / num_outputs,
        "accuracy": accuracy,
        "loss": (_mean(losses, used) / log_outputs).clamp(max=10).log1p(),
        "entropy": _mean(entropy, used) / log_outputs,
        "confidence": _mean(probs.amax(-1), used),
        "accuracy_of_seen": _mean((of_seen == y).float(), used),
        "relabelled_accuracy": relabelled,
        "relabelling_gain": relabelled - accuracy,
        "probe_accuracy": _probe_accuracy(features, y, used, num_outputs),
        "logit_probe_accuracy": _probe_accuracy(logits, y, used, num_outputs),
    }


def _place_signals(
    value: Tensor, gradient: Tensor, losses: Tensor, used: Tensor
) -> dict[str, Tensor]:
    """From activations and gradients `[P, R, C, positions]`."""
    scale, shift = (gradient * value).sum(-1), gradient.sum(-1)
    strength = (
        used.sum(1)[:, None] * gradient.flatten(2).norm(dim=-1) * value.flatten(2).norm(dim=-1)
    )
    return {
        "scale_consistency": _consistency(scale, used),
        "shift_consistency": _consistency(shift, used),
        "sensitivity": (_mean(strength, used) / _mean(losses, used).clamp(min=1e-3) + 1e-6).log10(),
    }


def _shift_signals(value: Tensor, used: Tensor, known: Tensor) -> dict[str, Tensor]:
    """How far the channels' means and spreads are from those of known rows."""
    mean, spread = _statistics(value, used)
    known_mean, known_spread = _statistics(known, torch.ones_like(known[:, :, 0, 0]))
    known_spread = known_spread.clamp(min=1e-3)
    ratio = spread.clamp(min=1e-3) / known_spread
    return {
        "mean_shift": ((mean - known_mean).abs() / known_spread).mean(1).log1p(),
        "spread_shift": ratio.log().abs().mean(1),
    }


def _gradients(
    names: tuple[str, ...], halves: list[dict[str, Tensor]], weights: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradient of some weights relative to their size, and whether two halves of the rows agree."""
    first, second = (torch.cat([half[n].flatten(1) for n in names], 1) for half in halves)
    size = torch.cat([weights[name].flatten(1) for name in names], 1).norm(dim=1)
    relative = ((first + second).norm(dim=1) / size + 1e-6).log10()
    return relative, F.cosine_similarity(first, second, dim=1)


def _consistency(gradients: Tensor, used: Tensor) -> Tensor:
    """Share of the gradients' squared length that their mean holds, without the share of chance.

    `[P]` from `[P, R, C]`: 1 if all rows ask for the same change, about 0 if for unrelated ones.
    """
    count = used.sum(1)
    mean = gradients.sum(1) / count[:, None]
    squares = gradients.square().sum((1, 2)) / count
    return (mean.square().sum(1) / squares.clamp(min=1e-12) - 1 / count).clamp(-1, 1)


def _relabelled_accuracy(predicted: Tensor, y: Tensor, used: Tensor, num_outputs: int) -> Tensor:
    """Accuracy if every predicted class is renamed to its most frequent label among other rows."""
    flat = (predicted * num_outputs + y).masked_fill(~used, 0)
    table = torch.zeros(len(y), num_outputs**2, device=y.device)
    table = table.scatter_add_(1, flat, used.float()).view(-1, num_outputs, num_outputs)
    rows = table.gather(1, predicted[..., None].expand(-1, -1, num_outputs))
    rows = rows - F.one_hot(y, num_outputs)  # leave the row itself out
    return _mean(((rows.argmax(-1) == y) & (rows.amax(-1) > 0)).float(), used)


def _probe_accuracy(features: Tensor, y: Tensor, used: Tensor, num_outputs: int) -> Tensor:
    """Accuracy of a ridge classifier on features `[P, R, ...]`, each half judged by the other."""
    weight, features = used.float(), features.flatten(2).float()  # of any precision
    centred = features - (features * weight[..., None]).sum(1, True) / weight.sum(1)[:, None, None]
    kernel = centred @ centred.mT
    scale = kernel.diagonal(dim1=1, dim2=2).mul(weight).sum(1) / weight.sum(1)
    kernel = kernel / scale.clamp(min=1e-9)[:, None, None] + 1.0  # the constant is a bias
    targets = F.one_hot(y, num_outputs).float() - 1 / num_outputs
    even = torch.arange(y.shape[1], device=y.device) % 2 == 0
    correct = torch.zeros_like(weight)
    for part in (even, ~even):
        known = weight * part
        masked = kernel * known[:, None] * known[..., None]
        ridge = _RIDGE + (1 - known) * 1.0
        solved = torch.linalg.solve(masked + torch.diag_embed(ridge), targets * known[..., None])
        predicted = (kernel @ (solved * known[..., None])).argmax(-1)
        correct = torch.where(part, correct, (predicted == y).float())
    return _mean(correct, used)


def _statistics(value: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of every channel, `[P, C]`, from `[P, R, C, positions]`."""
    weight = used.float()[..., None, None]
    total = weight.sum(1).squeeze(-1) * value.shape[-1]
    mean = (value * weight).sum((1, 3)) / total
    square = (value.square() * weight).sum((1, 3)) / total
    return mean, (square - mean.square()).clamp(min=0).sqrt()


def _by_channel(value: Tensor, kind: SiteKind) -> Tensor:
    """`[P, R, C, positions]` from activations `[P, R, ...]`."""
    if kind == SiteKind.TOKENS:
        return value.flatten(2, -2).movedim(-1, 2)
    return value.unsqueeze(-1) if value.dim() == 3 else value.flatten(3)


def _mean(values: Tensor, used: Tensor) -> Tensor:
    return (values * used).sum(1) / used.sum(1)
