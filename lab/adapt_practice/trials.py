"""Try every plan on many trained models with shifted data: the experience of a controller.

    pool = train_models(build, source, num_models=24, ...)
    table = try_plans(pool, target, scenarios, settings)

A scenario is a trained model, a shift and a number of rows. Models of one architecture are trained
and adapted together, so the whole table is a few thousand batched programs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adapt_practice.fitting import fit, logits_of_many, over_models
from adapt_practice.shifts import Rows, Shift
from esper.adapting.adapted import Adapted, tuned_name
from esper.adapting.plans import PLANS, RATES, Places, Plan, find_places
from esper.adapting.signals import measure

BATCH, RATE = 64, 4e-3  # to train models
INITIALISATIONS = 16  # of a plan's change; replicas share them in turn
SOURCE_ROWS = 128  # for signals
ROWS_AT_ONCE = 40_000  # judged, of all replicas together
# on a CPU fewer: large blocks would be fetched from the system again for every operation
CPU_REPLICAS, CPU_ROWS_AT_ONCE = 10, 1000


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    steps: int = 300
    batch: int = 32
    rates: tuple[float, ...] = RATES
    validation_share: float = 0.25
    test_rows: int = 1000
    replicas: int = 2048  # trained together


class Scenario(NamedTuple):
    shift: Shift
    rows: int  # labelled ones, training and validation together


class ModelPool(NamedTuple):
    """Trained models of one architecture."""

    model: nn.Module  # the architecture; its own weights are not used
    places: Places
    weights: dict[str, Tensor]  # [M, ...] parameters and buffers
    classes_seen: Tensor  # [M, classes] bool: in the training data
    source: Rows


class TrialTable(NamedTuple):
    """Results of every plan in every scenario; NaN where the model does not offer it."""

    signals: Tensor  # [E, S]
    rows: Tensor  # [E]
    added: Tensor  # [A] parameters of each plan's change without the head, relative to the model
    validation_accuracy: Tensor  # [E, A, rates]
    validation_loss: Tensor
    test_accuracy: Tensor
    kinds: tuple[str, ...]  # of the shifts, [E]


def train_models(
    build: Callable[[], nn.Module],
    source: Rows,
    *,
    num_models: int,
    num_classes: int,
    missing_classes: int = 3,
    steps: int = 1500,
    rng_seed: int = 0,
) -> ModelPool:
    """Train models from scratch on the source rows; every third has not seen some classes."""
    x, y = source
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng_seed)
        models = [build().eval() for _ in range(num_models)]
    model = models[0].to(x.device)
    places = find_places(model, x[:4])
    rng = torch.Generator().manual_seed(rng_seed)
    seen = torch.ones(num_models, num_classes, dtype=torch.bool)
    for number in range(2, num_models, 3):
        seen[number, torch.randperm(num_classes, generator=rng)[:missing_classes]] = False
    chances = seen[:, y.cpu()].float()  # of each row to be drawn
    states = [m.to(x.device).state_dict() for m in models]
    weights = {name: torch.stack([s[name] for s in states]) for name in states[0]}
    start = {name: weights[name] for name, _ in model.named_parameters()}
    draws = torch.stack([torch.multinomial(chances, BATCH, generator=rng) for _ in range(steps)])
    draws = draws.to(x.device)

    def loss_of(change: dict[str, Tensor], clock: Tensor) -> Tensor:
        drawn = draws[clock][0]
        return _summed_loss(logits_of_many(model, weights | change, x[drawn]), y[drawn])

    rates = torch.full((num_models,), RATE, device=x.device)
    weights |= fit(start, loss_of, rates=rates, steps=steps, as_graph=True)
    return ModelPool(model, places, weights, seen, source)


class _Data(NamedTuple):
    """Rows of E scenarios on the device: those that train, those that validate, and test rows."""

    rows: Rows  # [E, labelled + test, ...], labelled ones padded
    most: int  # labelled rows of a scenario
    counts: Tensor  # [E] labelled rows
    num_train: Tensor  # [E]
    weights: dict[str, Tensor]  # [E, ...]
    source: Tensor  # [E, SOURCE_ROWS, ...] that each model was trained on


def try_plans(
    pool: ModelPool,
    target: Rows,
    scenarios: Sequence[Scenario],
    settings: TrialSettings,
    *,
    plans: Sequence[Plan] = PLANS,
    auto_rgn: bool = False,
    rng_seed: int = 0,
    fit_rng_seed: int = 0,
) -> TrialTable:
    """The table of all plans; `target` rows are shifted, then split into labelled and test rows.

    `rng_seed` draws models and rows, `fit_rng_seed` minibatches and initial weights. `auto_rgn`
    trains by relative gradient (see `fit`).
    """
    data = _scenario_data(pool, target, scenarios, settings, rng_seed)
    num = len(scenarios)
    x, y = (part[:, : data.most] for part in data.rows)
    given = data.weights, x, y, data.counts, data.source
    signals_of = partial(measure, pool.model, pool.places, over_models=over_models)
    signals = [
        signals_of(*pytree.tree_map(itemgetter(part), given))
        for part in torch.split(torch.arange(num, device=data.counts.device), 64)
    ]
    results = torch.full((3, num, len(plans), len(settings.rates)), torch.nan)
    added = torch.full((len(plans),), torch.nan)
    size = sum(w[0].numel() for w in data.weights.values())
    for index, plan in enumerate(plans):
        if pool.places.offers(plan):
            results[:, :, index] = _try_plan(pool, data, plan, settings, fit_rng_seed, auto_rgn)
            added[index] = Adapted(pool.model, pool.places, plan).num_added / size
    kinds = tuple(scenario.shift.kinds for scenario in scenarios)
    accuracy, loss, test = results
    found = torch.cat(signals).cpu()
    return TrialTable(found, data.counts.cpu(), added, accuracy, loss, test, kinds)


def _scenario_data(
    pool: ModelPool,
    target: Rows,
    scenarios: Sequence[Scenario],
    settings: TrialSettings,
    rng_seed: int,
) -> _Data:
    device = target[0].device
    rng = torch.Generator().manual_seed(rng_seed)
    complete = pool.classes_seen.all(1).nonzero().squeeze(1).tolist()
    incomplete = [m for m in range(len(pool.classes_seen)) if m not in complete]
    most = max(scenario.rows for scenario in scenarios)
    all_x, all_y, model_ids = [], [], []
    for shift, rows in scenarios:
        is_new = "new_classes" in shift.kinds.split("+")
        candidates = incomplete if is_new else complete
        model_ids.append(candidates[int(torch.randint(len(candidates), (), generator=rng))])
        order = torch.randperm(len(target[1]), generator=rng)[: rows + settings.test_rows]
        x, y = target[0][order.to(device)], target[1][order.to(device)]
        x, y = shift(x, y, pool.classes_seen.shape[1])
        all_x.append(torch.cat([x[:rows], x.new_zeros(most - rows, *x.shape[1:]), x[rows:]]))
        all_y.append(torch.cat([y[:rows], y.new_zeros(most - rows), y[rows:]]))
    ids = torch.tensor(model_ids, device=device)
    counts = torch.tensor([scenario.rows for scenario in scenarios], device=device)
    num_train = counts - held_out_rows(counts, settings.validation_share)
    weights = {name: w[ids] for name, w in pool.weights.items()}
    chances = pool.classes_seen[:, pool.source[1].cpu()].float()
    known = torch.multinomial(chances, SOURCE_ROWS, generator=torch.Generator().manual_seed(0))
    source = pool.source[0][known.to(device)][ids]
    stacked = torch.stack(all_x), torch.stack(all_y)
    return _Data(stacked, most, counts, num_train, weights, source)


def held_out_rows(counts: Tensor, share: float) -> Tensor:
    """How many of the labelled rows validate."""
    return (counts * share).round().long().clamp(min=2)


def _try_plan(
    pool: ModelPool, data: _Data, plan: Plan, settings: TrialSettings, rng_seed: int, auto_rgn: bool
) -> Tensor:
    """Validation accuracy, validation loss and test accuracy, `[3, E, rates]`."""
    num, device = len(data.counts), data.counts.device
    seeds = range(rng_seed, rng_seed + min(INITIALISATIONS, num))
    variants = [Adapted(pool.model, pool.places, plan, seed) for seed in seeds]
    adapted = variants[0]
    tuned = {tuned_name(name): name for name in data.weights}
    initial = {
        name: torch.stack([v.get_parameter(name).detach() for v in variants])
        for name in adapted.changes()
        if name not in tuned
    }
    rng = torch.Generator(device).manual_seed(rng_seed)
    # every plan and rate sees the same minibatches
    draws = torch.rand(settings.steps, num, settings.batch, generator=rng, device=device)
    x, y = data.rows
    num_test = y.shape[1] - data.most

    def train_and_judge(env: Tensor, rates: Tensor) -> Tensor:
        """One replica for each scenario and rate, `[3, P]`."""
        weights = {name: tensor[env] for name, tensor in data.weights.items()}
        frozen = {f"model.{name}": tensor for name, tensor in weights.items()}
        change = {
            name: weights[tuned[name]] if name in tuned else initial[name][env % INITIALISATIONS]
            for name in adapted.changes()
        }

        def loss_of(change: dict[str, Tensor], clock: Tensor) -> Tensor:
            drawn = (draws[clock][0, env] * data.num_train[env][:, None]).long()
            logits = logits_of_many(adapted, frozen | change, x[env[:, None], drawn])
            return _summed_loss(logits, y[env[:, None], drawn])

        change = fit(
            change,
            loss_of,
            rates=rates,
            steps=settings.steps,
            first=adapted.trained_first,
            by_relative_gradient=auto_rgn,
            as_graph=True,
        )
        logits_of = partial(logits_of_many, adapted, frozen | change)
        test = torch.full_like(data.counts, data.most)
        validation = _judge(logits_of, data.rows, env, data.num_train, data.counts)
        return torch.cat([validation, _judge(logits_of, data.rows, env, test, test + num_test)[:1]])

    rates = torch.tensor(settings.rates, device=device)
    replicas = min(settings.replicas, CPU_REPLICAS if device.type == "cpu" else settings.replicas)
    parts = [
        train_and_judge(part // len(rates), rates[part % len(rates)])
        for part in torch.split(torch.arange(num * len(rates), device=device), replicas)
    ]
    return torch.cat(parts, dim=1).view(3, num, len(rates)).cpu()


@torch.no_grad()
def _judge(
    logits_of: Callable[[Tensor], Tensor], rows: Rows, env: Tensor, first: Tensor, end: Tensor
) -> Tensor:
    """Accuracy and loss `[2, P]` on rows `first` to `end` (exclusive) of each scenario."""
    (x, y), count = rows, end - first
    position = torch.arange(int(count.max()), device=env.device)
    index = (first[:, None] + position).clamp(max=y.shape[1] - 1)[env]
    used = (position < count[:, None])[env]
    total = torch.zeros(2, len(env), device=env.device)
    at_once = CPU_ROWS_AT_ONCE if env.device.type == "cpu" else ROWS_AT_ONCE
    for part in torch.split(position, max(100, at_once // len(env))):
        labels = y[env[:, None], index[:, part]]
        logits = logits_of(x[env[:, None], index[:, part]])
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        total[0] += ((logits.argmax(-1) == labels) & used[:, part]).sum(1) / count[env]
        total[1] += (losses.view_as(labels) * used[:, part]).sum(1) / count[env]
    return total


def _summed_loss(logits: Tensor, y: Tensor) -> Tensor:
    """The mean loss of each replica, summed over replicas."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
