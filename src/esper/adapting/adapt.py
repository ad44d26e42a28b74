"""`esper.adapt`: adapt a trained classifier to shifted data with few labelled rows.

    result = esper.adapt(model, rows, labels)
    result.model(x)        # the adapted model
    result.remove()        # the original, bit-identical

A controller that has practised on many shifts looks at the rows, decides where the model changes
and what is added there. Its plans are compared on held-out rows with the usual rules: the model as
it is, a new head, LP-FT (a new head first, then all weights; Kumar et al. 2022) and fine-tuning. Of
those within half a standard error of the best, the controller chooses which is trained again on
all rows.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, product
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree

from esper.adapting.adapted import Adapted, call_with, tuned_name
from esper.adapting.controller import (
    ANCHORS,
    MAX_TRIES,
    NUM_CHOICES,
    AdaptationController,
    Choice,
    Known,
    find_controller,
    flat_choice,
    plan_and_rate,
    validation_criterion,
)
from esper.adapting.fitting import fit
from esper.adapting.plans import MENU, RATES, HeadMode, Places, Plan, What, find_places
from esper.adapting.result import AdaptationResult, conclude, reasons_for
from esper.adapting.rows import LabelledRows, as_inputs, first_float, read_rows
from esper.adapting.signals import SIGNALS, logits_of, measure
from esper.leyline.protocols import controller_name
from esper.nissa.console import Report, progress_bar
from esper.nissa.ledger import Ledger, NetworkRecord, TrialRecord
from esper.nissa.page import check_page, try_write_page, with_page
from esper.runtime.checks import whole_number
from esper.surgery.eval_mode import untouched_randomness
from esper.surgery.inputs import forward, tensors
from esper.surgery.sharding import check_not_sharded
from esper.surgery.sites import count_params
from esper.surgery.tracing import without_graphs

MOST_SHARE = 4.0  # of the budget, in the size of the model
AS_IS, *RIVALS = map(plan_and_rate, ANCHORS)  # the usual rules
_USUAL = "a usual rule"

Controller = str | Path | AdaptationController


def adapt(
    model: nn.Module,
    rows: Any,
    labels: Tensor | None = None,
    *,
    budget: int | float | None = None,
    controller: Controller = "tamiyo",
    tries: int = 2,
    steps: int = 300,
    minibatch: int = 32,
    validation: float = 0.25,
    source: Any = None,
    page: str | Path | None = None,
    rng_seed: int = 0,
    progress: bool = True,
) -> AdaptationResult:
    """Adapt `model` to `rows` and `labels`; the model itself is not changed.

    Args:
        model: a trained classifier that returns `[rows, classes]`, one logit per row (two
            classes), or an object or dict with such `logits`.
        rows: a tensor or array of inputs, or a tuple or dict of the model's arguments; or, without
            `labels`, a loader of pairs `(inputs, labels)`.
        labels: the class of every row, from 0.
        budget: limit on the parameters of the change besides the head: a whole number, or a share
            of the model's own parameters such as 0.25.
        controller: "tamiyo" (trained, ships with Esper), the path of a file from
            `python -m adapt_practice` (in a clone), or a controller.
        tries: plans that the controller may try, besides the usual rules.
        steps: length of each training.
        minibatch: rows per step.
        validation: share of the rows held out to compare plans.
        source: some inputs that the model was trained on, if there are any; shifts of their
            statistics help to decide.
        page: file for a page that shows what is tried, what was decided and why. It is written
            while plans are tried, and reloads itself in a browser until the run is over.
    """
    tries, steps = whole_number("tries", tries, 1), whole_number("steps", steps, 1)
    minibatch = whole_number("minibatch", minibatch, 1)
    rng_seed = whole_number("rng_seed", rng_seed, 0)
    if tries > MAX_TRIES:
        raise ValueError(f"tries={tries}; the controller was trained with up to {MAX_TRIES}")
    check_page(page)
    chosen = find_controller(controller)
    _check_model(model)
    with torch.inference_mode(False), untouched_randomness(model, rows):
        data = read_rows(rows, labels, first_float(model), validation, rng_seed)
        host = copy.deepcopy(model, without_graphs(model)).eval()
        is_perfect = _check_output(host, data)
        places = find_places(host, data.part(data.train[:8])[0])
        limit = _limit(model, budget)
        legal = _legal_plans(host, places, limit)
        work = _Work(host, places, data, steps, minibatch, rng_seed)
        signals = work.signals(source)
        known = dict(zip(SIGNALS, signals[0].tolist(), strict=True))
        num_rows, held_out = len(data.labels), len(data.held_out)
        allowed = "none" if limit == math.inf else f"{int(limit):,} parameters besides the head"
        counts = f"{num_rows}, of which {held_out} are held out"
        facts = {"signals": reasons_for(known), "rows": counts, "budget": allowed}
        ledger = Ledger(
            model=type(host).__name__,
            metric="accuracy",
            controller=controller_name(controller),
            before=NetworkRecord(params=count_params(host), macs=0),
            facts=facts,
        )
        rivals = [rival for rival in RIVALS if rival[0] in legal]
        total = 0 if is_perfect else steps * (len(rivals) + tries + 1)
        heading = f"{ledger.model}: {num_rows} rows; {facts['signals']}"
        with progress_bar(max(1, total), heading, enabled=progress) as bar:
            trials = _Trials(work, ledger, legal, with_page(bar, ledger, page, total))
            trials.add(AS_IS, "the model as it is")
            kept = AS_IS
            if not is_perfect:
                for rival in rivals:
                    trials.add(rival, _USUAL)
                kept = trials.choose(chosen, signals, limit, tries)
                if not any(trial.loss is not None for trial in ledger.trials[1:]):
                    warnings.warn(
                        "every training diverged; give rows scaled as in the model's training",
                        stacklevel=2,
                    )
            kept, adapted = trials.train_on_all_rows(kept)
        accuracy = conclude(ledger, *kept)
        if is_perfect:
            facts["result"] = "the model is right on every row; nothing was changed"
        accuracy |= {t.plan: t.metric or 0.0 for t in ledger.trials if t.proposer == _USUAL}
        result = AdaptationResult.of(
            model,
            places,
            kept[0],
            adapted.changes(),
            example=data.part(torch.arange(2))[0],
            rate=kept[1],
            accuracy=accuracy,
            validation_rows=held_out,
            signals=known,
            ledger=ledger,
        )
        try_write_page(ledger, page)
    if progress:
        print(result)
    return result


@dataclass(frozen=True)
class _Work:
    """The model, its rows, and trainings of plans."""

    model: nn.Module
    places: Places
    data: LabelledRows
    steps: int
    minibatch: int
    rng_seed: int

    def fit(self, choice: Choice, rows: Tensor, report: Callable[[], None]) -> Adapted:
        """The model with a plan's change, trained on these rows."""
        plan, rate = choice
        adapted = Adapted(self.model, self.places, plan, self.rng_seed).eval()
        change, features = adapted.changes(), self.places.features
        rng = torch.Generator().manual_seed(self.rng_seed)
        draws = torch.rand(self.steps, self.minibatch, generator=rng)
        order = rows[(draws * len(rows)).long().to(rows.device)]
        head = self.model.get_submodule(features)
        own = {
            name.removeprefix(f"{features}."): change[tuned_name(name)]
            for name in (self.places.head if plan.head != HeadMode.KEEP else ())
        }

        def loss_at(step: int) -> Tensor:
            inputs, labels = self.data.part(order[step])
            moving = {name for name, tensor in change.items() if tensor.requires_grad}
            if self._head_inputs is not None and moving <= adapted.head:
                output = call_with(head, own, (self._head_inputs[order[step]],))
            else:
                output = forward(adapted, inputs)
            return F.cross_entropy(logits_of(output), labels)

        first = adapted.trained_first
        fit(change, loss_at, rate=rate, steps=self.steps, first=first, report=report)
        return adapted

    @cached_property
    @torch.no_grad()
    def _head_inputs(self) -> Tensor | None:
        """What the head reads for every row; None if the model changes its output afterwards."""
        if not self.places.head:
            return None
        calls: list[Any] = []
        head = self.model.get_submodule(self.places.features)
        with head.register_forward_hook(lambda _head, *call: calls.append(call), with_kwargs=True):
            logits = logits_of(forward(self.model, self.data.inputs))
        args, kwargs, output = calls[-1]
        is_plain = len(calls) == len(args) == 1 and not kwargs and isinstance(output, Tensor)
        is_last = is_plain and output.dim() == 2 and torch.equal(logits_of(output), logits)
        return args[0] if is_last else None

    def signals(self, source: Any) -> Tensor:
        """`[1, S]` from rows in random order: the first ones are read, and labels may be sorted."""
        if source is not None:
            source = as_inputs(source, first_float(self.model), "source")
            given, expected = (tuple(tensors(x)[0].shape[1:]) for x in (source, self.data.inputs))
            if given != expected or not len(tensors(source)[0]):
                shape = f"rows of shape {given}" if given != expected else "no rows"
                raise ValueError(f"source has {shape}; give some of shape {expected}, or none")
        own = (*self.model.named_parameters(), *self.model.named_buffers())
        weights = {name: tensor.detach() for name, tensor in own}
        rows, labels = self.data.part(torch.cat([self.data.train, self.data.held_out]))
        weights, rows, labels, source = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.unsqueeze(0), (weights, rows, labels, source)
        )
        counts = torch.tensor([labels.shape[1]], device=labels.device)
        with torch.enable_grad():
            return measure(self.model, self.places, weights, rows, labels, counts, source).cpu()


class _Trials:
    """Trials, each in the ledger from its beginning, and optimiser steps on a progress bar."""

    def __init__(self, work: _Work, ledger: Ledger, legal: dict[Plan, int], bar: Report):
        self.results: dict[Choice, float] = {}  # validation criteria
        self._work, self._records, self._legal = work, ledger.trials, legal
        self._bar, self._count, self._status = bar, 0, ""

    def add(self, choice: Choice, proposer: str) -> float:
        """Train a plan on the training rows; returns the criterion on the held-out ones."""
        (plan, rate), start, data = choice, time.monotonic(), self._work.data
        self._status = f"{proposer}: {plan}"
        # tuned and low-rank weights merge into the model, only branches stay
        params = self._legal.get(plan, 0) if plan.what in (What.SCALE, What.SEED) else 0
        record = TrialRecord(plan=str(plan), rate=rate, proposer=proposer, params=params)
        self._records.append(record)
        adapted = self._work.fit(choice, data.train, self._step)
        inputs, labels = data.part(data.held_out)
        with torch.no_grad():
            logits = logits_of(forward(adapted, inputs))
        loss = F.cross_entropy(logits, labels)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        self._records[-1] = replace(
            record,
            metric=float(accuracy),
            loss=float(loss),
            trained=sum(tensor.numel() for tensor in adapted.changes().values()),
            seconds=time.monotonic() - start,
        )
        criterion = float(validation_criterion(accuracy, loss.float()))
        self.results[choice] = criterion if loss.isfinite() else -1.0  # the training diverged
        return self.results[choice]

    def choose(
        self, controller: AdaptationController, signals: Tensor, limit: float, tries: int
    ) -> Choice:
        """Try the controller's proposals; returns what it keeps of all that was tried."""
        size, numbers = count_params(self._work.model), count(1)
        added = torch.full((1, NUM_CHOICES), torch.nan)
        for plan, rate in product(self._legal, RATES):
            added[0, flat_choice(plan, rate)] = self._legal[plan] / size
        held_out = torch.tensor([len(self._work.data.held_out)])
        usual = [self.results.get(plan_and_rate(anchor), torch.nan) for anchor in ANCHORS]
        return controller.choose(
            Known(signals, held_out, added, torch.tensor([usual])),
            lambda choice: self.add(choice, f"proposal {next(numbers)} of {tries}"),
            budget=limit / size,
            tries=tries,
        )

    def train_on_all_rows(self, choice: Choice) -> tuple[Choice, Adapted]:
        """Train what is kept again; if that diverges, nothing is changed."""
        self._status = f"training {choice[0]} on all rows"
        everything = torch.arange(len(self._work.data.labels), device=self._work.data.labels.device)
        adapted = self._work.fit(choice, everything, self._step)
        if not all(tensor.isfinite().all() for tensor in adapted.changes().values()):
            warnings.warn(
                f"training {choice[0]} on all rows diverged; nothing was changed", stacklevel=3
            )
            choice, adapted = AS_IS, self._work.fit(AS_IS, everything, self._step)
        self._bar(self._count, "done")
        return choice, adapted

    def _step(self) -> None:
        self._count += 1
        self._bar(self._count, self._status)


# -- checks ------------------------------------------------------------------------------------


def _check_model(model: nn.Module) -> None:
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {name}; give a trained nn.Module")
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise ValueError(f"the model is wrapped in {name}; give model.module")
    check_not_sharded(model, "the model whole")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("a scripted or traced model cannot change; give the nn.Module it is from")
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{name} has no parameters; give a trained model")
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise ValueError("float16 is too coarse to train in; give model.float() or bfloat16")


@torch.no_grad()
def _check_output(model: nn.Module, data: LabelledRows) -> bool:
    """Raise if the model and the rows do not fit; returns whether it is right on every row."""
    try:
        output = forward(model, data.inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        first = tensors(data.inputs)[0]
        raise ValueError(
            f"the model does not accept these rows, {first.dtype} of shape {tuple(first.shape)}: "
            f"{str(error).splitlines()[0]}. Give them as in its training"
        ) from error
    logits = logits_of(output)
    is_single = not bool(logits[:, 0].any())  # one output: class 0 has the logit 0
    is_one = torch.allclose(logits.sum(1), torch.ones_like(logits[:, 0]), atol=1e-4)
    is_share = is_single and bool(logits.any()) and bool((logits <= 1).all())
    if bool((logits >= 0).all()) and (is_one or is_share):
        warnings.warn(
            "the model returns probabilities: give one without the softmax or sigmoid at its end, "
            "or training will hardly move it",
            stacklevel=4,  # no_grad is a frame
        )
    largest, smallest = int(data.labels.max()), int(data.labels.min())
    if smallest < 0 or largest >= logits.shape[1]:
        raise ValueError(
            f"label {min(smallest, 0) or largest}; classes are numbered from 0, and the model has "
            f"{logits.shape[1]} outputs. Leave unlabelled rows out; for more classes, give it a "
            "larger output layer first"
        )
    return bool((logits.argmax(-1) == data.labels).all())


def _limit(model: nn.Module, budget: int | float | None) -> float:
    """The budget in parameters."""
    if budget is None:
        return math.inf
    if isinstance(budget, bool) or not isinstance(budget, Real) or not budget > 0:
        raise ValueError(f"budget={budget!r}; use a number of parameters, or a share such as 0.25")
    if isinstance(budget, Integral):
        return int(budget)
    if budget > MOST_SHARE:
        raise ValueError(
            f"budget={budget!r} is a share of the model, at most {MOST_SHARE:g}; give a number of "
            "parameters as an int, or leave it out for no limit"
        )
    return float(budget) * count_params(model)


def _legal_plans(model: nn.Module, places: Places, limit: float) -> dict[Plan, int]:
    """The plans of the menu that the model offers within the limit, with their parameters."""
    costs = {plan: Adapted(model, places, plan).num_added for plan in MENU if places.offers(plan)}
    changing = {plan: cost for plan, cost in costs.items() if cost}
    if not changing and not places.head:
        raise ValueError(
            "nothing can change in this model: no module returns a tensor with channels and no "
            "output layer was found; `esper sites` lists what was looked at"
        )
    if changing and limit < min(changing.values()):
        plan = min(changing, key=lambda plan: changing[plan])
        raise ValueError(
            f"the budget allows {int(limit):,} parameters; the smallest change ({plan}) has "
            f"{changing[plan]:,}"
        )
    return {plan: cost for plan, cost in costs.items() if cost <= limit}
