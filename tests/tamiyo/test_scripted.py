"""Random, scheduled and planned growth do what they say, step by step."""

import pytest
import torch

from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.protocols import Controller
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.scripted import FixedSchedule, RandomController
from support.growth_simulator import GrowthSimulator
from support.plans import planned
from support.random_reports import random_reports


def actions_over_an_episode(sim: GrowthSimulator, controller: Controller) -> list[list[int]]:
    """The first env's op, slot and blueprint at each step."""
    actions = []
    for _ in range(sim.num_steps):
        reports = sim.observe()
        action = controller.decide(reports, compute_batch_masks(reports, sim.action_space))
        actions.append(action[0, :3].tolist())
        sim.step(action)
    return actions


def test_a_constant_plan_germinates_on_its_steps_then_holds_and_commits() -> None:
    sim = GrowthSimulator(2, rent=0.1, num_steps=12)
    actions = actions_over_an_episode(sim, planned((1, 0, 5), (4, 2, 3), num_slots=3))
    did = {step: action for step, action in enumerate(actions) if action[0] != LifecycleOp.WAIT}
    # a ramp of two steps: a seed of step t trains in t and t + 1, and holds at t + 2
    assert did == {
        1: [LifecycleOp.GERMINATE, 0, 5],
        3: [LifecycleOp.FOSSILIZE, 0, 0],
        4: [LifecycleOp.GERMINATE, 2, 3],
        6: [LifecycleOp.FOSSILIZE, 2, 0],
    }


def test_planned_seeds_of_one_step_are_grown_one_after_the_other() -> None:
    sim = GrowthSimulator(1, rent=0.1)
    actions = actions_over_an_episode(sim, planned((0, 0, 1), (0, 1, 2), (0, 2, 0), num_slots=3))
    assert [a[:2] for a in actions[:3]] == [[LifecycleOp.GERMINATE, s] for s in range(3)]
    assert (sim.states.stage == SeedStage.FOSSILIZED).all()


def test_a_plan_commits_in_time_when_steps_run_out() -> None:
    sim = GrowthSimulator(1, rent=0.1, num_steps=4)
    actions = actions_over_an_episode(sim, planned((0, 0, 1), (1, 1, 2), (2, 2, 0), num_slots=3))
    assert [a[0] for a in actions[2:]] == [LifecycleOp.FOSSILIZE] * 2


def test_a_schedule_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="every=0"):
        FixedSchedule(every=0)


def test_a_fixed_schedule_grows_slot_after_slot_with_seeds_of_its_size() -> None:
    sim = GrowthSimulator(1, rent=0.1)
    actions = actions_over_an_episode(sim, FixedSchedule(first_step=2, every=4, size=200 / 858))
    grown = [(t, a[1], a[2]) for t, a in enumerate(actions) if a[0] == LifecycleOp.GERMINATE]
    assert grown == [(2, 0, 3), (6, 1, 3), (10, 2, 3)]
    assert (sim.states.stage == SeedStage.FOSSILIZED).all()


def test_random_choices_are_even_over_what_is_legal() -> None:
    reports = random_reports(1, num_slots=3, num_blueprints=4, rng_seed=7)
    reports.stage.copy_(torch.tensor([[SeedStage.DORMANT, SeedStage.DORMANT, SeedStage.HOLDING]]))
    reports.total_age.fill_(3)
    reports.fits.fill_(True)
    for name in ("params_left", "macs_left"):
        getattr(reports, name).fill_(torch.inf)
    reports.cost_params.fill_(1.0)
    reports.cost_macs.fill_(1.0)
    reports.seeds_left.fill_(1)
    many = reports.at(torch.zeros(20_000, dtype=torch.int64))
    masks = compute_batch_masks(many, tamiyo_action_space(3, 4))
    actions = RandomController(torch.Generator().manual_seed(0)).decide(many, masks)
    ops = torch.bincount(actions[:, 0], minlength=len(LifecycleOp)) / len(actions)
    expected = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2, 0.0])  # ADVANCE is legal nowhere
    torch.testing.assert_close(ops, expected, atol=0.015, rtol=0)
    germinated = actions[actions[:, 0] == LifecycleOp.GERMINATE]
    slots = torch.bincount(germinated[:, 1], minlength=3) / len(germinated)
    torch.testing.assert_close(slots, torch.tensor([0.5, 0.5, 0.0]), atol=0.03, rtol=0)
    blueprints = torch.bincount(germinated[:, 2], minlength=4) / len(germinated)
    torch.testing.assert_close(blueprints, torch.full((4,), 0.25), atol=0.03, rtol=0)


def test_random_actions_repeat_with_their_generator() -> None:
    reports = random_reports(32)
    masks = compute_batch_masks(reports, tamiyo_action_space(3, 8))
    first, again, other = (
        RandomController(torch.Generator().manual_seed(s)).decide(reports, masks) for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
