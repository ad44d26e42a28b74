"""`esper.grow`: train and grow a model in one call, and compare it with its ungrown twin.

    result = esper.grow(model, train_loader, val_loader, loss=cross_entropy, optimizer=optimizer,
                        budget=Budget(params=20_000), steps=2_000)

The twin is a copy of the model that does not grow. It trains on the same batches, with the same
randomness and optimizer settings. The verdict compares the two.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from esper.growing.data_facts import count_rows
from esper.growing.ddp import connected_ranks, unwrapped
from esper.growing.growth import DEFAULT_RENT, Growth
from esper.growing.preparation import check_arguments
from esper.growing.twin import Loss, Twin, TwinTask, Unpack, copied
from esper.growing.validation import Metric, paired_difference
from esper.leyline.budget import Budget
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.leyline.protocols import Controller
from esper.nissa.console import Report, progress_bar
from esper.nissa.ledger import Ledger, Verdict
from esper.nissa.page import check_page, try_write_page, with_page
from esper.runtime.checks import whole_number
from esper.runtime.interruption import stop_on_interrupt
from esper.surgery.export import FORMATS, TOLERANCE, export
from esper.surgery.slots import disable_nested_tensors
from esper.surgery.tracing import is_composed

Stop = Callable[[], bool]


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
        return (
            f"{ledger.summary()}\n"
            f"Grown network: {before.params:,} to {growth.params:,} parameters, "
            f"{before.macs:,} to {growth.macs:,} multiply-adds per example.\n"
            f"Seeds kept: {seeds or 'none'}; {len(ledger.seeds)} were tried.\n"
            f"{ledger.cost_summary()}\n"
            f"{len(ledger.decisions)} decisions by {ledger.controller}, "
            f"{growth.optimizer_steps:,} optimizer steps."
        )

    def export(
        self, path: str | Path, formats: Sequence[str] = FORMATS, *, tolerance: float = TOLERANCE
    ) -> dict[str, Path]:
        """Write the model as files that do not need Esper, by format."""
        return export(self.model, self.growth.example, path, formats, tolerance=tolerance)


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
    kind: Mapping[str, str] | None = None,
    blueprints: Sequence[str] | None = None,
    rent: float = DEFAULT_RENT,
    shadow_training: bool = False,
    rng_seed: int = 0,
    progress: bool = True,
    twin: bool = True,
    unpack: Unpack | None = None,
    autocast: torch.dtype | None = None,
    repeats: int = 1,
    page: str | Path | None = None,
) -> GrowthResult:
    """Train `model` for `steps` batches while it grows within `budget`, and train its twin.

    Loaders yield `(inputs, target)`; inputs are a tensor, a tuple of the model's arguments or a
    dict of them. For other batches `unpack` maps a batch to such a pair. `metric` maps output and
    target to one score per example, 0 to 1. The default is accuracy for class targets and
    1 / (1 + squared error / variance) for numbers. The scheduler is stepped after every batch. A
    model that is entirely in eval mode is put into train mode. `autocast` is the dtype of mixed
    precision, such as `torch.bfloat16`.

    Returns the best committed network by validation metric, or the twin at its best if that is as
    good. So the result is never worse on validation than the best network seen without growth.
    Ctrl-C ends the run after the current step and returns the best so far; a second one interrupts
    at once. With `progress` the verdict is printed. `page` names an HTML file for `write_page`: it
    is written after every decision, and reloads itself in a browser until the run is over.

    With `repeats` all is done several times from the same weights, with other batches, dropout and
    seeds. The verdict is then of the means, and its error includes this randomness. The network is
    that of the first run.

    With `twin=False` no twin is trained: that halves the cost, but the gain is not known, and the
    result may be worse than without growth.

    The twin is bit-exact the model that your own loop would have trained, if your data uses the
    generators of torch, numpy, Python or a DataLoader. Optimizer hooks are called for both models.

    In a process group all ranks start from the weights and random numbers of rank 0 and train one
    model (wrapped in DistributedDataParallel or not). Each takes its rows of every training batch,
    unless the loader has a `DistributedSampler`. All return the same result.
    """
    options = {name: value for name, value in locals().items() if name not in ("model", "repeats")}
    model, ranks = unwrapped(model, connected_ranks())
    _check_call(options, repeats)
    check_arguments(model, optimizer, decisions + 1, budget, rent, rng_seed)
    page = page if ranks.is_first else None
    check_page(page)
    copies = [copied(model, optimizer, scheduler) for _ in range(repeats - 1)]
    with stop_on_interrupt() as should_stop:  # before the loader starts workers: they inherit it
        task = TwinTask(model, train_loader, val_loader, loss, metric, unpack, autocast, ranks)
        _set_train_mode(model)
        ungrown = Twin(*copied(model, optimizer)[:2], task) if twin else None
        growth = Growth(
            model,
            optimizer,
            example=task.example,
            other_examples=task.other_examples,
            train_rows=count_rows(train_loader, task.example),
            decisions=decisions + 1,  # the last call closes the run
            val_loader=val_loader,
            score=lambda batch: task.score(model, batch),
            metric=task.metric_name,
            ranks=ranks,
            **{name: options[name] for name in _OF_GROWTH},
        )
        growth.expected_steps = steps // decisions
        if ungrown is not None:
            disable_nested_tensors(ungrown.model, growth.sites)  # as in the growing model
        shown = progress and ranks.is_first
        with progress_bar(steps, growth.describe(), enabled=shown) as report:
            report = with_page(report, growth.ledger, page, steps)
            _train(growth, ungrown, task, steps, report, lambda: ranks.any(should_stop()))
        result = _conclude(growth, ungrown, task)
        if copies and not should_stop():
            result = _repeated(result, copies, options)
        try_write_page(result.ledger, page)
        if shown:
            print(result)
        return result


# arguments that are passed on to `Growth`
_OF_GROWTH = (
    *("budget", "controller", "scheduler", "sites", "exclude", "kind", "blueprints", "rent"),
    *("shadow_training", "rng_seed"),
)


def _repeated(
    first: GrowthResult, others: Sequence[tuple[Any, ...]], options: dict[str, Any]
) -> GrowthResult:
    """Grow copies of the model; the first result, with a verdict over all runs."""
    verdicts, ledger = [first.verdict], first.ledger
    for number, (model, optimizer, scheduler) in enumerate(others, start=1):
        changed = {"optimizer": optimizer, "scheduler": scheduler, "progress": False, "page": None}
        changed["rng_seed"] = options["rng_seed"] + number
        with warnings.catch_warnings():
            # the copy of a scheduler does not find its mark in the copy of the optimizer
            warnings.filterwarnings("ignore", "Seems like `optimizer.step")
            again = grow(model, **(options | changed))
        verdicts.append(again.verdict)
        costs = again.ledger.costs.values()
        seconds = sum(cost.seconds or 0.0 for cost in costs)
        ledger.add_cost("repeats", sum(cost.macs for cost in costs), seconds)
    grown, ungrown = (torch.tensor([getattr(v, n) for v in verdicts]) for n in ("grown", "ungrown"))
    assert first.verdict is not None  # repeats have a twin
    ledger.verdict = replace(
        first.verdict,
        grown=float(grown.mean()),
        ungrown=float(ungrown.mean()),
        difference_error=float((grown - ungrown).std() / len(verdicts) ** 0.5),
        repeats=len(verdicts),
    )
    return replace(first, verdict=ledger.verdict)


def _check_call(options: dict[str, Any], repeats: int) -> None:
    """Check the arguments that `Growth` does not have."""
    steps, decisions = (whole_number(name, options[name], 1) for name in ("steps", "decisions"))
    whole_number("repeats", repeats, 1)
    if options["autocast"] == torch.float16:
        raise ValueError("autocast=torch.float16 needs a GradScaler; use bfloat16 or esper.Growth")
    if decisions > steps:
        raise ValueError(f"decisions={decisions} for steps={steps}; use 1 to {steps} decisions")
    if repeats > 1 and not options["twin"]:
        raise ValueError(f"repeats={repeats} with twin=False; only a verdict uses the other runs")
    if isinstance(options["scheduler"], ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau needs a metric; use esper.Growth in your own loop")


def _set_train_mode(model: nn.Module) -> None:
    """Put a model into train mode if all of it is in eval mode, as libraries return it.

    Single layers and frozen parts may be in eval mode on purpose; other parts are warned of.
    """
    if not any(module.training for module in model.modules()):
        model.train()
    resting = ((name, m) for name, m in model.named_modules() if not m.training and is_composed(m))
    names = [name for name, m in resting if any(p.requires_grad for p in m.parameters())]
    if names:
        warnings.warn(
            f"{names[0] or type(model).__name__} is in eval mode while other parts are not: no dropout, "
            "and batch norms keep their statistics. If that is not intended, call model.train() first",
            stacklevel=3,
        )


def _train(
    growth: Growth, twin: Twin | None, task: TwinTask, steps: int, report: Report, should_stop: Stop
) -> None:
    """Train both models for all steps, or until Ctrl-C, with the decisions in between."""
    decisions = growth.decisions - 1  # the last one closes the run
    for number in range(decisions):
        if twin is not None:
            twin.measure(growth.ledger, growth.step)
        growth.decide()
        until = steps * (number + 1) // decisions
        while growth.optimizer_steps < until and not should_stop():
            task.train_both(growth, twin)
            last, seeds = growth.ledger.steps[-1].metric, len(growth.seeds)
            shown = "is not a number" if last is None else f"{last:.4f}"
            status = f"{growth.ledger.metric} {shown}  {seeds} seeds  {growth.params:,} parameters"
            report(growth.optimizer_steps, status)
        if should_stop():
            break
    if twin is not None:
        twin.measure(growth.ledger, growth.step)
    growth.close()
    if (done := growth.optimizer_steps) < steps:
        told = f"stopped after {done} of {steps} steps; the result is the best so far"
        warnings.warn(told, stacklevel=3)


def _conclude(growth: Growth, twin: Twin | None, task: TwinTask) -> GrowthResult:
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
    growth.ledger.verdict = verdict = Verdict(
        grown=float(with_growth.mean()),
        ungrown=float(without.mean()),
        returned="grown" if returns_grown else "ungrown",
        difference_error=error if len(without) > 1 else None,
    )
    returned = grown if returns_grown else ungrown
    return GrowthResult(returned, ungrown, growth.ledger, verdict, growth)
