"""Signals against an implementation row by row in float64, and what must not change them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from esper.adapting.plans import SINGLE_PLACES, Place, find_places
from esper.adapting.signals import (
    GLOBAL_SIGNALS,
    MAX_ROWS,
    PLACE_SIGNALS,
    SIGNALS,
    _probe_accuracy,
    _relabelled_accuracy,
    _statistics,
    logits_of,
    measure,
)
from support.adaptations import build, mlp

CLASSES = 4


def rows_for(name, num, rng_seed=0):
    """Rows and labels that are partly predictable, and some of another distribution."""
    rng = torch.Generator().manual_seed(rng_seed)
    shape = (5,) if name == "mlp" else (1, 12)
    y = torch.randint(CLASSES - 1, (num,), generator=rng)  # one class is not seen
    x = torch.randn(num, *shape, generator=rng) + y.view(-1, *(1,) * len(shape))
    return x, y, 2 * torch.randn(50, *shape, generator=rng)


def stacked(model):
    return {name: tensor.unsqueeze(0) for name, tensor in model.state_dict().items()}


def measured(model, x, y, source=None):
    places = find_places(model, x)
    known = None if source is None else source.unsqueeze(0)
    counts = torch.tensor([len(y)])
    found = measure(model, places, stacked(model), x[None], y[None], counts, known)
    assert found.shape == (1, len(SIGNALS))
    return dict(zip(SIGNALS, found[0].tolist(), strict=True))


# -- the same signals, row by row, in numpy; gradients from a chain written out ---------------------


def segments_of(name, model):
    """The model as blocks that end at the places, and its head."""
    layers = list(model)
    if name == "mlp":
        return [nn.Sequential(*layers[i : i + 2]) for i in (0, 2, 4)], layers[6]
    return layers[:3], nn.Sequential(*layers[3:])


def chain(blocks, head, x):
    activations = [x]
    for block in blocks:
        activations.append(block(activations[-1]))
    return activations, head(activations[-1])


def oracle(name, model, x, y, source_x):
    blocks, head = segments_of(name, model)
    num, labels = len(y), y.numpy()
    activations, logits = chain(blocks, head, x.clone().requires_grad_())
    parts = [*blocks, head]
    halves = []
    for half in (0, 1):
        loss = sum(-logits[i].log_softmax(-1)[y[i]] for i in range(half, num, 2)) / num
        weights = [[*part.parameters()] for part in parts]
        flat = [p for group in weights for p in group]
        grads = torch.autograd.grad(loss, [*activations, *flat], retain_graph=True)
        at_places, rest = grads[: len(activations)], list(grads[len(activations) :])
        by_part = [torch.cat([rest.pop(0).flatten() for _ in group]) for group in weights]
        halves.append((at_places, by_part))
    scores = logits.detach().numpy()
    probs = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    losses = -np.log(probs[np.arange(num), labels])
    seen = sorted(set(labels.tolist()))
    predicted = scores.argmax(1)
    found = {
        "rows": math.log10(num),
        "rows_per_class": math.log10(num / len(seen)),
        "classes_seen": len(seen) / CLASSES,
        "accuracy": np.mean(predicted == labels),
        "loss": math.log1p(min(10, losses.mean() / math.log(CLASSES))),
        "entropy": np.mean(-(probs * np.log(probs)).sum(1)) / math.log(CLASSES),
        "confidence": probs.max(1).mean(),
        "accuracy_of_seen": np.mean([max(seen, key=lambda c: s[c]) for s in scores] == labels),
        "relabelled_accuracy": relabelled(predicted, labels),
        "probe_accuracy": probe(activations[-1].detach().flatten(1).numpy(), labels),
        "logit_probe_accuracy": probe(scores, labels),
        "has_source": 1.0,
    }
    found["relabelling_gain"] = found["relabelled_accuracy"] - found["accuracy"]
    found |= segment("head", parts[-1], [by_part[-1] for _, by_part in halves])
    known, _ = chain(blocks, head, source_x)
    for number, place in enumerate(SINGLE_PLACES):
        prefix = place.name.lower()
        value = activations[number].detach().numpy().reshape(num, activations[number].shape[1], -1)
        gradient = sum(at_places[number] for at_places, _ in halves).numpy().reshape(value.shape)
        norms = [np.linalg.norm(gradient[i]) * np.linalg.norm(value[i]) for i in range(num)]
        here = value.transpose(1, 0, 2).reshape(value.shape[1], -1)
        then = known[number].detach().numpy().swapaxes(0, 1).reshape(value.shape[1], -1)
        spread = np.maximum(then.std(1), 1e-3)
        signals = {
            "present": 1.0,
            "probe_accuracy": probe(pooled(value).reshape(num, -1), labels),
            "scale_consistency": consistency((gradient * value).sum(-1)),
            "shift_consistency": consistency(gradient.sum(-1)),
            "sensitivity": math.log10(num * np.mean(norms) / max(losses.mean(), 1e-3) + 1e-6),
            "mean_shift": math.log1p(np.mean(np.abs(here.mean(1) - then.mean(1)) / spread)),
            "spread_shift": np.mean(np.abs(np.log(np.maximum(here.std(1), 1e-3) / spread))),
        }
        found |= {f"{prefix}.{key}": value for key, value in signals.items()}
        if number:
            grads = [by_part[number - 1] for _, by_part in halves]
            found |= segment(prefix, parts[number - 1], grads)
    found["head_gradient"] = found.pop("head.relative_gradient")
    found["head_agreement"] = found.pop("head.gradient_agreement")
    return found


def segment(prefix, part, gradients):
    first, second = (gradient.numpy() for gradient in gradients)
    size = np.sqrt(sum(float(p.detach().square().sum()) for p in part.parameters()))
    agreement = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    return {
        f"{prefix}.relative_gradient": math.log10(np.linalg.norm(first + second) / size + 1e-6),
        f"{prefix}.gradient_agreement": agreement,
    }


def relabelled(predicted, labels):
    right = 0
    for i in range(len(labels)):
        votes = [0] * CLASSES
        for j in range(len(labels)):
            if i != j and predicted[j] == predicted[i]:
                votes[labels[j]] += 1
        right += max(votes) > 0 and votes.index(max(votes)) == labels[i]
    return right / len(labels)


def probe(features, labels):
    """Ridge regression with a bias, in its primal form."""
    features = features - features.mean(0)
    features = features / np.sqrt((features**2).sum(1).mean())
    features = np.concatenate([features, np.ones((len(features), 1))], 1)
    targets = np.eye(CLASSES)[labels] - 1 / CLASSES
    right = 0
    for half in (0, 1):
        known, tested = features[half::2], features[1 - half :: 2]
        penalty = 0.1 * np.eye(features.shape[1])
        solved = np.linalg.solve(known.T @ known + penalty, known.T @ targets[half::2])
        right += int(((tested @ solved).argmax(1) == labels[1 - half :: 2]).sum())
    return right / len(labels)


def pooled(value):
    length = value.shape[-1]
    size = min(8, length)
    ranges = [(i * length // size, -(-(i + 1) * length // size)) for i in range(size)]
    return np.stack([value[..., a:b].mean(-1) for a, b in ranges], -1)


def consistency(gradients):
    squares = (gradients**2).sum(1).mean()
    return (gradients.mean(0) ** 2).sum() / squares - 1 / len(gradients)


@pytest.mark.parametrize("name", ["mlp", "series"])
@pytest.mark.parametrize("num", [31, 64])
def test_signals_equal_those_computed_row_by_row(name, num):
    model, *_ = build(name)
    model = model.double()
    x, y, source = rows_for(name, num)
    x, source = x.double(), source.double()
    expected = oracle(name, model, x, y, source)
    found = measured(model, x, y, source)
    for signal in SIGNALS:
        # the input has no weights of its own
        assert found[signal] == pytest.approx(expected.get(signal, 0.0), rel=1e-4, abs=1e-5), signal
    assert set(expected) <= set(SIGNALS)


# -- what must not matter ---------------------------------------------------------------------------


def test_padding_rows_do_not_matter():
    model, _, places = build("series")
    x, y, source = rows_for("series", 40)
    args = model, places, stacked(model)
    alone = measure(*args, x[None], y[None], torch.tensor([40]), source[None])
    for filler in (0.0, 100.0):
        padded_x = torch.cat([x, torch.full((13, 1, 12), filler)])
        padded_y = torch.cat([y, torch.full((13,), 3)])
        padded = measure(*args, padded_x[None], padded_y[None], torch.tensor([40]), source[None])
        torch.testing.assert_close(padded, alone, rtol=1e-3, atol=1e-4)


def test_rows_beyond_the_limit_are_not_read():
    model, *_ = build("mlp")
    x, y, _ = rows_for("mlp", MAX_ROWS + 30)
    found = measured(model, x, y)
    x[MAX_ROWS:] = 100.0
    y[MAX_ROWS:] = 3
    assert measured(model, x, y) == found


def test_without_source_rows_their_signals_are_zero():
    model, *_ = build("mlp")
    x, y, source = rows_for("mlp", 40)
    without, known = measured(model, x, y), measured(model, x, y, source)
    of_source = {s for s in SIGNALS if s == "has_source" or s.endswith(("mean_shift", "d_shift"))}
    assert {s for s in SIGNALS if without[s] != known[s]} == of_source
    assert not any(without[signal] for signal in of_source)


def test_measuring_leaves_the_model_untouched():
    model, example, _ = build("residual")
    state = {n: t.clone() for n, t in model.state_dict().items()}
    y = torch.arange(6) % 3
    first, second = measured(model, example, y), measured(model, example, y)
    assert first == second
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_places_that_are_missing_have_zero_signals():
    model, *_ = build("one block")
    x, y, _ = rows_for("mlp", 20)
    found = measured(model, x, y)
    for place in (Place.EARLY, Place.MIDDLE):
        assert not any(found[f"{place.name.lower()}.{signal}"] for signal in PLACE_SIGNALS)
    assert found["late.present"] == found["input.present"] == 1.0


@pytest.mark.parametrize("name", ["encoder", "linear"])
def test_signals_of_other_models_are_finite(name):
    model, example, _ = build(name)
    found = measured(model, example, torch.arange(6) % 3)
    assert all(map(math.isfinite, found.values()))
    assert found["input.present"] == 1.0


def test_a_model_with_an_unused_layer():
    class WithAuxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.auxiliary = mlp(), nn.Linear(8, 4)

        def forward(self, x):
            return self.net(x)

    torch.manual_seed(0)
    x, y, _ = rows_for("mlp", 20)
    assert all(map(math.isfinite, measured(WithAuxiliary().eval(), x, y).values()))


def test_statistics_are_means_and_spreads_of_channels():
    value = torch.randn(1, 30, 4, 12)
    used = torch.arange(30)[None] < 20
    channels = value[0, :20].transpose(0, 1).flatten(1).double()
    expected = channels.mean(1), channels.std(1, correction=0)
    for found, statistic in zip(_statistics(value, used), expected, strict=True):
        torch.testing.assert_close(found[0].double(), statistic, atol=1e-4, rtol=1e-3)


# -- properties --------------------------------------------------------------------------------------


@st.composite
def labelled(draw):
    num = draw(st.integers(4, 24))
    labels = st.lists(st.integers(0, CLASSES - 1), min_size=num, max_size=num)
    return torch.tensor([draw(labels)]), torch.tensor([draw(labels)]), draw(st.integers(2, num))


@given(labelled(), st.permutations(range(CLASSES)))
def test_relabelled_accuracy(rows, names):
    predicted, y, count = rows
    used = torch.arange(y.shape[1])[None] < count
    found = float(_relabelled_accuracy(predicted, y, used, CLASSES))
    expected = relabelled(predicted[0, :count].numpy(), y[0, :count].numpy())
    assert found == pytest.approx(expected)
    assert 0 <= found <= 1
    # the names that the model gives to its classes do not matter
    renamed = torch.tensor(names)[predicted]
    assert float(_relabelled_accuracy(renamed, y, used, CLASSES)) == pytest.approx(found)


@given(labelled(), st.integers(0, 1000))
def test_probe_accuracy_is_a_share_and_finds_separable_classes(rows, seed):
    _, y, count = rows
    used = torch.arange(y.shape[1])[None] < count
    noise = torch.randn(1, y.shape[1], 3, generator=torch.Generator().manual_seed(seed))
    found = float(_probe_accuracy(noise, y, used, CLASSES))
    assert 0 <= found <= 1
    assert found * count == pytest.approx(round(found * count), abs=1e-4)  # a number of rows
    even, odd = (set(y[0, half:count:2].tolist()) for half in (0, 1))
    if even == odd:
        separable = F.one_hot(y, CLASSES).float()
        assert float(_probe_accuracy(separable, y, used, CLASSES)) == pytest.approx(1.0)


def test_logits_of_known_outputs():
    scores = torch.randn(3, 2)
    assert logits_of(scores) is scores
    assert logits_of(SimpleNamespace(logits=scores)) is scores
    assert logits_of((scores, torch.zeros(1))) is scores
    one = logits_of(torch.tensor([1.5, -2.0]))
    assert one.tolist() == logits_of(torch.tensor([[1.5], [-2.0]])).tolist() == [[0, 1.5], [0, -2]]
    assert logits_of({"logits": scores}) is scores
    wrongs = (torch.randn(3, 2, 2), torch.ones(3, 2, dtype=torch.long), "text", {"scores": scores})
    for wrong in wrongs:
        with pytest.raises(ValueError, match="needs a classifier"):
            logits_of(wrong)


def test_names_of_signals_are_distinct():
    assert len(set(SIGNALS)) == len(SIGNALS) == len(GLOBAL_SIGNALS) + 4 * len(PLACE_SIGNALS)
