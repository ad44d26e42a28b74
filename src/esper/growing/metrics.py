"""What `esper.grow` scores examples by where its user gives no metric.

Accuracy for targets that are classes. For numbers 1 / (1 + squared error / variance), with the
variance of the validation targets: the same in every unit, and 0.5 for an example that is as far
off as examples are from their mean.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Metric = Callable[[Any, Any], Tensor]  # of output and target: a score per example [batch], 0 to 1

IGNORED = -100  # a target that counts for nothing, as in torch's cross_entropy

_PASS_ONE = "pass metric=..., a score per example from 0 to 1"
_FOR_ONE_LOGIT = (
    "For one logit: lambda output, target: ((output > 0).reshape(len(target), -1) == "
    "(target > 0.5).reshape(len(target), -1)).float().mean(1)"
)
_FOR_PROBABILITIES = (
    "For the likeliest class: lambda output, target: (output.argmax(1) == target.argmax(1))"
    ".reshape(len(target), -1).float().mean(1)"
)


def default_metric(first: Any, targets: Iterable[Any]) -> tuple[str, Metric]:
    """The metric for a first target, and its name; raises where none fits.

    `targets` are those of all validation batches, and are read for numbers only.
    """
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return "accuracy", accuracy
    return "1 / (1 + squared error / variance)", closeness(_variance(targets))


def accuracy(output: Any, target: Any) -> Tensor:
    """The share of an example's classes that its output has right; an output of NaN has none."""
    if isinstance(output, Tensor) and isinstance(target, Tensor):
        for axis in _class_axes(output, target):
            if output.argmax(axis).shape == target.shape:
                correct = (output.argmax(axis) == target) & ~output.isnan().any(axis)
                counts = (target != IGNORED).reshape(len(target), -1)
                right = correct.reshape(len(target), -1) & counts
                return right.sum(1) / counts.sum(1).clamp(min=1)
    raise ValueError(f"{_unknown(output, target)}; {_PASS_ONE}. {_FOR_ONE_LOGIT}")


def closeness(variance: float) -> Metric:
    """1 / (1 + squared error / variance)."""

    def score(output: Any, target: Any) -> Tensor:
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            raise ValueError(f"{_unknown(output, target)}; {_PASS_ONE}")
        if output.shape != target.shape:
            like = (
                "give them the same shape, such as target.unsqueeze(1): a loss would set each "
                "output against every target"
                if output.numel() == target.numel()
                else _PASS_ONE
            )
            raise ValueError(f"{_unknown(output, target)} of numbers; {like}")
        error = (output - target).square().reshape(len(target), -1).mean(1)
        return 1 / (1 + error / variance)

    return score


def _class_axes(output: Tensor, target: Tensor) -> list[int]:
    """Where an output may have its classes: last, or second as in torch's own losses.

    One class is none: a single logit would always be the largest.
    """
    if target.is_floating_point() or output.dim() < 2:
        return []
    return [axis for axis in (-1, 1) if output.shape[axis] > 1]


def _variance(targets: Iterable[Tensor]) -> float:
    """Of numbers over all examples, the mean over a target's positions; raises for odd numbers."""
    moments = _Moments(0, torch.zeros(()), torch.zeros(()))
    is_binary, is_probabilities = True, True
    for target in targets:
        moments = moments.with_more(target.detach().cpu().double().reshape(len(target), -1))
        is_binary &= bool(((target == 0) | (target == 1)).all())
        is_probabilities &= _are_probabilities(target)
    if is_probabilities:
        raise ValueError(f"targets are probabilities of classes; {_PASS_ONE}. {_FOR_PROBABILITIES}")
    if is_binary:
        raise ValueError(
            "targets of 0.0 and 1.0 may be classes, and their logits no near numbers; "
            f"{_PASS_ONE}. {_FOR_ONE_LOGIT}"
        )
    variance = float((moments.squares / moments.rows).mean())
    if not 0 < variance < math.inf:
        raise ValueError(
            f"the validation targets have a variance of {variance}, by which no error can be "
            f"judged; {_PASS_ONE}"
        )
    return variance


class _Moments(NamedTuple):
    """Of rows of numbers, position by position: the mean and the sum of squared deviations."""

    rows: int
    mean: Tensor
    squares: Tensor

    def with_more(self, new: Tensor) -> "_Moments":
        """Those of two sets of rows together (Chan, Golub and LeVeque, 1983)."""
        if self.rows and new.shape[1:] != self.mean.shape:
            raise ValueError(f"the targets of validation batches differ in shape; {_PASS_ONE}")
        rows = self.rows + len(new)
        apart = new.mean(0) - self.mean
        between = apart.square() * self.rows * len(new) / rows
        within = (new - new.mean(0)).square().sum(0)
        return _Moments(rows, self.mean + apart * len(new) / rows, self.squares + between + within)


def _are_probabilities(target: Tensor) -> bool:
    """Whether rows of several numbers, none below 0, have a sum of 1."""
    if target.dim() < 2 or target.shape[1] < 2 or bool((target < 0).any()):
        return False
    sums = target.float().sum(1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


def _unknown(output: Any, target: Any) -> str:
    told = [
        f"{tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in (output, target)
    ]
    return f"no metric is known for an output {told[0]} and a target {told[1]}"
