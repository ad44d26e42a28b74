"""`esper.adapt`: inputs of every form, the original untouched, and better than a new head."""

import copy
import math
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.adapting.adapt import _Work
from esper.adapting.adapted import Adapted
from esper.adapting.controller import ANCHORS, AdaptationController, _load, plan_and_rate
from esper.adapting.plans import KNOWN_RULES, PLANS, RATES, HeadMode, Place, Plan, What, find_places
from esper.adapting.result import fingerprint, load_adaptation
from esper.adapting.rows import read_rows
from esper.adapting.signals import MAX_ROWS, SIGNALS, logits_of
from esper.nissa.ledger import Ledger
from esper.runtime.files import UnreadableFile
from support.adaptations import mlp, series_cnn
from support.models import TokenEncoder, blobs

QUICK = dict(steps=6, tries=1, progress=False)
SEED_AT_INPUT = Plan(Place.INPUT, What.SEED, HeadMode.ALONGSIDE)


class Fixed(AdaptationController):
    """Proposes given plans and notes what it was offered."""

    def __init__(self, *plans, rate=RATES[-1]):
        self.plans, self.rate, self.facts = plans, rate, {}

    def choose(self, known, try_plan, *, budget, tries):
        self.signals, self.added, self.budget, self.values = known.signals, known.added, budget, []
        anchors = known.usual[0].nan_to_num(-1)
        found = dict(zip(map(plan_and_rate, ANCHORS), anchors, strict=True))
        for number in range(tries):
            choice = self.plans[number % len(self.plans)], self.rate
            found[choice] = try_plan(choice)
            self.values.append(found[choice])
        return max(found, key=found.get)  # the first of equal ones


def train(model, x, y, steps=60, rate=1e-2, rng_seed=0):
    adam, rng = torch.optim.Adam(model.parameters(), rate), torch.Generator().manual_seed(rng_seed)
    for _ in range(steps):
        rows = torch.randint(len(y), (64,), generator=rng)
        adam.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        adam.step()
    model.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = nn.Sequential(*mlp(3, 8, 3))
    return train(model, *blobs())


@pytest.fixture
def model(trained):
    return copy.deepcopy(trained)


@pytest.fixture
def alone(monkeypatch):
    """Only the controller's plans are tried, not the usual rules."""
    monkeypatch.setattr("esper.adapting.adapt.RIVALS", ())


@pytest.fixture(scope="module")
def shifted():
    """Rows with their sign changed."""
    x, y = blobs(64, rng_seed=5)
    return -x, y


def state_of(model):
    return (
        {n: t.clone() for n, t in model.state_dict().items()},
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [p.grad for p in model.parameters()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
    )


def assert_same_state(model, before):
    now = state_of(model)
    assert now[1:] == before[1:]
    assert all(torch.equal(now[0][n], tensor) for n, tensor in before[0].items())


# -- what it does ------------------------------------------------------------------------------------


def templates(num, rng_seed):
    """Six smooth series, each moved by a few positions, with noise."""
    rng = torch.Generator().manual_seed(rng_seed)
    known = torch.randn(6, 1, 24, generator=torch.Generator().manual_seed(1234))
    known = 2 * F.avg_pool1d(F.pad(known, (2, 2), mode="circular"), 5, 1)
    y = torch.randint(6, (num,), generator=rng)
    moved = torch.stack([known.roll(by, -1) for by in range(6)])
    x = moved[torch.randint(6, (num,), generator=rng), y]
    return x + 0.35 * torch.randn(x.shape, generator=rng), y


def test_a_flipped_sign_is_learned_better_than_by_a_new_head():
    test_x, test_y = templates(1000, 99)
    accuracy = lambda model: float((model(-test_x).argmax(-1) == test_y).float().mean())  # noqa: E731
    leads = []
    for seed in range(3):
        torch.manual_seed(seed)
        blocks = [
            nn.Sequential(nn.Conv1d(before, 12, 3, stride, 1), nn.ReLU())
            for before, stride in ((1, 1), (12, 2), (12, 2))
        ]
        head = nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(24, 6)
        model = train(nn.Sequential(*blocks, *head), *templates(1500, seed), 150, rng_seed=seed)
        x, y = templates(120, 1000 + seed)
        options = dict(steps=100, progress=False, rng_seed=seed)
        result = esper.adapt(model, -x, y, **options)
        data = read_rows(-x, y, x, 0.25, seed)
        work = _Work(model, find_places(model, x), data, 100, 32, seed)
        heads = [  # at the learning rate that is best on the test rows
            accuracy(work.fit((KNOWN_RULES["head only"], rate), torch.arange(120), lambda: None))
            for rate in RATES
        ]
        leads.append(accuracy(result.model) - max(heads))
        if sum(lead > 0 for lead in leads) == 2:
            return  # two of three are enough
    pytest.fail(str(leads))


@pytest.mark.usefixtures("alone")
def test_the_result_is_the_plan_trained_on_all_rows(model, shifted):
    """Against a loop with torch's Adam, from the same initial seed and minibatches."""
    model, x, y = model.double(), shifted[0].double(), shifted[1]
    result = esper.adapt(model, x, y, controller=Fixed(SEED_AT_INPUT), **QUICK | {"steps": 20})
    assert result.plan == SEED_AT_INPUT
    adapted = Adapted(model, find_places(model, x), SEED_AT_INPUT, 0)
    own = adapted.changes()
    adam = torch.optim.Adam(own.values(), RATES[-1])
    draws = torch.rand(20, 32, generator=torch.Generator().manual_seed(0))
    for step in range(20):
        for group in adam.param_groups:
            group["lr"] = RATES[-1] * 0.5 * (1 + math.cos(math.pi * step / 20))
        rows = (draws[step] * len(y)).long()
        loss = F.cross_entropy(adapted(x[rows]), y[rows])
        gradients = torch.autograd.grad(loss, [*own.values()])
        for tensor, gradient in zip(own.values(), gradients, strict=True):
            tensor.grad = gradient
        adam.step()
    for name, tensor in result.change.items():
        torch.testing.assert_close(tensor, own[name], rtol=1e-3, atol=1e-4)
    assert result.params == sum(tensor.numel() for tensor in own.values())


def test_the_best_try_on_held_out_rows_is_kept(model, shifted):
    plans = KNOWN_RULES["nothing"], KNOWN_RULES["LP-FT"], KNOWN_RULES["head only"]
    controller = Fixed(*plans)
    options = dict(steps=40, tries=3, progress=False)
    result = esper.adapt(model, *shifted, controller=controller, **options)
    assert len(controller.values) == 3
    rules = {"head only", "LP-FT", "full fine-tuning"}
    assert set(result.accuracy) == {"adapted", "as it is", *rules}
    assert result.accuracy["adapted"] == max(result.accuracy.values())
    assert result.plan in plans[1:]
    assert result.validation_rows == 16
    tried = result.ledger.trials
    usual = ["head only", "LP-FT", "full fine-tuning"]
    assert [trial.plan for trial in tried] == ["nothing", *usual, *map(str, plans)]
    assert [trial.plan for trial in tried if trial.kept] == [str(result.plan)]


@pytest.mark.usefixtures("alone")
def test_the_model_is_kept_as_it_is_if_nothing_validates_better(model):
    x, y = blobs(64, rng_seed=5)
    y[0] = (y[0] + 1) % 3  # not perfect, but next to it
    result = esper.adapt(model, x, y, controller=Fixed(KNOWN_RULES["LP-FT"], rate=50.0), **QUICK)
    assert result.plan == KNOWN_RULES["nothing"]
    assert result.params == 0
    assert torch.equal(result.model(x), model(x))
    assert result.accuracy["adapted"] == result.accuracy["as it is"]


def test_a_training_that_diverges_is_never_kept(model, shifted):
    """Few rows validate, so half a standard error is wide; no number is no result."""
    x, y = shifted
    plan = KNOWN_RULES["LP-FT"]

    class Stubborn(Fixed):
        def choose(self, *arguments, **options):
            super().choose(*arguments, **options)
            return plan, self.rate

    with pytest.warns(UserWarning, match="diverged; nothing was changed"):
        result = esper.adapt(model, x, y, controller=Stubborn(plan, rate=1e30), **QUICK)
    assert result.plan == KNOWN_RULES["nothing"]
    assert torch.equal(result.model(x), model(x))


def test_a_perfect_model_is_said_to_be_and_not_changed(model, capsys):
    x, _ = blobs(64, rng_seed=5)
    with torch.no_grad():
        y = model(x).argmax(-1)
    result = esper.adapt(model, x, y, controller=Fixed(), **QUICK | {"progress": True})
    assert "right on every row" in str(result)
    assert "right on every row" in capsys.readouterr().out
    assert result.plan == KNOWN_RULES["nothing"]
    assert torch.equal(result.model(x), model(x))


def test_the_same_rng_seed_gives_the_same_result(model, shifted):
    first, again, other = (
        esper.adapt(model, *shifted, rng_seed=seed, **QUICK) for seed in (3, 3, 4)
    )
    assert first.plan == again.plan
    assert first.signals == again.signals
    assert all(torch.equal(again.change[n], tensor) for n, tensor in first.change.items())
    assert first.signals != other.signals or first.accuracy != other.accuracy


def test_sorted_labels_do_not_hide_classes_from_the_controller(model):
    x, y = blobs(3 * MAX_ROWS)
    order = y.argsort()
    controller = Fixed(KNOWN_RULES["head only"])
    esper.adapt(model, -x[order], y[order], controller=controller, **QUICK)
    assert controller.signals[0, SIGNALS.index("classes_seen")] == 1.0


def test_source_rows_add_their_signals(model, shifted):
    x, _ = blobs()
    known = esper.adapt(model, *shifted, source=x, **QUICK).signals
    assert known["has_source"] == 1.0
    assert known["input.mean_shift"] > 0
    assert esper.adapt(model, *shifted, **QUICK).signals["has_source"] == 0.0


# -- the original --------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["seeds everywhere", "LP-FT", "LoRA everywhere"])
def test_the_original_is_untouched(model, shifted, plan):
    for number, module in enumerate(model):
        module.train(number % 2 == 0)
    model[0].weight.requires_grad_(False)
    torch.manual_seed(3)
    before, python, torch_state = state_of(model), random.getstate(), torch.get_rng_state()
    result = esper.adapt(model, *shifted, controller=Fixed(KNOWN_RULES[plan]), **QUICK)
    assert_same_state(model, before)
    assert result.remove() is model
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_the_modes_are_restored_after_an_error(model, shifted):
    class Failing(Fixed):
        def choose(self, *args, **kwargs):
            raise KeyError("controller")

    model[1].train()
    before = state_of(model)
    with pytest.raises(KeyError):
        esper.adapt(model, *shifted, controller=Failing(), **QUICK)
    assert_same_state(model, before)


def test_frozen_parameters_and_disabled_gradients(model, shifted):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        controller = Fixed(KNOWN_RULES["LP-FT"])
        result = esper.adapt(model, *shifted, controller=controller, **QUICK | {"steps": 60})
    assert result.accuracy["adapted"] > result.accuracy["as it is"]
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_batch_norm_statistics_stay(shifted):
    torch.manual_seed(0)
    model = series_cnn(classes=3).eval()
    before = state_of(model)
    x = torch.randn(20, 1, 12)
    esper.adapt(model, x, torch.arange(20) % 3, controller=Fixed(KNOWN_RULES["LP-FT"]), **QUICK)
    assert_same_state(model, before)


# -- what becomes of the change -------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "plan",
    [SEED_AT_INPUT, *(KNOWN_RULES[n] for n in ("seeds everywhere", "LoRA everywhere", "LP-FT"))],
)
def test_a_saved_change_gives_the_same_model(model, shifted, tmp_path, plan):
    x, y = shifted
    result = esper.adapt(model, x, y, controller=Fixed(plan), **QUICK | {"steps": 25})
    assert result.plan == plan
    path = tmp_path / "change.pt"
    result.save(path)
    loaded = esper.load_adaptation(copy.deepcopy(model), path)
    plain = loaded.plain_model()
    for adapted in (loaded.model, plain, result.plain_model()):
        assert torch.equal(adapted(x), result.model(x))
    assert loaded.params == result.params
    loaded.save(again := tmp_path / "again.pt")
    assert torch.equal(esper.load_adaptation(model, again).model(x), result.model(x))
    if plan.what in (What.LORA, What.TUNE):
        assert list(plain.state_dict()) == list(model.state_dict())  # merged
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-3
    with pytest.raises(UnreadableFile, match="another model"):
        load_adaptation(other, path)


def test_the_fingerprint_sees_names_shapes_and_values():
    base = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    same = copy.deepcopy(base)
    assert fingerprint(same) == fingerprint(base)
    same[1].num_batches_tracked += 1
    assert fingerprint(same) != fingerprint(base)
    named = nn.Sequential()
    named.add_module("a", base[0])
    named.add_module("1", base[1])
    assert fingerprint(named) != fingerprint(base)


@pytest.mark.usefixtures("alone")
def test_export_of_seeds_at_the_input_and_in_the_net(model, shifted, tmp_path):
    x, y = shifted
    controller = Fixed(KNOWN_RULES["seeds everywhere"])
    result = esper.adapt(model, x, y, controller=controller, **QUICK | {"steps": 25})
    assert result.plan == KNOWN_RULES["seeds everywhere"]
    files = result.export(tmp_path, ("torch",))
    exported = torch.export.load(files["torch"]).module()
    result.save(tmp_path / "change.pt")
    loaded = esper.load_adaptation(model, tmp_path / "change.pt")
    with pytest.raises(ValueError, match="give example="):
        loaded.export(tmp_path)
    loaded.export(tmp_path / "again", ("torch",), example=x[:2])
    torch.testing.assert_close(exported(x), result.model(x), rtol=1e-4, atol=1e-5)


def test_a_page_says_what_was_decided(model, shifted, tmp_path):
    page = tmp_path / "page.html"
    result = esper.adapt(
        model, *shifted, controller=Fixed(KNOWN_RULES["LP-FT"]), page=page, **QUICK
    )
    text = page.read_text()
    assert "LP-FT" in text
    assert "the model is right on" in text
    assert result.ledger.verdict is not None
    assert Ledger.read(page.with_suffix(".json")) == result.ledger


@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_the_page_is_written_while_plans_are_tried(seconds, model, shifted, tmp_path, monkeypatch):
    pages = []

    def write(ledger, path, now):
        tried = [trial.plan for trial in ledger.trials if trial.seconds is not None]
        running = [trial.plan for trial in ledger.trials if trial.seconds is None]
        pages.append((tried, running, now, ledger.summary()))

    monkeypatch.setattr("esper.nissa.page.write_page", write)
    monkeypatch.setattr("esper.nissa.page._REWRITE_S", seconds)
    plan = KNOWN_RULES["seeds everywhere"]
    esper.adapt(model, *shifted, controller=Fixed(plan), page=tmp_path / "p.html", **QUICK)
    plans = ["nothing", "head only", "LP-FT", "full fine-tuning", "seeds everywhere"]
    started = {tuple(tried): (running, now) for tried, running, now, _ in reversed(pages[:-1])}
    for number in range(1, len(plans)):  # one page or more while each plan is tried
        running, now = started[tuple(plans[:number])]
        assert running == plans[number : number + 1]
        assert re.search(rf": {running[0]}; step \d+ of 30, 0:\d\d so far", now)
    assert pages[0][3] == "The run is not over: 0 plans so far, no verdict yet."
    assert pages[-1][:3] == (plans, [], "")
    assert len(pages) == (5 if seconds else 30 + 1 + 1)  # steps, "done" and the verdict


def test_the_text_names_plan_and_accuracies(model, shifted, capsys):
    options = dict(steps=40, tries=1)
    result = esper.adapt(model, *shifted, controller=Fixed(KNOWN_RULES["head only"]), **options)
    text = capsys.readouterr().out
    assert str(result) in text
    assert "plan: head only" in text
    assert "Nothing was kept" not in text
    assert "LP-FT" in text
    assert "result.remove()" in text


# -- inputs of other forms --------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    """Two inputs; returns an object with `logits`, as models of transformers do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, values, gain):
        return SimpleNamespace(logits=self.net(values * gain), hidden=None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("form", ["tuple", "dict", "loader of tuples", "loader of dicts"])
def test_several_inputs_and_an_output_with_logits(model, shifted, form):
    x, y = shifted
    gain = torch.full((len(x), 1), 0.5)
    inputs = {"values": x * 2, "gain": gain} if "dict" in form else (x * 2, gain)
    rows, labels = inputs, y
    if form.startswith("loader"):

        def part(s):
            return {n: t[s] for n, t in inputs.items()} if "dict" in form else (x[s] * 2, gain[s])

        rows, labels = [(part(slice(i, i + 16)), y[i : i + 16]) for i in range(0, 64, 16)], None
    for plan in (SEED_AT_INPUT, KNOWN_RULES["LP-FT"]):
        result = esper.adapt(
            TwoInputs(model).eval(), rows, labels, controller=Fixed(plan), **QUICK | {"steps": 25}
        )
        plain = esper.adapt(model, x, y, controller=Fixed(plan), **QUICK | {"steps": 25})
        assert result.plan == plan
        assert result.signals["accuracy"] == pytest.approx(plain.signals["accuracy"])
        args = inputs if isinstance(inputs, tuple) else ()
        kwargs = {} if args else inputs
        logits = result.model(*args, **kwargs).logits
        assert logits.shape == (64, 3)
        found = result.plain_model()(*args, **kwargs).logits
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)


def test_a_data_loader_and_arrays_of_numpy(model, shifted):
    x, y = shifted
    controller = Fixed(KNOWN_RULES["head only"])
    expected = esper.adapt(model, x, y, controller=controller, **QUICK)
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    arrays = [(x[i : i + 10].numpy(), y[i : i + 10].numpy()) for i in range(0, 64, 10)]
    forms = [(loader,), (arrays,), ([({"input": x}, y)],), (x.numpy(), y.numpy()), (x, y.tolist())]
    forms += [({"input": x.numpy()}, y), ((x.numpy(),), y), (x.tolist(), y)]
    for rows in forms:
        found = esper.adapt(model, *rows, controller=controller, **QUICK)
        assert found.accuracy == expected.accuracy
        assert found.signals == expected.signals


def test_token_ids():
    torch.manual_seed(0)
    ids, y = torch.randint(0, 20, (40, 7)), torch.arange(40) % 3
    model = TokenEncoder().eval()
    for plan in (SEED_AT_INPUT, KNOWN_RULES["LP-FT"], KNOWN_RULES["seeds everywhere"]):
        result = esper.adapt(model, ids, y, controller=Fixed(plan), **QUICK)
        assert result.model(ids).shape == (40, 3)
    assert math.isfinite(sum(result.signals.values()))


@pytest.mark.usefixtures("alone")
def test_a_linear_layer_and_a_model_in_double_precision(model, shifted):
    x, y = shifted
    torch.manual_seed(0)
    linear = nn.Linear(5, 3)
    result = esper.adapt(linear, x, y, controller=Fixed(KNOWN_RULES["head only"]), **QUICK)
    assert result.params == 18
    double = copy.deepcopy(model).double()
    result = esper.adapt(double, x.double(), y, controller=Fixed(SEED_AT_INPUT), **QUICK)
    assert result.model(x.double()).dtype == torch.float64


def test_a_model_with_an_unused_layer(model, shifted):
    class WithAuxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.auxiliary = model, nn.Linear(8, 3)

        def forward(self, x):
            return self.net(x)

    controller = Fixed(KNOWN_RULES["full fine-tuning"])
    whole = WithAuxiliary().eval()
    result = esper.adapt(whole, *shifted, controller=controller, **QUICK)
    assert torch.equal(result.plain_model().auxiliary.weight, whole.auxiliary.weight)


# -- the budget -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [60, np.int64(60), np.float32(60.5 / 219), None])
def test_the_budget_limits_the_plans_offered(model, shifted, budget):
    assert sum(p.numel() for p in model.parameters()) == 48 + 72 + 72 + 27 == 219
    controller = Fixed(KNOWN_RULES["head only"])
    result = esper.adapt(model, *shifted, controller=controller, budget=budget, **QUICK)
    offered = {
        plan: float(cost) * 219
        for plan, cost in zip(PLANS, controller.added.view(len(PLANS), -1)[:, 0], strict=True)
        if not cost.isnan()
    }
    assert max(offered.values()) <= (60 if budget else math.inf)
    assert KNOWN_RULES["head only"] in offered  # the head is not counted
    assert (KNOWN_RULES["LP-FT"] in offered) == (budget is None)
    assert ("change more than the budget allows" in str(result)) == (budget is not None)
    assert offered[Plan(Place.EARLY, What.TUNE, HeadMode.KEEP)] == pytest.approx(48)
    expected = math.inf if budget is None else 60 / 219
    assert controller.budget == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("budget", [0, -1, 0.0, math.nan, "60", True, 3, 0.01, 60.0])
def test_budgets_that_allow_nothing(model, shifted, budget):
    with pytest.raises(ValueError, match="budget"):
        esper.adapt(model, *shifted, budget=budget, **QUICK)


# -- bad input: an error before anything is spent -------------------------------------------------------------


def bad_inputs():
    x, y = blobs(64, rng_seed=5)
    nan = x.clone()
    nan[3, 2] = math.nan
    return {
        "no labels": ((x,), {}, "no labels"),
        "labels in the rows": (((x, y),), {}, "no labels"),
        "an empty loader": (([],), {}, "no labels"),
        "single rows": (([*zip(x, y, strict=True)],), {}, "single rows"),
        "one class": ((x, torch.zeros(64, dtype=torch.long)), {}, "two or more classes"),
        "few rows": ((x[:7], y[:7]), {}, "at least 8"),
        "no rows": ((x[:0], y[:0]), {}, "empty"),
        "fewer labels": ((x, y[:-1]), {}, "one label per row"),
        "another shape": ((x[:, :4], y), {}, "does not accept these rows, torch.float32 of shape"),
        "words as labels": ((x, ["a"] * len(y)), {}, "labels cannot be numbers"),
        "negative labels": ((x, y - 1), {}, "numbered from 0"),
        "a list of rows": ((list(x), y), {}, "give rows as one tensor: torch.stack"),
        "nothing": ((None, y), {}, "rows of type NoneType cannot be read"),
        "an object": ((object(), y), {}, "rows of type object cannot be read"),
        "text": (("abc", y), {}, "rows of type str cannot be read"),
        "a loader with labels": (
            (DataLoader(TensorDataset(x, y), 9), y),
            {},
            "a loader of pairs goes without labels",
        ),
        "a loader of dicts": (([{"x": x, "labels": y}],), {}, "gives dicts; give pairs"),
        "batches of two shapes": (([(x, y), (x[:, :4], y)],), {}, "cannot be joined"),
        "text as the source": ((x, y), {"source": "a"}, "source of type str cannot be read"),
        "an empty source": ((x, y), {"source": x[:0]}, "source has no rows"),
        "source of another shape": ((x, y), {"source": x[:, :4]}, "source has rows of shape"),
        "no folder for the page": ((x, y), {"page": "/proc/none/run.html"}, "not a folder"),
        "inputs of two lengths": (((x, x[:9]), y), {}, "first axis"),
        "float labels": ((x, y + 0.5), {}, "whole number per row"),
        "one-hot labels": ((x, F.one_hot(y)), {}, r"labels.argmax\(1\)"),
        "too large a label": ((x, y + 1), {}, "the model has 3 outputs"),
        "a negative label": ((x, y - 1), {}, "label -1"),
        "not finite": ((nan, y), {}, "not finite"),
        "no steps": ((x, y), dict(steps=0), "steps=0"),
        "half a try": ((x, y), dict(tries=1.5), "tries=1.5"),
        "many tries": ((x, y), dict(tries=99), "up to 6"),
        "no minibatch": ((x, y), dict(minibatch=0), "minibatch=0"),
        "no validation": ((x, y), dict(validation=0.0), "validation=0.0"),
        "all validation": ((x, y), dict(validation=0.9), "validation=0.9"),
        "text as validation": ((x, y), dict(validation="a"), "validation='a'"),
        "text as rng_seed": ((x, y), dict(rng_seed="a"), "rng_seed='a'"),
        "a number as page": ((x, y), dict(page=3), "give the name of a file"),
        "a folder as page": ((x, y), dict(page="."), "give the name of a file"),
        "no controller": ((x, y), dict(controller=None), "no controller 'None'"),
        "no such controller": ((x, y), dict(controller="tezzeret"), "no controller"),
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input_is_an_error_before_anything_is_spent(model, case, monkeypatch):
    def spent(*args, **kwargs):
        raise AssertionError("trained or measured")

    monkeypatch.setattr("esper.adapting.adapt.fit", spent)
    monkeypatch.setattr("esper.adapting.adapt.measure", spent)
    rows, options, message = bad_inputs()[case]
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        esper.adapt(model, *rows, **QUICK | options)
    assert_same_state(model, before)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_models_that_cannot_be_adapted(shifted):
    x, y = shifted
    net = nn.Sequential(nn.Linear(5, 3))
    for wrong, message in [
        (nn.DataParallel(copy.deepcopy(net)), "give model.module"),  # it moves to a GPU
        (torch.jit.trace(net, x), "give the nn.Module"),
        (copy.deepcopy(net).half(), r"give model.float\(\) or bfloat16"),
    ]:
        with pytest.raises(ValueError, match=message):
            esper.adapt(wrong, x, y, **QUICK)
    with pytest.raises(ValueError, match="give the nn.Module first"):
        load_adaptation("x", "change.pt")
    with pytest.raises(ValueError, match="no parameters"):
        esper.adapt(nn.ReLU(), x, y, **QUICK)
    with pytest.raises(ValueError, match="needs a classifier"):
        esper.adapt(nn.Sequential(nn.Linear(5, 3), nn.Unflatten(1, (3, 1))), x, y, **QUICK)


def test_a_model_without_any_place():
    class Table(nn.Module):
        """Scores of one id, looked up in a parameter of its own."""

        def __init__(self):
            super().__init__()
            self.scores = nn.Parameter(torch.randn(9, 3))

        def forward(self, ids):
            return self.scores[ids]

    with pytest.raises(ValueError, match="nothing can change"):
        esper.adapt(Table().eval(), torch.arange(40) % 9, torch.arange(40) % 3, **QUICK)


def test_numpy_generators_stay(model, shifted):
    np.random.seed(3)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    esper.adapt(model, *shifted, controller=Fixed(KNOWN_RULES["head only"]), **QUICK)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def with_norm_and_dropout():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(1, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5),
        nn.Flatten(), nn.Linear(6 * 10, 3),
    ).eval()  # fmt: skip


def test_neither_model_can_change_the_other():
    model = with_norm_and_dropout()
    x, y = torch.randn(40, 1, 10), torch.arange(40) % 3
    result = esper.adapt(model, x, y, steps=3, tries=1, progress=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not result.model.training
    result.model.train()
    optimizer = torch.optim.SGD(result.model.parameters(), 0.1)
    F.cross_entropy(result.model(x), y).backward()
    optimizer.step()
    assert result.remove() is model
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_loaded_change_leaves_the_given_model_in_its_mode(tmp_path):
    model = with_norm_and_dropout()
    x, y = torch.randn(40, 1, 10), torch.arange(40) % 3
    result = esper.adapt(model, x, y, steps=3, tries=1, progress=False)
    result.save(tmp_path / "change.pt")
    model.train()
    loaded = esper.load_adaptation(model, tmp_path / "change.pt")
    assert model.training
    assert torch.equal(loaded.model(x), result.model(x))


def test_arrays_and_other_precisions_are_converted():
    model = with_norm_and_dropout()
    x, y = torch.randn(40, 1, 10), torch.arange(40) % 3
    options = dict(steps=3, tries=1, progress=False)
    known = torch.randn(20, 1, 10)
    expected = esper.adapt(model, x, y, source=known, **options)
    got = esper.adapt(model, x.double().numpy(), y.numpy(), source=known.numpy(), **options)
    assert got.plan == expected.plan
    assert got.signals == expected.signals


@pytest.mark.parametrize(
    "end",
    [
        (nn.Softmax(1),),
        (nn.Linear(3, 1), nn.Sigmoid()),
        (nn.Linear(3, 1), nn.Sigmoid(), nn.Flatten(0)),
    ],
)
def test_probabilities_at_the_end_warn(end):
    model = nn.Sequential(with_norm_and_dropout(), *end).eval()
    with pytest.warns(UserWarning, match="returns probabilities") as caught:
        esper.adapt(model, torch.randn(40, 1, 10), torch.arange(40) % 2, **QUICK)
    assert caught[0].filename == __file__


def test_few_rows_per_class_warn(model):
    x, y = blobs(8)
    with pytest.warns(UserWarning, match="8 rows of 3 classes are too few"):
        esper.adapt(model, x, y, controller=Fixed(KNOWN_RULES["head only"]), **QUICK)


@pytest.mark.usefixtures("alone")
def test_a_warning_says_that_every_training_diverged(model, shifted):
    with pytest.warns(UserWarning, match="every training diverged"):
        esper.adapt(model, *shifted, controller=Fixed(KNOWN_RULES["LP-FT"], rate=1e30), **QUICK)


def test_inside_inference_mode(model):
    with torch.inference_mode():
        x, y = blobs(64, rng_seed=5)
        plan = KNOWN_RULES["LP-FT"]
        result = esper.adapt(model, -x, y, controller=Fixed(plan), **QUICK | {"steps": 60})
    assert result.accuracy["adapted"] > result.accuracy["as it is"]


def test_no_random_state_moves(model, shifted, tmp_path):
    loader = DataLoader(TensorDataset(*shifted), batch_size=10, shuffle=True)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    _load.cache_clear()
    result = esper.adapt(model, loader, **QUICK)
    result.export(tmp_path, ("torch",))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_a_model_with_one_logit_is_adapted_as_one_with_two_classes(shape):
    class OneLogit(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.hidden, self.head = nn.Linear(6, 16), nn.Linear(16, 1)

        def forward(self, x):
            return self.head(self.hidden(x).relu()).view(shape)

    model, rng = OneLogit(), torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=rng)
    y = (x[:, 0] + x[:, 1] > 0).float()
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        adam.zero_grad()
        F.binary_cross_entropy_with_logits(model(x).flatten(), y).backward()
        adam.step()
    model.eval()
    flipped = 1 - y[:80]  # the classes have changed places
    result = esper.adapt(model, x[:80], flipped.view(shape), steps=250, tries=1, progress=False)
    correct = ((result.model(x[80:]).flatten() > 0) == (y[80:] == 0)).float().mean()
    assert result.model(x).shape == model(x).shape
    assert correct > 0.9
    torch.testing.assert_close(
        F.cross_entropy(logits_of(model(x)), y.long()),
        F.binary_cross_entropy_with_logits(model(x).flatten(), y),
    )
