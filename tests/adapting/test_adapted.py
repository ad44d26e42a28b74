"""A model with a change: the same at first, merged as hooked, and never written to."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.adapting.adapted import SCALE_UNIT, Adapted, LowRank, ScaleShift, tuned_name
from esper.adapting.plans import KNOWN_RULES, PLANS, HeadMode, Place, Plan, What, find_places
from esper.adapting.result import plain_copy
from support.adaptations import MODELS, build, changed


def offered(places):
    return [plan for plan in PLANS if places.offers(plan)]


def snapshot(model):
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
        for m in model.modules()
    ]
    flags = [(p.requires_grad, p.grad is None) for p in model.parameters()]
    classes = [type(m) for m in model.modules()]
    return {n: t.clone() for n, t in model.state_dict().items()}, hooks, flags, classes


def assert_untouched(model, before):
    state, *others = snapshot(model)
    assert others == [*before[1:]]
    assert list(state) == list(before[0])
    assert all(torch.equal(state[name], tensor) for name, tensor in before[0].items())


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_every_plan_leaves_the_output_bit_identical_before_training(name, with_grad):
    model, example, places = build(name)
    with torch.set_grad_enabled(with_grad):
        expected = model(example)
        for plan in offered(places):
            assert torch.equal(Adapted(model, places, plan).eval()(example), expected), plan


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_untouched_by_training(name):
    model, example, places = build(name)
    next(iter(model.parameters())).requires_grad_(False)
    before = snapshot(model)
    labels = torch.arange(len(example)) % 3
    for plan in offered(places)[1::5]:
        adapted = Adapted(model, places, plan)
        own = list(adapted.changes().values())
        optimizer = torch.optim.SGD(own, 0.1)
        for _ in range(2):
            gradients = torch.autograd.grad(F.cross_entropy(adapted(example), labels), own)
            for tensor, gradient in zip(own, gradients, strict=True):
                tensor.grad = gradient
            optimizer.step()
        assert not torch.equal(adapted(example), model(example)), plan
        assert_untouched(model, before)


@pytest.mark.parametrize("plan", ["seeds everywhere", "LoRA everywhere", "LP-FT"])
def test_an_error_in_the_forward_pass_leaves_no_hook(plan):
    model, _, places = build("series")
    adapted, before = changed(model, places, KNOWN_RULES[plan]), snapshot(model)
    with pytest.raises(RuntimeError):
        adapted(torch.randn(2, 1, 13))  # too long for the head
    assert_untouched(model, before)


@pytest.mark.parametrize("name", MODELS)
def test_merged_weights_give_the_hooked_output(name):
    model, example, places = build(name)
    if example.is_floating_point():
        model, example = model.double(), example.double()
    for plan in offered(places):
        adapted = changed(model, places, plan)
        if adapted.branches():
            continue
        merged = copy.deepcopy(model)
        _missing, unexpected = merged.load_state_dict(adapted.weights(), strict=False)
        assert not unexpected
        expected = merged(example)
        torch.testing.assert_close(adapted(example), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(plain_copy(adapted)(example), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_plain_copy_gives_the_adapted_output(name, with_grad):
    model, example, places = build(name)
    with torch.set_grad_enabled(with_grad):
        for plan in offered(places):
            adapted = changed(model, places, plan)
            plain = plain_copy(adapted)
            expected = adapted(example)
            torch.testing.assert_close(plain(example), expected, rtol=1e-4, atol=1e-5)
            assert not any(isinstance(module, Adapted) for module in plain.modules())
            is_shared = {id(p) for p in model.parameters()} & {id(p) for p in plain.parameters()}
            assert not is_shared


def test_low_rank_update_by_the_formula():
    torch.manual_seed(0)
    weight = torch.randn(16, 24, 3, dtype=torch.float64)
    update = LowRank(weight, torch.Generator().manual_seed(0))
    assert update.up.shape == (16, 2)
    assert update.down.shape == (2, 72)
    torch.nn.init.normal_(update.up)
    added = torch.einsum("or,rik->oik", update.up, update.down.view(2, 24, 3))
    torch.testing.assert_close(update(weight), weight + added)


def test_a_low_rank_update_starts_at_zero_with_rows_of_length_one():
    update = LowRank(torch.randn(64, 400), torch.Generator().manual_seed(0))
    assert update.up.shape == (64, 8)
    assert not update.up.any()
    torch.testing.assert_close(update.down.norm(dim=1), torch.ones(8), rtol=0.2, atol=0.0)


def test_scale_and_shift_by_the_formula():
    _, _example, places = build("series")
    change = ScaleShift(places.sites[Place.EARLY])
    x = torch.randn(3, 8, 12)
    torch.nn.init.normal_(change.scale)
    torch.nn.init.normal_(change.shift)
    scale, shift = (SCALE_UNIT * p.view(1, 8, 1) for p in (change.scale, change.shift))
    torch.testing.assert_close(change(x), x * (1 + scale) + shift)


def test_parameter_counts_by_hand():
    model, _, places = build("series")  # width 8, kernel 3, input of one channel
    head = 24 * 4 + 4
    counts = {
        Plan(Place.NOWHERE, What.NOTHING, HeadMode.KEEP): 0,
        Plan(Place.NOWHERE, What.NOTHING, HeadMode.ALONGSIDE): head,
        Plan(Place.MIDDLE, What.SCALE, HeadMode.KEEP): 16,
        Plan(Place.INPUT, What.SCALE, HeadMode.FIRST): 2 + head,
        Plan(Place.EARLY, What.TUNE, HeadMode.KEEP): (8 * 3 + 8) + 16,
        Plan(Place.LATE, What.TUNE, HeadMode.KEEP): (8 * 8 * 3 + 8) + 16,
        # norms and biases of three blocks: bias, scale and shift of 8 channels each
        KNOWN_RULES["norms and biases"]: 3 * (8 + 16) + head,
        # low rank: 1 of 8 rows and 3 or 24 columns
        Plan(Place.EVERYWHERE, What.LORA, HeadMode.KEEP): (8 + 3) + 2 * (8 + 24),
        # an adapter at the input: 16 channels, kernel 7, norm, back to one channel
        Plan(Place.INPUT, What.SEED, HeadMode.KEEP): (7 * 16 + 16) + 32 + (16 * 7 + 1),
        # in the net: 8 // 4 would be 2 channels; at least 4, kernel 3
        Plan(Place.LATE, What.SEED, HeadMode.KEEP): (8 * 3 * 4 + 4) + 8 + (4 * 3 * 8 + 8),
    }
    for plan, count in counts.items():
        own = Adapted(model, places, plan).changes()
        assert sum(tensor.numel() for tensor in own.values()) == count, plan
    whole = Adapted(model, places, KNOWN_RULES["full fine-tuning"]).changes()
    assert sum(t.numel() for t in whole.values()) == sum(p.numel() for p in model.parameters())


def test_only_the_heads_copies_are_head():
    model, _, places = build("mlp")
    adapted = Adapted(model, places, KNOWN_RULES["LP-FT"])
    assert adapted.head == {*map(tuned_name, places.head)} < {*adapted.changes()}
    assert adapted.trained_first == adapted.head
    assert not Adapted(model, places, KNOWN_RULES["full fine-tuning"]).trained_first


def test_the_rng_seed_decides_the_initial_change_and_nothing_else():
    model, _, places = build("mlp")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    plan = KNOWN_RULES["seeds everywhere"]
    first, again, other = (Adapted(model, places, plan, seed).changes() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert any(not torch.equal(other[name], tensor) for name, tensor in first.items())


def test_seeds_work_in_an_encoder_with_a_padding_mask():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
            self.encoder = nn.TransformerEncoder(layer, 2)  # uses nested tensors in eval mode

        def forward(self, ids):
            hidden = self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0)
            return self.head(hidden[:, 0])

    torch.manual_seed(0)
    model, ids = Masked().eval(), torch.randint(1, 9, (4, 6))
    ids[:, 4:] = 0
    places = find_places(model, ids)
    adapted = changed(model, places, KNOWN_RULES["seeds everywhere"])
    expected = adapted(ids)
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(plain_copy(adapted)(ids), expected, rtol=1e-4, atol=1e-5)
