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

import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from esper.adapting.adapted import Adapted, tuned_name
from esper.adapting.controller import AdaptationController, find_controller
from esper.adapting.evidence import SIGNALS, logits_of, measure, source_statistics
from esper.adapting.fitting import fit
from esper.adapting.plans import MENU, PLANS, RATES, Places, Plan, What, find_places
from esper.adapting.practice import validation_criterion
from esper.adapting.result import AdaptationResult, conclude, new_ledger, reasons_for
from esper.adapting.trial_envs import ANCHORS, MAX_TRIES, Known, plan_and_rate
from esper.growing.controllers import controller_name
from esper.growing.eval_mode import untouched_randomness
from esper.growing.inputs import arguments, batch_size, forward, tensors
from esper.growing.ledger import Ledger, TrialRecord
from esper.growing.page import check_page, try_write_page, with_page
from esper.growing.sites import count_params
from esper.nissa.console import Report, progress_bar

MIN_ROWS = 8
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
        model: a trained classifier in eval mode that returns `[rows, classes]`, one logit per row
            (two classes), or an object with such `logits`.
        rows: a tensor of inputs, or a tuple or dict of the model's arguments; or, without `labels`,
            a loader of pairs `(inputs, labels)`.
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
    _check_numbers(tries=tries, steps=steps, minibatch=minibatch)
    check_page(page)
    chosen = find_controller(controller)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; give a trained nn.Module")
    like = next(model.parameters(), torch.zeros(0))
    data = _read_rows(rows, labels, like, validation, rng_seed)
    _check_model(model, data)
    modes = [(module, module.training) for module in model.modules()]
    with untouched_randomness(model):
        model.eval()
        try:
            places = find_places(model, data.part(data.train[:8])[0])
            limit = _limit(model, budget)
            legal = _legal_plans(model, places, limit)
            name = controller_name(controller)
            work = _Work(model, places, data, steps, minibatch, rng_seed)
            return _adapt(work, chosen, name, legal, limit, tries, source, page, progress)
        finally:
            for module, training in modes:
                module.training = training


class _Data(NamedTuple):
    inputs: Any
    labels: Tensor
    train: Tensor  # indices of rows
    held_out: Tensor

    def part(self, rows: Tensor) -> tuple[Any, Tensor]:
        inputs = pytree.tree_map_only(Tensor, lambda tensor: tensor[rows], self.inputs)
        return inputs, self.labels[rows]


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
        self, model: nn.Module, places: Places, data: _Data, steps: int, minibatch: int, seed: int
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
            output = functional_call(adapted, change, args, kwargs)
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
        return logits_of(functional_call(head, own, (self.head_inputs[rows],)))

    def signals(self, source: Any) -> Tensor:
        """`[1, S]` from rows in random order: the first ones are read, and labels may be sorted."""
        first = lambda tensor: tensor.unsqueeze(0)  # noqa: E731
        weights = {name: tensor.unsqueeze(0) for name, tensor in self.model.state_dict().items()}
        known = None
        if source is not None:
            source = _as_inputs(source, next(self.model.parameters()))
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
def _head_inputs(model: nn.Module, places: Places, data: _Data) -> Tensor | None:
    """What the head reads for every row; None if the model changes its output afterwards."""
    if not places.head:
        return None
    seen: list[Tensor] = []
    head = model.get_submodule(places.features)
    handle = head.register_forward_pre_hook(lambda _module, args: seen.extend(args[:1]))
    try:
        logits = logits_of(forward(model, data.inputs))
    finally:
        handle.remove()
    is_plain = len(seen) == 1 and len(seen[0]) == len(logits)
    return seen[0] if is_plain and torch.equal(logits_of(head(seen[0])), logits) else None


def _adapt(
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
    result = AdaptationResult(
        adapted.own_copy(),
        work.model,
        kept.rate,
        accuracy,
        len(work.data.held_out),
        known,
        ledger,
        work.places,
        work.data.part(everything[:2])[0],
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


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise ValueError(f"{name}={number!r}; use a whole number from 1")
    if numbers["tries"] > MAX_TRIES:
        raise ValueError(
            f"tries={numbers['tries']}; the controller was trained with up to {MAX_TRIES}"
        )


def _read_rows(rows: Any, labels: Any, like: Tensor, validation: float, rng_seed: int) -> _Data:
    if not 0 < validation <= 0.5:
        raise ValueError(f"validation={validation}; use a share above 0 and up to 0.5")
    if labels is None:
        rows, labels = _from_loader(rows)
    try:
        labels = torch.as_tensor(labels)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"labels cannot be numbers ({error}); give one whole number per row, the index of its class"
        ) from error
    if labels.shape[1:] == (1,) and bool(((labels == 0) | (labels == 1)).all()):
        labels = labels[:, 0]  # as a loss of one logit takes them
    if labels.dim() == 1 and labels.is_floating_point() and bool((labels == labels.round()).all()):
        labels = labels.long()
    inputs = _as_inputs(rows, like)
    count = batch_size(inputs)
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            f"labels are {labels.dtype} {tuple(labels.shape)}; give one whole number per row, the "
            "index of its class"
        )
    sizes = [tuple(tensor.shape) for tensor in tensors(inputs)]
    if any(size[:1] != (count,) for size in sizes):
        raise ValueError(f"inputs of shapes {sizes}; the first axis of each must be the rows")
    if len(labels) != count:
        is_list = isinstance(rows, list) and len(rows) == len(labels)
        remedy = "rows as one tensor: torch.stack(rows)" if is_list else "one label per row"
        raise ValueError(f"{count} rows and {len(labels)} labels; give {remedy}")
    if count < MIN_ROWS:
        raise ValueError(f"{count} rows; adaptation needs at least {MIN_ROWS}, to hold some out")
    if len(labels.unique()) < 2:
        raise ValueError(
            f"all rows have the label {int(labels[0])}; give rows of two or more classes"
        )
    for tensor in tensors(inputs):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError("the rows are not finite; replace NaN and inf by numbers")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(rng_seed)).to(like.device)
    held_out = max(2, round(count * validation))
    return _Data(inputs, labels.long().to(like.device), order[held_out:], order[:held_out])


def _as_inputs(rows: Any, like: Tensor) -> Any:
    """Tensors, or arrays as tensors, on the model's device; floats in the model's precision."""
    given = rows if tensors(rows) else torch.as_tensor(rows)

    def fitting(tensor: Tensor) -> Tensor:
        return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)

    return pytree.tree_map_only(Tensor, fitting, given)


def _from_loader(loader: Any) -> tuple[Any, Tensor]:
    """All rows of a loader of pairs."""
    is_pairs = isinstance(loader, Iterable) and not isinstance(loader, Tensor | dict | str)
    batches = list(loader) if is_pairs else []
    if not batches or any(not isinstance(b, tuple | list) or len(b) != 2 for b in batches):
        raise ValueError(
            "there are no labels: give adapt(model, rows, labels), or a loader of pairs "
            "(inputs, labels), such as torch.utils.data.DataLoader(dataset, 64)"
        )
    inputs, labels = zip(*batches, strict=True)
    if any(torch.as_tensor(part).dim() == 0 for part in labels):
        raise ValueError("the loader gives single rows; give batches of rows and labels")
    joined = pytree.tree_map(lambda *parts: torch.cat([*map(torch.as_tensor, parts)]), *inputs)
    return joined, torch.cat([torch.as_tensor(part) for part in labels])


def _check_model(model: nn.Module, data: _Data) -> None:
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters; give a trained model")
    if any(isinstance(part, _BatchNorm) and part.training for part in model.modules()):
        raise ValueError(
            "the model is in training mode and has batch norm, whose statistics would change with "
            "every row; call model.eval() first"
        )
    try:
        with torch.no_grad(), untouched_randomness(model):
            output = forward(model, data.part(data.train[:2])[0])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        first = tensors(data.inputs)[0]
        raise ValueError(
            f"the model does not accept these rows, {first.dtype} of shape {tuple(first.shape)}: "
            f"{str(error).splitlines()[0]}. Give them as in its training"
        ) from error
    probabilities = logits_of(output)
    classes = probabilities.shape[1]
    largest, smallest = int(data.labels.max()), int(data.labels.min())
    if bool((probabilities >= 0).all()) and torch.allclose(
        probabilities.sum(1), torch.ones_like(probabilities[:, 0]), atol=1e-4
    ):
        warnings.warn(
            "the model returns probabilities: give one without the softmax at its end, or training "
            "will hardly move it",
            stacklevel=4,
        )
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
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
        raise ValueError(f"budget={budget!r}; use a number of parameters, or a share such as 0.25")
    return budget if isinstance(budget, int) else budget * count_params(model)


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
