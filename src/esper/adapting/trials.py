"""Try every plan on many trained models with shifted data: the experience of a controller.

    pool = train_models(build, source, num_models=24, ...)
    table = try_plans(pool, target, scenarios, settings)

A scenario is a trained model, a shift and a number of rows. Models of one architecture are trained
and adapted together, so the whole table is a few thousand batched programs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.adapting.adapted import Adapted, tuned_name
from esper.adapting.evidence import measure, source_statistics
from esper.adapting.fitting import fit, logits_of_many
from esper.adapting.plans import KNOWN_RULES, PLANS, RATES, Places, Plan, find_places
from esper.adapting.shifts import Rows, Shift

INITIALISATIONS = 16  # of a plan's change; replicas share them in turn


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
    auto_rgn: Tensor  # [E, 3, rates]: the same three for Auto-RGN
    kinds: tuple[str, ...]  # of the shifts, [E]


def train_models(
    build: Callable[[], nn.Module],
    source: Rows,
    *,
    num_models: int,
    num_classes: int,
    missing_classes: int = 3,
    steps: int = 1500,
    batch: int = 64,
    rate: float = 4e-3,
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
    weights = {f"model.{name}": torch.stack([s[name] for s in states]) for name in states[0]}
    everything = Adapted(model, places, KNOWN_RULES["full fine-tuning"])
    names = {tuned_name(name): f"model.{name}" for name, _ in model.named_parameters()}
    change = {name: weights[names[name]] for name in everything.changes()}

    draws = torch.stack([torch.multinomial(chances, batch, generator=rng) for _ in range(steps)])
    draws = draws.to(x.device)

    def loss_of(change: dict[str, Tensor], clock: Tensor) -> Tensor:
        drawn = draws[clock][0]
        logits = logits_of_many(everything, weights, change, x[drawn])
        return _summed_loss(logits, y[drawn])

    rates = torch.full((num_models,), rate, device=x.device)
    is_head, head = everything.is_head, everything.plan.head
    change = fit(
        change, loss_of, is_head=is_head, head=head, rates=rates, steps=steps, as_graph=True
    )
    weights |= {names[name]: tensor for name, tensor in change.items()}
    return ModelPool(model, places, weights, seen, source)


class _Data(NamedTuple):
    """Rows of E scenarios on the device."""

    few: Rows  # [E, rows, ...], padded
    counts: Tensor  # [E] labelled rows
    num_train: Tensor  # [E]
    test: Rows  # [E, rows, ...]
    weights: dict[str, Tensor]  # [E, ...]
    model_ids: Tensor


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
    report: Callable[[str], None] = lambda line: None,
) -> TrialTable:
    """The table of all plans; `target` rows are shifted, then split into labelled and test rows.

    `rng_seed` draws models and rows, `fit_rng_seed` minibatches and initial weights.
    """
    data = _scenario_data(pool, target, scenarios, settings, rng_seed)
    num = len(scenarios)
    plain = {name.removeprefix("model."): w for name, w in data.weights.items()}
    known = _source_rows(pool, data.model_ids)
    source = source_statistics(pool.model, pool.places, plain, known)
    chunks = [
        measure(
            pool.model,
            pool.places,
            {name: w[part] for name, w in plain.items()},
            data.few[0][part],
            data.few[1][part],
            data.counts[part],
            {place: type(s)(s.mean[part], s.spread[part]) for place, s in source.items()},
        )
        for part in torch.split(torch.arange(num, device=data.counts.device), 64)
    ]
    results = torch.full((3, num, len(plans), len(settings.rates)), torch.nan)
    added = torch.full((len(plans),), torch.nan)
    size = sum(w[0].numel() for w in plain.values())
    for index, plan in enumerate(plans):
        if pool.places.offers(plan):
            results[:, :, index] = _try_plan(pool, data, plan, settings, fit_rng_seed)
            adapted = Adapted(pool.model, pool.places, plan)
            own = {n: t for n, t in adapted.changes().items() if not adapted.is_head(n)}
            added[index] = sum(t.numel() for t in own.values()) / size
            report(f"{plan}: {float(results[2, :, index].nanmean()):.3f}")
    rgn = torch.full((3, num, len(settings.rates)), torch.nan)
    if auto_rgn:
        rgn = _try_plan(
            pool, data, KNOWN_RULES["full fine-tuning"], settings, fit_rng_seed, rgn=True
        )
    return TrialTable(
        torch.cat(chunks).cpu(),
        data.counts.cpu(),
        added,
        results[0],
        results[1],
        results[2],
        rgn.transpose(0, 1),
        tuple(scenario.shift.kinds for scenario in scenarios),
    )


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
    partial = [m for m in range(len(pool.classes_seen)) if m not in complete]
    most = max(scenario.rows for scenario in scenarios)
    few, few_y, test, test_y, model_ids = [], [], [], [], []
    for shift, rows in scenarios:
        is_new = "new_classes" in shift.kinds.split("+")
        candidates = partial if is_new else complete
        model_ids.append(candidates[int(torch.randint(len(candidates), (), generator=rng))])
        order = torch.randperm(len(target[1]), generator=rng)[: rows + settings.test_rows]
        x, y = target[0][order.to(device)], target[1][order.to(device)]
        x, y = shift(x, y, pool.classes_seen.shape[1])
        padding = (0,) * (2 * (x.dim() - 1)) + (0, most - rows)
        few.append(F.pad(x[:rows], padding))
        few_y.append(F.pad(y[:rows], (0, most - rows)))
        test.append(x[rows:])
        test_y.append(y[rows:])
    ids = torch.tensor(model_ids, device=device)
    counts = torch.tensor([scenario.rows for scenario in scenarios], device=device)
    held = held_out_rows(counts, settings.validation_share)
    return _Data(
        (torch.stack(few), torch.stack(few_y)),
        counts,
        counts - held,
        (torch.stack(test), torch.stack(test_y)),
        {name: w[ids] for name, w in pool.weights.items()},
        ids,
    )


def held_out_rows(counts: Tensor, share: float) -> Tensor:
    """How many of the labelled rows validate."""
    return (counts * share).round().long().clamp(min=2)


def _source_rows(pool: ModelPool, model_ids: Tensor, rows: int = 128) -> Tensor:
    """Rows that each model was trained on, `[E, rows, ...]`."""
    x, y = pool.source
    rng = torch.Generator().manual_seed(0)
    chances = pool.classes_seen[:, y.cpu()].float()
    drawn = torch.multinomial(chances, rows, generator=rng).to(x.device)
    return x[drawn][model_ids]


def _try_plan(
    pool: ModelPool,
    data: _Data,
    plan: Plan,
    settings: TrialSettings,
    rng_seed: int,
    rgn: bool = False,
) -> Tensor:
    """Validation accuracy, validation loss and test accuracy, `[3, E, rates]`."""
    num, num_rates = len(data.counts), len(settings.rates)
    pairs = torch.arange(num * num_rates, device=data.counts.device)
    parts = [
        _try_replicas(
            pool, data, plan, settings, part // num_rates, part % num_rates, rng_seed, rgn
        )
        for part in torch.split(pairs, settings.replicas)
    ]
    return torch.cat(parts, dim=1).view(3, num, num_rates).cpu()


def _try_replicas(
    pool: ModelPool,
    data: _Data,
    plan: Plan,
    settings: TrialSettings,
    env: Tensor,
    rate_ids: Tensor,
    rng_seed: int,
    rgn: bool,
) -> Tensor:
    device = env.device
    weights = {name: tensor[env] for name, tensor in data.weights.items()}
    variants = [
        Adapted(pool.model, pool.places, plan, rng_seed + i) for i in range(INITIALISATIONS)
    ]
    adapted = variants[0]
    names = {tuned_name(name): f"model.{name}" for name, _ in pool.model.named_parameters()}
    change = {}
    for name in adapted.changes():
        if name in names:
            change[name] = weights[names[name]]
        else:
            stacked = torch.stack([v.get_parameter(name).detach() for v in variants])
            change[name] = stacked[env % INITIALISATIONS]
    rates = torch.tensor(settings.rates, device=device)[rate_ids]
    rng = torch.Generator(device).manual_seed(rng_seed)
    # every plan and rate sees the same minibatches
    draws = torch.rand(
        settings.steps, len(data.counts), settings.batch, generator=rng, device=device
    )

    def loss_of(change: dict[str, Tensor], clock: Tensor) -> Tensor:
        drawn = (draws[clock][0, env] * data.num_train[env][:, None]).long()
        x, y = data.few[0][env[:, None], drawn], data.few[1][env[:, None], drawn]
        return _summed_loss(logits_of_many(adapted, weights, change, x), y)

    if change:
        change = fit(
            change,
            loss_of,
            is_head=adapted.is_head,
            head=plan.head,
            rates=rates,
            steps=settings.steps,
            by_relative_gradient=rgn,
            as_graph=True,
        )
    with torch.no_grad():
        return _judge(adapted, weights, change, data, env)


def _judge(
    adapted: Adapted,
    weights: dict[str, Tensor],
    change: dict[str, Tensor],
    data: _Data,
    env: Tensor,
) -> Tensor:
    """Validation accuracy, validation loss and test accuracy, `[3, P]`."""
    held = data.counts - data.num_train
    position = torch.arange(int(held.max()), device=env.device)
    rows = (data.num_train[:, None] + position).clamp(max=data.few[1].shape[1] - 1)[env]
    used = (position < held[:, None])[env]
    total = torch.zeros(3, len(env), device=env.device)
    for part in torch.split(position, 100):
        x = data.few[0][env[:, None], rows[:, part]]
        y = data.few[1][env[:, None], rows[:, part]]
        logits = logits_of_many(adapted, weights, change, x)
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
        total[0] += ((logits.argmax(-1) == y) & used[:, part]).sum(1) / held[env]
        total[1] += (losses * used[:, part]).sum(1) / held[env]
    num_test = data.test[1].shape[1]
    for part in torch.split(torch.arange(num_test, device=env.device), 100):
        x, y = data.test[0][env[:, None], part], data.test[1][env[:, None], part]
        correct = logits_of_many(adapted, weights, change, x).argmax(-1) == y
        total[2] += correct.sum(1) / num_test
    return total


def _summed_loss(logits: Tensor, y: Tensor) -> Tensor:
    """The mean loss of each replica, summed over replicas."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
