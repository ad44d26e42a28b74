"""How good the network is on validation data, and what each of its seeds is worth there.

Each batch is scored with all seeds, then with each of them switched off, so that a seed is judged
on the very examples that it helped with or spoiled, whatever the order of the data.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.growing.network import GrowingNetwork
from esper.growing.randomness import untouched_randomness

# a batch's score per example [n], 0 to 1, higher is better; with the batch's mean loss, if known
Score = Callable[[Any], Tensor | tuple[Tensor, Tensor]]

ROUNDING = 1e-4  # by which a score may be beyond 0 or 1, as a sum of probabilities is

Number = float | Tensor  # of one element; numpy's are floats


class Measurement(NamedTuple):
    metric: float  # mean score
    loss: float | None
    contributions: dict[int, tuple[float, float]]  # by slot: score lost without it, its error
    committed_metric: float | None  # with the committed seeds alone; None: not measured

    @property
    def loss_or_guess(self) -> float:
        """The validation loss; without one, what a metric of this size often goes with."""
        return -math.log(max(self.metric, 1e-3)) if self.loss is None else self.loss


def told(metric: Number, loss: Number | None, *, is_committed: bool) -> Measurement:
    """What the owner of the loop has measured, of a network with uncommitted seeds or without."""
    value = _as_float(metric)
    known_loss = None if loss is None else _as_float(loss)
    return Measurement(value, known_loss, {}, value if is_committed else None)


def _as_float(number: Number) -> float:
    """Without the graph that it may come with."""
    if not isinstance(number, Tensor):
        return float(number)
    if number.numel() != 1:
        raise ValueError(f"a metric or loss of shape {tuple(number.shape)}; give one number")
    return float(number.detach())


def measure(network: GrowingNetwork, batches: Iterable[Any], score: Score) -> Measurement:
    """The network, and the network without each seed that it feels."""
    uncommitted = tuple(network.uncommitted)
    everything: tuple[int, ...] = ()
    variants = {everything, *((slot,) for slot in network.active), uncommitted}
    scores: dict[tuple[int, ...], list[Tensor]] = {slots: [] for slots in sorted(variants)}
    losses: list[Tensor] = []
    with resting(network.model, batches):
        for batch in batches:
            for off, collected in scores.items():
                with network.without(off):
                    values, loss = _scored(batch, score)
                collected.append(values)
                if loss is not None and off == everything:
                    losses.append(loss.detach() * len(values))
    per_example = {off: bounded(joined(collected)) for off, collected in scores.items()}
    whole = per_example[everything]
    differences = {slot: paired_difference(whole, per_example[slot,]) for slot in network.active}
    return Measurement(
        metric=float(whole.mean()),
        loss=float(torch.stack(losses).sum() / len(whole)) if losses else None,
        contributions={s: known for s, known in differences.items() if not math.isnan(known[0])},
        committed_metric=float(per_example[uncommitted].mean()),
    )


def check_score(model: nn.Module, batches: Iterable[Any], score: Score) -> None:
    """Raise for data or a score that a network cannot be judged by."""
    with resting(model, batches):
        scores = joined([_scored(batch, score)[0] for batch in batches])
    lowest, highest = scores.aminmax()  # a mean can hide an error where a score belongs
    if lowest < -ROUNDING or highest > 1 + ROUNDING:
        raise ValueError(
            f"scores of {float(lowest):.4g} to {float(highest):.4g}; each must be 0 to 1, higher "
            "is better: a share, not per cent, and for an error something like 1 / (1 + error)"
        )
    check_metric(float(bounded(scores).mean()))


def check_metric(metric: float) -> None:
    if not 0.0 <= metric <= 1.0:
        raise ValueError(
            f"the validation metric is {metric}; it must be 0 to 1, higher is better: a share, not "
            "per cent, and for a loss something like 1 / (1 + loss)"
        )


@contextmanager
def resting(model: nn.Module, *loaders: Iterable[Any]) -> Iterator[None]:
    """The model in eval mode and without gradients; afterwards each module as it was.

    Nothing is drawn from the user's randomness: `loaders` draw a number every time they start.
    """
    modes = [(module, module.training) for module in model.modules()]
    with untouched_randomness(model, *loaders), torch.no_grad():
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


def check_loader(loader: Iterable[Any], name: str) -> None:
    """Raise for a loader that can be read only once: growth goes through it many times."""
    if isinstance(loader, Iterator):
        raise ValueError(
            f"the {name} loader is a {type(loader).__name__}, which can be read only once; give a "
            "DataLoader or a list of batches"
        )


def _scored(batch: Any, score: Score) -> tuple[Tensor, Tensor | None]:
    """A batch's scores, and its mean loss if it is known."""
    scored = score(batch)
    values, loss = scored if isinstance(scored, tuple) else (scored, None)
    return checked_scores(values), loss


def checked_scores(values: Tensor) -> Tensor:
    if not isinstance(values, Tensor):
        raise ValueError(
            f"a score of type {type(values).__name__}; give a tensor, one number per example"
        )
    if values.dim() != 1:
        raise ValueError(
            f"a score of shape {tuple(values.shape)}; give one number per example, [batch]"
        )
    return values.detach()


def joined(parts: list[Tensor]) -> Tensor:
    """All examples' scores on the CPU, float64 `[n]`."""
    if not any(len(part) for part in parts):
        raise ValueError("the validation loader yields nothing; growth is judged on its examples")
    return torch.cat(parts).double().cpu()


def bounded(scores: Tensor) -> Tensor:
    """Scores from 0 to 1, as a run that is under way takes them.

    One below counts as 0, as bad as can be; one above as no number, since it must not win.
    """
    return scores.where(scores <= 1 + ROUNDING, math.nan).clamp(0, 1)


def paired_difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Mean of a - b over the examples, and its standard error."""
    difference = a - b
    error = float(difference.std()) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return float(difference.mean()), error
