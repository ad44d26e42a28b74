"""`esper.adapt` on models of many forms: shared weights, late pooling, own buffers, several inputs."""

import copy
import runpy
import threading

import pytest
import torch
from torch import nn

import esper
from adapting.test_adapt import QUICK, SEED_AT_INPUT, Fixed
from esper.adapting.plans import KNOWN_RULES, Place, find_places

PLANS = [
    KNOWN_RULES[name] for name in ("head only", "LP-FT", "LoRA everywhere", "seeds everywhere")
]
LABELS = torch.arange(60) % 3


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Only the controller's plans are tried, and kept."""
    torch.manual_seed(0)
    monkeypatch.setattr("esper.adapting.adapt.RIVALS", ())


class Kept(Fixed):
    """Keeps its first proposal, whatever the results are."""

    def choose(self, known, try_plan, **options):
        choice = self.plans[0], self.rate
        try_plan(choice)
        return choice


class PerToken(nn.Module):
    """The output layer reads tokens, and its outputs are averaged."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = (
            nn.Embedding(9, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )

    def forward(self, ids):
        return self.head(self.hidden(self.embedding(ids)).relu()).mean(1)


class Tied(PerToken):
    """The output layer shares its weight with the embedding."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight


class TwoNames(nn.Module):
    """A block with two names, of which the second is used; state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.a = self.b = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass

    def forward(self, x):
        return self.head(self.hidden(self.b(x)).relu())


class IntegerFirst(nn.Module):
    """Its first parameter holds integers; it returns a plain dict."""

    def __init__(self):
        super().__init__()
        self.numbers = nn.Parameter(torch.arange(3), requires_grad=False)
        self.hidden, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return {"logits": self.head(self.hidden(x).relu())}


class OwnBuffers(nn.Module):
    """State that forward passes change, most of it in training mode."""

    def __init__(self):
        super().__init__()
        self.conv = nn.utils.spectral_norm(nn.Conv1d(1, 8, 3, padding=1))
        self.norm, self.other = nn.InstanceNorm1d(8, track_running_stats=True), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(self.other(self.norm(self.conv(x))).relu().mean(-1))


def image_model(*end):
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), *end, nn.Flatten())


VECTORS, IDS = torch.randn(60, 5), torch.arange(360).view(60, 6) % 7
IMAGES, SERIES = torch.randn(60, 1, 6, 6), torch.randn(60, 1, 10)
MODELS = {
    "pooling after the head": (
        lambda: image_model(nn.Conv2d(8, 3, 1), nn.AdaptiveAvgPool2d(1)),
        IMAGES,
    ),
    "flatten after the head": (
        lambda: image_model(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 3, 1)),
        IMAGES,
    ),
    "a mean after the head": (PerToken, IDS),
    "tied weights": (Tied, IDS),
    "two names": (TwoNames, VECTORS),
    "integers first": (IntegerFirst, VECTORS),
    "own buffers": (lambda: OwnBuffers().train(), SERIES),
}


def logits(output):
    return output["logits"] if isinstance(output, dict) else output


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_forms_adapt_and_stay_as_they_are(name, plan, tmp_path):
    build, x = MODELS[name]
    model = build()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    parameters = [*model.named_parameters(remove_duplicate=False)]
    result = esper.adapt(model, x, LABELS, controller=Kept(plan), **QUICK)
    for (name, found), (expected, given) in zip(
        model.named_parameters(remove_duplicate=False), parameters, strict=True
    ):
        assert name == expected
        assert found is given
    for key, value in model.state_dict().items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, before[key]), key
    assert [m.training for m in model.modules()] == modes
    assert result.plan == plan
    adapted = logits(result.model(x))
    model = model.eval()
    if result.params:
        assert not torch.equal(adapted, logits(model(x)))
    model.load_state_dict(before)
    result.save(tmp_path / "change.pt")
    loaded = esper.load_adaptation(model, tmp_path / "change.pt")
    assert torch.equal(logits(loaded.model(x)), adapted)


def test_a_shared_weight_stays_shared():
    result = esper.adapt(Tied(), IDS, LABELS, controller=Kept(KNOWN_RULES["LP-FT"]), **QUICK)
    assert result.model.head.weight is result.model.embedding.weight


@pytest.mark.parametrize("plan", [SEED_AT_INPUT, *PLANS], ids=str)
def test_threads_may_share_the_adapted_model(plan):
    model = nn.Sequential(
        nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    adapted = esper.adapt(model, VECTORS, LABELS, controller=Kept(plan), **QUICK).model
    hooks = [len(part._forward_hooks) for part in adapted.modules()]
    expected, wrong = adapted(VECTORS), []

    def call():
        wrong.extend(not torch.equal(adapted(VECTORS), expected) for _ in range(60))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)
    assert [len(part._forward_hooks) for part in adapted.modules()] == hooks


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_left, self.of_right, self.head = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, left, right):
        return self.head((self.of_left(left) + 2 * self.of_right(right)).relu())


@pytest.mark.parametrize("names", [("left", "right"), ("right", "left")])
def test_a_seed_at_the_input_follows_the_argument(names):
    given = {"left": VECTORS, "right": VECTORS.flip(0).contiguous()}
    rows = {name: given[name] for name in names}
    result = esper.adapt(TwoInputs(), rows, LABELS, controller=Kept(SEED_AT_INPUT), **QUICK)
    left, right = given.values()
    expected = result.model(left, right)
    assert torch.equal(result.model(right=right, left=left), expected)
    assert torch.equal(result.model(left, right=right), expected)
    assert torch.equal(result.model(left, left), result.model(left, left.clone()))
    with pytest.raises(TypeError, match="argument 'left' is missing"):
        result.model(right=right)


@pytest.mark.parametrize("names", [("left", "right"), ("right", "left")])
def test_an_export_of_a_seed_at_the_input_takes_named_arguments(names, tmp_path):
    rows = {name: VECTORS if name == "left" else VECTORS.flip(0) for name in names}
    result = esper.adapt(TwoInputs(), rows, LABELS, controller=Kept(SEED_AT_INPUT), **QUICK)
    files = result.export(tmp_path, ("torch", "source"))
    expected = result.model(**rows)
    program = torch.export.load(files["torch"]).module()
    source = runpy.run_path(str(files["source"]))["load"]()
    for exported in (program, source):
        torch.testing.assert_close(exported(**rows), expected, rtol=1e-4, atol=1e-5)


def test_a_class_that_the_model_checks_is_no_place():
    class Checks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            if type(self.first) is not nn.Linear:
                raise TypeError("a linear layer is needed")
            return self.head(self.second(self.first(x).relu()).relu())

    places = find_places(Checks(), VECTORS)
    assert [site.name for site in places.sites.values()] == ["", "second"]


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_text_models_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Bert": dict(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        ),
        "GPT2": dict(n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1),
    }[name]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=9, num_labels=3, pad_token_id=0, **sizes
    )
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    rows = transformers.BatchEncoding(
        {"attention_mask": torch.ones_like(IDS), "input_ids": IDS + 1}
    )
    site = find_places(model, dict(rows)).sites[Place.INPUT].name
    assert site == {"Bert": "bert.embeddings.LayerNorm", "GPT2": "transformer.drop"}[name]
    result = esper.adapt(model, rows, LABELS, controller=Kept(SEED_AT_INPUT), **QUICK)
    assert result.plan == SEED_AT_INPUT
    assert not torch.equal(result.model(**rows).logits, model(**rows).logits)
