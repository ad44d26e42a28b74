"""The network's validation metric, and the contribution of each seed to it.

Each batch is scored with all seeds and then without each of them. A contribution is therefore a
paired difference on the same examples, whatever the order of the data.

Default metrics of `esper.grow`: accuracy for class targets. For numbers: 1 / (1 + squared error /
variance), with the variance of the validation targets. It does not depend on the unit, and is 0.5
for an error of one standard deviation.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.growing.ddp import ALONE, Ranks, is_split
from esper.growing.growing_network import GrowingNetwork
from esper.nissa.ledger import StepRecord
from esper.surgery.eval_mode import eval_mode

# batch -> a score per example [n], 0 to 1, higher is better; optionally with the mean loss
Score = Callable[[Any], Tensor | tuple[Tensor, Tensor]]
Number = float | Tensor  # a tensor has one element; numpy's floats are floats
Given = tuple[Number | None, Number | None]  # the user's validation metric and loss
Metric = Callable[[Any, Any], Tensor]  # (output, target) -> a score per example [batch], 0 to 1

ROUNDING = 1e-4  # a score may exceed 0 or 1 by this much, as sums of probabilities do
CLEAR_FALL, NUM_FALLS = 0.2, 3  # share of the metric, and how many steps must show it
IGNORED = -100  # a target that does not count, as in torch's cross_entropy

_RANGE = "0 to 1, higher is better. Use a share instead of per cent, and 1 / (1 + loss) for a loss"
_PASS_ONE = "pass metric=..., a score per example from 0 to 1"
_FOR_ONE_LOGIT = (
    "For one logit: lambda output, target: ((output > 0).reshape(len(target), -1) == "
    "(target > 0.5).reshape(len(target), -1)).float().mean(1)"
)
_FOR_PROBABILITIES = (
    "For the most probable class: lambda output, target: (output.argmax(1) == target.argmax(1))"
    ".reshape(len(target), -1).float().mean(1)"
)


class Measurement(NamedTuple):
    metric: float  # mean score
    loss: float | None
    contributions: dict[int, tuple[float, float]]  # by slot: score lost without it, its error
    committed_metric: float | None  # with committed seeds only; None: not measured
    rows: int = 0  # examples scored, in all passes together

    @property
    def loss_or_guess(self) -> float:
        """The validation loss; if unknown, the negative log of the metric."""
        return -math.log(max(self.metric, 1e-3)) if self.loss is None else self.loss


class Validator:
    """Measures a network on a loader with a score function, or takes the user's metric."""

    def __init__(self, val_loader: Iterable[Any] | None, score: Score | None):
        if (val_loader is None) != (score is None):
            raise ValueError("val_loader and score go together; give both or none")
        if val_loader is not None:
            check_loader(val_loader, "validation")
        self._loader, self.score, self._has_warned = val_loader, score, False

    def check(self, model: nn.Module) -> None:
        """Raise for validation data or scores that cannot be used."""
        if self._loader is None or self.score is None:
            return
        with eval_mode(model, self._loader):
            scores = joined([_scored(batch, self.score)[0] for batch in self._loader])
        lowest, highest = scores.aminmax()  # the mean can be valid while single scores are not
        if not (lowest >= -ROUNDING and highest <= 1 + ROUNDING):
            raise ValueError(
                f"scores of {float(lowest):.4g} to {float(highest):.4g}; each must be {_RANGE}"
            )

    def measure(
        self, network: GrowingNetwork, given: Given, is_first: bool, judged: Collection[int] | None
    ) -> Measurement:
        """A metric outside 0 to 1 raises if it is the first of the run, else it becomes NaN.

        `judged`: as in the function `measure`.
        """
        ranks, (val_metric, val_loss) = network.ranks, given
        if self._loader is not None and self.score is not None:
            if val_metric is not None:
                raise ValueError("growth measures the metric itself with score=; leave it out here")
            measured = measure(network, self._loader, self.score, judged)
        elif val_metric is None:
            raise ValueError("decide() needs the validation metric; or give Growth a score")
        else:
            metric, loss = _as_float(val_metric), None if val_loss is None else _as_float(val_loss)
            every = ranks.gather((metric, loss))
            metric = sum(metric for metric, _ in every) / ranks.size
            loss = None if loss is None else sum(loss or 0.0 for _, loss in every) / ranks.size
            measured = Measurement(metric, loss, {}, None if network.uncommitted else metric)
        if 0.0 <= measured.metric <= 1.0:
            return measured
        if is_first:
            raise ValueError(f"the validation metric is {measured.metric}; it must be {_RANGE}")
        return measured._replace(metric=math.nan)

    def warn_if_metric_falls_with_loss(self, steps: Sequence[StepRecord]) -> None:
        """Warn once if lower seems better: growth would return the worst network.

        No metric is above the first, and the last `NUM_FALLS` with a lower loss are clearly below it.
        """
        pairs = ((record.metric, record.validation_loss) for record in steps)
        known = [(value, loss) for value, loss in pairs if value is not None and loss is not None]
        better = [metric for metric, loss in known if loss < known[0][1]]
        if self._has_warned or len(better) < NUM_FALLS:
            return
        first, highest = known[0][0], max(metric for metric, _ in known)
        if highest > first or max(better[-NUM_FALLS:]) >= (1 - CLEAR_FALL) * first:
            return
        self._has_warned = True
        warnings.warn(
            "the validation metric decreases while the loss decreases. Esper maximises the metric; "
            "if lower is better, pass 1 - metric",
            stacklevel=5,
        )


def _as_float(number: Number) -> float:
    return float(number.detach() if isinstance(number, Tensor) else number)


def measure(
    network: GrowingNetwork,
    batches: Iterable[Any],
    score: Score,
    judged: Collection[int] | None = None,
) -> Measurement:
    """Score the network, the network without each active seed, and the committed network.

    With `judged` only the seeds of these slots are left out.
    """
    ranks = network.ranks if is_split(batches) else ALONE
    uncommitted, complete = tuple(network.uncommitted), ()
    judged = [slot for slot in network.active if judged is None or slot in judged]
    switched_off = {complete, *((slot,) for slot in judged), uncommitted}
    scores: dict[tuple[int, ...], list[Tensor]] = {slots: [] for slots in sorted(switched_off)}
    losses: list[Tensor] = []
    with eval_mode(network.model, batches):
        for batch in batches:
            for off, collected in scores.items():
                with network.without(off):
                    values, loss = _scored(batch, score)
                collected.append(values)
                if loss is not None and off == complete:
                    losses.append(loss.detach() * len(values))
    per_example = {off: bounded(joined(collected, ranks)) for off, collected in scores.items()}
    whole = per_example[complete]
    differences = {slot: paired_difference(whole, per_example[slot,]) for slot in judged}
    mean_loss = None
    if losses:
        total = torch.stack(losses).sum().cpu()  # of this rank's examples
        mean_loss = float(torch.stack(ranks.gather(total)).sum() / len(whole))
    measured = Measurement(
        metric=float(whole.mean()),
        loss=mean_loss,
        contributions={s: known for s, known in differences.items() if not math.isnan(known[0])},
        committed_metric=float(per_example[uncommitted].mean()),
        rows=len(whole) * len(per_example),
    )
    return network.ranks.broadcast(measured)


def check_loader(loader: Iterable[Any], name: str) -> None:
    """Raise for a loader that can be read only once."""
    if isinstance(loader, Iterator):
        raise ValueError(
            f"the {name} loader is a {type(loader).__name__}, which can be read only once; give a "
            "DataLoader or a list of batches"
        )


def _scored(batch: Any, score: Score) -> tuple[Tensor, Tensor | None]:
    """A batch's scores, and its mean loss if the score function returns one."""
    scored = score(batch)
    values, loss = scored if isinstance(scored, tuple) else (scored, None)
    if not isinstance(values, Tensor) or values.dim() != 1:
        raise ValueError(f"a score {_shown(values)}; give one number per example, a tensor [batch]")
    if loss is not None and loss.numel() != 1:
        raise ValueError(f"a loss of shape {_shown(loss)}; give the batch's mean, one number")
    return values.detach(), loss


def joined(parts: list[Tensor], ranks: Ranks = ALONE) -> Tensor:
    """The scores of all batches of all ranks, float64 `[n]` on the CPU."""
    if not any(len(part) for part in parts):
        raise ValueError("the validation loader yields nothing; give it one example or more")
    return torch.cat(ranks.gather(torch.cat(parts).double().cpu()))


def bounded(scores: Tensor) -> Tensor:
    """Scores from 0 to 1: one below counts as 0; one above becomes NaN, since it must not win."""
    return scores.where(scores <= 1 + ROUNDING, math.nan).clamp(0, 1)


def paired_difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Mean of a - b over the examples, and its standard error."""
    difference = a - b
    error = float(difference.std()) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return float(difference.mean()), error


def default_metric(first: Any, targets: Iterable[Any]) -> tuple[str, Metric]:
    """The name and function of the metric for targets like `first`; raises if none fits.

    `targets` are those of all validation batches; they are read only if they are numbers.
    """
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return "accuracy", accuracy
    return "1 / (1 + squared error / variance)", closeness(_variance(targets))


def accuracy(output: Any, target: Any) -> Tensor:
    """The share of an example's classes that are predicted correctly; NaN outputs count as wrong.

    Classes are on the last axis, or on the second as in torch's losses. An axis of size 1 is
    excluded: a single logit is always the largest.
    """
    if isinstance(output, Tensor) and isinstance(target, Tensor) and output.dim() > 1:
        for axis in () if target.is_floating_point() else (-1, 1):
            if output.shape[axis] > 1 and output.argmax(axis).shape == target.shape:
                correct = (output.argmax(axis) == target) & ~output.isnan().any(axis)
                counts = (target != IGNORED).reshape(len(target), -1)
                right = correct.reshape(len(target), -1) & counts
                return right.sum(1) / counts.sum(1).clamp(min=1)
    raise ValueError(f"{_unknown(output, target)}; {_PASS_ONE}. {_FOR_ONE_LOGIT}")


def closeness(variance: float) -> Metric:
    """1 / (1 + squared error / variance)."""

    def score(output: Any, target: Any) -> Tensor:
        if not isinstance(output, Tensor) or _shown(output) != _shown(target):
            raise ValueError(
                f"{_unknown(output, target)} of numbers; give them the same shape, such as "
                f"target.unsqueeze(1), since a loss would broadcast them, or {_PASS_ONE}"
            )
        error: Tensor = (output - target).square().reshape(len(target), -1).mean(1)
        return 1 / (1 + error / variance)

    return score


def _variance(targets: Iterable[Tensor]) -> float:
    """Variance over all examples, averaged over positions; raises if it cannot scale an error."""
    parts = [target.detach().cpu().double() for target in targets]
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError(f"the targets of validation batches differ in shape; {_PASS_ONE}")
    values = torch.cat(parts)
    has_several = values.dim() > 1 and values.shape[1] > 1 and not (values < 0).any()
    if has_several and ((values.sum(1) - 1).abs() < 1e-3).all():
        raise ValueError(f"the targets are class probabilities; {_PASS_ONE}. {_FOR_PROBABILITIES}")
    if bool(((values == 0) | (values == 1)).all()):
        raise ValueError(
            "targets of 0.0 and 1.0 are probably classes, for which a squared error is wrong; "
            f"{_PASS_ONE}. {_FOR_ONE_LOGIT}"
        )
    variance = float(values.var(dim=0, correction=0).mean())
    if not 0 < variance < math.inf:
        raise ValueError(f"the validation targets have a variance of {variance}; {_PASS_ONE}")
    return variance


def _unknown(output: Any, target: Any) -> str:
    return f"no default metric fits an output {_shown(output)} and a target {_shown(target)}"


def _shown(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
