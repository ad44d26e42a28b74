"""`esper.grow`: train and grow a model in one call, and compare it with its ungrown twin.

    result = esper.grow(model, train_loader, val_loader, loss=cross_entropy, optimizer=optimizer,
                        budget=Budget(params=20_000), steps=2_000)

The twin is a copy of the model that does not grow. It trains on the same batches, with the same
randomness and optimizer settings. The verdict compares the two.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from esper.growing.budget import Budget
from esper.growing.checkpoint import group_settings
from esper.growing.eval_mode import eval_mode, untouched_randomness
from esper.growing.export import FORMATS, export
from esper.growing.growth import DEFAULT_RENT, Growth
from esper.growing.inputs import batch_size, count_rows, forward, moved
from esper.growing.ledger import Ledger, TwinRecord, Verdict
from esper.growing.network import are_finite, finite_buffers
from esper.growing.page import write_page
from esper.growing.parallel import is_split, rows_of, unwrapped
from esper.growing.preparation import check_arguments, check_whole
from esper.growing.slots import disable_nested_tensors
from esper.growing.tracing import without_graphs
from esper.growing.validation import (
    Metric,
    bounded,
    check_loader,
    checked_scores,
    default_metric,
    joined,
    paired_difference,
)
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.leyline.interruption import stop_on_interrupt
from esper.leyline.protocols import Controller
from esper.leyline.ranks import ALONE, Ranks, join_ranks
from esper.nissa.console import ProgressSink

Loss = Callable[[Any, Any], Tensor]  # (model output, target) -> mean loss of the batch
Unpack = Callable[[Any], tuple[Any, Any]]  # a batch of the loader -> (inputs, target)
Report = Callable[[int, str], None]  # steps done, and a short status


@dataclass(frozen=True)
class GrowthResult:
    """The result of `esper.grow`."""

    model: nn.Module  # without slots: the grown network, or the twin if that is as good
    ungrown: nn.Module | None  # the twin at its best; None: there was none
    ledger: Ledger
    verdict: Verdict | None
    growth: Growth

    def __str__(self) -> str:
        """The verdict, the size, the seeds, the cost and the controller, a line each."""
        ledger, growth = self.ledger, self.growth
        before, seeds = ledger.before, ", ".join(f"{b} at {s}" for s, b in growth.seeds.items())
        return "\n".join(
            (
                ledger.summary(),
                f"Grown network: {before.params:,} to {growth.params:,} parameters, "
                f"{before.macs:,} to {growth.macs:,} multiply-adds per example.",
                f"Seeds kept: {seeds or 'none'}; {len(ledger.seeds)} were tried.",
                ledger.cost_summary(),
                f"{len(ledger.decisions)} decisions by {ledger.controller}, "
                f"{growth.optimizer_steps:,} optimizer steps.",
            )
        )

    def export(self, path: str | Path, formats: Sequence[str] = FORMATS) -> dict[str, Path]:
        """Write the model as files that do not need Esper, by format."""
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
    twin: bool = True,
    unpack: Unpack | None = None,
    page: str | Path | None = None,
) -> GrowthResult:
    """Train `model` for `steps` batches while it grows within `budget`, and train its twin.

    Loaders yield `(inputs, target)`; inputs are a tensor, a tuple of the model's arguments or a
    dict of them. For other batches `unpack` maps a batch to such a pair. `metric` maps output and target to one score per example, 0 to 1. The default is
    accuracy for class targets and 1 / (1 + squared error / variance) for numbers. The scheduler is
    stepped after every batch. A model that is entirely in eval mode is put into train mode.

    Returns the best committed network by validation metric, or the twin at its best if that is as
    good. So the result is never worse on validation than the best network seen without growth.
    Ctrl-C ends the run after the current step and returns the best so far; a second one interrupts
    at once. With `progress` the verdict is printed. `page` names an HTML file for `write_page`: it
    is written after every decision, and reloads itself in a browser until the run is over.

    With `twin=False` no twin is trained: that halves the cost, but the gain is not known, and the
    result may be worse than without growth.

    The twin is bit-exact the model that your own loop would have trained, if your data uses the
    generators of torch, numpy, Python or a DataLoader. Optimizer hooks are called for both models.

    Under torchrun all ranks start from the weights and random numbers of rank 0 and train one model
    (wrapped in DistributedDataParallel or not). Each takes its rows of every training batch, unless
    the loader has a `DistributedSampler`. All return the same result.
    """
    model, ranks = unwrapped(model)[0], join_ranks()
    _check_call(steps, decisions, loss, metric, scheduler)
    check_arguments(
        model, optimizer, decisions=decisions + 1, budget=budget, rent=rent, rng_seed=rng_seed
    )
    device = next(model.parameters()).device
    check_loader(train_loader, "training")
    check_loader(val_loader, "validation")
    ranks.copy_first(t.detach() for t in (*model.parameters(), *model.buffers()))
    if not is_split(train_loader):
        torch.set_rng_state(ranks.broadcast(torch.get_rng_state()))
    with stop_on_interrupt() as should_stop:  # before the loader starts workers: they inherit it
        batches = _endless(train_loader)
        # the first batch is trained on too, so the loader is read as often as in the user's loop
        unpack = unpack or _as_it_is
        raw, (example, _) = _first_batch(batches, "training", device, unpack)
        with untouched_randomness(model, val_loader):
            _, (val_example, val_target) = _first_batch(
                iter(val_loader), "validation", device, unpack
            )
            metric_name, metric = (
                default_metric(val_target, (unpack(batch)[1] for batch in val_loader))
                if metric is None
                else (_name_of(metric), metric)
            )
        task = _Task(loss, metric, val_loader, device, unpack, ranks, is_split(train_loader))
        _set_train_mode(model)
        ungrown = _Twin(*_copied(model, optimizer), task) if twin else None
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
            score=lambda batch: task.score(model, batch),
            scheduler=scheduler,
            sites=sites,
            exclude=exclude,
            blueprints=blueprints,
            rent=rent,
            shadow_training=shadow_training,
            rng_seed=rng_seed,
            metric=metric_name,
            ranks=ranks,
        )
        growth.expected_steps = steps // decisions
        if ungrown is not None:
            disable_nested_tensors(ungrown.model, growth.sites)  # as in the growing model
        stop = lambda: ranks.any(should_stop())  # noqa: E731
        shown = progress and ranks.is_first
        with progress_bar(steps, growth.describe(), enabled=shown) as report:
            if page is not None and ranks.is_first:
                report = _with_page(report, growth.ledger, page)
            _train(growth, ungrown, task, chain([raw], batches), steps, report, stop)
        result = _conclude(growth, ungrown, task)
        if page is not None and ranks.is_first:
            write_page(result.ledger, page)
        if shown:
            print(result)
        return result


def _check_call(
    steps: int, decisions: int, loss: Loss, metric: Metric | None, scheduler: LRScheduler | None
) -> None:
    """Check the arguments that `Growth` does not have."""
    check_whole(steps=steps, decisions=decisions)
    if steps < 1:
        raise ValueError(f"steps={steps}; use 1 or more, the number of batches to train on")
    if not 1 <= decisions <= steps:
        raise ValueError(f"decisions={decisions} for steps={steps}; use 1 to {steps} decisions")
    for name, given in (("loss", loss), ("metric", metric or loss)):
        if not callable(given):
            raise ValueError(f"{name}={given!r}; give a function of the model's output and target")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau needs a metric; use esper.Growth in your own loop")


def _name_of(metric: Metric) -> str:
    """The name of a custom metric in the ledger."""
    name = getattr(metric, "__name__", type(metric).__name__)
    return "score" if name == "<lambda>" else name


def _set_train_mode(model: nn.Module) -> None:
    """Put a model into train mode if all of it is in eval mode, as libraries return it.

    Single layers and frozen parts may be in eval mode on purpose; other parts are warned of.
    """
    if not any(module.training for module in model.modules()):
        model.train()
    for name, module in model.named_modules():
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        if not module.training and is_trained and any(True for _ in module.children()):
            warnings.warn(
                f"{name or type(model).__name__} is in eval mode while other parts of the model "
                "are in train mode: it trains without dropout, and its batch norms keep their "
                "statistics. If that is not intended, call model.train() first",
                stacklevel=3,
            )
            return


class _Task:
    """What both networks share: loss, metric, validation data and device."""

    def __init__(
        self,
        loss: Loss,
        metric: Metric,
        val_loader: Iterable[Any],
        device: torch.device,
        unpack: Unpack,
        ranks: Ranks,
        has_own_rows: bool,
    ):
        self._loss, self._metric, self._unpack = loss, metric, unpack
        self._val_loader, self._device = val_loader, device
        self.ranks, self._has_own_rows = ranks, has_own_rows  # a rank reads its own batches

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, target = batch
        return _checked_loss(self._loss(forward(model, inputs), target))

    def score(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Each example's score, and the mean loss."""
        inputs, target = moved(self._unpack(batch), self._device)
        output = forward(model, inputs)
        scores = checked_scores(self._metric(output, target))
        return scores, _checked_loss(self._loss(output, target))

    def val_scores(self, *models: nn.Module) -> list[Tensor]:
        """The scores of each model on the same validation batches, each `[n]`."""
        scores: list[list[Tensor]] = [[] for _ in models]
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(eval_mode(model, self._val_loader))
            for batch in self._val_loader:
                for collected, model in zip(scores, models, strict=True):
                    collected.append(self.score(model, batch)[0])
        split = self.ranks if is_split(self._val_loader) else ALONE
        return self.ranks.broadcast([bounded(joined(parts, split)) for parts in scores])

    def train_both(self, growth: Growth, twin: "_Twin | None", batch: Any) -> None:
        """One step of both models on the same batch with the same randomness."""
        batch = moved(self._unpack(batch), self._device)
        batch, weight = (batch, 1.0) if self._has_own_rows else rows_of(batch, self.ranks)
        start = time.perf_counter()
        with untouched_randomness(growth.model) if twin else nullcontext():
            loss = self._step(growth.model, growth.optimizer, batch, weight, growth.shadow_loss)
        growth.after_step(loss)
        middle = time.perf_counter()
        growth.ledger.add_cost("growing", 0, middle - start)
        if twin is None:
            if growth.scheduler is not None:
                growth.scheduler.step()
            return
        is_first = growth.optimizer_steps == 1
        before = _versions(growth.model) if is_first else []
        self._step(twin.model, twin.optimizer, batch, weight)
        if is_first and _versions(growth.model) != before:
            raise ValueError(
                "a step of the ungrown twin changed the growing model: the loss or an optimizer "
                "hook accesses the model directly, so the twin would train without it. Use only "
                "the arguments (a loss: output and target; a hook: optimizer.param_groups)"
            )
        twin.follow(growth.scheduler, growth.optimizer)
        macs = 3 * growth.ledger.before.macs * batch_size(growth.example)
        growth.ledger.add_cost("twin", macs, time.perf_counter() - middle)

    def _step(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        batch: Any,
        weight: float,
        shadow: Callable[[Callable[[], Tensor]], None] | None = None,
    ) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss = loss if weight == 1.0 else weight * loss
        loss.backward()  # type: ignore[no-untyped-call]
        self.ranks.mean([p.grad for p in model.parameters() if p.grad is not None])
        if shadow is not None:
            shadow(lambda: weight * self.loss(model, batch))
        optimizer.step()
        return loss.detach()


class _Twin:
    """The ungrown copy of the model."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, task: _Task):
        self.model, self.optimizer = model, optimizer
        self._task = task
        self._finite_buffers = finite_buffers(model)
        self.best_metric = -1.0
        self.best = model  # a copy, once it was measured

    def follow(self, scheduler: LRScheduler | None, optimizer: optim.Optimizer) -> None:
        """Step the growing model's scheduler, and apply what it changes to the twin's optimizer.

        Settings that an optimizer changes by itself stay separate.
        """
        if scheduler is None:
            return
        before = group_settings(optimizer)
        scheduler.step()
        groups = zip(self.optimizer.param_groups, before, group_settings(optimizer), strict=False)
        for own, old, new in groups:
            own.update({name: value for name, value in new.items() if value != old.get(name)})

    def measure(self, ledger: Ledger, step: int) -> None:
        ranks, start = self._task.ranks, time.perf_counter()
        ranks.copy_first(b for b in self.model.buffers() if b.is_floating_point())
        (scores,) = self._task.val_scores(self.model)
        macs = ledger.before.macs * len(scores)
        ledger.add_cost("measuring", macs, time.perf_counter() - start)
        is_finite = are_finite(self.model, self.model.parameters(), self._finite_buffers)
        metric = float(scores.mean()) if is_finite else math.nan  # NaN is never the best
        metric = ranks.broadcast(metric)
        ledger.twin.append(TwinRecord(step=step, metric=metric))
        if metric > self.best_metric:
            self.best_metric = metric
            self.best = copy.deepcopy(self.model, without_graphs(self.model))


def _copied(model: nn.Module, optimizer: optim.Optimizer) -> tuple[nn.Module, optim.Optimizer]:
    """Copies of both; `Optimizer.__getstate__` omits hooks and attributes, so these are added."""
    own = {id(p) for p in model.parameters()}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained & own and trained - own:
        raise ValueError(
            "the optimizer also trains weights that are not the model's, such as those of a loss; "
            "the twin would share them. Make them part of the model, or use esper.Growth in your "
            "own loop"
        )
    copies = without_graphs(model)
    twins = copy.deepcopy((model, optimizer), copies)
    missing = vars(optimizer).keys() - {"defaults", "state", "param_groups"}
    missing -= {"step"}  # replaced by a scheduler, and bound to its optimizer
    for name in missing:
        setattr(twins[1], name, copy.deepcopy(vars(optimizer)[name], copies))
    return twins


def _train(
    growth: Growth,
    twin: _Twin | None,
    task: _Task,
    batches: Iterator[Any],
    steps: int,
    report: Report,
    should_stop: Callable[[], bool],
) -> None:
    """Train both models for all steps, or until Ctrl-C, with the decisions in between."""
    decisions = growth.decisions - 1  # the last one closes the run
    for number in range(decisions):
        if twin is not None:
            twin.measure(growth.ledger, growth.step)
        growth.decide()
        until = steps * (number + 1) // decisions
        while growth.optimizer_steps < until and not should_stop():
            task.train_both(growth, twin, next(batches))
            report(growth.optimizer_steps, _status(growth))
        if should_stop():
            break
    if twin is not None:
        twin.measure(growth.ledger, growth.step)
    growth.close()
    if growth.optimizer_steps < steps:
        warnings.warn(
            f"stopped after {growth.optimizer_steps} of {steps} steps; the result is the best so "
            "far",
            stacklevel=3,
        )


def _status(growth: Growth) -> str:
    last = growth.ledger.steps[-1].metric
    shown = "is not a number" if last is None else f"{last:.4f}"
    seeds = len(growth.seeds)
    return f"{growth.ledger.metric} {shown}  {seeds} seeds  {growth.params:,} parameters"


def _conclude(growth: Growth, twin: _Twin | None, task: _Task) -> GrowthResult:
    """Compare both models at their best on the same validation batches."""
    if twin is None:
        return GrowthResult(growth.plain_model(), None, growth.ledger, None, growth)
    grown, ungrown = growth.plain_model(), twin.best
    with_growth, without = task.val_scores(grown, ungrown)
    if bool((with_growth - without).isnan().any()):
        # the metric fails now: use the metrics measured before
        best = [[growth.best_metric], [twin.best_metric]]
        with_growth, without = torch.tensor(best, dtype=torch.float64)
    gain, error = paired_difference(with_growth, without)
    has_grown = growth.params > growth.ledger.before.params
    returns_grown = gain > 0 or (gain == 0 and not has_grown)
    verdict = Verdict(
        grown=float(with_growth.mean()),
        ungrown=float(without.mean()),
        returned="grown" if returns_grown else "ungrown",
        difference_error=error if len(without) > 1 else None,
    )
    growth.ledger.verdict = verdict
    returned = grown if returns_grown else ungrown
    return GrowthResult(returned, ungrown, growth.ledger, verdict, growth)


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Change when a weight or its gradient is written to."""
    tensors = (t for p in model.parameters() for t in (p, p.grad) if t is not None)
    return [(id(tensor), tensor._version) for tensor in tensors]


def _checked_loss(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(
            f"a loss of shape {tuple(loss.shape)}; give the batch's mean, one number, as with "
            "reduction='mean'"
        )
    return loss


def _as_it_is(batch: Any) -> Any:
    return batch


def _first_batch(
    batches: Iterator[Any], name: str, device: torch.device, unpack: Unpack
) -> tuple[Any, Any]:
    """The next batch, and its inputs and target on the device."""
    batch = next(batches, None)
    if batch is None:
        raise ValueError(f"the {name} loader yields nothing")
    pair = unpack(batch)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(
            f"the {name} loader yields a {type(pair).__name__}; it must yield pairs "
            "(inputs, target). For other batches give unpack=, a function from a batch to such a "
            'pair: lambda batch: ({"x": batch["x"]}, batch["labels"])'
        )
    batch_size(pair[0])  # raises if it has no examples
    return batch, moved(pair, device)


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches, again and again; nothing if it is empty from the start."""
    for times in count():
        batches = 0
        for batch in loader:
            batches += 1
            yield batch
        if batches == 0 and times > 0:
            raise ValueError("the training loader yields nothing when it is read again")
        if batches == 0:
            return


def _with_page(report: Report, ledger: Ledger, page: str | Path) -> Report:
    """Also write the page whenever the ledger has a new step."""
    written = 0

    def report_and_write(steps: int, status: str) -> None:
        nonlocal written
        report(steps, status)
        if len(ledger.steps) > written:
            written = len(ledger.steps)
            write_page(ledger, page)

    return report_and_write


@contextmanager
def progress_bar(total_steps: int, heading: str, *, enabled: bool) -> Iterator[Report]:
    """Progress in the terminal."""
    if not enabled:
        yield lambda steps, status: None
        return
    print(heading)
    with ProgressSink(total_steps) as sink:
        yield sink.update
