"""Growing a model inside its own training loop: three lines.

    budget = esper.Budget(params=20_000)
    growth = esper.Growth(model, optimizer, example=inputs, budget=budget, decisions=25)
    for epoch in range(25):
        for inputs, targets in train_loader:
            ...                       # forward, backward, optimizer.step()
            growth.after_step()
        growth.decide(accuracy_on_validation_data)

After the last of its decisions the model is the best committed network that was seen, and
`growth.plain_model()` is a copy of it with no slot left.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn, optim

from esper.growing.bookkeeping import Bookkeeper, facts, network_record
from esper.growing.budget import Budget
from esper.growing.checkpoint import (
    check_fit,
    group_settings,
    network_from_dict,
    network_to_dict,
    random_states,
    read,
    set_random_states,
    write,
)
from esper.growing.controllers import (
    StatefulController,
    check_legal,
    check_time,
    controller_name,
    make_controller,
    reason_of,
)
from esper.growing.data import DataFacts
from esper.growing.export import FORMATS, export
from esper.growing.gradient_use import GradientUse
from esper.growing.ledger import BudgetRecord, DecisionRecord, Ledger, RollbackRecord
from esper.growing.measuring import (
    Measurement,
    Number,
    Score,
    check_metric,
    check_score,
    measure,
    told,
)
from esper.growing.network import GrowingNetwork
from esper.growing.plain import check_plain, plain_model
from esper.growing.reporting import Reporter, add_measured_seeds
from esper.growing.safe_points import SafePoint, SafePoints
from esper.growing.seed_groups import AnyScheduler
from esper.growing.sites import ModelSite, count_macs, count_params, site_table, trace_sites
from esper.growing.slots import disable_nested_tensors
from esper.growing.starting import check_arguments, check_measuring, fitting_menu, seed_costs
from esper.kasmina.lifecycle import apply, begin_step, end_step
from esper.leyline.protocols import Controller
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tolaria.reports import History

DEFAULT_RENT = 0.02  # little: the budget is the limit, rent keeps out what brings nothing

_made_here: WeakSet["Growth"] = WeakSet()  # those that are still in use


class Growth:
    """A model that grows while its owner trains it.

    `example` is a batch of the model's inputs: a tensor, a tuple of arguments or a dict of them;
    sites must keep their shape in `other_examples` too. `decisions` is how often `decide` will be
    called, which a controller plans by; the last call closes the run. With `val_loader` and
    `score` (a batch's scores, one per example, 0 to 1) growth measures itself what each seed is
    worth; without, `decide` needs the validation metric. `shadow_training` trains new seeds by
    `shadow_loss` before the model feels them.
    `rent` is the metric that a seed has to bring per unit of log(1 + its parameters / the model's).
    `train_rows`, the number of training rows, is shown to the controller with what `example` says
    of the data.
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
        blueprints: Sequence[str] | None = None,
        rent: float = DEFAULT_RENT,
        max_germinations: int = 100,
        shadow_training: bool = False,
        rng_seed: int = 0,
        metric: str = "accuracy",
    ):
        check_arguments(
            model,
            optimizer,
            decisions=decisions,
            budget=budget,
            rent=rent,
            rng_seed=rng_seed,
        )
        check_measuring(val_loader, score)
        _check_alone(model)
        data = DataFacts.of(example, train_rows)
        self.model, self.optimizer, self.example = model, optimizer, example
        self.budget = budget or Budget()
        self.controller = make_controller(controller)
        self.decisions = decisions
        self.scheduler = scheduler
        self.shadow_training = shadow_training
        self._val_loader, self._score = val_loader, score
        trace = trace_sites(model, example, *other_examples)
        chosen = trace.choose(sites, exclude)
        disable_nested_tensors(model, chosen)
        check_plain(model, chosen, example)
        model_params, model_macs = count_params(model), count_macs(model, example)
        self.budget.check(model_params, model_macs)
        menu = fitting_menu(chosen, blueprints)
        self.budget.check_room(model_params, model_macs, seed_costs(chosen, menu))
        if val_loader is not None and score is not None:
            check_score(model, val_loader, score)
        check_time(self.controller, decisions - 1)  # the last call only closes the run
        self.controller.begin(torch.zeros(1, dtype=torch.int64))
        generator = torch.Generator().manual_seed(rng_seed)
        self._network = GrowingNetwork(
            model, optimizer, chosen, menu, scheduler=scheduler, generator=generator
        )
        self._reporter = Reporter(
            self._network,
            self.budget,
            model_params=model_params,
            model_macs=model_macs,
            data=data,
            rent=rent,
            max_germinations=max_germinations,
        )
        self._evidence = History(1, len(chosen), self._reporter.action_space.num_heads)
        ledger = Ledger(
            model=type(model).__name__,
            metric=metric,
            controller=controller_name(controller),
            before=network_record(model, trace, model_params, model_macs),
            budget=BudgetRecord(**vars(self.budget)),
            facts=facts(chosen[0].device, rng_seed),
        )
        self._books = Bookkeeper(ledger, self._network, self._reporter)
        self._safe = SafePoints(self._network, self._books)
        self.step = 0  # decisions made
        self.optimizer_steps = 0
        self._train_losses: list[Tensor] = []
        self._gradient_norms: dict[int, Tensor] = {}  # by slot, of the last step
        self._has_shadowed = False  # since the last step
        self._gradient_use = GradientUse()
        self.is_closed = self._has_warned = False
        _made_here.add(self)

    # ---- in the training loop

    def after_step(self, loss: Tensor | None = None) -> None:
        """After every step of the optimiser; `loss`, if given, is for the ledger."""
        self.optimizer_steps += 1
        if loss is not None:
            self._train_losses.append(loss.detach())
        grown = [(i, slot) for i, slot in enumerate(self._network.slots) if slot.seed is not None]
        if not grown:
            return
        self._check_shadow()
        self._gradient_use.note(self._network.called)
        for index, slot in grown:
            if slot.alpha != 0.0 and not self.is_closed:
                slot.note_step()
            self._note_gradients(index)

    def shadow_loss(self, compute_loss: Callable[[], Tensor]) -> None:
        """With `shadow_training`: before `optimizer.step()`, once for each backward pass.

        `compute_loss` makes the loss that was called `backward` on. Its gradient reaches the
        seeds that train behind the model and nothing else; without such a seed it is not called.
        """
        self._has_shadowed = True
        self._network.shadow_loss(compute_loss)

    def decide(
        self, val_metric: Number | None = None, val_loss: Number | None = None
    ) -> DecisionRecord | None:
        """One decision of the controller, carried out; None when the last call closed the run.

        Later calls do nothing but warn once: training that is spent is not lost to a count.

        `val_metric` is the network's as it is now, 0 to 1, higher is better.
        """
        if self._is_over():
            return None
        self._gradient_use.check()
        if self.step == self.decisions - 1:
            self.close(val_metric, val_loss)
            return None
        self._take_stock(val_metric, val_loss)
        return self._act()

    def close(self, val_metric: Number | None = None, val_loss: Number | None = None) -> None:
        """The end of growth: the model becomes the best committed network that was seen.

        Seeds that the controller has not committed are taken out. But before the last of the
        decisions it had not yet come to that, and without `score` nobody measured the network
        without them: then the seeds of the best network that was measured stay. Call it to stop
        early; `decide` does it on its last call.
        """
        if self._is_over():
            return
        now = self._take_stock(val_metric, val_loss)
        is_early = self.step < self.decisions - 1
        if (is_early or self._score is None) and self._safe.commit_best_seen(now):
            self._books.kept(self.step, "the best metric was measured with it")
        best = self._safe.best
        assert best is not None
        self._safe.go_back(best)
        self.is_closed = True
        self._books.last_fates(self.step, best.step, self._evidence)
        self.ledger.conclude(after=replace(self.ledger.before, params=self.params, macs=self.macs))

    # ---- what there is

    @property
    def sites(self) -> tuple[ModelSite, ...]:
        return tuple(slot.site for slot in self._network.slots)

    @property
    def seeds(self) -> dict[str, str]:
        """The blueprints of the seeds that are in the network now, by site."""
        return {
            slot.site.name: self._network.menu[int(blueprint)].name
            for slot, blueprint in zip(
                self._network.slots, self._network.states.blueprint[0], strict=True
            )
            if slot.seed is not None
        }

    @property
    def ledger(self) -> Ledger:
        return self._books.ledger

    @property
    def params(self) -> int:
        """Of the model and every seed in it."""
        return self._reporter.params

    @property
    def macs(self) -> int:
        """Multiply-adds per example, likewise."""
        return self._reporter.macs

    @property
    def best_metric(self) -> float | None:
        """Of the best committed network so far."""
        return None if self._safe.best is None else self._safe.best.metric

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's weights and its seeds': what to clip the gradients of."""
        return self._network.parameters()

    def plain_model(self) -> nn.Module:
        """A copy of the model with its committed seeds as ordinary modules, and no slot."""
        return self._committed()

    def describe(self) -> str:
        """Sites, costs and budget, before anything is spent."""
        own = (self._reporter.model_params, self._reporter.model_macs)
        return f"{self.budget.describe(*own)}\n{site_table(self.sites)}"

    def export(self, path: str | Path, formats: Sequence[str] = FORMATS) -> dict[str, Path]:
        """Writes the model with its committed seeds as files that need no Esper, by format."""
        return export(self._committed(), self.example, path, formats)

    def _committed(self) -> nn.Module:
        if self._network.uncommitted and not self.is_closed:
            left_out = ", ".join(self.sites[slot].name for slot in self._network.uncommitted)
            warnings.warn(
                f"growth is not closed, and the seeds at {left_out} are not committed: they are "
                "left out here; call close() first to stop with the best network that was measured",
                stacklevel=3,
            )
        return plain_model(self.model, self._network.slots)

    # ---- checkpoints

    @property
    def _made(self) -> dict[str, Any]:
        """What a run that goes on from a file must have in common with the one that saved it."""
        return {
            "sites": [site.name for site in self.sites],
            "blueprints": [blueprint.name for blueprint in self._network.menu],
            "optimizer": type(self.optimizer).__name__,
            **self._network.made,
            "scheduler": self.scheduler and type(self.scheduler).__name__,
        }

    def save(self, path: str | Path) -> None:
        """All of the run in one file; between two steps of the optimiser, whatever the stages."""
        contents = {
            "made": self._made,
            "size": (self.params, self.macs),
            "data": tuple(self._reporter.data),
            "network": network_to_dict(self._network.capture()),
            "settings": group_settings(self.optimizer),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "safe_points": self._safe.to_dict(),
            "evidence": self._evidence.to_dict(),
            "counts": (self.step, self.optimizer_steps, self.is_closed),
            "train_losses": self._train_losses,
            "gradient_norms": self._gradient_norms,
            "ledger": self.ledger.to_json(),
            "seed_ids": self._books.seed_ids,
            "memory": self.controller.memory()
            if isinstance(self.controller, StatefulController)
            else {},
            "births": self._network.generator.get_state(),
            "random": random_states(),
        }
        write(path, contents)

    def load(self, path: str | Path) -> None:
        """Go on from a file; this growth must be new and made as the one that saved it was.

        A scheduler that growth was not given is its owner's to save and load.
        """
        if self.step or self.optimizer_steps:
            raise ValueError("this growth is under way; load into a new one")
        saved = read(path)
        check_fit(path, saved, made=self._made, decisions=self.decisions, budget=self.budget)
        self._reporter.data = DataFacts(*saved["data"])  # another example may look different
        self._network.restore(network_from_dict(saved["network"]))
        for group, settings in zip(self.optimizer.param_groups, saved["settings"], strict=True):
            group.update(settings)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        self._safe.load(saved["safe_points"])
        self._evidence = History.from_dict(saved["evidence"])
        self.step, self.optimizer_steps, self.is_closed = saved["counts"]
        self._train_losses, self._gradient_norms = saved["train_losses"], saved["gradient_norms"]
        self._books.ledger = Ledger.from_json(saved["ledger"])
        self._books.seed_ids = saved["seed_ids"]
        if isinstance(self.controller, StatefulController):
            self.controller.recall(saved["memory"])
        self._network.generator.set_state(saved["births"])
        set_random_states(saved["random"])

    # ---- the parts of a decision

    def _is_over(self) -> bool:
        if self.is_closed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"growth with decisions={self.decisions} is closed: the model trains on as it is, "
                "and calls do nothing",
                stacklevel=3,
            )
        return self.is_closed

    def _take_stock(self, val_metric: Number | None, val_loss: Number | None) -> SafePoint | None:
        """The end of the step that was trained: all is measured, and timed moves happen.

        They change no output: a seed that goes now has alpha 0 already. Gives the network as it is
        then; None if it was taken back to one that was not measured as it is.
        """
        measured = self._measured(val_metric, val_loss)
        if self.step > 0:
            self._network.adopt(end_step(self._network.states))
            self._settle_fates()
        broken = self._safe.why_broken(measured)
        # what a broken network shows of its seeds is no evidence
        contributions = {} if broken else measured.contributions
        gradient_norms = {} if broken else self._gradient_norms
        add_measured_seeds(self._evidence, contributions, gradient_norms)
        self._gradient_norms = {}
        self._books.step(
            self.step,
            measured.metric,
            self._evidence,
            val_loss=measured.loss,
            train_loss=self._mean_train_loss(),
            optimizer_steps=self.optimizer_steps,
        )
        if broken:
            return self._roll_back(broken)
        metric, loss = torch.tensor([[measured.metric], [measured.loss_or_guess]])
        self._evidence.add_validation(metric, loss)
        self._safe.keep(self.step, measured.metric, measured.committed_metric)
        return self._safe.last

    def _act(self) -> DecisionRecord:
        steps_left = self.decisions - 1 - self.step
        reports = self._reporter.observe(self.step, steps_left, self._evidence)
        masks = compute_batch_masks(reports, self._reporter.action_space)
        actions = self.controller.decide(reports, masks)
        check_legal(actions, masks)
        reason = reason_of(self.controller, reports, masks, actions)
        record = self._books.decision(self.step, actions[0], masks, reason)
        transition = apply(
            self._network.states,
            actions,
            self._reporter.action_space,
            shadow_training=self.shadow_training,
        )
        self._network.adopt(transition.then(begin_step))
        self._evidence.add_action(actions)
        self._settle_fates()
        self._gradient_use.begin(self._network.learning)
        self._network.forget_calls()
        self.step += 1
        for limit, used in ((self.budget.params, self.params), (self.budget.macs, self.macs)):
            assert limit is None or used <= limit, "the masks let the budget be exceeded"
        return record

    def _settle_fates(self) -> None:
        """What became of seeds is written down; what was known of those that are gone is not."""
        self._books.fates(self.step, self._evidence)
        self._evidence.forget(~self._network.states.has_seed)

    def _measured(self, val_metric: Number | None, val_loss: Number | None) -> Measurement:
        if self._val_loader is not None and self._score is not None:
            if val_metric is not None:
                raise ValueError("growth measures the metric itself with score=; leave it out here")
            measured = measure(self._network, self._val_loader, self._score)
        elif val_metric is None:
            raise ValueError(
                "decide() needs the validation metric, or Growth a val_loader and score"
            )
        else:
            measured = told(val_metric, val_loss, is_committed=not self._network.uncommitted)
        if self._safe.best is None:
            check_metric(measured.metric)
        is_known = 0.0 <= measured.metric <= 1.0
        return measured if is_known else measured._replace(metric=math.nan)

    def _roll_back(self, reason: str) -> SafePoint | None:
        """Goes back to a safe point; None if a seed of it was pruned since."""
        point = self._safe.recover()
        self._books.rolled_back(self.step, reason)
        self.ledger.record_rollback(
            RollbackRecord(step=self.step, to_step=point.step, reason=reason)
        )
        self._evidence.add_validation(torch.tensor([point.metric]))
        self._evidence.forget(~self._network.states.has_seed)
        return point if self._safe.is_whole(point) else None

    def _check_shadow(self) -> None:
        has_shadowed, self._has_shadowed = self._has_shadowed, False
        if self.shadow_training and not has_shadowed and self._network.in_shadow:
            raise ValueError(
                "shadow_training=True, but shadow_loss was not called in the last step, so the seed "
                "behind the model did not train; call growth.shadow_loss(lambda: loss of the "
                "batch) before optimizer.step()"
            )

    def _note_gradients(self, index: int) -> None:
        seed = self._network.seed(index)
        gradients = [p.grad for p in seed.parameters() if p.grad is not None]
        if not gradients:
            return
        count = sum(g.numel() for g in gradients)
        norm = torch.nn.utils.get_total_norm(gradients) / math.sqrt(count)
        self._gradient_norms[index] = norm.detach()
        for parameter in seed.parameters():
            parameter.grad = None  # the model's own zero_grad() would not reach it

    def _mean_train_loss(self) -> float | None:
        losses, self._train_losses = self._train_losses, []
        return float(torch.stack(losses).mean()) if losses else None


def _check_alone(model: nn.Module) -> None:
    """Raise if another growth is under way in the model: each would keep a budget of its own."""
    modules = set(model.modules())
    for other in _made_here:
        if not other.is_closed and not modules.isdisjoint(other.model.modules()):
            raise ValueError(
                "another growth of this model is not closed yet; close() it first, or make the "
                "model and its optimizer anew"
            )
