"""The ungrown twin, and the data and steps that it has in common with the growing model."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler

from esper.growing import validation
from esper.growing.ddp import ALONE, Ranks, is_split, rows_of
from esper.growing.growing_network import are_finite, finite_buffers
from esper.growing.growth import Growth
from esper.growing.seed_groups import group_settings
from esper.growing.validation import Metric
from esper.nissa.ledger import Ledger, TwinRecord
from esper.surgery.eval_mode import eval_mode, untouched_randomness
from esper.surgery.inputs import batch_size, forward, moved, tensors
from esper.surgery.tracing import without_graphs

Loss = Callable[[Any, Any], Tensor]  # (model output, target) -> mean loss of the batch
Unpack = Callable[[Any], tuple[Any, Any]]  # a batch of the loader -> (inputs, target)


class TwinTask:
    """What both networks share: data, loss, metric and device."""

    def __init__(
        self,
        model: nn.Module,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any],
        loss: Loss,
        metric: Metric | None,
        unpack: Unpack | None,
        autocast: torch.dtype | None,
        ranks: Ranks,
    ):
        """Starts all ranks alike, and looks at the first batches."""
        validation.check_loader(train_loader, "training")
        validation.check_loader(val_loader, "validation")
        self.ranks, self._device = ranks, next(model.parameters()).device
        self._loss, self._dtype, self._unpack = loss, autocast, unpack or (lambda batch: batch)
        self._val_loader, self._is_split = val_loader, is_split(train_loader)
        ranks.copy_first(t.detach() for t in (*model.parameters(), *model.buffers()))
        if not self._is_split:
            torch.set_rng_state(ranks.broadcast(torch.get_rng_state()))
        batches = _endless(train_loader)
        raw, (self.example, _) = self._first(batches, "training")
        # it is trained on too, so the loader is read as often as in the user's loop
        self._batches = chain([raw], batches)
        with untouched_randomness(model, val_loader):
            _, (inputs, target) = self._first(iter(val_loader), "validation")
            # a batch whose examples have another shape, if there is one
            known, unpacked = _shapes(self.example), map(self._unpack, val_loader)
            others = list(islice((x for x, _ in unpacked if _shapes(x) != known), 1))
            self.other_examples = [inputs, *moved(others, self._device)]
            if metric is None:
                targets = (target for _, target in map(self._unpack, val_loader))
                self.metric_name, self._metric = validation.default_metric(target, targets)
            else:
                name, self._metric = getattr(metric, "__name__", type(metric).__name__), metric
                self.metric_name = "score" if name == "<lambda>" else name

    def _first(self, batches: Iterator[Any], name: str) -> tuple[Any, Any]:
        """The next batch, and its inputs and target on the device."""
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"the {name} loader yields nothing")
        pair = self._unpack(batch)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                f"the {name} loader yields a {type(pair).__name__}; it must yield pairs "
                "(inputs, target). For other batches give unpack=, a function from a batch to such a "
                'pair: lambda batch: ({"x": batch["x"]}, batch["labels"])'
            )
        batch_size(pair[0])  # raises if it has no examples
        return batch, moved(pair, self._device)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, self._dtype) if self._dtype else nullcontext()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, target = batch
        with self._precision():
            return self._loss(forward(model, inputs), target)

    def score(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Each example's score, and the mean loss."""
        inputs, target = moved(self._unpack(batch), self._device)
        with self._precision():
            output = forward(model, inputs)
            return self._metric(output, target), self._loss(output, target)

    def val_scores(self, *models: nn.Module) -> list[Tensor]:
        """The scores of each model on the same validation batches, each `[n]`."""
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(eval_mode(model, self._val_loader))
            batches = [[self.score(m, batch)[0] for m in models] for batch in self._val_loader]
        split = self.ranks if is_split(self._val_loader) else ALONE
        scores = [validation.joined(list(parts), split) for parts in zip(*batches, strict=True)]
        return self.ranks.broadcast([validation.bounded(of_model) for of_model in scores])

    def train_both(self, growth: Growth, twin: "Twin | None") -> None:
        """One step of both models on the next batch with the same randomness."""
        batch = moved(self._unpack(next(self._batches)), self._device)
        batch, weight = (batch, 1.0) if self._is_split else rows_of(batch, self.ranks)
        start = time.perf_counter()
        with untouched_randomness(growth.model) if twin else nullcontext():
            loss = self._step(growth, batch, weight)
        growth.after_step(loss)
        middle = time.perf_counter()
        growth.ledger.add_cost("growing", 0, middle - start)
        if twin is not None:
            is_first = growth.optimizer_steps == 1
            before = _versions(growth.model) if is_first else []
            self._step(twin, batch, weight)
            if is_first and _versions(growth.model) != before:
                raise ValueError(
                    "a step of the ungrown twin changed the growing model: the loss or an optimizer "
                    "hook accesses the model directly, so the twin would train without it. Use only "
                    "the arguments (a loss: output and target; a hook: optimizer.param_groups)"
                )
            macs = 3 * growth.ledger.before.macs * batch_size(growth.example)
            growth.ledger.add_cost("twin", macs, time.perf_counter() - middle)
        if growth.scheduler is not None:
            _step_scheduler(growth.scheduler, growth.optimizer, twin)

    def _step(self, trained: "Growth | Twin", batch: Any, weight: float) -> Tensor:
        model, optimizer = trained.model, trained.optimizer
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss = loss if weight == 1.0 else weight * loss
        loss.backward()  # type: ignore[no-untyped-call]
        self.ranks.average_gradients([p for p in model.parameters() if p.requires_grad])
        if isinstance(trained, Growth):
            trained.shadow_loss(lambda: weight * self.loss(model, batch))
        optimizer.step()
        return loss.detach()


class Twin:
    """The ungrown copy of the model."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, task: TwinTask):
        self.model, self.optimizer = model, optimizer
        self._task = task
        self._finite_buffers = finite_buffers(model)
        self.best_metric = -1.0
        self.best = model  # a copy, once it was measured

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


def _step_scheduler(scheduler: Any, optimizer: optim.Optimizer, twin: Twin | None) -> None:
    """Step the growing model's scheduler, and apply what it changes to the twin's optimizer.

    Settings that an optimizer changes by itself stay separate.
    """
    before = group_settings(optimizer)
    scheduler.step()
    own_groups = [] if twin is None else twin.optimizer.param_groups
    for own, old, new in zip(own_groups, before, group_settings(optimizer), strict=False):
        own.update({name: value for name, value in new.items() if value != old.get(name)})


def copied(
    model: nn.Module, optimizer: optim.Optimizer, scheduler: LRScheduler | None = None
) -> tuple[nn.Module, optim.Optimizer, LRScheduler | None]:
    """Copies of them; `Optimizer.__getstate__` omits hooks and attributes, so these are added."""
    own = {id(p) for p in model.parameters()}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained & own and trained - own:
        raise ValueError(
            "the optimizer also trains weights that are not the model's, and the twin would share "
            "them; make them part of the model, or use esper.Growth in your own loop"
        )
    copies = without_graphs(model)
    twins = copy.deepcopy((model, optimizer), copies)
    missing = vars(optimizer).keys() - {"defaults", "state", "param_groups"}
    missing -= {"step"}  # replaced by a scheduler, and bound to its optimizer
    for name in missing:
        setattr(twins[1], name, copy.deepcopy(vars(optimizer)[name], copies))
    return *twins, copy.deepcopy(scheduler, copies)


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches, again and again."""
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise ValueError("the training loader yields nothing, perhaps when it is read again")


def _shapes(inputs: Any) -> list[Any]:
    """Of the tensors of one example."""
    return [tensor.shape[1:] for tensor in tensors(inputs)]


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Change when a weight or its gradient is written to."""
    watched = (t for p in model.parameters() for t in (p, p.grad) if t is not None)
    return [(id(tensor), tensor._version) for tensor in watched]
