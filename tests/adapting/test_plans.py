"""Places of a model, the weights that belong to each, and the plans that it offers."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from esper.adapting.plans import (
    KNOWN_RULES,
    MENU,
    PLANS,
    SINGLE_PLACES,
    HeadMode,
    Place,
    Plan,
    What,
    find_places,
)
from esper.leyline.constants import SiteKind
from support.adaptations import MODELS, build


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_belongs_to_one_place_or_to_the_head(name):
    model, _, places = build(name)
    owned = [weight for names in places.weights[What.TUNE].values() for weight in names] + [
        *places.head
    ]
    assert sorted(owned) == sorted(weight for weight, _ in model.named_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_the_output_layer(name):
    model, example, places = build(name)
    head = model.get_submodule(places.features)
    assert isinstance(head, nn.Linear)
    assert [id(model.get_parameter(n)) for n in places.head] == [*map(id, head.parameters())]
    assert model(example).shape[1] == head.out_features


def test_places_of_a_cnn_with_batch_norm():
    _, _, places = build("series")
    assert {p: s.name for p, s in places.sites.items()} == {
        Place.INPUT: "",
        Place.EARLY: "0.2",
        Place.MIDDLE: "1.2",
        Place.LATE: "2.2",
    }
    for number, place in enumerate(SINGLE_PLACES[1:]):
        names = tuple(f"{number}.{i}.{w}" for i in (0, 1) for w in ("weight", "bias"))
        assert places.weights[What.TUNE][place] == names
        assert places.weights[What.LORA][place] == (f"{number}.0.weight",)
    assert Place.INPUT not in places.weights[What.TUNE]
    assert places.sites[Place.INPUT].kind == SiteKind.SERIES


def test_a_shortcut_belongs_to_its_block():
    _, _, places = build("residual")
    assert "layer2.0.shortcut.weight" in places.weights[What.LORA][Place.LATE]
    assert places.sites[Place.LATE].name == "layer2.0"


def test_token_ids_enter_at_their_embedding():
    _, _, places = build("encoder")
    site = places.sites[Place.INPUT]
    assert site.name == "embedding"
    assert site.kind == SiteKind.TOKENS
    assert places.weights[What.TUNE][Place.INPUT] == ("embedding.weight",)
    assert Place.INPUT not in places.weights[What.LORA]  # an embedding is looked up, not multiplied
    assert all(site.width == 8 for site in places.sites.values())


def test_a_net_with_one_block_has_an_input_and_a_late_place():
    _, _, places = build("one block")
    assert list(places.sites) == [Place.INPUT, Place.LATE]


def test_two_blocks_are_early_and_late():
    places = find_places(nn.Sequential(*mlp_layers(2)), torch.randn(4, 5))
    assert {p: s.name for p, s in places.sites.items()} == {
        Place.INPUT: "",
        Place.EARLY: "1",
        Place.LATE: "3",
    }


def mlp_layers(depth):
    sizes = [5] + [8] * depth
    for before, after in itertools.pairwise(sizes):
        yield from (nn.Linear(before, after), nn.ReLU())
    yield nn.Linear(8, 3)


@pytest.mark.parametrize("depth", range(3, 8))
def test_thirds_of_deeper_nets(depth):
    places = find_places(nn.Sequential(*mlp_layers(depth)), torch.randn(4, 5))
    blocks = [int(places.sites[place].name) // 2 + 1 for place in SINGLE_PLACES[1:]]
    assert blocks == [-(-depth * third // 3) for third in (1, 2, 3)]


def test_a_linear_layer_alone_offers_its_input_and_its_head():
    _, _, places = build("linear")
    offered = {plan for plan in PLANS if places.offers(plan)}
    assert {plan.place for plan in offered} == {Place.NOWHERE, Place.INPUT, Place.EVERYWHERE}
    assert KNOWN_RULES["head only"] in offered
    assert KNOWN_RULES["full fine-tuning"] not in offered  # there is nothing besides the head


def test_offers_what_the_model_has():
    _, _, places = build("mlp")
    assert all(map(places.offers, PLANS))
    _, _, places = build("one block")
    for plan in PLANS:
        is_there = plan.place in (Place.NOWHERE, Place.INPUT, Place.LATE, Place.EVERYWHERE)
        assert places.offers(plan) == is_there


def test_without_an_output_layer_the_head_must_stay():
    _, _, places = build("mlp")
    headless = dataclasses.replace(places, head=(), features="")
    for plan in PLANS:
        assert headless.offers(plan) == (plan.head == HeadMode.KEEP)


def test_a_tied_output_layer_is_owned_once():
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    places = find_places(model, torch.randn(4, 5))
    owned = [weight for names in places.weights[What.TUNE].values() for weight in names] + [
        *places.head
    ]
    assert sorted(owned) == sorted(weight for weight, _ in model.named_parameters())


def test_a_root_parameter_belongs_to_the_first_block():
    class WithScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.net = nn.Parameter(torch.ones(5)), nn.Sequential(*mlp_layers(2))

        def forward(self, x):
            return self.net(x * self.scale)

    places = find_places(WithScale(), torch.randn(4, 5))
    assert places.weights[What.TUNE][Place.EARLY][0] == "scale"


def test_plans_are_distinct_and_the_menu_is_part_of_them():
    assert len(set(PLANS)) == len(PLANS) == 2 + 3 * (4 * 4 + 2) + 1
    assert set(MENU) <= set(PLANS)
    assert set(KNOWN_RULES.values()) - set(MENU) == {KNOWN_RULES["norms and biases"]}
    assert PLANS[0] == KNOWN_RULES["nothing"]
    assert len({str(plan) for plan in PLANS}) == len(PLANS)
    assert str(Plan(Place.INPUT, What.SEED, HeadMode.FIRST)) == "seed input, head first"
