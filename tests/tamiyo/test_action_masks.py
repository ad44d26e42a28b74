"""Batched masks against a per-env loop, the table of legal moves, and compiled code."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from esper.leyline.constants import MIN_PRUNE_AGE
from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, tamiyo_action_space
from esper.leyline.reports import Reports
from esper.leyline.stages import LEGAL_MOVES, LifecycleOp, SeedStage
from esper.tamiyo.policy.action_masks import compute_action_masks, compute_batch_masks
from support.count_ops import CountOps
from support.per_env import looped_masks, unpack
from support.random_reports import random_reports, report_batches


def space_of(reports: Reports) -> FactoredActionSpace:
    return tamiyo_action_space(reports.num_slots, reports.num_blueprints)


@given(report_batches())
def test_batched_masks_equal_a_loop_over_envs_slots_and_choices(reports: Reports) -> None:
    space = space_of(reports)
    masks = compute_batch_masks(reports, space)
    looped = [looped_masks(report) for report in unpack(reports)]
    for name in space.names:
        assert torch.equal(masks[name], torch.stack([env[name] for env in looped])), name


def test_random_reports_make_every_op_legal_somewhere_and_illegal_elsewhere() -> None:
    reports = random_reports(64)
    op = compute_batch_masks(reports, space_of(reports))["op"]
    assert op[:, LifecycleOp.WAIT].all()
    others = [o for o in LifecycleOp if o != LifecycleOp.WAIT]
    assert op[:, others].any(dim=0).all()
    assert not op[:, others].all(dim=0).any()


@pytest.mark.parametrize("stage", SeedStage)
@pytest.mark.parametrize("op", [o for o in LifecycleOp if o != LifecycleOp.WAIT])
def test_a_mask_is_legal_iff_the_lifecycle_table_allows_it(
    stage: SeedStage, op: LifecycleOp
) -> None:
    reports = random_reports(1, num_slots=1, num_blueprints=1)
    reports.stage.fill_(stage)
    reports.total_age.fill_(MIN_PRUNE_AGE)
    reports.fits.fill_(True)
    reports.cost_params.fill_(10)
    reports.cost_macs.fill_(10)
    reports.params_left.fill_(10)
    reports.macs_left.fill_(10)
    reports.seeds_left.fill_(1)
    masks = compute_batch_masks(reports, space_of(reports))
    assert masks["op"][0, op] == ((stage, op) in LEGAL_MOVES)
    assert masks["slot"][0, op, 0] == ((stage, op) in LEGAL_MOVES)


@pytest.mark.parametrize("field", ["params_left", "macs_left", "seeds_left", "fits"])
def test_each_limit_alone_stops_a_germination(field: str) -> None:
    reports = random_reports(1, num_slots=2, num_blueprints=2)
    reports.fits.fill_(True)
    reports.stage.fill_(SeedStage.DORMANT)
    reports.cost_params.copy_(torch.tensor([[[10.0, 20], [10, 20]]]))
    reports.cost_macs.copy_(torch.tensor([[[10.0, 20], [10, 20]]]))
    reports.params_left.fill_(20)
    reports.macs_left.fill_(20)
    reports.seeds_left.fill_(1)
    space = space_of(reports)
    germinate = LifecycleOp.GERMINATE
    assert compute_batch_masks(reports, space)["blueprint"][0, germinate].all()
    limit = getattr(reports, field)
    limit.fill_(9 if field.endswith("_left") and field != "seeds_left" else 0)
    masks = compute_batch_masks(reports, space)
    assert not masks["op"][0, germinate]
    assert not masks["slot"][0, germinate].any()
    assert not masks["blueprint"].any()
    if field in ("params_left", "macs_left"):
        limit.fill_(10)  # the cheaper blueprint alone fits the budget
        expected = torch.tensor([[True, False], [True, False]])
        assert torch.equal(compute_batch_masks(reports, space)["blueprint"][0, germinate], expected)


def test_one_env_gets_the_masks_it_gets_in_a_batch() -> None:
    reports = random_reports(7)
    space = space_of(reports)
    batch = compute_batch_masks(reports, space)
    for env in range(7):
        alone = compute_action_masks(reports, space, env)
        assert all(torch.equal(alone[name][0], batch[name][env]) for name in space.names)


def test_masks_of_an_env_that_does_not_exist_are_refused() -> None:
    reports = random_reports(3)
    for env in (-1, 3):
        with pytest.raises(ValueError, match=f"env_id={env}; the reports have envs 0 to 2"):
            compute_action_masks(reports, space_of(reports), env)


def test_the_number_of_tensor_operations_does_not_depend_on_the_number_of_envs() -> None:
    counts = []
    for num_envs in (1, 4096):
        reports = random_reports(num_envs)
        space = space_of(reports)
        compute_batch_masks(reports, space)  # fills the caches
        with CountOps() as ops:
            compute_batch_masks(reports, space)
        counts.append(ops.count)
    assert counts[0] == counts[1] > 0


def test_masks_compile_without_a_graph_break() -> None:
    def packed(reports: Reports, space: FactoredActionSpace) -> tuple[Tensor, ...]:
        return compute_batch_masks(reports, space).groups

    torch._dynamo.reset()
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    for num_slots, num_blueprints in ((3, 8), (5, 4)):
        reports = random_reports(6, num_slots, num_blueprints)
        space = space_of(reports)
        for ours, expected in zip(compiled(reports, space), packed(reports, space), strict=True):
            assert torch.equal(ours, expected)


def test_an_action_space_of_another_host_is_refused() -> None:
    reports = random_reports(2, num_slots=3, num_blueprints=8)
    with pytest.raises(ValueError, match=r"use tamiyo_action_space\(3, 8\)"):
        compute_batch_masks(reports, tamiyo_action_space(4, 8))


def test_rows_of_the_masks_are_found_without_copying_them() -> None:
    reports = random_reports(4)
    masks: ActionMasks = compute_batch_masks(reports, space_of(reports))
    assert all(run.is_contiguous() for run in masks.groups)
