"""Seeds in a user's model: silent at birth, felt by a hook alone, gone without a trace."""

import copy

import pytest
import torch
from torch import nn

from esper.leyline.constants import BlendStyle
from esper.surgery.slots import Slot, blend_one, new_seed
from support.growth_loops import X, new_growth, train
from support.models import MODELS, Script, block_sites, build, germinate


def slot_with_seed(name="residual", blueprint=-1, style=BlendStyle.ADD, site=0, awake=True):
    """A model, its example and a slot whose seed computes something."""
    model, example = build(name)
    model.eval()
    place = block_sites(model, example)[site]
    slot = Slot(place, model)
    blueprint = place.blueprints()[blueprint]
    seed = new_seed(blueprint.program(place.seed_site), place, torch.Generator().manual_seed(1))
    slot.add_seed(seed, style)
    if awake:
        for parameter in seed.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model, example, slot


@pytest.mark.parametrize("style", list(BlendStyle))
@pytest.mark.parametrize("name", list(MODELS))
def test_a_birth_changes_no_bit_of_the_output(name, style):
    model, example = build(name)
    model.eval()
    before = model(example)
    for place in block_sites(model, example):
        for blueprint in place.blueprints():
            slot = Slot(place, model)
            slot.add_seed(
                new_seed(
                    blueprint.program(place.seed_site), place, torch.Generator().manual_seed(0)
                ),
                style,
            )
            slot.alpha = 1.0
            assert torch.equal(model(example), before), (place.name, blueprint.name)
            slot.clear()


def test_a_dormant_slot_leaves_no_hook():
    model, example, slot = slot_with_seed()
    hooks = lambda: sum(len(m._forward_hooks) for m in model.modules())  # noqa: E731
    before = model(example)
    slot.alpha = 0.0
    assert hooks() == 0
    slot.alpha = 0.5
    assert hooks() == 1
    assert not torch.equal(model(example), before)
    slot.clear()
    assert hooks() == 0
    assert torch.equal(model(example), before)


@pytest.mark.parametrize("style", list(BlendStyle))
def test_the_blend_by_its_formula(style):
    x, seed = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    change = {
        BlendStyle.ADD: seed,
        BlendStyle.MULTIPLY: x * torch.tanh(seed),
        BlendStyle.GATE: seed / (1 + torch.exp(-x)),
    }[style]
    torch.testing.assert_close(blend_one(x, seed, 0.7, style), x + 0.7 * change)


def test_births_follow_the_blueprint_and_leave_the_users_randomness_alone():
    model, example = build("mlp")
    place = block_sites(model, example)[0]
    blueprint = place.blueprints()[-1]  # dense_dense
    state = torch.get_rng_state()
    seed = new_seed(blueprint.program(place.seed_site), place, torch.Generator().manual_seed(3))
    again = new_seed(blueprint.program(place.seed_site), place, torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), state)
    first, norm, _, last = seed.layers
    assert 0 < first.weight.abs().max() <= 1 / 6**0.5
    assert first.weight.std() > 0.1
    assert (norm.weight == 1).all()
    assert (last.weight == 0).all()
    for one, other in zip(seed.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_tokens_do_not_see_one_another_and_may_be_any_number():
    model, _, slot = slot_with_seed("encoder")
    x = torch.randn(2, 9, 8)
    y = slot.seed(x)
    later = x.clone()
    later[:, 5:] += 1.0
    assert torch.equal(slot.seed(later)[:, :5], y[:, :5])
    slot.alpha = 1.0
    assert model(torch.randint(0, 20, (2, 11))).shape == (2, 3)


def test_a_site_that_changes_shape_is_named():
    model, _, slot = slot_with_seed("series")
    slot.alpha = 1.0
    with pytest.raises(ValueError, match=r"site '1' gave \(4, 8\) .* now \(4, 10\)"):
        model(torch.randn(2, 1, 20))


def test_a_copy_of_the_model_has_a_seed_of_its_own():
    model, example, slot = slot_with_seed()
    slot.alpha = 1.0
    twin = copy.deepcopy(model)
    assert torch.equal(twin(example), model(example))
    with torch.no_grad():
        for parameter in slot.seed.parameters():
            parameter.zero_()
    assert not torch.equal(twin(example), model(example))


def test_looking_without_the_seed_is_undone():
    model, example, slot = slot_with_seed()
    without = model(example)
    slot.alpha = 1.0
    with_seed = model(example)
    with slot.with_alpha(0.0):
        assert torch.equal(model(example), without)
    assert torch.equal(model(example), with_seed)


def test_a_seed_behind_a_tuple_acts_on_its_first_part():
    layer = nn.LSTM(4, 6, batch_first=True)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.layer(x)[0][:, -1])

    model, example = Recurrent(), torch.randn(3, 5, 4)
    place = block_sites(model, example)[0]
    assert place.name == "layer"
    slot = Slot(place, model)
    blueprint = place.blueprints()[1]
    slot.add_seed(
        new_seed(blueprint.program(place.seed_site), place, torch.Generator()), BlendStyle.ADD
    )
    nn.init.normal_(slot.seed.layers[-1].weight)
    output, state = layer(example)
    slot.alpha = 1.0
    grown, same_state = layer(example)
    assert not torch.equal(grown, output)
    assert all(torch.equal(a, b) for a, b in zip(state, same_state, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_seeds_take_the_models_own_dtype(dtype):
    model, example = build("mlp")
    place = block_sites(model.to(dtype), example.to(dtype))[0]
    blueprint = place.blueprints()[0]
    seed = new_seed(blueprint.program(place.seed_site), place, torch.Generator())
    assert {parameter.dtype for parameter in seed.parameters()} == {dtype}


class Cast(nn.Module):
    """Computes in bfloat16, by autocast or by weights, and hands on float32 or bfloat16."""

    def __init__(self, by_autocast: bool):
        super().__init__()
        self.by_autocast = by_autocast
        self.layer, self.activation = nn.Linear(4, 4), nn.ReLU()
        self.head = nn.Linear(4, 2)
        self.upcast = Upcast()
        if not by_autocast:
            self.layer.bfloat16()

    def forward(self, x):
        if self.by_autocast:
            with torch.autocast("cpu", torch.bfloat16):
                return self.head(self.activation(self.layer(x)))
        return self.head(self.upcast(self.layer(x.bfloat16())))


class Upcast(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.parametrize("by_autocast", [True, False])
def test_seeds_take_the_dtype_of_weights_whatever_flows(by_autocast):
    torch.manual_seed(0)
    model, example = Cast(by_autocast), torch.randn(3, 4)
    place = block_sites(model, example)[0]
    assert place.name == ("activation" if by_autocast else "upcast")
    slot = Slot(place, model)
    blueprint = place.blueprints()[1]
    slot.add_seed(
        new_seed(blueprint.program(place.seed_site), place, torch.Generator()), BlendStyle.ADD
    )
    expected = {torch.float32 if by_autocast else torch.bfloat16}
    assert {parameter.dtype for parameter in slot.seed.parameters()} == expected
    before = model(example)
    slot.alpha = 1.0
    after = model(example)
    assert torch.equal(after, before)
    assert after.dtype == before.dtype


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it compiles
def test_a_model_compiled_in_place_feels_and_trains_its_seeds():
    growth = new_growth(Script(germinate(0, blueprint=1, tempo=0)))
    growth.model.compile(backend="eager")
    for _ in range(4):
        train(growth, steps=6)  # more than a seed that is never called would get
        growth.decide(0.5)
    (slot, *_) = growth._network.slots
    assert slot.alpha == 1.0
    assert slot.seed.layers[-1].weight.abs().max() > 0  # it was 0 at birth
    model = growth.model.eval()
    whole = model(X)
    with slot.with_alpha(0.0):
        assert not torch.allclose(model(X), whole)
