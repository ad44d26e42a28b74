"""The twin of `esper.grow`: the training that a user's own loop would have done."""

import math
import random
import warnings
from itertools import chain, repeat

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import esper
from esper.tamiyo.scripted import FixedSchedule
from support.grow_calls import DECISIONS, STEPS, adamw, plain_training, refused, run
from support.models import Script, blobs, loaders, mlp


@pytest.mark.parametrize("controller", ["wait", "grow"])
def test_the_twin_is_the_users_own_training(controller):
    """Shuffling and dropout included, whatever grows beside it: batches of the same shape."""
    controllers = {"wait": Script(), "grow": FixedSchedule(every=1)}
    result = run(controllers[controller])
    assert [twin.metric for twin in result.ledger.twin] == plain_training()
    assert len(result.ledger.twin) == DECISIONS + 1


def likelihood(output, target):
    """A metric that no two networks share."""
    return output.softmax(1).gather(1, target[:, None])[:, 0]


def assert_same_curve(metrics: list[float], expected: list[float]) -> None:
    """Up to float32 rounding: the two loops may validate in other batches or another order."""
    curves = (torch.tensor(curve, dtype=torch.float64) for curve in (metrics, expected))
    torch.testing.assert_close(*curves, rtol=1e-5, atol=0)


def own_training(new_loaders, new_optimizer=adamw, new_scheduler=None) -> list[float]:
    """Validation likelihoods of the loop that a user would write; it validates on fixed data."""
    seed_everything()
    model, (train, _) = mlp(), new_loaders()
    optimizer = new_optimizer(model)
    scheduler = new_scheduler(optimizer) if new_scheduler else None
    found = []
    for step, (x, y) in enumerate(chain.from_iterable(repeat(train, STEPS))):
        if step % (STEPS // DECISIONS) == 0:
            model.eval()
            with torch.no_grad():
                x_val, y_val = blobs(64, rng_seed=1)
                found.append(float(likelihood(model(x_val), y_val).double().mean()))
            model.train()
        if step == STEPS:
            return found
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def twins_training(new_loaders, new_optimizer=adamw, new_scheduler=None) -> list[float]:
    """The same of the twin, with a network beside it that grows."""
    seed_everything()
    model, (train, val) = mlp(), new_loaders()
    optimizer = new_optimizer(model)
    result = esper.grow(
        model,
        train,
        val,
        loss=F.cross_entropy,
        optimizer=optimizer,
        scheduler=new_scheduler(optimizer) if new_scheduler else None,
        metric=likelihood,
        controller=FixedSchedule(every=1),
        steps=STEPS,
        decisions=DECISIONS,
        progress=False,
    )
    assert result.ledger.seeds
    return [twin.metric for twin in result.ledger.twin]


def seed_everything():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


class Noisy(Dataset):
    """Rows with noise from a generator that everybody shares."""

    def __init__(self, draw, rows=96, rng_seed=0, scale=0.3):
        self.x, self.y = blobs(rows, rng_seed)
        self.draw, self.scale = draw, scale

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        return self.x[row] + self.scale * np.float32(self.draw()), self.y[row]


def one_generator_for_both():
    generator = torch.Generator().manual_seed(3)
    train = DataLoader(Noisy(lambda: 0), 16, shuffle=True, generator=generator)
    return train, DataLoader(Noisy(lambda: 0, 64, 1), 64, generator=generator)


def samplers_with_a_generator():
    generator = torch.Generator().manual_seed(3)
    data, val = Noisy(lambda: 0), Noisy(lambda: 0, 64, 1)
    train = DataLoader(data, 16, sampler=RandomSampler(data, generator=generator))
    again = BatchSampler(RandomSampler(val, generator=generator), 64, drop_last=False)
    return train, DataLoader(val, batch_sampler=again)


def noise_of(draw):
    """Validation data draw too, though it makes no difference there."""
    train = DataLoader(Noisy(draw), 16, shuffle=True)
    return lambda: (train, DataLoader(Noisy(draw, 64, 1, scale=0.0), 64))


@pytest.mark.parametrize(
    "new_loaders",
    [
        one_generator_for_both,
        samplers_with_a_generator,
        noise_of(np.random.standard_normal),
        noise_of(random.random),
        noise_of(lambda: torch.randn(())),
    ],
)
def test_the_twin_is_the_users_own_training_whatever_it_draws_from(new_loaders):
    assert_same_curve(twins_training(new_loaders), own_training(new_loaders))


def clipping(model):
    def clip(optimizer, args, kwargs):
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(weights, 0.01)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(clip)
    return optimizer


class Ascending(torch.optim.SGD):
    """An optimizer with an attribute of its own, and settings that it changes by itself."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.factor = 1.05
        self.param_groups[0]["distance"] = 0.0

    def step(self, closure=None):
        group = self.param_groups[0]
        group["distance"] += sum(float(p.grad.abs().sum()) for p in group["params"])
        for p in group["params"]:
            p.grad *= self.factor / (1 + group["distance"])
        return super().step(closure)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)


def tensor_rate(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(3e-2))


@pytest.mark.parametrize(
    ("new_optimizer", "new_scheduler"),
    [
        (clipping, None),
        (lambda model: Ascending(model.parameters()), None),
        (lambda model: Ascending(model.parameters()), lambda o: CosineAnnealingLR(o, STEPS)),
        (clipping, one_cycle),
        (tensor_rate, lambda optimizer: CosineAnnealingLR(optimizer, STEPS)),
    ],
)
def test_the_twin_is_the_users_own_training_whatever_its_optimizer(new_optimizer, new_scheduler):
    settings = new_optimizer, new_scheduler
    assert_same_curve(twins_training(loaders, *settings), own_training(loaders, *settings))


def test_what_reaches_the_model_by_its_name_is_told():
    """The twin would train without it, and the verdict would compare something else."""
    model = mlp()
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.01) and None
    )
    refused(
        "a step of the ungrown twin changed the growing model", model=model, optimizer=optimizer
    )
    model = mlp()
    decayed = lambda *pair: F.cross_entropy(*pair) + model[0].weight.square().sum()  # noqa: E731
    refused("accesses the model directly", model=model, loss=decayed)


def test_without_growth_both_networks_are_the_same():
    result = run(Script())
    assert [step.metric for step in result.ledger.steps] == plain_training()
    assert result.verdict.grown == result.verdict.ungrown == max(plain_training())
    assert result.verdict.returned == "grown"


def test_the_twin_at_its_best_is_whole():
    """With what a state_dict leaves out, too."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.register_buffer("mean", torch.zeros(3), persistent=False)

        def forward(self, x):
            output = self.inner(x)
            if self.training:
                self.mean.mul_(0.5).add_(output.detach().mean(0))
            return output - self.mean

    result = run(FixedSchedule(every=1), model=Centred(), metric=likelihood, lr=0.5)
    seen = [twin.metric for twin in result.ledger.twin]
    assert seen.index(max(seen)) < DECISIONS  # training went on, and did not help
    assert result.verdict.ungrown == pytest.approx(max(seen), rel=1e-6)


def test_a_twin_that_is_no_network_any_more_is_not_returned():
    """Of outputs that are no numbers `argmax` makes the first class, here that of most rows."""
    calls = 0

    def overflows(output, target):
        nonlocal calls
        calls += output.requires_grad  # two networks a step
        return F.cross_entropy(output, target) * (math.nan if calls > STEPS else 1.0)

    def share(output, target):
        return (output.argmax(1) == 0).float()

    result = run(Script(), loss=overflows, metric=share)
    assert [twin.metric is None for twin in result.ledger.twin] == [False] * 4 + [True] * 3
    for model in (result.model, result.ungrown):
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_one_schedule_drives_both_networks():
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, 0.5, total_steps=STEPS + 1)
    result = run(Script(), model=model, optimizer=optimizer, scheduler=scheduler)
    assert scheduler.last_epoch == STEPS
    rates = {group["lr"] for group in optimizer.param_groups}
    assert len(rates) == 1
    assert rates.pop() < 0.01
    grown = [step.metric for step in result.ledger.steps]
    assert grown == [twin.metric for twin in result.ledger.twin]


@pytest.mark.parametrize("is_for_use", [True, False])
def test_a_model_that_comes_ready_for_use_is_trained(is_for_use):
    """One with modules in either mode stays as it is."""
    frozen, free = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    model = nn.Sequential(frozen, free, mlp())
    frozen.eval()
    if is_for_use:
        model.eval()
    result = run(Script(), model=model)
    for network in (result.growth.model, result.model, result.ungrown):
        assert network.training
        assert network[0].training == is_for_use
    assert free.num_batches_tracked > 0
    assert bool(frozen.num_batches_tracked > 0) == is_for_use


@pytest.mark.parametrize(
    ("part", "is_told"),
    [("backbone", True), ("backbone.1", False), ("frozen", False)],
)
def test_a_part_that_trains_in_eval_mode_is_told(part, is_told):
    """As a model from a library does under a new head; a norm alone is meant to be so."""
    layers = dict(
        backbone=nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)),
        frozen=nn.Sequential(nn.Linear(5, 5), nn.ReLU()).requires_grad_(False),
        head=mlp(),
    )
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    model.get_submodule(part).eval()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(Script(), model=model)
    assert [str(w.message).partition(" while")[0] for w in told] == (
        ["backbone is in eval mode"] if is_told else []
    )
    assert not model.get_submodule(part).training


def test_a_score_that_leaves_its_range_does_not_end_the_run():
    """1 - error / 2 of a network whose rate is too high, and of its twin."""
    torch.manual_seed(0)
    x = torch.rand(64, 5) * 2 - 1
    data = [(x, torch.sin(3 * x[:, :1]))]
    model = mlp(classes=1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    lowest = []

    def metric(output, target):
        scores = 1 - (output - target).abs().mean(1) / 2
        lowest.append(float(scores.min()))
        return scores

    settings = dict(loss=F.mse_loss, steps=24, decisions=8, progress=False, metric=metric)
    result = esper.grow(model, data, data, optimizer=optimizer, **settings)
    assert any(score < -1 for score in lowest)
    assert result.growth.optimizer_steps == 24
    assert len(result.ledger.twin) == 9
    known = [record.metric for record in result.ledger.twin if record.metric is not None]
    assert all(0 <= metric <= 1 for metric in known)
