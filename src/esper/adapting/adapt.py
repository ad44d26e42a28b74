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
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree

from esper.adapting.adapted import Adapted, call_with, tuned_name
from esper.adapting.controller import AdaptationController, find_controller
from esper.adapting.evidence import SIGNALS, logits_of, measure, source_statistics
from esper.adapting.fitting import fit
from esper.adapting.plans import MENU, PLANS, RATES, Places, Plan, What, find_places
from esper.adapting.practice import validation_criterion
from esper.adapting.result import AdaptationResult, conclude, new_ledger, reasons_for
from esper.adapting.rows import LabelledRows, as_inputs, first_float, read_rows
from esper.adapting.trial_envs import ANCHORS, MAX_TRIES, Known, plan_and_rate
from esper.growing.controllers import controller_name
from esper.growing.eval_mode import untouched_randomness
from esper.growing.inputs import arguments, forward, tensors
from esper.growing.ledger import Ledger, TrialRecord
from esper.growing.page import check_page, try_write_page, with_page
from esper.growing.preparation import check_not_sharded
from esper.growing.sites import count_params
from esper.growing.tracing import without_graphs
from esper.leyline.checks import whole_number
from esper.nissa.console import Report, progress_bar

MOST_SHARE = 4.0  # of the budget, in the size of the model
AS_IS, *RIVALS = map(plan_and_rate, ANCHORS)  # the usual rules

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
            `esper train-adapt`, or a controller.
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
        _check_output(host, data)
        places = find_places(host, data.part(data.train[:8])[0])
        limit = _limit(model, budget)
        legal = _legal_plans(host, places, limit)
        work = _Work(host, places, data, steps, minibatch, rng_seed)
        name = controller_name(controller)
        return _adapt(model, work, chosen, name, legal, limit, tries, source, page, progress)


class _Trial(NamedTuple):
    """A plan trained on the training rows, judged on the held-out ones."""

    plan: Plan
    rate: float
    accuracy: float
    loss: float
    trained: int  # parameters

    @property
    def criterion(self) -> float:
        if not math.isfinite(self.loss):
            return -1.0  # the training diverged
        accuracy, loss = torch.tensor(self.accuracy), torch.tensor(self.loss)
        return float(validation_criterion(accuracy, loss))


class _Work:
    """The model, its rows, and trainings of plans."""

    def __init__(
        self,
        model: nn.Module,
        places: Places,
        data: LabelledRows,
        steps: int,
        minibatch: int,
        seed: int,
    ):
        self.model, self.places, self.data = model, places, data
        self.steps, self.minibatch, self.rng_seed = steps, minibatch, seed
        self.head_inputs = _head_inputs(model, places, data)  # while the head trains alone

    def trial(self, plan: Plan, rate: float, report: Callable[[], None]) -> _Trial:
        adapted = self.fit(plan, rate, self.data.train, report)
        inputs, labels = self.data.part(self.data.held_out)
        with torch.no_grad():
            logits = logits_of(forward(adapted, inputs))
        loss = float(F.cross_entropy(logits, labels))
        accuracy = float((logits.argmax(-1) == labels).float().mean())
        trained = sum(tensor.numel() for tensor in adapted.changes().values())
        return _Trial(plan, rate, accuracy, loss, trained)

    def fit(self, plan: Plan, rate: float, rows: Tensor, report: Callable[[], None]) -> Adapted:
        """The model with the plan's change, trained on these rows."""
        adapted = Adapted(self.model, self.places, plan, self.rng_seed).eval()
        start = adapted.changes()
        if not start:
            return adapted
        rng = torch.Generator().manual_seed(self.rng_seed)
        draws = torch.rand(self.steps, self.minibatch, generator=rng)
        order = rows[(draws * len(rows)).long().to(rows.device)]

        def loss_of(change: dict[str, Tensor], clock: Tensor) -> Tensor:
            inputs, labels = self.data.part(chosen := order[clock][0])
            moving = [name for name, tensor in change.items() if tensor.requires_grad]
            if self.head_inputs is not None and all(map(adapted.is_head, moving)):
                return F.cross_entropy(self._head_logits(change, chosen), labels)
            args, kwargs = arguments(inputs)
            output = call_with(adapted, change, args, kwargs)
            return F.cross_entropy(logits_of(output), labels)

        with torch.enable_grad():
            trained = fit(
                start,
                loss_of,
                is_head=adapted.is_head,
                head=plan.head,
                rates=torch.tensor([rate], device=rows.device),
                steps=self.steps,
                report=report,
            )
        with torch.no_grad():
            for name, tensor in trained.items():
                start[name].copy_(tensor)
        return adapted

    def _head_logits(self, change: dict[str, Tensor], rows: Tensor) -> Tensor:
        assert self.head_inputs is not None
        name = self.places.features
        own = {part.removeprefix(f"{name}."): change[tuned_name(part)] for part in self.places.head}
        head = self.model.get_submodule(name)
        return logits_of(call_with(head, own, (self.head_inputs[rows],)))

    def signals(self, source: Any) -> Tensor:
        """`[1, S]` from rows in random order: the first ones are read, and labels may be sorted."""
        first = lambda tensor: tensor.unsqueeze(0)  # noqa: E731
        own = (*self.model.named_parameters(), *self.model.named_buffers())
        weights = {name: tensor.detach().unsqueeze(0) for name, tensor in own}
        known = None
        if source is not None:
            source = as_inputs(source, first_float(self.model), "source")
            given, expected = (tuple(tensors(x)[0].shape[1:]) for x in (source, self.data.inputs))
            if given != expected or not len(tensors(source)[0]):
                shape = f"rows of shape {given}" if given != expected else "no rows"
                raise ValueError(f"source has {shape}; give some of shape {expected}, or none")
            stacked = pytree.tree_map_only(Tensor, first, source)
            known = source_statistics(self.model, self.places, weights, stacked)
        rows, labels = self.data.part(torch.cat([self.data.train, self.data.held_out]))
        inputs, labels = pytree.tree_map_only(Tensor, first, (rows, labels))
        counts = torch.tensor([labels.shape[1]], device=labels.device)
        with torch.enable_grad():
            return measure(self.model, self.places, weights, inputs, labels, counts, known).cpu()


@torch.no_grad()
def _head_inputs(model: nn.Module, places: Places, data: LabelledRows) -> Tensor | None:
    """What the head reads for every row; None if the model changes its output afterwards."""
    if not places.head:
        return None
    calls: list[Any] = []
    head = model.get_submodule(places.features)
    with head.register_forward_hook(lambda _head, *call: calls.append(call), with_kwargs=True):
        logits = logits_of(forward(model, data.inputs))
    args, kwargs, output = calls[-1]
    is_plain = len(calls) == len(args) == 1 and not kwargs and isinstance(output, Tensor)
    is_last = is_plain and output.dim() == 2 and torch.equal(logits_of(output), logits)
    return args[0] if is_last else None


def _adapt(
    original: nn.Module,
    work: _Work,
    controller: AdaptationController,
    name: str,
    legal: dict[Plan, int],
    limit: float,
    tries: int,
    source: Any,
    page: str | Path | None,
    progress: bool,
) -> AdaptationResult:
    size, num_rows = count_params(work.model), len(work.data.labels)
    signals = work.signals(source)
    known = dict(zip(SIGNALS, signals[0].tolist(), strict=True))
    reasons = reasons_for(known)
    with torch.no_grad():
        output = logits_of(forward(work.model, work.data.inputs))
    is_perfect = bool((output.argmax(-1) == work.data.labels).all())
    rivals = [rival for rival in RIVALS if rival[0] in legal]
    total = 0 if is_perfect else work.steps * (len(rivals) + tries + 1)
    heading = f"{type(work.model).__name__}: {num_rows} rows; {reasons}"
    ledger = new_ledger(
        work.model,
        name,
        signals=reasons,
        rows=f"{num_rows}, of which {len(work.data.held_out)} are held out",
        budget="none" if limit == math.inf else f"{int(limit):,} parameters besides the head",
    )
    with progress_bar(max(1, total), heading, enabled=progress) as bar:
        done = _Progress(work, ledger, legal, with_page(bar, ledger, page, total))
        kept = as_is = done.trial(AS_IS, "the model as it is")
        trials = done.trials
        if not is_perfect:
            for rival in rivals:
                done.trial(rival, "a usual rule")
            added = torch.full((1, len(PLANS), len(RATES)), torch.nan)
            for plan, params in legal.items():
                added[0, PLANS.index(plan)] = params / size
            found = {trial.plan: trial.criterion for trial in trials}
            anchors = torch.tensor([[found.get(plan, math.nan) for plan, _ in (AS_IS, *RIVALS)]])
            held_out = torch.tensor([len(work.data.held_out)])
            before = Known(signals, held_out, added.flatten(1), anchors)
            chooser = controller.choose(before, budget=limit / size, tries=tries)
            choice = next(chooser)
            for number in range(tries):
                trial = done.trial(choice, f"proposal {number + 1} of {tries}")
                choice = chooser.send(trial.criterion)
            kept = next(trial for trial in trials if (trial.plan, trial.rate) == choice)
            if not any(math.isfinite(trial.loss) for trial in trials[1:]):
                warnings.warn(
                    "every training diverged; give rows scaled as in the model's training",
                    stacklevel=3,
                )
        done.status = f"training {kept.plan} on all rows"
        everything = torch.arange(num_rows, device=work.data.labels.device)
        adapted = work.fit(kept.plan, kept.rate, everything, done.step)
        if not all(tensor.isfinite().all() for tensor in adapted.changes().values()):
            warnings.warn(
                f"training {kept.plan} on all rows diverged; nothing was changed", stacklevel=3
            )
            kept, adapted = as_is, work.fit(*AS_IS, everything, done.step)
        done.finish()
    conclude(ledger, trials.index(kept))
    if is_perfect:
        ledger.facts["result"] = "the model is right on every row; nothing was changed"
    accuracy = {"adapted": kept.accuracy, "as it is": as_is.accuracy}
    accuracy |= {str(trial.plan): trial.accuracy for trial in trials[1 : 1 + len(rivals)]}
    result = AdaptationResult.of(
        original,
        work.places,
        kept.plan,
        adapted.changes(),
        example=work.data.part(everything[:2])[0],
        rate=kept.rate,
        accuracy=accuracy,
        validation_rows=len(work.data.held_out),
        signals=known,
        ledger=ledger,
    )
    try_write_page(ledger, page)
    if progress:
        print(result)
    return result


class _Progress:
    """Trials, each in the ledger from its beginning, and optimiser steps on a progress bar."""

    def __init__(self, work: _Work, ledger: Ledger, costs: dict[Plan, int], bar: Report):
        self.trials: list[_Trial] = []
        self._work, self._records, self._costs = work, ledger.trials, costs
        self._bar, self._count, self.status = bar, 0, ""

    def trial(self, choice: tuple[Plan, float], proposer: str) -> _Trial:
        (plan, rate), start = choice, time.monotonic()
        self.status = f"{proposer}: {plan}"
        # tuned and low-rank weights merge into the model, only branches stay
        params = self._costs.get(plan, 0) if plan.what in (What.SCALE, What.SEED) else 0
        record = TrialRecord(plan=str(plan), rate=rate, proposer=proposer, params=params)
        self._records.append(record)
        trial = self._work.trial(plan, rate, self.step)
        self.trials.append(trial)
        result: Any = {"metric": trial.accuracy, "loss": trial.loss, "trained": trial.trained}
        self._records[-1] = replace(record, **result, seconds=time.monotonic() - start)
        return trial

    def step(self) -> None:
        self._count += 1
        self._bar(self._count, self.status)

    def finish(self) -> None:
        self._bar(self._count, "done")


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
def _check_output(model: nn.Module, data: LabelledRows) -> None:
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
    classes = logits.shape[1]
    largest, smallest = int(data.labels.max()), int(data.labels.min())
    if smallest < 0:
        raise ValueError(
            f"label {smallest}; classes are numbered from 0: leave unlabelled rows out"
        )
    if largest >= classes:
        raise ValueError(
            f"label {largest}; the model has {classes} outputs, so labels go from 0 to {classes - 1}. "
            "For more classes, give it a larger output layer first"
        )


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
