"""Controllers as files, what they accept, and the one that ships."""

from pathlib import Path

import pytest
import torch

import esper
from esper.adapting import controller as controller_module
from esper.adapting.controller import (
    ANCHORS,
    MAX_TRIES,
    NUM_CHOICES,
    AdaptationController,
    Known,
    find_controller,
    flat_choice,
    new_policy,
    plan_and_rate,
)
from esper.adapting.plans import MENU, PLANS, RATES
from esper.adapting.signals import SIGNALS
from esper.runtime.files import UnreadableFile
from esper.tamiyo.policy.network import PolicyConfig


def new_controller(rng_seed=0):
    torch.manual_seed(rng_seed)
    policy = new_policy(PolicyConfig(lstm_hidden_dim=16))
    low = torch.full((len(SIGNALS),), -1.0)
    return AdaptationController(policy, low, -low, {"trained on": "nothing"})


def offers(num=1, params=0.1):
    """Every plan of the menu at the same cost."""
    added = torch.full((num, len(PLANS), len(RATES)), torch.nan)
    added[:, [plan in MENU for plan in PLANS]] = params
    added[:, 0] = 0.0
    return added.flatten(1)


def proposals(controller, signals, values=(0.1, 0.9, 0.3), **options):
    """What is tried, and at last what is kept."""
    options = dict(budget=torch.inf, tries=len(values)) | options
    added, tried = offers(), []
    known = Known(signals, torch.tensor([20]), added, torch.full((1, len(ANCHORS)), 0.5))

    def try_plan(choice):
        tried.append(choice)
        return values[len(tried) - 1]

    kept = controller.choose(known, try_plan, **options)
    return [*tried, kept]


def test_a_file_gives_the_same_controller(tmp_path):
    controller, path = new_controller(), tmp_path / "controller.pt"
    controller.save(path)
    again = AdaptationController.load(path)
    assert path.stat().st_size < 1_000_000
    assert again.facts == {"trained on": "nothing"}
    assert torch.equal(again.low, controller.low)
    for seed in range(4):
        signals = torch.randn(1, len(SIGNALS), generator=torch.Generator().manual_seed(seed))
        assert proposals(again, signals) == proposals(controller, signals)


@pytest.mark.parametrize("name", ["SIGNALS", "MENU", "RATES"])
def test_other_signals_menus_and_rates_are_refused(tmp_path, monkeypatch, name):
    path = tmp_path / "controller.pt"
    monkeypatch.setattr(controller_module, name, getattr(controller_module, name)[:-1])
    new_controller().save(path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"other {name.lower()}"):
        AdaptationController.load(path)


def test_signals_beyond_the_range_of_training_are_limited():
    controller = new_controller()
    signals = torch.randn(1, len(SIGNALS), generator=torch.Generator().manual_seed(0))
    extreme = torch.where(signals > 0, 1e6, -1e6)
    assert proposals(controller, extreme) == proposals(controller, signals.sign())


@pytest.mark.parametrize("tries", range(1, MAX_TRIES + 1))
def test_proposals_are_plans_of_the_menu(tries):
    found = proposals(new_controller(tries), torch.zeros(1, len(SIGNALS)), (0.45,) * tries)
    assert len(found) == tries + 1
    assert all(plan in MENU and rate in RATES for plan, rate in found)
    assert len(set(found[:-1])) == tries  # nothing is tried twice
    assert found[-1] in {*found[:-1], *map(plan_and_rate, ANCHORS)}


def test_a_small_budget_leaves_the_model_as_it_is():
    for plan, _ in proposals(new_controller(), torch.zeros(1, len(SIGNALS)), budget=0.05):
        assert plan == PLANS[0]


def test_many_models_are_chosen_for_as_one_after_the_other():
    controller, num, tries = new_controller(3), 5, 3
    rng = torch.Generator().manual_seed(0)
    signals = torch.randn(num, len(SIGNALS), generator=rng)
    validation = torch.rand(num, len(PLANS) * len(RATES), generator=rng)
    known = Known(signals, torch.full((num,), 20), offers(num), validation[:, ANCHORS])
    options = dict(budget=torch.inf, tries=tries)
    together = controller.choose_many(known, lambda c: validation[range(num), c], **options)
    for i in range(num):
        alone = Known(*(part[i : i + 1] for part in known))
        result = lambda choice, i=i: float(validation[i, flat_choice(*choice)])  # noqa: E731
        kept = controller.choose(alone, result, **options)
        assert int(together[i]) == flat_choice(*kept)


def test_a_flat_choice_is_a_plan_and_a_rate():
    for number in range(NUM_CHOICES):
        plan, rate = plan_and_rate(number)
        assert number == PLANS.index(plan) * len(RATES) + RATES.index(rate)
        assert flat_choice(plan, rate) == number


def test_the_shipped_controller_is_listed_with_its_facts():
    found = esper.controllers()
    assert "tamiyo" in found
    assert {"trained on", "shifts", "held out", "config"} <= set(found["tamiyo"])
    folder = Path(controller_module.__file__).parent / "controllers"
    files = {path.stem: path for path in folder.glob("*.pt")}
    assert set(files) == set(found)
    assert all(path.stat().st_size < 1_000_000 for path in files.values())
    controller = find_controller("tamiyo")
    assert (controller.low <= controller.high).all()
    assert len(proposals(controller, torch.zeros(1, len(SIGNALS)))) == 4


def test_a_controller_can_be_given_in_three_ways(tmp_path):
    controller, path = new_controller(), tmp_path / "mine.pt"
    controller.save(path)
    assert find_controller(controller) is controller
    assert find_controller(path).facts == find_controller(str(path)).facts == controller.facts
    controller.facts["trained on"] = "more"
    controller.save(path)
    assert find_controller(path).facts == {"trained on": "more"}  # not what was read before
    with pytest.raises(ValueError, match="no controller 'tezzeret'.*'tamiyo'"):
        find_controller("tezzeret")
    (tmp_path / "text.pt").write_text("no archive")
    with pytest.raises(UnreadableFile):
        find_controller(tmp_path / "text.pt")
