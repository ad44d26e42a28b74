"""The grown model as an ordinary one."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from esper.leyline.constants import BlendStyle
from esper.surgery.plain import Grown, check_plain, plain_model
from esper.surgery.sites import ModelSite, trace_sites
from esper.surgery.slots import Slot, new_seed
from support.models import MODELS, block_sites, build


def fully_grown(name: str, style: BlendStyle = BlendStyle.ADD):
    """A model with an awake, committed seed at each site."""
    model, example = build(name)
    return model.eval(), example, with_committed_seeds(model, example, style)


def with_committed_seeds(
    model: nn.Module, example: Tensor, style: BlendStyle, sites: Sequence[ModelSite] = ()
) -> list[Slot]:
    """At these sites, or at all that are found."""
    slots: list[Slot] = []
    for place in sites or block_sites(model, example):
        slot = Slot(place, model)
        blueprint = place.blueprints()[-1]
        slot.add_seed(
            new_seed(
                blueprint.program(place.seed_site), place, torch.Generator().manual_seed(len(slots))
            ),
            style,
        )
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
            with slot.with_alpha(0.0):
                assert not torch.allclose(model(example), whole), slot.site.name


def test_uncommitted_seeds_are_left_out():
    model, example, slots = fully_grown("residual")
    slots[0].is_committed = False
    plain = plain_model(model, slots)
    with slots[0].with_alpha(0.0):
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
    place = block_sites(model, example)[0]
    slot = Slot(place, model)
    blueprint = place.blueprints()[1]
    slot.add_seed(
        new_seed(blueprint.program(place.seed_site), place, torch.Generator()), BlendStyle.ADD
    )
    nn.init.normal_(slot.seed.layers[-1].weight)
    slot.alpha, slot.is_committed = 1.0, True
    plain = plain_model(model, [slot])
    assert torch.equal(plain(example), model(example))
    assert plain.layer is plain.alias[0]


class Rectified(nn.Module):
    """Layers that it knows twice: as children, and in a container of `kind`."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        layers = [self.first, self.second]
        self.path = {"list": layers, "dict": dict(enumerate(layers)), "tuple": (*layers,)}[kind]

    def forward(self, x):
        for layer in self.path.values() if isinstance(self.path, dict) else self.path:
            x = layer(x).relu()
        return self.head(x)


class ByClass(nn.Module):
    """Rectifies what comes out of a linear layer, and of nothing else."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 6)])
        self.middle, self.head = nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.Linear):
                x = x.relu()
        return self.head(self.middle(x))


@pytest.mark.parametrize("kind", ["list", "dict", "tuple"])
def test_modules_in_plain_containers_have_grown_too(kind):
    torch.manual_seed(0)
    model, example = Rectified(kind), torch.randn(3, 4)
    slots = with_committed_seeds(model, example, BlendStyle.ADD)
    assert len(slots) == 2
    assert torch.equal(plain_model(model, slots)(example), model(example))


def test_a_site_inside_another_keeps_its_seed():
    torch.manual_seed(0)
    model, example = (
        nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2)),
        torch.ones(3, 4),
    )
    both = list(trace_sites(model, example).candidates.values())[:2]
    slots = with_committed_seeds(model, example, BlendStyle.ADD, both)
    assert [slot.site.name for slot in slots] == ["0.0", "0"]
    for order in (slots, slots[::-1]):
        assert torch.equal(plain_model(model, order)(example), model(example))


def test_a_seed_that_a_plain_model_would_lose_is_told_by_its_site():
    torch.manual_seed(0)
    model, example = ByClass().train(), torch.randn(3, 4)
    sites = block_sites(model, example)
    assert [site.name for site in sites] == ["layers.0", "middle"]
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"grows at \['layers.0'\] would be lost"):
        check_plain(model, sites, example)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    check_plain(model, sites[1:], example)


@pytest.mark.parametrize("name", list(MODELS))
def test_seeds_of_ordinary_models_are_not_lost(name):
    model, example = build(name)
    check_plain(model, block_sites(model, example), example)
