"""Signals about a model and a few shifted rows, from which a controller infers what to change.

All are cheap: one forward pass and two backward passes over at most `MAX_ROWS` rows, without any
training. `measure` returns them for many models at once, `[P, len(SIGNALS)]`.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.adapting.adapted import call_with, outputs_changed
from esper.adapting.fitting import ConvolutionsAsProducts
from esper.adapting.plans import SINGLE_PLACES, Place, Places
from esper.growing.inputs import arguments, tensors
from esper.leyline.constants import SiteKind

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
SIGNALS = GLOBAL_SIGNALS + tuple(
    f"{place.name.lower()}.{name}" for place in SINGLE_PLACES for name in PLACE_SIGNALS
)


class Statistics(NamedTuple):
    """Mean and spread of every channel at a place, `[P, channels]` each."""

    mean: Tensor
    spread: Tensor


class _Probed(nn.Module):
    """The model with a tensor added at every place, whose gradient is that of the activations."""

    def __init__(self, model: nn.Module, places: Places):
        super().__init__()
        self.model, self.places = model, places

    def forward(self, inputs: Any, added: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and the activations at the places and before the head."""
        seen: dict[str, Tensor] = {}

        def add(place: Place, value: Tensor) -> Tensor:
            seen[place.name] = value
            return value + added[place.name] if place.name in added else value

        def keep_head_input(_module: nn.Module, args: Any) -> None:
            if args:
                seen["HEAD"] = args[0]

        args, kwargs = arguments(inputs)
        at_modules = {}
        for place, site in self.places.sites.items():
            if site.name:
                at_modules[site.name] = partial(add, place)
            else:
                args, kwargs = self.places.argument.changed(partial(add, place), args, kwargs)
        with ExitStack() as stack:
            stack.enter_context(outputs_changed(self.model, at_modules))
            if self.places.head or self.places.features:
                head = self.model.get_submodule(self.places.features)
                stack.enter_context(head.register_forward_pre_hook(keep_head_input))
            return logits_of(self.model(*args, **kwargs)), seen


def source_statistics(
    model: nn.Module, places: Places, weights: dict[str, Tensor], x: Any
) -> dict[Place, Statistics]:
    """Statistics of the activations on rows `[P, rows, ...]` of the data the models know."""
    with torch.no_grad():
        _, seen = _run(_Probed(model, places), weights, x, {})
        values = {place: _by_channel(seen[place.name], place, places) for place in places.sites}
    return {p: _statistics_of(v, torch.ones_like(v[:, :, 0, 0])) for p, v in values.items()}


def measure(
    model: nn.Module,
    places: Places,
    weights: dict[str, Tensor],
    x: Any,
    y: Tensor,
    counts: Tensor,
    source: dict[Place, Statistics] | None = None,
) -> Tensor:
    """Signals `[P, len(SIGNALS)]` for rows `x` `[P, R, ...]` with labels `y` `[P, R]`.

    Model p has `counts[p]` rows; at most the first `MAX_ROWS` are read. `weights` are the models'
    parameters and buffers, `[P, ...]` each. Inputs may be a tuple or dict of tensors. A single model
    may be any module; several are mapped over with `torch.vmap`.
    """
    x = pytree.tree_map_only(Tensor, lambda rows: rows[:, :MAX_ROWS], x)
    y = y[:, :MAX_ROWS]
    position = torch.arange(y.shape[1], device=y.device)
    used = position < counts[:, None]  # [P, R]
    num_read = used.sum(1, keepdim=True)
    probed = _Probed(model, places)
    with torch.no_grad():
        _, seen = _run(probed, weights, x, {})
    added = {p.name: torch.zeros_like(seen[p.name]).requires_grad_() for p in places.sites}
    names = [name for group in places.weights.values() for name in group] + list(places.head)
    leaves = {name: weights[name].detach().clone().requires_grad_() for name in names}
    logits, _ = _run(probed, {**weights, **leaves}, x, added)
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y) * used
    halves = []
    in_first = position % 2 == 0
    wanted = [*leaves.values(), *added.values()]
    for part in (in_first, ~in_first):
        mean_loss = (losses * part / num_read).sum()
        grads = torch.autograd.grad(
            mean_loss, wanted, retain_graph=part is in_first, materialize_grads=True
        )
        halves.append(dict(zip([*leaves, *added], grads, strict=True)))
    logits, losses = logits.detach(), losses.detach()
    found = _global_signals(logits, losses, seen, y, used, counts)
    zero = torch.zeros_like(found["accuracy"])
    found["has_source"] = zero + float(source is not None)
    if places.head:
        found["head_gradient"], found["head_agreement"] = _gradients(places.head, halves, weights)
    for place in SINGLE_PLACES:
        prefix = place.name.lower()
        if place in places.sites:
            found[f"{prefix}.present"] = zero + 1.0
            found |= _place_signals(
                place, places, seen[place.name], halves, losses, y, used, logits.shape[-1], source
            )
        if own := places.weights.get(place):
            gradient, agreement = _gradients(own, halves, weights)
            found[f"{prefix}.relative_gradient"] = gradient
            found[f"{prefix}.gradient_agreement"] = agreement
    return torch.stack([found.get(name, zero).float() for name in SIGNALS], dim=1)


def _run(probed: _Probed, weights: dict[str, Tensor], x: Any, added: dict[str, Tensor]) -> Any:
    named = {f"model.{name}": tensor for name, tensor in weights.items()}

    def call(named: dict[str, Tensor], x: Tensor, added: dict[str, Tensor]) -> Any:
        return call_with(probed, named, (x, added))

    if len(tensors(x)[0]) == 1:
        one = pytree.tree_map_only(Tensor, lambda tensor: tensor[0], (named, x, added))
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.unsqueeze(0), call(*one))
    with ConvolutionsAsProducts():
        return torch.vmap(call)(named, x, added)


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
    place: Place,
    places: Places,
    value: Tensor,
    halves: list[dict[str, Tensor]],
    losses: Tensor,
    y: Tensor,
    used: Tensor,
    num_outputs: int,
    source: dict[Place, Statistics] | None,
) -> dict[str, Tensor]:
    prefix, key = place.name.lower(), place.name
    gradient = _by_channel(halves[0][key] + halves[1][key], place, places)  # [P, R, C, positions]
    value = _by_channel(value, place, places)
    scale, shift = (gradient * value).sum(-1), gradient.sum(-1)
    strength = (
        used.sum(1)[:, None] * gradient.flatten(2).norm(dim=-1) * value.flatten(2).norm(dim=-1)
    )
    pooled = F.adaptive_avg_pool1d(value.flatten(0, 1), min(_POOLED, value.shape[-1]))
    found = {
        "probe_accuracy": _probe_accuracy(pooled.view(*value.shape[:3], -1), y, used, num_outputs),
        "scale_consistency": _consistency(scale, used),
        "shift_consistency": _consistency(shift, used),
        "sensitivity": (_mean(strength, used) / _mean(losses, used).clamp(min=1e-3) + 1e-6).log10(),
    }
    if source is not None and place in source:
        here = _statistics_of(value, used)
        known = source[place]
        spread = known.spread.clamp(min=1e-3)
        found["mean_shift"] = ((here.mean - known.mean).abs() / spread).mean(1).log1p()
        ratio = here.spread.clamp(min=1e-3) / spread
        found["spread_shift"] = ratio.log().abs().mean(1)
    return {f"{prefix}.{name}": signal for name, signal in found.items()}


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


def _statistics_of(value: Tensor, used: Tensor) -> Statistics:
    """From `[P, R, C, positions]`."""
    weight = used.float()[..., None, None]
    total = weight.sum(1).squeeze(-1) * value.shape[-1]
    mean = (value * weight).sum((1, 3)) / total
    square = (value.square() * weight).sum((1, 3)) / total
    return Statistics(mean, (square - mean.square()).clamp(min=0).sqrt())


def _by_channel(value: Tensor, place: Place, places: Places) -> Tensor:
    """`[P, R, C, positions]` from activations `[P, R, ...]`."""
    site = places.sites[place]
    if site.kind == SiteKind.TOKENS:
        return value.flatten(2, -2).movedim(-1, 2)
    return value.unsqueeze(-1) if value.dim() == 3 else value.flatten(3)


def _mean(values: Tensor, used: Tensor) -> Tensor:
    return (values * used).sum(1) / used.sum(1)
