"""`esper.grow`: the one call, its twin and its verdict."""

import math
import multiprocessing
import os
import random
import signal
from itertools import chain, repeat

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from grow.small_models import Script, TokenEncoder, blobs, build, loaders, mlp
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import esper
from esper import Budget
from esper.grow import progress
from esper.grow.run import default_metric
from esper.tamiyo.scripted import FixedSchedule, RandomController

STEPS, DECISIONS = 24, 6


def run(controller="heuristic", rng_seed=0, model=None, lr=3e-2, **options):
    torch.manual_seed(rng_seed)
    model = model or mlp()
    train, val = loaders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    settings = dict(loss=F.cross_entropy, steps=STEPS, decisions=DECISIONS, progress=False)
    return esper.grow(
        model, train, val, optimizer=optimizer, controller=controller, **{**settings, **options}
    )


def accuracy(model: nn.Module) -> float:
    x, y = blobs(64, rng_seed=1)
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def plain_training(rng_seed=0) -> list[float]:
    """Validation accuracies of the loop that a user would write, before each decision and after."""
    torch.manual_seed(rng_seed)
    model = mlp()
    train, _ = loaders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    found, steps = [accuracy(model)], 0
    model.train()
    while steps < STEPS:
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
            if steps % (STEPS // DECISIONS) == 0:
                found.append(accuracy(model))
                model.train()
    return found


@pytest.mark.parametrize("controller", ["wait", "grow"])
def test_the_twin_is_the_users_own_training(controller):
    """To the bit, shuffling and dropout included, whatever grows beside it."""
    controllers = {"wait": Script(), "grow": FixedSchedule(every=1)}
    result = run(controllers[controller])
    assert [twin.metric for twin in result.ledger.twin] == plain_training()
    assert len(result.ledger.twin) == DECISIONS + 1


def likelihood(output, target):
    """A metric that no two networks share."""
    return output.softmax(1).gather(1, target[:, None])[:, 0]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-2)


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
    assert twins_training(new_loaders) == own_training(new_loaders)


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
    assert twins_training(loaders, *settings) == own_training(loaders, *settings)


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
    refused("reaches the model by its name", model=model, loss=decayed)


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
    assert result.verdict.ungrown == max(seen)


@pytest.mark.parametrize("rng_seed", range(6))
def test_the_result_is_never_worse_than_what_was_seen_without_growth(rng_seed):
    controller = RandomController(torch.Generator().manual_seed(rng_seed))
    result = run(controller, rng_seed)
    seen = [twin.metric for twin in result.ledger.twin]
    seen += [step.metric for step in result.ledger.steps if not step.seeds]
    assert accuracy(result.model) >= max(seen)
    assert accuracy(result.model) == max(result.verdict.grown, result.verdict.ungrown)


def test_a_grown_network_is_plain_and_within_budget(tmp_path):
    own = sum(p.numel() for p in mlp().parameters())
    result = run(FixedSchedule(every=1), budget=Budget(params=own + 60), steps=48)
    grown = sum(p.numel() for p in result.growth.plain_model().parameters())
    assert own < grown <= own + 60
    assert not any(module._forward_hooks for module in result.model.modules())
    assert result.ledger.verdict is result.verdict
    assert result.ledger.summary()
    files = result.export(tmp_path, formats=("source",))
    assert "esper" not in files["source"].read_text()


def test_one_schedule_drives_both_networks():
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, 0.5, total_steps=STEPS + 1)
    train, val = loaders()
    result = esper.grow(
        model,
        train,
        val,
        loss=F.cross_entropy,
        optimizer=optimizer,
        scheduler=scheduler,
        controller=Script(),
        steps=STEPS,
        decisions=DECISIONS,
        progress=False,
    )
    assert scheduler.last_epoch == STEPS
    rates = {group["lr"] for group in optimizer.param_groups}
    assert len(rates) == 1
    assert rates.pop() < 0.01
    grown = [step.metric for step in result.ledger.steps]
    assert grown == [twin.metric for twin in result.ledger.twin]


def test_behind_the_host():
    result = run(FixedSchedule(every=2), behind_host=True, steps=60, decisions=12)
    stages = {state.stage for step in result.ledger.steps for state in step.seeds}
    assert "TRAINING" in stages
    assert "FOSSILIZED" in stages


@pytest.mark.parametrize("name", ["residual", "series"])
def test_other_models_grow_too(name):
    model, example = build(name)
    targets = torch.randint(0, 3, (len(example),))
    result = run_on(model, [(example, targets)] * 2, FixedSchedule(every=1, size=2.0))
    assert result.growth.seeds


def run_on(model, batches, controller, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = dict(loss=F.cross_entropy, steps=12, decisions=6, progress=False)
    return esper.grow(
        model,
        batches,
        batches,
        optimizer=optimizer,
        controller=controller,
        **{**settings, **options},
    )


def test_tokens_with_a_dict_of_inputs_and_a_metric_of_ones_own():
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 20, (8, 5)), torch.randint(0, 3, (8,))
    result = run_on(
        TokenEncoder(),
        [({"tokens": tokens}, targets)],
        FixedSchedule(every=1),
        metric=lambda output, target: (output.argmax(1) == target).float(),
    )
    assert result.growth.seeds


def test_numbers_as_targets():
    torch.manual_seed(0)
    x = torch.randn(32, 5)
    result = run_on(mlp(classes=1), [(x, x[:, :1])], FixedSchedule(every=1), loss=F.mse_loss)
    assert 0 < result.verdict.grown <= 1
    assert "1 / (1 + squared error) 0." in result.ledger.summary()


def test_the_ledger_has_the_metrics_own_name():
    def top_two(output, target):
        return (output.topk(2).indices == target.unsqueeze(1)).any(1).float()

    assert run(Script()).ledger.metric == "accuracy"
    assert run(Script(), metric=top_two).ledger.metric == "top_two"
    assert run(Script(), metric=lambda *pair: top_two(*pair)).ledger.metric == "score"


def test_the_default_metric_by_hand():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
    assert default_metric(logits, torch.tensor([0, 0, 0])).tolist() == [1.0, 0.0, 1.0]
    per_token = torch.zeros(1, 4, 3)
    per_token[0, :, 1] = 1.0
    target = torch.tensor([[1, 0, -100, 1]])
    assert default_metric(per_token, target).tolist() == pytest.approx([2 / 3])
    assert default_metric(per_token.movedim(-1, 1), target).tolist() == pytest.approx([2 / 3])
    error = default_metric(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]))
    assert error.tolist() == pytest.approx([1 / 3])


def test_the_metric_that_is_advised_for_one_logit_works():
    target = torch.tensor([0, 1, 1, 0])
    with pytest.raises(ValueError, match="For one logit") as told:
        default_metric(torch.zeros(4, 1), target)
    advised = eval(str(told.value).partition("For one logit: ")[2])
    logits = torch.tensor([-1.0, -2.0, 3.0, 4.0])
    for shown in (logits, logits[:, None]):
        assert advised(shown, target).tolist() == [1.0, 0.0, 1.0, 0.0]
        assert advised(shown, target[:, None].float()).tolist() == [1.0, 0.0, 1.0, 0.0]


def refused(message, **options):
    train, val = loaders()
    model = options.pop("model", None) or mlp()
    arguments = dict(
        train_loader=train,
        val_loader=val,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        steps=20,
        decisions=8,
        progress=False,
    )
    with pytest.raises(ValueError, match=message):
        esper.grow(model, **{**arguments, **options})


class ByClass(nn.Sequential):
    """Rectifies what comes out of a linear layer, and of nothing else."""

    def __init__(self):
        super().__init__(nn.Linear(5, 6), nn.Linear(6, 3))

    def forward(self, x):
        for layer in self:
            x = layer(x)
            x = x.relu() if isinstance(layer, nn.Linear) else x
        return x


def test_mistakes_are_told_before_any_training():
    refused("the training loader yields nothing", train_loader=[])
    refused("the validation loader yields nothing", val_loader=[])
    refused(r"must yield pairs \(inputs, target\)", train_loader=[torch.randn(3, 5)])
    refused(
        "training loader is a list_iterator, which can be read only once", train_loader=iter([])
    )
    refused("validation loader is a generator", val_loader=(batch for batch in loaders()[1]))
    empty = [(torch.randn(0, 5), torch.zeros(0, dtype=torch.int64))]
    refused("a batch of inputs without an example in it", train_loader=empty)
    refused("a batch of inputs without an example in it", val_loader=empty)
    refused("decisions=30 for steps=20", decisions=30)
    refused("steps=0; use 1 or more", steps=0)
    refused("is below the model's own", budget=Budget(params=5))
    refused("pass metric=", val_loader=[(torch.randn(4, 5), torch.randn(4, 2, 2))])
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    waits = ReduceLROnPlateau(optimizer)
    refused("waits for a metric", model=model, optimizer=optimizer, scheduler=waits)
    nan = lambda output, target: torch.full((len(target),), math.nan)  # noqa: E731
    refused("the validation metric is nan", metric=nan)
    flags = [(torch.randn(4, 5), torch.tensor([[0.0], [1.0], [1.0], [0.0]]))]
    refused("targets of 0.0 and 1.0 may be classes", val_loader=flags)
    flags = [(torch.randn(4, 5), torch.tensor([0, 1, 1, 0]))]
    one_logit = r"no metric is known for an output \(4, 1\) and a target \(4,\).*For one logit"
    refused(one_logit, model=mlp(classes=1), val_loader=flags)
    flat = nn.Sequential(mlp(classes=1), nn.Flatten(0))
    refused(r"for an output \(4,\) and a target \(4,\)", model=flat, val_loader=flags)
    per_example = lambda *pair: F.cross_entropy(*pair, reduction="none")  # noqa: E731
    refused(r"a loss of shape \(32,\); give the batch's mean", loss=per_example)
    refused("a score of type float", metric=lambda output, target: 0.5)
    model, of_the_loss = mlp(), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *of_the_loss.parameters()], 0.1)
    refused("weights that are not the model's", model=model, optimizer=optimizer)
    refused("trains none of the model's weights", optimizer=adamw(mlp()))
    refused("would be lost in the plain model", model=ByClass())
    refused("wrapped in DataParallel", model=nn.DataParallel(mlp()))


def test_a_loader_that_dries_up_is_noticed():
    class Stream:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(list(loaders()[0]) if self.passes < 3 else [])

    refused("training loader yields nothing when it is read again", train_loader=Stream())


def test_progress_is_shown_with_the_budget(capsys):
    run(Script(), progress=True, budget=Budget(params=4_000))
    shown = capsys.readouterr().out
    assert "at most 4,000 grown" in shown
    assert "24 / 24 steps" in shown


def test_a_metric_that_is_no_number_for_a_while_is_gone_back_from(capsys, monkeypatch):
    """As when training overflows: growth and its twin go on, and the run ends with a verdict."""
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    calls = 0

    def overflows(output, target):
        nonlocal calls
        calls += output.requires_grad  # two networks a step
        return F.mse_loss(output, target) * (math.inf if calls in (5, 6) else 1.0)

    x = torch.randn(32, 5)
    result = run_on(
        mlp(classes=1), [(x, x[:, :1])], FixedSchedule(every=1), loss=overflows, progress=True
    )
    assert "1 / (1 + squared error) is not a number" in capsys.readouterr().out
    assert len(result.ledger.rollbacks) == 1
    assert [twin.metric is None for twin in result.ledger.twin] == [False] * 2 + [True] * 5
    assert 0 < result.verdict.grown <= 1
    result.ledger.to_json()


def test_ctrl_c_finishes_the_step_and_hands_back_what_there_is():
    def pressed_at(step):
        calls = 0

        def loss(output, target):
            nonlocal calls
            calls += output.requires_grad
            if calls == 2 * step - 1 and output.requires_grad:  # in the growing model's pass
                os.kill(os.getpid(), signal.SIGINT)
            return F.cross_entropy(output, target)

        return loss

    with pytest.warns(UserWarning, match="stopped after 14 of 24 steps"):
        result = run(FixedSchedule(every=1), loss=pressed_at(14))
    assert result.growth.is_closed
    assert result.growth.optimizer_steps == 14
    assert [twin.metric for twin in result.ledger.twin[:4]] == plain_training()[:4]
    assert [twin.step for twin in result.ledger.twin] == [0, 1, 2, 3, 4]
    assert accuracy(result.model) == max(result.verdict.grown, result.verdict.ungrown)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_ctrl_c_leaves_the_workers_of_loaders_alive():
    """A terminal sends it to all processes; the result is still measured with those workers."""

    def loss(output, target):
        if output.requires_grad and signal.getsignal(signal.SIGINT) is not before:
            for process in multiprocessing.active_children():
                os.kill(process.pid, signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return F.cross_entropy(output, target)

    before = signal.getsignal(signal.SIGINT)
    options = dict(num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    train, val = (DataLoader(loader.dataset, 32, **options) for loader in loaders())
    model = mlp()
    with pytest.warns(UserWarning, match="stopped after 1 of 24 steps"):
        result = esper.grow(
            model, train, val, loss=loss, optimizer=adamw(model), steps=STEPS, progress=False,
            controller=Script(), decisions=DECISIONS,
        )  # fmt: skip
    assert len(result.ledger.twin) == 2


def test_ctrl_c_twice_interrupts_at_once():
    pressed = 0

    def loss(output, target):
        nonlocal pressed
        if output.requires_grad:
            pressed += 1
            os.kill(os.getpid(), signal.SIGINT)
        return F.cross_entropy(output, target)

    with pytest.raises(KeyboardInterrupt):
        run(Script(), loss=loss)
    assert pressed == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_stays_in_place():
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        with progress.stopped_by_ctrl_c() as is_stopped:
            os.kill(os.getpid(), signal.SIGINT)
            assert not is_stopped()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [1]


def test_progress_without_rich(capsys, monkeypatch):
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    run(Script(), progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert "24 / 24 steps" in lines[-1]


def test_the_name_is_the_function_and_the_package_can_still_be_imported():
    from esper.grow.sites import find_sites

    assert callable(esper.grow)
    assert callable(find_sites)
