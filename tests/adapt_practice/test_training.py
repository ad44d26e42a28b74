"""Training a controller of adaptations, from practice to its file."""

from dataclasses import replace

import pytest
import torch

from adapt_practice import training
from adapt_practice.__main__ import main
from adapt_practice.scenarios import (
    ARCHITECTURES,
    HELD_OUT_KINDS,
    clusters,
    draw_scenarios,
    glyphs,
    series,
)
from adapt_practice.shifts import INPUT_SHIFTS, OUTPUT_SHIFTS
from adapt_practice.training import AdaptConfig, train_controller
from esper.adapting.controller import AdaptationController, new_policy
from esper.tamiyo.policy.network import PolicyConfig

TINY = AdaptConfig(
    architectures=("mlp 64",),
    scenarios=2,
    held_out_scenarios=1,
    models=3,
    model_steps=3,
    steps=3,
    num_envs=16,
    rounds=2,
    hidden=8,
)


def test_the_command_writes_the_controller_of_its_rng_seed_and_compares_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(training.PRESETS, "quick", TINY)
    path = tmp_path / "controller.pt"
    main(["--out", str(path), "--device", "cpu"])
    printed = capsys.readouterr().out
    assert "points over LP-FT" in printed
    controller = AdaptationController.load(path)
    assert controller.facts["trained on"] == "mlp 64"
    assert controller.facts["config"]["scenarios"] == 2
    with pytest.raises(SystemExit, match="exists"):
        main(["--out", str(path)])
    with pytest.raises(SystemExit, match="no_such"):
        main(["--out", str(tmp_path / "other.pt"), "--device", "no_such"])
    assert not capsys.readouterr().out  # it announced nothing
    again = train_controller(
        replace(TINY, device="cpu")
    ).policy.state_dict()  # the same rng seed, the same controller
    for name, weight in controller.policy.state_dict().items():
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
    kinds = {architecture.input_kinds for architecture in ARCHITECTURES.values()}
    practised = {
        s.shift.kinds
        for inputs in kinds
        for seed in range(20)
        for s in draw_scenarios(180, seed, inputs)
    }
    parts = {part for kinds in practised for part in kinds.split("+")}
    held_out = {part for kinds in HELD_OUT_KINDS for part in kinds.split("+")}
    known = {*INPUT_SHIFTS, *OUTPUT_SHIFTS, "none", "new_classes"}
    assert parts <= known
    assert held_out <= known
    assert parts & held_out == {"new_classes", "swap_labels"}  # only in pairs with others


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_read_their_data(name):
    architecture = ARCHITECTURES[name]
    model = architecture.build(architecture.num_classes)
    (x, _), _ = architecture.rows("cpu")
    assert model(x[:2]).shape == (2, architecture.num_classes)


@pytest.mark.parametrize("rows", [series, glyphs, clusters])
def test_data_to_practise_on_are_standardised_and_can_be_learned(rows):
    (x, y), (other, other_y) = rows()
    assert len(x) == 4000
    assert len(other) == 5000
    assert set(y.tolist()) == set(range(10))
    assert abs(float(x.mean())) < 1e-3
    assert float(x.std()) == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(x[0], other[0])
    again = rows()[1][0]
    assert torch.equal(other, again)  # fixed by their rng seeds
    flat, flat_other = x.flatten(1), other.flatten(1)
    nearest = torch.cdist(flat_other[:300], flat).argmin(1)
    assert (y[nearest] == other_y[:300]).float().mean() > 0.4  # chance is .1


@pytest.mark.parametrize(
    ("head_only", "advice"), [(0.30, "use it:"), (0.45, "but head only is better")]
)
def test_the_advice_follows_the_best_rule(tmp_path, monkeypatch, capsys, head_only, advice):
    found = {"head only": head_only, "LP-FT": 0.35, "controller": 0.40}
    monkeypatch.setattr(
        training,
        "train_controller",
        lambda config, say: AdaptationController(
            new_policy(PolicyConfig(lstm_hidden_dim=8)), torch.zeros(1), torch.zeros(1)
        ),
    )
    monkeypatch.setattr(training, "compare_on_held_out", lambda controller, config: dict(found))
    main(["--out", str(tmp_path / "controller.pt"), "--device", "cpu"])
    assert f"+5.0 points over LP-FT; {advice}" in capsys.readouterr().out
