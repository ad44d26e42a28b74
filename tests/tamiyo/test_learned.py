"""A frozen policy as a controller: it acts as the policy does, remembers per env, and travels."""

import pytest
import torch

from esper.leyline.factored_actions import tamiyo_action_space
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import FEATURES, FeatureLayout
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.policy.plain_heads import flat_policy
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from support.random_reports import random_reports


def make_policy(num_slots=3, num_blueprints=8, rng_seed=0):
    torch.manual_seed(rng_seed)
    layout = FeatureLayout(num_slots, num_blueprints)
    policy = tamiyo_policy(layout, PolicyConfig(lstm_hidden_dim=16))
    for weight in policy.parameters():  # as far from indifferent as a trained one
        torch.nn.init.normal_(weight, std=0.5)
    reports = random_reports(50, num_slots=num_slots, num_blueprints=num_blueprints)
    policy.heads.update_scales(layout.features(reports))
    return policy


def masks_of(reports):
    return compute_batch_masks(
        reports, tamiyo_action_space(reports.num_slots, reports.num_blueprints)
    )


def test_it_acts_as_its_policy_does_and_carries_the_state():
    policy = make_policy()
    controller, state = LearnedController(policy), policy.initial_state(100)
    layout = FeatureLayout(3, 8)
    without_memory = []
    for step in range(4):
        reports = random_reports(100, rng_seed=step)
        masks = masks_of(reports)
        expected = policy.act(layout.features(reports), masks, state, deterministic=True)
        forgetful = policy.act(
            layout.features(reports), masks, policy.initial_state(100), deterministic=True
        )
        assert torch.equal(controller.decide(reports, masks), expected.actions)
        without_memory.append(torch.equal(forgetful.actions, expected.actions))
        state = expected.state
    assert not all(without_memory)


def test_an_env_that_begins_anew_is_forgotten_and_no_other():
    controller, fresh = LearnedController(make_policy()), LearnedController(make_policy())
    first, second = random_reports(6, rng_seed=1), random_reports(6, rng_seed=2)
    controller.decide(first, masks_of(first))
    before = [part.clone() for part in controller._state]
    controller.begin(torch.tensor([2, 4]))
    for part, old in zip(controller._state, before, strict=True):
        assert (part[[2, 4]] == 0).all()
        assert torch.equal(part[[0, 1, 3, 5]], old[[0, 1, 3, 5]])
    controller.begin(torch.arange(6))
    assert torch.equal(
        controller.decide(second, masks_of(second)), fresh.decide(second, masks_of(second))
    )


def test_a_saved_controller_loads_and_acts_alike_on_other_slots_and_menus(tmp_path):
    controller = LearnedController(make_policy())
    controller.save(tmp_path / "controller.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["controller.pt"]
    loaded = LearnedController.load(tmp_path / "controller.pt")
    reports = random_reports(20, num_slots=5, num_blueprints=4)
    actions = loaded.decide(reports, masks_of(reports))
    assert torch.equal(actions, controller.decide(reports, masks_of(reports)))
    assert masks_of(reports)["op"].gather(1, actions[:, :1]).all()
    assert len(actions[:, 0].unique()) > 1


def test_a_controller_that_was_trained_on_other_features_is_refused_by_their_names(tmp_path):
    path = tmp_path / "controller.pt"
    LearnedController(make_policy()).save(path)
    saved = torch.load(path)
    here = saved["contents"]["features"]
    assert len(here) == len(FEATURES)

    def trained_on(features):
        contents = {**saved["contents"], "features": features}
        torch.save({**saved, "contents": contents}, path)
        with pytest.raises(ValueError, match="was trained with a different feature set") as refusal:
            LearnedController.load(path)
        return str(refusal.value)

    without = trained_on([feature for feature in here if "locality" not in feature])
    assert "(env locality [1]: x). Retrain it" in without
    rescaled = trained_on([feature.replace("log(1 + x / 100)", "log(1 + x)") for feature in here])
    assert "env train_rows [1]: 0.25 log(1 + x / 100)" in rescaled
    assert "env train_rows [1]: 0.25 log(1 + x))" in rescaled
    assert "(another order)" in trained_on(here[::-1])
    torch.save({**saved, "version": 1}, path)
    with pytest.raises(ValueError, match="holds version 1 of the kind 'controller'"):
        LearnedController.load(path)


def test_what_is_not_a_controller_is_refused(tmp_path):
    torch.save({"weights": {}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not a file that Esper wrote"):
        LearnedController.load(tmp_path / "other.pt")
    flat = flat_policy(tamiyo_action_space(3, 8), 7)
    with pytest.raises(ValueError, match="no slot heads"):
        LearnedController(flat)
    controller = LearnedController(make_policy())
    reports = random_reports(3)
    controller.decide(reports, masks_of(reports))
    with pytest.raises(ValueError, match="reports of 5 envs; this controller has seen 3"):
        controller.decide(random_reports(5), masks_of(random_reports(5)))
