"""Training a controller of adaptations, from practice to its file."""

import pytest
import torch

from esper.adapting import training
from esper.adapting.controller import AdaptationController
from esper.adapting.practice import ARCHITECTURES, HELD_OUT_KINDS, draw_scenarios
from esper.adapting.shifts import INPUT_SHIFTS, OUTPUT_SHIFTS
from esper.adapting.training import AdaptConfig, train_controller
from esper.cli import main

TINY = AdaptConfig(
    architectures=("mlp 64",),
    scenarios=4,
    held_out_scenarios=3,
    models=3,
    model_steps=3,
    steps=3,
    num_envs=16,
    rounds=2,
    hidden=8,
)


def test_the_command_writes_a_controller_and_compares_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(training.PRESETS, "quick", TINY)
    path = tmp_path / "controller.pt"
    main(["train-adapt", "--out", str(path), "--device", "cpu"])
    printed = capsys.readouterr().out
    assert "points over LP-FT" in printed
    facts = AdaptationController.load(path).facts
    assert facts["trained on"] == "MNIST-1D: mlp 64"
    assert facts["config"]["scenarios"] == 4
    with pytest.raises(SystemExit, match="exists"):
        main(["train-adapt", "--out", str(path)])


def test_the_same_rng_seed_trains_the_same_controller():
    first, again = (train_controller(TINY).policy.state_dict() for _ in range(2))
    for name, weight in first.items():
        assert weight.equal(again[name]), name


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"architectures": ()}, "use some of"),
        ({"architectures": ("resnet",)}, "resnet"),
        ({"scenarios": 0}, "scenarios"),
        ({"models": 2}, "models"),
    ],
)
def test_wrong_settings_are_refused(setting, match):
    with pytest.raises(ValueError, match=match):
        AdaptConfig(**setting)


def test_held_out_kinds_are_not_practised():
    practised = {s.shift.kinds for seed in range(20) for s in draw_scenarios(180, seed)}
    parts = {part for kinds in practised for part in kinds.split("+")}
    held_out = {part for kinds in HELD_OUT_KINDS for part in kinds.split("+")}
    known = {*INPUT_SHIFTS, *OUTPUT_SHIFTS, "none", "new_classes"}
    assert parts <= known
    assert held_out <= known
    assert parts & held_out == {"new_classes", "swap_labels"}  # only in pairs with others


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_have_the_number_of_outputs_they_say(name):
    architecture = ARCHITECTURES[name]
    model = architecture.build(architecture.num_classes)
    assert model(torch.zeros(2, *architecture.shape)).shape == (2, architecture.num_classes)
