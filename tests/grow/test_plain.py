"""The grown model as an ordinary one."""

from typing import NamedTuple

import pytest
import torch
from grow.small_models import MODELS, build
from torch import Tensor, nn

from esper.grow.plain import Grown, plain_model
from esper.grow.sites import find_sites
from esper.grow.slots import Slot, new_seed
from esper.leyline.constants import BlendStyle


def fully_grown(name: str, style: BlendStyle = BlendStyle.ADD):
    """A model with an awake, committed seed at each site."""
    model, example = build(name)
    return model.eval(), example, with_committed_seeds(model, example, style)


def with_committed_seeds(model: nn.Module, example: Tensor, style: BlendStyle) -> list[Slot]:
    slots: list[Slot] = []
    for place in find_sites(model, example):
        slot = Slot(place, model.get_submodule(place.name))
        program = place.blueprints()[-1].program(place.seed_site)
        slot.plant(new_seed(program, place, torch.Generator().manual_seed(len(slots))), style)
        for parameter in slot.seed.parameters():
            nn.init.normal_(parameter, std=0.2)
        slot.alpha, slot.is_committed = 0.7, True
        slots.append(slot)
    return slots


@pytest.mark.parametrize("style", list(BlendStyle))
@pytest.mark.parametrize("name", list(MODELS))
def test_it_computes_what_the_growing_model_computes(name, style):
    model, example, slots = fully_grown(name, style)
    plain = plain_model(model, slots)
    assert torch.equal(plain(example), model(example))
    assert sum(isinstance(module, Grown) for module in plain.modules()) == len(slots)
    assert not any(module._forward_hooks for module in plain.modules())


@pytest.mark.parametrize("name", list(MODELS))
def test_every_seed_is_felt_without_gradients_too(name):
    """Torch has fast paths for evaluation that skip modules; none may skip a seed."""
    model, example, slots = fully_grown(name)
    plain = plain_model(model, slots)
    with torch.no_grad():
        whole = model(example)
        torch.testing.assert_close(plain(example), whole)
        for slot in slots:
            with slot.at(0.0):
                assert not torch.allclose(model(example), whole), slot.site.name


def test_uncommitted_seeds_are_left_out():
    model, example, slots = fully_grown("residual")
    slots[0].is_committed = False
    plain = plain_model(model, slots)
    with slots[0].at(0.0):
        assert torch.equal(plain(example), model(example))
    slots[0].clear()
    assert torch.equal(plain(example), model(example))


def test_it_shares_nothing_with_the_growing_model():
    model, example, slots = fully_grown("mlp")
    plain = plain_model(model, slots)
    expected = plain(example).clone()
    with torch.no_grad():
        for parameter in (*model.parameters(), *slots[0].seed.parameters()):
            parameter.zero_()
    assert torch.equal(plain(example), expected)


def test_a_named_tuple_stays_one():
    class Encoded(NamedTuple):
        hidden: Tensor
        size: int

    class Encoder(nn.Linear):
        def forward(self, x):
            return Encoded(super().forward(x), len(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = Encoder(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            encoded = self.encoder(x)
            return self.head(encoded.hidden) / encoded.size

    model, example = Net(), torch.randn(3, 4)
    without = model(example)
    slots = with_committed_seeds(model, example, BlendStyle.ADD)
    assert not torch.allclose(model(example), without)
    assert torch.equal(plain_model(model, slots)(example), model(example))


def test_a_site_that_two_parents_know_is_grown_for_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.alias = nn.ModuleList([self.layer])
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.alias[0](x))

    model, example = Twice(), torch.randn(3, 4)
    place = find_sites(model, example)[0]
    slot = Slot(place, model.layer)
    program = place.blueprints()[1].program(place.seed_site)
    slot.plant(new_seed(program, place, torch.Generator()), BlendStyle.ADD)
    nn.init.normal_(slot.seed.layers[-1].weight)
    slot.alpha, slot.is_committed = 1.0, True
    plain = plain_model(model, [slot])
    assert torch.equal(plain(example), model(example))
    assert plain.layer is plain.alias[0]
