"""One call: a model, its data and a budget in; a grown model, its ledger and a verdict out.

    result = esper.grow(model, train_loader, val_loader, loss=cross_entropy, optimizer=optimizer,
                        budget=Budget(params=20_000), steps=2_000)

Beside the growing model its ungrown twin is trained on the very same batches, with the same
randomness and the same settings of the optimiser, so that the verdict compares growth with
nothing but its absence.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils import _pytree as pytree

from esper.growing.budget import Budget
from esper.growing.checkpoint import group_settings
from esper.growing.copying import without_graphs
from esper.growing.data import count_rows
from esper.growing.export import FORMATS, export
from esper.growing.growth import DEFAULT_RENT, Growth
from esper.growing.ledger import Ledger, TwinRecord, Verdict
from esper.growing.measuring import (
    bounded,
    check_loader,
    checked_scores,
    joined,
    paired_difference,
    resting,
)
from esper.growing.metrics import Metric, default_metric
from esper.growing.network import are_finite, finite_buffers
from esper.growing.progress import Report, progress_bar, stopped_by_ctrl_c
from esper.growing.randomness import untouched_randomness
from esper.growing.sites import batch_size, forward
from esper.growing.slots import disable_nested_tensors
from esper.growing.starting import check_arguments, check_whole
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.leyline.protocols import Controller

Loss = Callable[[Any, Any], Tensor]  # of the model's output and the target


@dataclass(frozen=True)
class GrowthResult:
    """What came of a run."""

    model: nn.Module  # ordinary modules, no slots: the grown network, or the ungrown if better
    ungrown: nn.Module  # the twin at its best
    ledger: Ledger
    verdict: Verdict
    growth: Growth

    def export(self, path: str | Path, formats: Sequence[str] = FORMATS) -> dict[str, Path]:
        """Writes the model as files that need no Esper, by format."""
        return export(self.model, self.growth.example, path, formats)


def grow(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    loss: Loss,
    optimizer: optim.Optimizer,
    steps: int,
    budget: Budget | None = None,
    controller: str | Path | Controller = "heuristic",
    decisions: int = DEFAULT_EPISODE_LENGTH,
    metric: Metric | None = None,
    scheduler: LRScheduler | None = None,
    sites: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    blueprints: Sequence[str] | None = None,
    rent: float = DEFAULT_RENT,
    shadow_training: bool = False,
    rng_seed: int = 0,
    progress: bool = True,
) -> GrowthResult:
    """Trains `model` for `steps` batches while it grows within `budget`, and its twin beside it.

    Loaders yield `(inputs, target)`; inputs are a tensor, a tuple of the model's arguments or a
    dict of them. `metric` scores each example 0 to 1; without it accuracy is used for targets
    that are classes, and 1 / (1 + squared error / variance of the validation targets) for
    numbers. A scheduler is stepped after every batch. A model of which every module is in eval
    mode is put into train mode.

    The result is the best committed network that the run saw, by validation metric; or the twin
    at its own best, where that is better or as good. So it is never worse on validation than the
    best that was seen without growth. Ctrl-C ends the run after the step that it is at, with the
    result of what was trained so far; pressed twice, it interrupts at once.

    The twin is bit for bit the model that a loop of the user's own would have trained, for data
    that draw from torch's, numpy's or Python's generators or those of a DataLoader. Hooks of the
    optimizer are called for both, and settings that it changes by itself are each network's own.
    """
    _check_call(steps, decisions, loss, metric, scheduler)
    check_arguments(
        model, optimizer, decisions=decisions + 1, budget=budget, rent=rent, rng_seed=rng_seed
    )
    device = next(model.parameters()).device
    check_loader(train_loader, "training")
    check_loader(val_loader, "validation")
    with stopped_by_ctrl_c() as is_stopped:  # a loader's workers, once there, know it too
        batches = _endless(train_loader)
        # it is trained on, too: a loader is read as often as in a loop of the user's
        example, _ = first = _first_batch(batches, "training", device)
        with untouched_randomness(model, val_loader):
            val_example, val_target = _first_batch(iter(val_loader), "validation", device)
            metric_name, metric = (
                default_metric(val_target, (target for _, target in val_loader))
                if metric is None
                else (_name_of(metric), metric)
            )
        trainer = _Trainer(loss, metric, device)
        _begin_training(model)
        ungrown = _Twin(*_copied(model, optimizer), trainer)
        growth = Growth(
            model,
            optimizer,
            example=example,
            other_examples=(val_example,),
            train_rows=count_rows(train_loader, example),
            budget=budget,
            controller=controller,
            decisions=decisions + 1,  # the last call closes the run
            val_loader=val_loader,
            score=lambda batch: trainer.score(model, batch),
            scheduler=scheduler,
            sites=sites,
            exclude=exclude,
            blueprints=blueprints,
            rent=rent,
            shadow_training=shadow_training,
            rng_seed=rng_seed,
            metric=metric_name,
        )
        disable_nested_tensors(ungrown.model, growth.sites)  # as it is in the growing model
        with progress_bar(steps, growth.describe(), enabled=progress) as report:
            batches = chain([first], batches)
            _train(growth, ungrown, trainer, batches, val_loader, steps, report, is_stopped)
        return _conclude(growth, ungrown, val_loader, trainer)


def _check_call(
    steps: int, decisions: int, loss: Loss, metric: Metric | None, scheduler: LRScheduler | None
) -> None:
    """Raise for what is wrong in this call and no matter in a loop of the user's own."""
    check_whole(steps=steps, decisions=decisions)
    if steps < 1:
        raise ValueError(f"steps={steps}; use 1 or more: the number of batches to train on")
    if not 1 <= decisions <= steps:
        raise ValueError(f"decisions={decisions} for steps={steps}; use 1 to {steps} decisions")
    for name, given in (("loss", loss), ("metric", metric or loss)):
        if not callable(given):
            raise ValueError(f"{name}={given!r}; give a function of the model's output and target")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau waits for a metric; use esper.Growth in your own loop")


def _begin_training(model: nn.Module) -> None:
    """Into train mode: libraries hand out models ready for use. Of one that is partly so it tells.

    Single layers may be in eval mode on purpose, and so may parts that are frozen.
    """
    if not any(module.training for module in model.modules()):
        model.train()
    for name, module in model.named_modules():
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        if not module.training and is_trained and any(True for _ in module.children()):
            warnings.warn(
                f"{name or type(model).__name__} is in eval mode, and other parts of the model are "
                "not: its weights are trained without its dropout, and its norms learn no "
                "statistics; call model.train() first, unless that is meant",
                stacklevel=3,
            )
            return


def _train(
    growth: Growth,
    ungrown: "_Twin",
    trainer: "_Trainer",
    batches: Iterator[Any],
    val_loader: Iterable[Any],
    steps: int,
    report: Report,
    is_stopped: Callable[[], bool],
) -> None:
    """All steps of both networks, or those up to Ctrl-C, with the decisions in between."""
    decisions = growth.decisions - 1  # the last one closes the run
    for number in range(decisions):
        ungrown.measure(val_loader, growth.ledger, growth.step)
        growth.decide()
        until = steps * (number + 1) // decisions
        while growth.optimizer_steps < until and not is_stopped():
            trainer.train_both(growth, ungrown, next(batches))
            report(growth.optimizer_steps, _standing(growth))
        if is_stopped():
            break
    ungrown.measure(val_loader, growth.ledger, growth.step)
    growth.close()
    if growth.optimizer_steps < steps:
        warnings.warn(
            f"stopped after {growth.optimizer_steps} of {steps} steps: the result is the best so "
            "far",
            stacklevel=3,
        )


def _name_of(metric: Metric) -> str:
    """What the ledger calls a metric of the user's."""
    name = getattr(metric, "__name__", type(metric).__name__)
    return "score" if name == "<lambda>" else name


class _Trainer:
    """What both networks share: the loss, the metric and the device."""

    def __init__(self, loss: Loss, metric: Metric, device: torch.device):
        self._loss, self._metric, self._device = loss, metric, device

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, target = batch
        return _checked_loss(self._loss(forward(model, inputs), target))

    def score(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Each example's score, and the mean loss."""
        inputs, target = _moved(batch, self._device)
        output = forward(model, inputs)
        scores = checked_scores(self._metric(output, target))
        return scores, _checked_loss(self._loss(output, target))

    def train_both(self, growth: Growth, twin: "_Twin", batch: Any) -> None:
        """One step of each on the same batch, with the same randomness, and of their schedule."""
        batch = _moved(batch, self._device)
        with untouched_randomness(growth.model):
            loss = self._step(growth.model, growth.optimizer, batch, growth.shadow_loss)
        growth.after_step(loss)
        is_first = growth.optimizer_steps == 1
        before = _changes(growth.model) if is_first else []
        self._step(twin.model, twin.optimizer, batch)
        if is_first and _changes(growth.model) != before:
            raise ValueError(
                "a step of the ungrown twin changed the growing model: the loss or a hook of the "
                "optimizer reaches the model by its name. They must work with what they are given "
                "(a loss: output and target; a hook: optimizer.param_groups), or the twin would "
                "train without them"
            )
        twin.follow(growth.scheduler, growth.optimizer)

    def _step(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        batch: Any,
        shadow: Callable[[Callable[[], Tensor]], None] | None = None,
    ) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if shadow is not None:
            shadow(lambda: self.loss(model, batch))
        optimizer.step()
        return loss.detach()


class _Twin:
    """The ungrown model, trained alike."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, trainer: _Trainer):
        self.model, self.optimizer = model, optimizer
        self._trainer = trainer
        self._sound = finite_buffers(model)
        self.best_metric = -1.0
        self.best = model  # a copy, once it was measured

    def follow(self, scheduler: LRScheduler | None, optimizer: optim.Optimizer) -> None:
        """A step of the growing model's schedule; what it changes there changes here too.

        Settings that an optimiser changes by itself are each network's own.
        """
        if scheduler is None:
            return
        before = group_settings(optimizer)
        scheduler.step()
        groups = zip(self.optimizer.param_groups, before, group_settings(optimizer), strict=False)
        for own, old, new in groups:
            own.update({name: value for name, value in new.items() if value != old.get(name)})

    def measure(self, val_loader: Iterable[Any], ledger: Ledger, step: int) -> None:
        with resting(self.model, val_loader):
            parts = [self._trainer.score(self.model, batch)[0] for batch in val_loader]
        is_finite = are_finite(self.model, self.model.parameters(), self._sound)
        scores = bounded(joined(parts))
        metric = float(scores.mean()) if is_finite else math.nan  # which is never the best
        ledger.record_twin(TwinRecord(step=step, metric=metric))
        if metric > self.best_metric:
            self.best_metric = metric
            self.best = copy.deepcopy(self.model, without_graphs(self.model))


def _copied(model: nn.Module, optimizer: optim.Optimizer) -> tuple[nn.Module, optim.Optimizer]:
    """Both once more, and the optimiser with its hooks and attributes, which a copy leaves out."""
    own = {id(p) for p in model.parameters()}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained & own and trained - own:
        raise ValueError(
            "the optimizer trains weights that are not the model's, such as those of a loss, which "
            "the growing model and its ungrown twin would share; make them part of the model, or "
            "use esper.Growth in your own loop"
        )
    copies = without_graphs(model)
    twins = copy.deepcopy((model, optimizer), copies)
    missing = vars(optimizer).keys() - {"defaults", "state", "param_groups"}
    missing -= {"step"}  # a scheduler has put its own there, bound to the optimiser that it drives
    for name in missing:
        setattr(twins[1], name, copy.deepcopy(vars(optimizer)[name], copies))
    return twins


def _changes(model: nn.Module) -> list[tuple[int, int]]:
    """How often each weight and its gradient were changed in place."""
    tensors = (t for p in model.parameters() for t in (p, p.grad) if t is not None)
    return [(id(tensor), tensor._version) for tensor in tensors]


def _conclude(
    growth: Growth, twin: _Twin, val_loader: Iterable[Any], trainer: _Trainer
) -> GrowthResult:
    """Both at their best on the same validation batches; the better is the result."""
    grown, ungrown = growth.plain_model(), twin.best
    scores: tuple[list[Tensor], list[Tensor]] = ([], [])
    with resting(grown, val_loader), resting(ungrown):
        for batch in val_loader:
            for collected, model in zip(scores, (grown, ungrown), strict=True):
                collected.append(trainer.score(model, batch)[0])
    with_growth, without = (bounded(joined(collected)) for collected in scores)
    if bool((with_growth - without).isnan().any()):
        # the metric fails at the very end: what it said before stands
        best = [[growth.best_metric], [twin.best_metric]]
        with_growth, without = torch.tensor(best, dtype=torch.float64)
    gain, error = paired_difference(with_growth, without)
    has_grown = growth.params > growth.ledger.before.params
    keeps_growth = gain > 0 or (gain == 0 and not has_grown)
    verdict = Verdict(
        grown=float(with_growth.mean()),
        ungrown=float(without.mean()),
        returned="grown" if keeps_growth else "ungrown",
        difference_error=error if len(without) > 1 else None,
    )
    assert growth.ledger.after is not None
    growth.ledger.conclude(after=growth.ledger.after, verdict=verdict)
    returned = grown if keeps_growth else ungrown
    return GrowthResult(returned, ungrown, growth.ledger, verdict, growth)


def _checked_loss(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(
            f"a loss of shape {tuple(loss.shape)}; give the batch's mean, one number, such as "
            "reduction='mean' makes it"
        )
    return loss


def _standing(growth: Growth) -> str:
    last = growth.ledger.steps[-1].metric
    shown = "is not a number" if last is None else f"{last:.4f}"
    seeds = len(growth.seeds)
    return f"{growth.ledger.metric} {shown}  {seeds} seeds  {growth.params:,} parameters"


def _first_batch(batches: Iterator[Any], name: str, device: torch.device) -> Any:
    """The next batch's inputs and target, on the device."""
    batch = next(batches, None)
    if batch is None:
        raise ValueError(f"the {name} loader yields nothing")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(
            f"the {name} loader yields a {type(batch).__name__}; it must yield pairs "
            "(inputs, target). For other batches use esper.Growth in your own loop"
        )
    batch_size(batch[0])  # raises if it has none
    return _moved(batch, device)


def _moved(batch: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Its batches, over and over; none if there is none."""
    for times in count():
        batches = 0
        for batch in loader:
            batches += 1
            yield batch
        if batches == 0 and times > 0:
            raise ValueError("the training loader yields nothing when it is read again")
        if batches == 0:
            return
