"""What cannot work is told when growth is made, before anything is touched."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from esper import Budget, Growth
from esper.tamiyo.growth_rules import EvidenceConfig, EvidenceController
from support.growth_loops import X, Y, new_growth, train
from support.models import Script, build, germinate, mlp


def refused(message, *, model=None, optimizer=None, **options):
    model = model or mlp()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=message):
        Growth(model, optimizer, **{"example": X, "decisions": 8, **options})


OTHER = torch.optim.SGD(mlp().parameters(), 0.1)  # of another model


def traced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch would have it gone
        return torch.jit.trace(mlp().eval(), X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(model=len, optimizer=OTHER), "the model is a builtin_.*; give an nn.Module"),
        (dict(model=traced()), "a TopLevelTracedModule; give an nn.Module, neither"),
        (dict(model=nn.DataParallel(mlp())), "DataParallel does not copy new weights"),
        (dict(model=mlp().requires_grad_(False)), "the optimizer has only frozen weights"),
        (dict(optimizer=torch.optim.SGD), "optimizer=<class .*SGD.*>; give an instance"),
        (dict(optimizer=OTHER), "trains none of the model's"),
        (
            dict(example=X.double()),
            r"does not accept a batch, torch.float64 of shape \(\d+, \d+\): ",
        ),
        (dict(train_rows=0), "train_rows=0; use 1 or more, or leave it out"),
        (dict(sites=["11"]), "did you mean '1'"),
        (dict(blueprints=["conv"]), r"none of the blueprints \['conv'\] fits"),
        (dict(blueprints=["cnov"]), r"no blueprints \['cnov'\]"),
        (dict(val_loader=[(X, Y)]), "go together"),
        (dict(controller=None), "or an object with methods begin"),
        (dict(controller=Script), "or an object with methods begin"),
        (dict(controller="heuristics"), "controller='heuristics'; give 'heuristic', the file"),
        (dict(controller="runs/1/controller.pt"), "controller='runs/1/controller.pt': there is no"),
        (dict(controller=Path("runs/mine")), "controller='runs/mine': there is no such file"),
        (dict(decisions=1), "decisions=1; use 2 or more"),
        (dict(decisions=8.5), "decisions=8.5; use a whole number"),
        (dict(rng_seed="0"), "rng_seed='0'; use a whole number"),
        (dict(rent=math.nan), "rent=nan; use 0 or more"),
        (dict(rent=-0.1), "rent=-0.1; use 0 or more"),
        (dict(rent=math.inf), "rent=inf; use 0 or more"),
        (dict(rent="a"), "rent='a'; use 0 or more"),
        (dict(budget=1000), "budget=1000; give a Budget"),
        (dict(budget=Budget(params=10)), r"Budget\(params=10, .*no room to grow: .* has 111 p.*"),
        (dict(budget=Budget(macs=10)), r"Budget\(.*macs=10\) leaves no room .* and 84 multiply"),
    ],
)
def test_mistakes_are_told_at_once(options, message):
    refused(message, **options)


def test_a_run_too_short_for_the_heuristic_is_refused():
    refused("the controller needs 7 decisions.*there are 4.*give it 3 more decisions", decisions=5)
    refused(
        "there are 6 before the last one: nothing would grow; give it 1 more decision$", decisions=7
    )
    patient = EvidenceController(EvidenceConfig(patience=9))
    refused("needs 13 decisions", controller=patient, decisions=13)


def test_the_least_time_that_the_heuristic_asks_for_is_enough():
    growth = new_growth("heuristic", decisions=8, rent=0.0)
    assert growth.decide(0.5).op == "WAIT"  # before any evidence
    for metric in (0.6, 0.7, 0.8, 0.9, 1.0):
        train(growth)
        growth.decide(metric)
    assert [d.op for d in growth.ledger.decisions].count("GERMINATE") >= 1
    assert [d.op for d in growth.ledger.decisions][-1] == "FOSSILIZE"


def test_a_model_with_some_frozen_weights_can_grow():
    model = mlp()
    model[0].requires_grad_(False)
    growth = Growth(model, torch.optim.SGD(model.parameters(), 0.1), example=X, decisions=8)
    assert growth.sites


def test_a_controller_that_fails_leaves_nothing_behind():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    class Fails(Script):
        def begin(self, env_ids):
            raise ValueError("not today")

    refused("not today", model=model, optimizer=optimizer, controller=Fails())
    assert len(optimizer.param_groups) == 1


def test_a_budget_is_whole_numbers():
    assert Budget(params=2e4, macs=math.inf) == Budget(params=20_000)


@pytest.mark.parametrize("limits", [dict(params="1000"), dict(macs=0), dict(macs=math.nan)])
def test_a_budget_that_is_no_number_is_refused(limits):
    with pytest.raises(ValueError, match="use a number above 0"):
        Budget(**limits)


@pytest.mark.parametrize(
    "limits", [dict(params=111), dict(params=152), dict(macs=84 + 35), dict(params=153, macs=119)]
)
def test_a_budget_without_room_for_the_smallest_seed_is_refused(limits):
    """The model has 111 parameters and 84 multiply-adds; a dense seed adds 42 and 36."""
    message = r"no room .* 111 .* 84 .* \(dense at '1'\) adds 42 and 36"
    refused(message, budget=Budget(**limits), exclude=["0->3"])


def test_a_budget_with_room_for_the_smallest_seed_is_not_refused():
    growth = new_growth(Script(germinate(0, blueprint=1)), budget=Budget(params=153, macs=120))
    growth.decide(0.5)
    assert (growth.params, growth.macs) == (153, 120)


def test_a_budget_that_no_one_seed_keeps_is_refused():
    """Each limit has room for some seed, but no seed keeps both."""
    seeds = [("wide", 10, 50), ("long", 50, 10)]
    Budget(params=120, macs=150).check_room(110, 100, seeds)
    with pytest.raises(ValueError, match=r"smallest seed \(long\) adds 50 and 10"):
        Budget(params=120, macs=110).check_room(110, 100, seeds)


def test_a_model_that_grows_already_is_refused():
    growth = new_growth(Script(germinate(0, blueprint=1)))
    growth.decide(0.5)
    growth.close(0.6)
    assert growth.seeds
    refused("the model has seeds of another growth", model=growth.model)


def test_a_model_is_grown_by_one_growth_at_a_time():
    growth = new_growth(Script())
    refused("another growth of this model is not closed yet", model=growth.model)
    refused("another growth of this model", model=nn.Sequential(growth.model, nn.ReLU()))
    refused("another growth of this model", model=growth.model[3])
    growth.close(0.5)
    optimizer = torch.optim.SGD(growth.model.parameters(), 0.1)
    again = Growth(growth.model, optimizer, example=X, decisions=8)  # nothing had grown
    assert again.params == growth.params


def test_a_growth_that_no_one_holds_any_more_is_none():
    growth = new_growth(Script())
    model = growth.model
    del growth
    again = Growth(model, torch.optim.SGD(model.parameters(), 0.1), example=X, decisions=8)
    assert not again.is_closed


def test_a_seed_for_one_length_does_not_grow_where_lengths_differ():
    model, example = build("series")
    model = nn.Sequential(*model[:5], nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(16, 3))
    refused(
        r"\['mixer'\] fits; there are \['SERIES'\] sites, with other lengths in other",
        model=model,
        example=example,
        other_examples=[torch.randn(2, 1, 24)],
        sites=["1"],
        blueprints=["mixer"],
    )
