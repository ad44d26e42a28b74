"""Features against a per-env loop, under permutations of slots and blueprints, and compiled."""

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleOp
from esper.tamiyo.policy.features import FEATURES, FeatureLayout, feature_list
from support.count_ops import CountOps
from support.feature_positions import positions
from support.per_env import looped_features, unpack
from support.random_reports import random_reports, report_batches, report_shapes


def layout_of(reports: Reports) -> FeatureLayout:
    return FeatureLayout(reports.num_slots, reports.num_blueprints)


def feature(reports: Reports, name: str) -> Tensor:
    """One feature by name, `[*block, width]`."""
    layout = layout_of(reports)
    blocks = dict(
        zip(("env", "slot", "blueprint"), layout.split(layout.features(reports)), strict=True)
    )
    (block,) = [row.block for row in FEATURES if row.name == name]
    start, width = positions(block)[name]
    return blocks[block][..., start : start + width]


@given(report_batches())
def test_features_equal_a_loop_over_envs_and_slots(reports: Reports) -> None:
    expected = torch.stack([looped_features(report) for report in unpack(reports)])
    torch.testing.assert_close(layout_of(reports).features(reports), expected, atol=2e-5, rtol=1e-4)


@given(report_batches())
def test_features_are_finite_and_have_the_declared_width(reports: Reports) -> None:
    layout = layout_of(reports)
    features = layout.features(reports)
    assert features.shape == (reports.num_envs, layout.width)
    assert features.dtype == torch.float32
    assert features.isfinite().all()


def test_features_are_finite_at_the_edges_of_what_is_legal() -> None:
    reports = random_reports(4)
    for name in ("rent", "compute_price", "host_params", "host_macs", "params", "macs"):
        getattr(reports, name).zero_()
    for name in ("cost_params", "cost_macs", "seed_params", "seed_macs", "site_width"):
        getattr(reports, name).zero_()
    reports.params_left.copy_(torch.tensor([0.0, torch.inf, 0.0, torch.inf]))
    reports.macs_left.copy_(torch.tensor([torch.inf, 0.0, 0.0, torch.inf]))
    reports.accuracy_history_known.fill_(True)
    reports.validation_loss.fill_(torch.inf)
    reports.accuracy_history.zero_()
    reports.gradient_known.fill_(True)
    reports.gradient_norm.copy_(torch.tensor([0.0, torch.inf, 1.0]).expand(4, 3))
    assert layout_of(reports).features(reports).isfinite().all()


def test_a_worked_example_of_scales() -> None:
    reports = random_reports(1, num_slots=2, num_blueprints=1)
    reports.host_params.fill_(1000)
    reports.params.fill_(1500)
    reports.rent.fill_(0.1)
    reports.seed_params.copy_(torch.tensor([[300.0, 200.0]]))
    reports.contribution_known.copy_(torch.tensor([[True, False]]))
    reports.contribution.fill_(0.05)
    reports.fits.fill_(True)
    reports.cost_params.fill_(750)
    rent = 0.1 * (math.log(1.5) - math.log(1.2))
    torch.testing.assert_close(feature(reports, "added_params").item(), math.log(1.5))
    assert feature(reports, "seed_rent")[0, 0].item() == pytest.approx(10 * rent, rel=1e-4)
    assert feature(reports, "contribution")[0, :, 0].tolist() == pytest.approx([0.05, 0.0])
    extra_rent = 0.1 * (math.log(2.25) - math.log(1.5))
    assert feature(reports, "cost_rent")[0, 0, 0].item() == pytest.approx(10 * extra_rent, rel=1e-4)


def permuted(reports: Reports, slots: Tensor, blueprints: Tensor) -> Reports:
    """The same envs with slot i now that which was `slots[i]`, and blueprints likewise."""
    moved = {}
    for name, shape in report_shapes().items():
        value = getattr(reports, name)
        for axis, letter in enumerate(shape):
            if letter in "SB":
                value = value.index_select(axis, slots if letter == "S" else blueprints)
        moved[name] = value.clone()
    chose = moved["last_action"][:, 0] != LifecycleOp.WAIT
    for column, order in ((1, slots), (2, blueprints)):
        new_place = torch.argsort(order)[moved["last_action"][:, column]]
        moved["last_action"][:, column] = torch.where(chose, new_place, 0)
    grown = moved["blueprint"] >= 0
    new_place = torch.argsort(blueprints)[moved["blueprint"].clamp(min=0)]
    moved["blueprint"] = torch.where(grown, new_place, -1)
    return Reports(**moved)


def test_permuting_slots_or_blueprints_permutes_their_blocks_and_changes_nothing_else() -> None:
    reports = random_reports(64, num_slots=4, num_blueprints=5)
    layout = layout_of(reports)
    env, slots, blueprints = layout.split(layout.features(reports))
    slot_order, menu_order = torch.tensor([2, 0, 3, 1]), torch.tensor([4, 2, 0, 1, 3])
    moved = layout.split(layout.features(permuted(reports, slot_order, menu_order)))
    expected = (env, slots[:, slot_order], blueprints[:, slot_order][:, :, menu_order])
    # vectorised and scalar float32 arithmetic may differ in the last bit
    torch.testing.assert_close(moved, expected, atol=1e-6, rtol=1e-6)


def test_the_last_actions_slot_is_a_flag_on_that_slot_and_waiting_flags_none() -> None:
    reports = random_reports(2)
    reports.last_action_known.fill_(True)
    reports.last_action[:, 0] = torch.tensor([LifecycleOp.PRUNE, LifecycleOp.WAIT])
    reports.last_action[:, 1] = torch.tensor([2, 0])
    expected = [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert feature(reports, "last_action_here")[..., 0].tolist() == expected


def test_split_gives_views_for_any_leading_axes() -> None:
    layout = FeatureLayout(3, 8)
    features = torch.randn(5, 7, layout.width)[:, ::2]
    env, slots, blueprints = layout.split(features)
    assert env.shape == (5, 4, layout.env_width)
    assert slots.shape == (5, 4, 3, layout.slot_width)
    assert blueprints.shape == (5, 4, 3, 8, layout.blueprint_width)
    base = features.untyped_storage().data_ptr()
    assert all(part.untyped_storage().data_ptr() == base for part in (env, slots, blueprints))
    packed = torch.cat([env, slots.flatten(-2), blueprints.flatten(-3)], dim=-1)
    assert torch.equal(packed, features)


def test_an_env_has_the_same_features_whoever_else_is_in_the_batch() -> None:
    reports = random_reports(9)
    layout = layout_of(reports)
    some = torch.tensor([7, 2])
    # vectorised and scalar float32 arithmetic may differ in the last bit
    torch.testing.assert_close(
        layout.features(reports.at(some)), layout.features(reports)[some], atol=1e-6, rtol=1e-6
    )


def test_the_number_of_tensor_operations_depends_on_nothing() -> None:
    counts = []
    for num_envs, num_slots, num_blueprints in ((1, 1, 1), (4096, 3, 8), (16, 10, 8)):
        reports = random_reports(num_envs, num_slots, num_blueprints)
        layout_of(reports).features(reports)  # fills the caches
        with CountOps() as ops:
            layout_of(reports).features(reports)
        counts.append(ops.count)
    assert len(set(counts)) == 1


def test_features_compile_without_a_graph_break() -> None:
    torch._dynamo.reset()
    for num_slots, num_blueprints in ((3, 8), (5, 4)):
        reports = random_reports(6, num_slots, num_blueprints)
        layout = layout_of(reports)
        compiled = torch.compile(layout.features, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(reports), layout.features(reports))


def test_the_list_has_every_feature_with_its_width() -> None:
    listed = feature_list()
    assert len(listed) == len(FEATURES)
    for row in FEATURES:
        assert any(line.startswith(f"{row.block} {row.name} [{row.width}]: ") for line in listed)


def test_flags_are_0_or_1_and_nothing_else_is_called_one() -> None:
    reports = random_reports(200)
    layout = layout_of(reports)
    features, is_flag = layout.features(reports), layout.is_flag()
    is_binary = ((features == 0) | (features == 1)).all(dim=0)
    assert is_flag.shape == (layout.width,)
    assert is_binary[is_flag].all()
    site_depth_of_two = 2  # the first and last slots have depth 0 and 1
    assert int((is_binary & ~is_flag).sum()) == site_depth_of_two


def test_reports_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="the layout is for 4 and 8"):
        FeatureLayout(4, 8).features(random_reports(2, num_slots=3, num_blueprints=8))
    with pytest.raises(ValueError, match="got features of width 7"):
        FeatureLayout(3, 8).split(torch.zeros(2, 7))
