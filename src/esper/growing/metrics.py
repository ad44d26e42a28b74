"""The default metrics of `esper.grow`.

Class targets: accuracy. Numbers: 1 / (1 + squared error / variance), with the variance of the
validation targets. It does not depend on the unit, and is 0.5 for an error of one standard
deviation.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Metric = Callable[[Any, Any], Tensor]  # (output, target) -> a score per example [batch], 0 to 1

IGNORED = -100  # a target that does not count, as in torch's cross_entropy

_PASS_ONE = "pass metric=..., a score per example from 0 to 1"
_FOR_ONE_LOGIT = (
    "For one logit: lambda output, target: ((output > 0).reshape(len(target), -1) == "
    "(target > 0.5).reshape(len(target), -1)).float().mean(1)"
)
_FOR_PROBABILITIES = (
    "For the most probable class: lambda output, target: (output.argmax(1) == target.argmax(1))"
    ".reshape(len(target), -1).float().mean(1)"
)


def default_metric(first: Any, targets: Iterable[Any]) -> tuple[str, Metric]:
    """The name and function of the metric for targets like `first`; raises if none fits.

    `targets` are those of all validation batches; they are read only if they are numbers.
    """
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return "accuracy", accuracy
    return "1 / (1 + squared error / variance)", closeness(_variance(targets))


def accuracy(output: Any, target: Any) -> Tensor:
    """The share of an example's classes that are predicted correctly; NaN outputs count as wrong."""
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
                "give them the same shape, such as target.unsqueeze(1): a loss would broadcast "
                "each output against every target"
                if output.numel() == target.numel()
                else _PASS_ONE
            )
            raise ValueError(f"{_unknown(output, target)} of numbers; {like}")
        error = (output - target).square().reshape(len(target), -1).mean(1)
        return 1 / (1 + error / variance)

    return score


def _class_axes(output: Tensor, target: Tensor) -> list[int]:
    """Axes that may hold the classes: the last, or the second as in torch's losses.

    An axis of size 1 is excluded: a single logit is always the largest.
    """
    if target.is_floating_point() or output.dim() < 2:
        return []
    return [axis for axis in (-1, 1) if output.shape[axis] > 1]


def _variance(targets: Iterable[Tensor]) -> float:
    """Variance over all examples, averaged over positions; raises if it cannot scale an error."""
    moments = _Moments(0, torch.zeros(()), torch.zeros(()))
    is_binary, is_probabilities = True, True
    for target in targets:
        moments = moments.with_more(target.detach().cpu().double().reshape(len(target), -1))
        is_binary &= bool(((target == 0) | (target == 1)).all())
        is_probabilities &= _are_probabilities(target)
    if is_probabilities:
        raise ValueError(f"the targets are class probabilities; {_PASS_ONE}. {_FOR_PROBABILITIES}")
    if is_binary:
        raise ValueError(
            "targets of 0.0 and 1.0 are probably classes, for which a squared error is wrong; "
            f"{_PASS_ONE}. {_FOR_ONE_LOGIT}"
        )
    variance = float((moments.squares / moments.rows).mean())
    if not 0 < variance < math.inf:
        raise ValueError(
            f"the validation targets have a variance of {variance}, which cannot scale an error; "
            f"{_PASS_ONE}"
        )
    return variance


class _Moments(NamedTuple):
    """Mean and sum of squared deviations of rows, per position."""

    rows: int
    mean: Tensor
    squares: Tensor

    def with_more(self, new: Tensor) -> "_Moments":
        """Moments of both sets of rows (Chan, Golub and LeVeque, 1983)."""
        if self.rows and new.shape[1:] != self.mean.shape:
            raise ValueError(f"the targets of validation batches differ in shape; {_PASS_ONE}")
        rows = self.rows + len(new)
        apart = new.mean(0) - self.mean
        between = apart.square() * self.rows * len(new) / rows
        within = (new - new.mean(0)).square().sum(0)
        return _Moments(rows, self.mean + apart * len(new) / rows, self.squares + between + within)


def _are_probabilities(target: Tensor) -> bool:
    """Whether all rows have several numbers, none below 0, that sum to 1."""
    if target.dim() < 2 or target.shape[1] < 2 or bool((target < 0).any()):
        return False
    sums = target.float().sum(1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


def _unknown(output: Any, target: Any) -> str:
    shown = [
        f"{tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in (output, target)
    ]
    return f"there is no default metric for an output {shown[0]} and a target {shown[1]}"
