"""`esper.grow`: the one call, its twin and its verdict."""

import copy
import math
import multiprocessing
import os
import re
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import esper
from esper import Budget
from esper.nissa.console import LINES
from esper.nissa.ledger import Ledger
from esper.nissa.page import write_page
from esper.runtime.interruption import stop_on_interrupt
from esper.tamiyo.scripted import FixedSchedule, RandomController
from support.grow_calls import DECISIONS, STEPS, accuracy, adamw, plain_training, refused, run
from support.models import Script, TokenEncoder, build, loaders, mlp


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


def test_behind_the_host():
    result = run(FixedSchedule(every=2), shadow_training=True, steps=60, decisions=12)
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
    assert "1 / (1 + squared error / variance) 0." in result.ledger.summary()


def test_the_ledger_has_the_metrics_own_name():
    def top_two(output, target):
        return (output.topk(2).indices == target.unsqueeze(1)).any(1).float()

    assert run(Script()).ledger.metric == "accuracy"
    assert run(Script(), metric=top_two).ledger.metric == "top_two"
    assert run(Script(), metric=lambda *pair: top_two(*pair)).ledger.metric == "score"


class ByClass(nn.Sequential):
    """Rectifies what comes out of a linear layer, and of nothing else."""

    def __init__(self):
        super().__init__(nn.Linear(5, 6), nn.Linear(6, 3))

    def forward(self, x):
        for layer in self:
            x = layer(x)
            x = x.relu() if isinstance(layer, nn.Linear) else x
        return x


def one_loss_per_example(output, target):
    return F.cross_entropy(output, target, reduction="none")


def scores_of_nan(output, target):
    return torch.full((len(target),), math.nan)


FLAGS = [(torch.randn(4, 5), torch.tensor([0, 1, 1, 0]))]
EMPTY = [(torch.randn(0, 5), torch.zeros(0, dtype=torch.int64))]
ONE_LOGIT = r"no default metric fits an output \(4, 1\) and a target \(4,\).*For one logit"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(train_loader=[]), "the training loader yields nothing"),
        (dict(val_loader=[]), "the validation loader yields nothing"),
        (dict(train_loader=[torch.randn(3, 5)]), r"must yield pairs \(inputs, target\)"),
        (dict(train_loader=iter([])), "training loader is a list_iterator, .* read only once"),
        (dict(val_loader=(batch for batch in FLAGS)), "validation loader is a generator"),
        (dict(train_loader=EMPTY), "an empty batch of inputs"),
        (dict(val_loader=EMPTY), "an empty batch of inputs"),
        (dict(val_loader=[(torch.randn(4, 5), torch.randn(4, 2, 2))]), "pass metric="),
        (dict(model=mlp(classes=1), val_loader=FLAGS), ONE_LOGIT),
        (
            dict(model=nn.Sequential(mlp(classes=1), nn.Flatten(0)), val_loader=FLAGS),
            r"fits an output \(4,\) and a target \(4,\)",
        ),
        (dict(metric=scores_of_nan), "scores of nan to nan; each must be 0 to 1"),
        (dict(metric=lambda output, target: 0.5), "a score float; give one number"),
        (dict(loss=one_loss_per_example), r"a loss of shape \(32,\); give the batch's mean"),
        (dict(autocast=torch.float16), "GradScaler"),
        (dict(decisions=30), "decisions=30 for steps=20"),
        (dict(decisions="8"), "decisions='8'; use a whole number"),
        (dict(steps=0), "steps=0; use 1 or more"),
        (dict(steps=20.0), "steps=20.0; use a whole number"),
        (dict(repeats=True), "repeats=True; use a whole number"),
        (dict(repeats=0), "repeats=0; use 1 or more"),
        (dict(repeats=3, twin=False), "repeats=3 with twin=False"),
        (dict(budget=Budget(params=5)), "leaves no room to grow: the model itself has"),
        (dict(optimizer=adamw(mlp())), "trains none of the model's weights"),
        (dict(model=ByClass()), "would be lost in the plain model"),
    ],
)
def test_mistakes_are_told_before_any_training(options, message):
    refused(message, **options)


def test_what_drives_other_weights_or_needs_a_metric_is_refused():
    model, of_the_loss = mlp(), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *of_the_loss.parameters()], 0.1)
    refused("weights that are not the model's", model=model, optimizer=optimizer)
    waits = ReduceLROnPlateau(optimizer)
    refused("ReduceLROnPlateau needs a metric", model=model, optimizer=optimizer, scheduler=waits)


def test_after_a_run_that_failed_the_seeds_that_it_left_are_told():
    model = mlp()
    again = dict(model=model, optimizer=adamw(model), controller=FixedSchedule(every=1))
    calls = 0

    def fails(output, target):
        nonlocal calls
        calls += output.requires_grad
        if calls == 2 * 12:
            raise ValueError("not today")
        return F.cross_entropy(output, target)

    refused("not today", loss=fails, **again)
    refused("the model has seeds of another growth, perhaps one that failed", **again)


def test_a_loader_that_dries_up_is_noticed():
    class Stream:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(list(loaders()[0]) if self.passes < 3 else [])

    refused("training loader yields nothing, perhaps when it is read again", train_loader=Stream())


def test_progress_is_shown_with_the_budget(capsys):
    run(Script(), progress=True, budget=Budget(params=4_000))
    shown = capsys.readouterr().out
    assert "at most 4,000 grown" in shown
    assert "24 / 24 steps" in shown


def test_a_metric_that_is_no_number_for_a_while_is_gone_back_from(capsys, monkeypatch):
    """As when training overflows: growth and its twin go on, and the run ends with a verdict."""
    monkeypatch.setattr("esper.nissa.console.find_spec", lambda name: None)
    calls = 0

    def overflows(output, target):
        nonlocal calls
        calls += output.requires_grad  # two networks a step
        return F.mse_loss(output, target) * (math.inf if calls in (5, 6) else 1.0)

    x = torch.randn(32, 5)
    result = run_on(
        mlp(classes=1), [(x, x[:, :1])], FixedSchedule(every=1), loss=overflows, progress=True
    )
    assert "1 / (1 + squared error / variance) is not a number" in capsys.readouterr().out
    assert len(result.ledger.rollbacks) == 1
    assert [twin.metric is None for twin in result.ledger.twin] == [False] * 2 + [True] * 5
    assert 0 < result.verdict.grown <= 1
    result.ledger.to_json()


def test_a_metric_that_fails_at_the_very_end_costs_no_result():
    calls = 0

    def fails(output, target):
        nonlocal calls
        calls += 1
        right = (output.argmax(1) == target).float()
        return right * (math.nan if calls > 2 + 2 * 2 * (DECISIONS + 1) else 1.0)

    result = run(Script(), metric=fails)  # of two batches: once before, then by both networks
    assert result.verdict.grown == result.growth.best_metric == accuracy(result.model)
    assert result.verdict.ungrown == max(twin.metric for twin in result.ledger.twin)
    assert result.verdict.difference_error is None


@pytest.mark.usefixtures("default_signals")
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


@pytest.mark.usefixtures("default_signals")
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


@pytest.mark.usefixtures("default_signals")
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
        with stop_on_interrupt() as should_stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not should_stop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [1]


def test_progress_without_rich(capsys, monkeypatch):
    monkeypatch.setattr("esper.nissa.console.find_spec", lambda name: None)
    run(Script(), progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert "24 / 24 steps" in lines[-6]
    assert sum(" / 24 steps" in line for line in lines) <= LINES
    assert len(str(run(Script())).splitlines()) == 5  # the verdict follows


def test_the_page_is_written_after_every_decision_and_at_the_end(tmp_path, monkeypatch):
    pages = []

    def write(ledger, path, now):
        pages.append((len(ledger.steps), ledger.after is None, now))
        return write_page(ledger, path, now)

    monkeypatch.setattr("esper.nissa.page.write_page", write)
    monkeypatch.setattr("esper.nissa.page._REWRITE_S", math.inf)
    result = run(Script(), page=tmp_path / "run.html")
    assert [done for done, *_ in pages] == list(range(1, len(result.ledger.steps) + 1))
    assert pages[0][1]
    assert re.search(r"0 seeds .*; step 1 of 24, 0:\d\d so far", pages[0][2])
    assert pages[-1][1:] == (False, "")
    assert result.ledger.summary()[:12] in (tmp_path / "run.html").read_text()


def test_a_page_that_cannot_be_written_is_told_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.html").mkdir()
    model = mlp()
    weights = copy.deepcopy(model.state_dict())
    for page in ("file/run.html", "folder.html"):
        with pytest.raises(ValueError, match="is a folder, or .* is not a folder to write to"):
            run(Script(), model=model, page=tmp_path / page)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    run(Script(), page=tmp_path / "new" / "run")
    assert (tmp_path / "new" / "run.html").exists()


def test_a_page_that_is_not_written_later_does_not_end_the_run(tmp_path, monkeypatch):
    def write(ledger, path, now):
        raise OSError("no space left")

    monkeypatch.setattr("esper.nissa.page.write_page", write)
    with pytest.warns(UserWarning, match=r"run\.html' was not written: no space left"):
        result = run(Script(), page=tmp_path / "run.html")
    assert result.growth.is_closed


def test_without_a_twin_the_grown_network_is_returned():
    result = run(FixedSchedule(every=1), twin=False)
    assert result.verdict is None
    assert result.ungrown is None
    assert "No ungrown twin was trained" in str(result)
    assert not result.ledger.twin
    assert "twin" not in result.ledger.costs
    assert result.growth.params > result.ledger.before.params
    torch.testing.assert_close(accuracy(result.model), result.growth.best_metric)


def test_the_ledger_has_the_cost_of_every_part():
    result = run(Script())
    costs, before = result.ledger.costs, result.ledger.before
    rows = len(next(iter(loaders()[0]))[1])
    assert costs["growing"].macs == costs["twin"].macs == 3 * before.macs * rows * STEPS
    val_rows = sum(len(target) for _, target in loaders()[1])
    assert costs["measuring"].macs == 2 * before.macs * val_rows * (DECISIONS + 1)
    assert all(cost.seconds > 0 for cost in costs.values())
    assert Ledger.from_json(result.ledger.to_json()) == result.ledger


def test_batches_of_another_form_are_unpacked():
    train_loader, val_loader = (
        [{"x": x, "labels": y, "id": 0} for x, y in loader] for loader in loaders()
    )
    options = dict(train_loader=train_loader, val_loader=val_loader)
    refused("give unpack=, a function from a batch", **options)
    unpack = lambda batch: (batch["x"], batch["labels"])  # noqa: E731
    model = mlp()
    settings = dict(loss=F.cross_entropy, optimizer=adamw(model), steps=8, progress=False)
    result = esper.grow(
        model, **options, **settings, decisions=4, controller=Script(), unpack=unpack
    )
    assert result.growth.optimizer_steps == 8


def test_the_name_is_the_function_and_the_package_can_still_be_imported():
    import esper.nissa.page as page
    from esper.surgery.sites import find_sites

    assert esper.grow.__name__ == "grow"
    assert callable(esper.grow)
    assert callable(find_sites)
    assert esper.nissa.page is page
    assert callable(page.write_page)


def test_repeats_put_the_randomness_of_training_into_the_error():
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    schedule = FixedSchedule(every=1)
    result = run(schedule, model=model, optimizer=optimizer, scheduler=scheduler, repeats=3)
    assert result.verdict.repeats == 3
    assert "The means of 3 runs" in str(result)
    assert result.ledger.costs["repeats"].macs > 0
    alone = run(schedule)
    assert alone.verdict.repeats == 1
    assert "does not include the randomness of training" in str(alone)


def test_autocast_computes_in_another_precision():
    seen = set()

    def loss(output, target):
        seen.add(output.dtype)
        return F.cross_entropy(output, target)

    result = run(FixedSchedule(every=1), loss=loss, autocast=torch.bfloat16)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}


def test_series_of_several_lengths_grow_and_train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 5, padding=2), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.ReLU())
    model.extend((nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)))
    train = [(torch.randn(16, 1, n), torch.randint(0, 3, (16,))) for n in (20, 33, 18, 41)]
    result = esper.grow(
        model,
        train,
        [(torch.randn(8, 1, n), torch.randint(0, 3, (8,))) for n in (20, 50)],
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
        steps=30,
        kind={"1": "series"},
        progress=False,
    )
    assert result.ledger.seeds
    plain = result.growth.plain_model()
    assert [plain(x).shape for x, _ in train] == [(16, 3)] * 4
