"""Grow a model inside your own training loop, with three lines.

    budget = esper.Budget(params=20_000)
    growth = esper.Growth(model, optimizer, example=inputs, budget=budget, decisions=25)
    for epoch in range(25):
        for inputs, targets in train_loader:
            ...                       # forward, backward, optimizer.step()
            growth.after_step()
        growth.decide(accuracy_on_validation_data)

After the last decision the model is the best committed network of the run. `growth.plain_model()`
is a copy of it without slots.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn, optim

from esper.growing import checkpoint, controllers, preparation
from esper.growing.data_facts import DataFacts
from esper.growing.ddp import ALONE, Ranks, unwrapped, warn_if_not_connected
from esper.growing.gradient_evidence import Evidence
from esper.growing.growing_network import GrowingNetwork
from esper.growing.recorder import Recorder, network_record
from esper.growing.reporter import Reporter, add_measured_seeds
from esper.growing.safe_points import SafePoint, SafePoints
from esper.growing.seed_groups import AnyScheduler, SeedGradients
from esper.growing.validation import Given, Measurement, Number, Score, Validator
from esper.kasmina.host_reports import History
from esper.kasmina.lifecycle import apply, begin_step, end_step
from esper.leyline.budget import Budget
from esper.leyline.protocols import Controller, controller_name
from esper.nissa.ledger import DecisionRecord, Ledger, StepRecord
from esper.surgery.export import FORMATS, TOLERANCE, export
from esper.surgery.inputs import batch_size
from esper.surgery.plain import plain_model
from esper.surgery.sites import ModelSite, site_table
from esper.tamiyo.growth_rules import EvidenceController
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.policy.action_masks import compute_batch_masks

DEFAULT_RENT = 0.02  # low: the budget is the limit, rent only keeps out seeds that gain nothing
RAMP_PARTS = 2  # alphas move in the first of this many parts of the steps between two decisions

_instances: WeakSet["Growth"] = WeakSet()


class Growth:
    """Grows a model while your own loop trains it.

    Args:
        model, optimizer: as your loop uses them.
        example: a batch of the model's inputs: a tensor, a tuple of arguments or a dict of them.
        decisions: how often `decide` will be called; the last call closes the run.
        other_examples: further batches in which sites must keep their width. Where lengths
            differ between batches, only seeds for any length grow.
        train_rows: number of training rows; a learned controller uses it.
        budget: limits on the whole grown model.
        controller: "heuristic", the path of a saved policy, or a controller.
        val_loader, score: with both, growth measures the metric and every seed's contribution
            itself. `score` maps a batch to one score per example, 0 to 1. Without them, `decide`
            needs the validation metric.
        scheduler: one that already drives the optimizer; new weights follow it.
        sites, exclude: names of modules to grow at, or not to; see `find_sites`.
        kind: the kind of sites where the trace is wrong, by name: "vector", "series", "image" or
            "tokens".
        blueprints: names of the seeds that may grow; by default all that fit, or those that a
            learned controller was trained with.
        frozen: switch off `requires_grad` for all weights but the output layer's, so that only it
            and the seeds train: a trained model adapts to other data without forgetting.
        rent: metric that a seed must gain per unit of log(1 + its parameters / the model's), plus
            the same for multiply-adds.
        max_germinations: most seeds that may be started.
        shadow_training: train new seeds by `shadow_loss` before they change the output.
        rng_seed: of the initial weights of seeds.
        metric: name of the metric in the ledger.
        ranks: whose gradients your loop averages, with a model that is not wrapped.

    A model in `DistributedDataParallel` grows on all its ranks: rank 0 decides, seeds' gradients are
    averaged like the model's, and a metric given to `decide` is averaged too. The validation loader
    may be the same on all ranks, or have a `DistributedSampler`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        *,
        example: Any,
        decisions: int,
        other_examples: Sequence[Any] = (),
        train_rows: int | None = None,
        budget: Budget | None = None,
        controller: str | Path | Controller = "heuristic",
        val_loader: Iterable[Any] | None = None,
        score: Score | None = None,
        scheduler: AnyScheduler | None = None,
        sites: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        kind: Mapping[str, str] | None = None,
        blueprints: Sequence[str] | None = None,
        rent: float = DEFAULT_RENT,
        max_germinations: int = 100,
        shadow_training: bool = False,
        rng_seed: int = 0,
        metric: str = "accuracy",
        frozen: bool = False,
        ranks: Ranks = ALONE,
    ):
        warn_if_not_connected()
        model, ranks = unwrapped(model, ranks)
        preparation.check_arguments(model, optimizer, decisions, budget, rent, rng_seed)
        self.model, self.optimizer, self.example = model, optimizer, example
        self.ranks, self.is_closed = ranks, False
        modules, others = set(model.modules()), (g for g in _instances if not g.is_closed)
        if not all(modules.isdisjoint(other.model.modules()) for other in others):
            # their budgets would conflict
            raise ValueError("another growth of this model is not closed yet; close() it first")
        if frozen:
            preparation.freeze_all_but_head(model, example)
        data = ranks.broadcast(DataFacts.of(example, train_rows))
        self.decisions, self.budget = decisions, budget or Budget()
        # the last call of `decide` only closes the run
        self.controller = made = controllers.make_controller(controller, decisions - 1)
        self._heuristic = made if isinstance(made, EvidenceController) else None
        self.scheduler, self.shadow_training = scheduler, shadow_training
        self._rent, self._max_germinations = rent, max_germinations
        self._validator = Validator(val_loader, score)
        menu = controllers.blueprints_for(self.controller, blueprints)
        widens = not isinstance(self.controller, LearnedController)  # it was trained without
        prepared = preparation.prepare_model(
            model, (example, *other_examples), self.budget, sites, exclude, kind, menu, widens
        )
        self._validator.check(model)
        self.controller.begin(torch.zeros(1, dtype=torch.int64))
        device = str(prepared.sites[0].device)
        ledger = Ledger(
            model=type(model).__name__,
            metric=metric,
            controller=controller_name(controller),
            before=network_record(model, prepared),
            budget=self.budget,
            facts={"device": device, "torch": torch.__version__, "rng seed": str(rng_seed)},
        )
        # arguments are checked, and now the optimizer is changed
        generator = torch.Generator().manual_seed(rng_seed)
        network = GrowingNetwork(model, optimizer, prepared, generator, scheduler, ranks)
        self._network = network
        self._reporter = Reporter(network, self.budget, prepared, data)
        self._history = History(1, len(network.slots), self._reporter.action_space.num_heads)
        self._recorder = Recorder(ledger, network, self._history)
        self._safe_points = SafePoints(network, self._recorder)
        self._gradients = SeedGradients(optimizer, network.slots)
        self._evidence = Evidence(network, self._reporter.may_grow)
        self.step = 0  # decisions made
        self.optimizer_steps = self._steps_at_decision = 0
        self.expected_steps = 0  # before the first decision, if it is known
        self._train_losses: list[Tensor] = []
        self._has_shadowed = False  # since the last step
        self._has_warned_of_close = False
        _instances.add(self)

    # ---- in the training loop

    def after_step(self, loss: Tensor | None = None) -> None:
        """Call after every `optimizer.step()`; `loss` is recorded in the ledger."""
        self.optimizer_steps += 1
        if loss is not None:
            self._train_losses.append(loss.detach())
        self._evidence.after_step()
        grown = [slot for slot in self._network.slots if slot.seed is not None]
        if not grown:
            return
        has_shadowed, self._has_shadowed = self._has_shadowed, False
        if self.shadow_training and not has_shadowed and self._network.in_shadow:
            raise ValueError(
                "shadow_training=True, but shadow_loss was not called in the last step; call "
                "growth.shadow_loss(lambda: loss of the batch) before optimizer.step()"
            )
        for slot in grown:
            if slot.alpha != 0.0 and not self.is_closed:
                slot.note_step()
        self._gradients.after_step()
        self._network.move_alphas()

    def shadow_loss(self, compute_loss: Callable[[], Tensor]) -> None:
        """With `shadow_training`: call before `optimizer.step()`, once per backward pass.

        `compute_loss` returns the loss of the same batch. Its gradient reaches only seeds in shadow
        training. Without such a seed it is not called.
        """
        self._has_shadowed = True
        self._network.shadow_loss(compute_loss)

    def decide(
        self, val_metric: Number | None = None, val_loss: Number | None = None
    ) -> DecisionRecord | None:
        """Let the controller make one decision and apply it; None if this call closed the run.

        `val_metric` is the metric of the current network, 0 to 1, higher is better. Calls after the
        last one warn once and do nothing.
        """
        if self._is_over():
            return None
        self._gradients.check()
        if self.step == self.decisions - 1:
            self.close(val_metric, val_loss)
            return None
        self._finish_step((val_metric, val_loss))
        return self._apply_decision()

    def close(self, val_metric: Number | None = None, val_loss: Number | None = None) -> None:
        """End growth: the model becomes the best committed network of the run.

        The last `decide` does it; call it to stop early. Uncommitted seeds are removed, with two
        exceptions: before the last decision, when the controller had no chance to commit, and
        without `score`, when the network without them was never measured. Then the best measured
        network keeps its seeds.
        """
        if self._is_over():
            return
        now = self._finish_step((val_metric, val_loss))
        is_early = self.step < self.decisions - 1
        if is_early or self._validator.score is None:
            self._safe_points.commit_best_seen(now)
        best = self._safe_points.best
        assert best is not None
        self._safe_points.restore(best)
        self.is_closed = True
        self._recorder.closed(self.step, best["step"])
        if self.ranks.size == 1:  # DDP averages only the weights that it was made with
            self._network.merge_branches()
        self.ledger.costs = self.ranks.broadcast(self.ledger.costs)  # clocks of ranks differ
        self.ledger.after = replace(self.ledger.before, params=self.params, macs=self.macs)

    # ---- the state of the run

    @property
    def sites(self) -> tuple[ModelSite, ...]:
        return tuple(slot.site for slot in self._network.slots)

    @property
    def seeds(self) -> dict[str, str]:
        """The blueprint of every seed in the network, by site."""
        blueprints = self._network.states.blueprint[0].tolist()
        grown = zip(self.sites, blueprints, strict=True)
        return {site.name: self._network.menu[b].name for site, b in grown if b >= 0}

    @property
    def ledger(self) -> Ledger:
        return self._recorder.ledger

    @property
    def params(self) -> int:
        """Parameters of the model and all its seeds."""
        return self._reporter.size[0]

    @property
    def macs(self) -> int:
        """Multiply-adds per example of the model and all its seeds."""
        return self._reporter.size[1]

    @property
    def best_metric(self) -> float | None:
        """Metric of the best committed network so far."""
        return None if self._safe_points.best is None else self._safe_points.best["metric"]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the model and its seeds, for gradient clipping."""
        yield from self._network.named_parameters().values()

    def plain_model(self) -> nn.Module:
        """A copy of the model with its committed seeds as ordinary modules, without slots."""
        return self._committed()

    def _committed(self) -> nn.Module:
        if self._network.uncommitted and not self.is_closed:
            left_out = ", ".join(self.sites[slot].name for slot in self._network.uncommitted)
            warnings.warn(
                f"growth is not closed, and the seeds at {left_out} are not committed: they are "
                "left out. To keep the best measured network, call close() first",
                stacklevel=3,
            )
        self._evidence.stop()  # a copy of the model would have its hooks
        return plain_model(self.model, self._network.slots)

    def describe(self) -> str:
        """Size, budget and sites, as text."""
        return f"{self.budget.describe(*self._reporter.model_size)}\n{site_table(self.sites)}"

    def export(
        self, path: str | Path, formats: Sequence[str] = FORMATS, *, tolerance: float = TOLERANCE
    ) -> dict[str, Path]:
        """Write the model with its committed seeds as files that do not need Esper, by format."""
        return export(self._committed(), self.example, path, formats, tolerance=tolerance)

    # ---- checkpoints

    def save(self, path: str | Path) -> None:
        """Write the whole run to a file. Call it between two optimizer steps, in any stage.

        Of several ranks, rank 0 writes; all of them load the file.
        """
        checkpoint.save(self, path)

    def load(self, path: str | Path) -> None:
        """Resume from a file. This growth must be new and created like the saved one.

        A scheduler that was not passed to `Growth` is yours to save and load.
        """
        if self.step or self.optimizer_steps:
            raise ValueError("this growth has already started; load into a new one")
        self.ranks.broadcast(None)  # rank 0 may still write the file
        checkpoint.resume(self, path)
        if len(set(self.ranks.gather((self.step, self.optimizer_steps, self.params)))) > 1:
            raise ValueError(f"{path} is another file on another rank; give all ranks the same one")

    # ---- the parts of a decision

    def _is_over(self) -> bool:
        if self.is_closed and not self._has_warned_of_close:
            self._has_warned_of_close = True
            told = f"growth with decisions={self.decisions} is closed; this call does nothing"
            warnings.warn(told, stacklevel=3)
        return self.is_closed

    def _finish_step(self, given: Given) -> SafePoint | None:
        """Measure the trained network, let timed stage changes happen, roll back if it is broken.

        The stage changes do not affect the output: a seed that is removed here has alpha 0. Returns
        the network as it is now; None if it was never measured in this state.
        """
        self._evidence.stop()
        self._network.set_alphas(is_over=True)
        measured = self._measure(given)
        if self.step > 0:
            self._network.adopt(end_step(self._network.states))
            self._recorder.fates(self.step)
        broken = self._safe_points.why_broken(measured, has_grown=bool(self.ledger.seeds))
        broken = next(filter(None, self.ranks.gather(broken)), "")  # roll back on all ranks
        # measurements of a broken network say nothing about its seeds
        known = ({}, {}) if broken else (measured.contributions, self._gradients.norms)
        add_measured_seeds(self._history, *known)
        self._gradients.norms = {}
        self._record_step(measured)
        if broken:
            point = self._safe_points.recover()
            self._recorder.rolled_back(self.step, point["step"], broken)
            self._history.add_validation(torch.tensor([point["metric"]]))
            # a seed of it may have been pruned since
            return point if self._safe_points.has_all_seeds(point) else None
        metric, loss = torch.tensor([[measured.metric], [measured.loss_or_guess]])
        self._history.add_validation(metric, loss)
        self._safe_points.update(self.step, measured)
        return self._safe_points.last

    def _measure(self, given: Given) -> Measurement:
        """The metric and the contributions that the controller needs now, with all costs so far."""
        states, judged = self._network.states, None
        if self._heuristic is not None:
            is_judged = self._heuristic.judges(states.stage, states.stage_age)
            judged = is_judged[0].nonzero().flatten().tolist()
        # multiply-adds of the optimiser steps since the last decision, by the size of `example`
        if steps := self.optimizer_steps - self._steps_at_decision:
            self.ledger.add_cost("growing", steps * 3 * batch_size(self.example) * self.macs)
        start = time.perf_counter()
        self.ranks.copy_first(self._network.statistics())
        is_first = self._safe_points.best is None
        measured = self._validator.measure(self._network, given, is_first, judged)
        macs = self._evidence.macs + self.macs * measured.rows
        if macs:
            seconds = time.perf_counter() - start if measured.rows else None
            self.ledger.add_cost("measuring", macs, seconds)
        return measured

    def _record_step(self, measured: Measurement) -> None:
        losses, self._train_losses = self._train_losses, []
        loss = torch.stack(losses).mean() if losses else None
        if loss is not None:
            self.ranks.average([loss])
        self.ledger.steps.append(
            StepRecord(
                step=self.step,
                metric=measured.metric,
                params=self.params,
                macs=self.macs,
                train_loss=None if loss is None else float(loss),
                validation_loss=measured.loss,
                optimizer_steps=self.optimizer_steps,
                seeds=self._recorder.seed_states(),
            )
        )
        self._validator.warn_if_metric_falls_with_loss(self.ledger.steps)

    def _apply_decision(self) -> DecisionRecord:
        left, limits = self.decisions - 1 - self.step, (self._max_germinations, self._rent)
        reports = self._reporter.observe(self.step, left, self._history, *limits)
        action_space = self._reporter.action_space
        masks = compute_batch_masks(reports, action_space)
        heuristic = self._heuristic
        if heuristic is not None:
            heuristic.see(self._evidence.gains())
            self._evidence.clear()
        actions = self.controller.decide(reports, masks)
        controllers.check_legal(actions, masks)
        reason = ""
        if isinstance(self.controller, controllers.ExplainingController):
            reason = self.controller.reasons(reports, masks, actions)[0]
        actions, reason = self.ranks.broadcast((actions, reason))
        record = self._recorder.decision(self.step, actions[0], masks, reason)
        states = self._network.states
        transition = apply(states, actions, action_space, shadow_training=self.shadow_training)
        # as many steps as before the decision are expected after it
        steps = self.optimizer_steps - self._steps_at_decision or self.expected_steps
        self._steps_at_decision = self.optimizer_steps
        self._network.adopt(transition.then(begin_step), max(1, steps // RAMP_PARTS))
        self._history.add_action(actions)
        self._recorder.fates(self.step)
        for slot in self._network.slots:
            slot.is_called = False  # in validation
        self.step += 1
        if heuristic is not None and heuristic.wants_evidence(self.step / (self.decisions - 1)):
            self._evidence.start(self.step, steps)
        assert min(self.budget.left(*self._reporter.size)) >= 0, "the masks exceed the budget"
        return record
