"""The heuristic's judgement, one case at a time, and its score on hosts with known gains."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from esper.leyline.constants import SiteKind
from esper.leyline.factored_actions import ActionMasks, tamiyo_action_space
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tamiyo.heuristic import (
    HeuristicConfig,
    HeuristicController,
    judge_seeds,
    value_of_growing,
)
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.scripted import FixedSchedule, RandomController
from support.growth_simulator import HOST_PARAMS, GrowthSimulator, NoGrowth
from support.plans import planned
from support.random_reports import random_reports, report_batches

CONV, CONV_CONV = 3, 5  # blueprints of the simulator


def masks_of(reports: Reports) -> ActionMasks:
    return compute_batch_masks(
        reports, tamiyo_action_space(reports.num_slots, reports.num_blueprints)
    )


def decide(reports: Reports, config: HeuristicConfig | None = None) -> Tensor:
    return HeuristicController(config).decide(reports, masks_of(reports))


def one_held_seed(
    *, contribution: float, rent: float, step: int = 10, stage: SeedStage = SeedStage.HOLDING
) -> Reports:
    """A host with a conv-conv seed at full weight in its first slot."""
    sim = GrowthSimulator(1, rent)
    sim.step_count = step
    sim.accuracies = [torch.tensor([0.7])] * 5
    sim.states.stage[0, 0] = int(stage)
    sim.states.blueprint[0, 0] = CONV_CONV
    sim.states.alpha[0, 0] = sim.states.alpha_target[0, 0] = 1.0
    sim.states.total_age[0, 0], sim.states.stage_age[0, 0] = 8, 6
    reports = sim.observe()
    reports.contribution[0, 0] = contribution
    return reports


def test_it_keeps_a_seed_that_pays_its_rent_and_prunes_one_that_does_not() -> None:
    # rent of a 416-parameter seed in an 858-parameter host: 0.1 * log(1.485) = 0.040
    pays = decide(one_held_seed(contribution=0.10, rent=0.1))
    does_not = decide(one_held_seed(contribution=0.01, rent=0.1))
    assert pays[0, 0] != LifecycleOp.PRUNE
    assert does_not[0, :2].tolist() == [LifecycleOp.PRUNE, 0]
    assert decide(one_held_seed(contribution=0.01, rent=0.01))[0, 0] != LifecycleOp.PRUNE


def test_it_waits_for_evidence_before_it_prunes() -> None:
    reports = one_held_seed(contribution=-0.05, rent=0.1)
    assert decide(reports)[0, 0] == LifecycleOp.PRUNE
    reports.stage_age[0, 0] = 1
    assert decide(reports)[0, 0] != LifecycleOp.PRUNE
    reports.stage_age[0, 0] = 6
    reports.contribution_age[0, 0] = 9
    assert decide(reports)[0, 0] != LifecycleOp.PRUNE
    reports.contribution_age[0, 0] = 0
    reports.contribution_known.fill_(False)
    assert decide(reports)[0, 0] != LifecycleOp.PRUNE


def test_a_noisy_contribution_gets_the_benefit_of_the_doubt() -> None:
    reports = one_held_seed(contribution=0.02, rent=0.1)
    assert decide(reports)[0, 0] == LifecycleOp.PRUNE
    reports.contribution_error.fill_(0.05)
    assert decide(reports)[0, 0] != LifecycleOp.PRUNE


def test_it_commits_what_pays_before_the_end_and_nothing_else() -> None:
    assert decide(one_held_seed(contribution=0.1, rent=0.1, step=10))[0, 0] != LifecycleOp.FOSSILIZE
    last = decide(one_held_seed(contribution=0.1, rent=0.1, step=24))
    assert last[0, :2].tolist() == [LifecycleOp.FOSSILIZE, 0]
    loses = decide(one_held_seed(contribution=0.01, rent=0.1, step=24))
    assert loses[0, 0] != LifecycleOp.FOSSILIZE


def test_it_hurries_a_seed_that_would_blend_past_the_end() -> None:
    reports = one_held_seed(contribution=0.1, rent=0.1, step=23, stage=SeedStage.BLENDING)
    assert decide(reports)[0, :2].tolist() == [LifecycleOp.ADVANCE, 0]


def test_it_leaves_a_seed_alone_that_is_being_pruned() -> None:
    reports = one_held_seed(contribution=0.1, rent=0.1, step=23, stage=SeedStage.BLENDING)
    reports.alpha_target.zero_()
    assert decide(reports)[0, 0] == LifecycleOp.WAIT


def test_it_brings_a_seed_out_from_behind_the_host() -> None:
    reports = one_held_seed(contribution=0.1, rent=0.1, stage=SeedStage.TRAINING)
    assert decide(reports)[0, :2].tolist() == [LifecycleOp.ADVANCE, 0]


def test_it_grows_at_once_in_the_first_slot_and_not_too_late_to_commit() -> None:
    sim = GrowthSimulator(1, rent=0.1)
    assert decide(sim.observe())[0, :2].tolist() == [LifecycleOp.GERMINATE, 0]
    for step in range(18, 25):
        sim.step_count = step
        assert decide(sim.observe())[0, 0] == LifecycleOp.WAIT


def test_high_rent_makes_it_choose_small_seeds_and_prohibitive_rent_none() -> None:
    sizes = []
    for rent in (0.02, 0.25):
        sim = GrowthSimulator(1, rent)
        sim.step(HeuristicController().decide(sim.observe(), masks_of(sim.observe())))
        sizes.append(sim.seed_params().sum().item())
    assert sizes[0] > 2 * sizes[1] > 0
    assert decide(GrowthSimulator(1, rent=5.0).observe())[0, 0] == LifecycleOp.WAIT


def test_a_price_on_compute_makes_it_choose_less_of_it() -> None:
    reports = GrowthSimulator(1, rent=0.02).observe()
    free = decide(reports)[0, 2]
    priced = decide(replace(reports, compute_price=torch.tensor([0.1])))[0, 2]
    assert reports.cost_macs[0, 0, priced] < reports.cost_macs[0, 0, free]


def test_it_never_exceeds_its_budget() -> None:
    sim = GrowthSimulator(64, rent=0.005, params_budget=500.0)
    controller = HeuristicController()
    grew = torch.zeros(64, dtype=torch.bool)
    for _ in range(sim.num_steps):
        reports = sim.observe()
        assert (reports.params <= HOST_PARAMS + 500).all()
        sim.step(controller.decide(reports, masks_of(reports)))
        grew |= sim.states.has_seed.any(dim=-1)
    assert grew.all()


def with_first_slot(reports: Reports, stage: SeedStage, blueprint: int) -> Reports:
    """Every env with this in its first slot, and a seed that nobody touches in every other."""
    stages = torch.full_like(reports.stage, int(SeedStage.FOSSILIZED))
    blueprints = torch.full_like(reports.blueprint, CONV)
    stages[:, 0], blueprints[:, 0] = int(stage), blueprint
    return replace(reports, stage=stages, blueprint=blueprints)


def failing_in_the_first_slot(rent: float) -> Iterator[tuple[HeuristicController, Reports]]:
    """A controller of two envs, and reports of an empty first slot, after each further failure."""
    reports = GrowthSimulator(2, rent).observe()
    empty = with_first_slot(reports, SeedStage.DORMANT, -1)
    controller = HeuristicController()
    while True:
        yield controller, empty
        grown = controller.decide(empty, masks_of(empty))
        assert (grown[:, :2] == torch.tensor([LifecycleOp.GERMINATE, 0])).all()
        for stage, blueprint in ((SeedStage.BLENDING, int(grown[0, 2])), (SeedStage.EMBARGOED, -1)):
            seen = with_first_slot(reports, stage, blueprint)
            controller.decide(seen, masks_of(seen))


def test_it_refuses_reports_of_another_number_of_envs() -> None:
    controller, reports = HeuristicController(), random_reports(3, 2, 4)
    controller.decide(reports, masks_of(reports))
    one = random_reports(1, 2, 4)
    with pytest.raises(ValueError, match=r"reports of \(1, 2, 4\).*has seen \(3, 2, 4\)"):
        controller.decide(one, masks_of(one))


def test_it_tries_a_slot_again_with_another_blueprint() -> None:
    tried = []
    for (controller, reports), _ in zip(failing_in_the_first_slot(0.01), range(3), strict=False):
        tried.append(int(controller.decide(reports, masks_of(reports))[0, 2]))
    assert len(set(tried)) == 3


def test_at_a_higher_rent_one_failure_is_enough_until_a_new_episode() -> None:
    failures = failing_in_the_first_slot(0.2)
    next(failures)
    controller, reports = next(failures)
    assert (controller.decide(reports, masks_of(reports))[:, 0] == LifecycleOp.WAIT).all()
    controller.begin(torch.tensor([1]))
    again = controller.decide(reports, masks_of(reports))
    assert again[:, 0].tolist() == [LifecycleOp.WAIT, LifecycleOp.GERMINATE]


def test_what_failed_is_the_seed_that_was_there_last() -> None:
    """The first seed went by a rollback: its slot did not rest, and it does not count."""
    controller, reports = next(failing_in_the_first_slot(0.1))
    for blueprint in (CONV_CONV, CONV):
        grown = with_first_slot(reports, SeedStage.HOLDING, blueprint)
        controller.decide(grown, masks_of(grown))
    gone = with_first_slot(reports, SeedStage.EMBARGOED, -1)
    controller.decide(gone, masks_of(gone))
    assert controller._failed[:, 0].nonzero().tolist() == [[0, CONV], [1, CONV]]


@pytest.mark.parametrize(
    ("macs", "depth", "reach", "kind", "expected"),
    [
        (4000.0, 2.0, 0.0, SiteKind.SERIES, 0.23 * 0.35 * math.log(2) ** 0.8),
        (1000.0, 3.0, 0.0, SiteKind.IMAGE, 0.23 * 0.35 * math.log(1.25) ** 0.8),
        (4000.0, 1.0, 0.0, SiteKind.SERIES, 0.23 * 0.35 * math.log(2) ** 0.8 * 0.8),
        (4000.0, 2.0, 0.6, SiteKind.SERIES, 0.23 * 0.35 * math.log(2) ** 0.8 * 0.7),
        (4000.0, 2.0, 1.0, SiteKind.VECTOR, 0.23 * 0.35 * math.log(2) ** 0.8),  # no positions
    ],
)
def test_what_it_expects_of_a_first_seed(
    macs: float, depth: float, reach: float, kind: SiteKind, expected: float
) -> None:
    reports = GrowthSimulator(1, rent=0.0).observe()
    reports = replace(
        reports,
        cost_macs=torch.full_like(reports.cost_macs, macs),
        depth=torch.full_like(reports.depth, depth),
        reach=torch.full_like(reports.reach, reach),
        site_kind=torch.full_like(reports.site_kind, int(kind)),
    )
    config, none_failed = HeuristicConfig(), torch.zeros_like(reports.fits)
    seeds = judge_seeds(reports, config)
    growth, _ = value_of_growing(reports, masks_of(reports), seeds, none_failed, config)
    torch.testing.assert_close(growth, torch.full_like(growth, expected))


def is_legal(masks: ActionMasks, actions: Tensor) -> Tensor:
    """Each choice is in its row, or is 0 where the row is empty, `[N, H]`."""
    rows = [masks.row(h, actions) for h in range(masks.action_space.num_heads)]
    return torch.stack(
        [
            row.gather(-1, actions[:, h : h + 1]).squeeze(-1)
            | (~row.any(dim=-1) & (actions[:, h] == 0))
            for h, row in enumerate(rows)
        ],
        dim=-1,
    )


@given(report_batches())
def test_every_scripted_controller_acts_within_the_masks(reports: Reports) -> None:
    masks = masks_of(reports)
    last_slot, last_blueprint = reports.num_slots - 1, reports.num_blueprints - 1
    for controller in (
        HeuristicController(),
        RandomController(torch.Generator().manual_seed(0)),
        FixedSchedule(every=1),
        planned((0, last_slot, last_blueprint), num_slots=last_slot + 1),
    ):
        controller.begin(torch.arange(reports.num_envs))
        actions = controller.decide(reports, masks)
        assert actions.dtype == torch.int64
        assert is_legal(masks, actions).all(), type(controller).__name__


@pytest.mark.parametrize("num_slots", [3, 8])
@pytest.mark.parametrize("rent", [0.02, 0.1, 0.25])
def test_it_beats_random_growth_a_fixed_schedule_and_none_on_known_gains(
    rent: float, num_slots: int
) -> None:
    def final_score(controller: object) -> float:
        sim = GrowthSimulator(128, rent, num_slots=num_slots, rng_seed=1)
        return sim.run(controller).mean().item()  # type: ignore[arg-type]

    ours = final_score(HeuristicController())
    assert ours > final_score(NoGrowth()) + 0.006
    assert ours > final_score(RandomController(torch.Generator().manual_seed(0))) + 0.02
    assert ours > final_score(FixedSchedule()) + (0.0 if rent == 0.1 else 0.01)


def test_evidence_is_worth_something_to_it() -> None:
    def final_score(config: HeuristicConfig) -> float:
        sim = GrowthSimulator(256, 0.1, rng_seed=2)
        return sim.run(HeuristicController(config)).mean().item()

    deaf = HeuristicConfig(max_evidence_age=-1)  # every contribution is too old
    assert final_score(HeuristicConfig()) > final_score(deaf) + 0.01


def test_the_later_the_more_a_contribution_counts() -> None:
    """Half of the time is enough to catch up with most of it, a fifth is not."""
    assert decide(one_held_seed(contribution=0.15, rent=0.3))[0, 0] == LifecycleOp.PRUNE
    late = one_held_seed(contribution=0.15, rent=0.3, step=20)
    assert decide(late)[0, 0] != LifecycleOp.PRUNE
