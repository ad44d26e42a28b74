"""Scales of features: against a loop in float64, alike for slots and blueprints, fitted once."""

import pytest
import torch

from esper.leyline.factored_actions import FactoredActionSpace, Head
from esper.tamiyo.policy.feature_scales import (
    LEAST_STD,
    LIMIT,
    FeatureScales,
    RunningNormalizer,
)
from esper.tamiyo.policy.features import FEATURES, FeatureLayout
from esper.tamiyo.policy.plain_heads import flat_policy
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from support.agents import random_features, random_frames
from support.feature_positions import positions
from support.random_reports import random_reports

LAYOUT = FeatureLayout(3, 8)


def some_features(num_envs=64, rng_seed=0):
    return LAYOUT.features(random_reports(num_envs, rng_seed=rng_seed))


def fitted(features):
    scales = FeatureScales(LAYOUT)
    scales.fit(features)
    return scales


def column(layout, features, block, name):
    """One feature of a block, `[all envs, slots and blueprints, width]`."""
    part = dict(zip(("env", "slot", "blueprint"), layout.split(features), strict=True))[block]
    start, width = positions(block)[name]
    return part[..., start : start + width].reshape(-1, width)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda row: f"{row.block} {row.name}")
def test_every_feature_is_scaled_by_what_was_there(feature):
    features = some_features()
    raw = column(LAYOUT, features, feature.block, feature.name).double()
    is_there = torch.ones(len(raw), dtype=torch.bool)
    if feature.block == "blueprint":
        is_there = column(LAYOUT, features, "blueprint", "fits")[:, 0] > 0.5
    expected = raw
    if feature.scale != "flag":
        seen = raw[is_there]
        center = seen.sum(0) / len(seen)
        std = ((seen - center).square().sum(0) / len(seen)).sqrt().clamp(min=LEAST_STD)
        expected = (raw - center * (feature.block != "blueprint")) / std
    parts = fitted(features)(features)
    found = torch.cat([part.reshape(len(features), -1) for part in parts], dim=1)
    torch.testing.assert_close(
        column(LAYOUT, found, feature.block, feature.name).double(),
        expected.clamp(-LIMIT, LIMIT),
        atol=1e-4,
        rtol=1e-4,
    )


def test_features_are_as_the_layout_gives_them_until_scales_are_fitted():
    features = some_features()
    for part, raw in zip(FeatureScales(LAYOUT)(features), LAYOUT.split(features), strict=True):
        assert torch.equal(part, raw.clamp(-LIMIT, LIMIT))


def test_what_does_not_fit_stays_zero():
    features = some_features()
    _, _, raw = LAYOUT.split(features)
    _, _, blueprints = fitted(features)(features)
    absent = ~LAYOUT.blueprint_fits(raw)
    assert absent.any()
    assert (blueprints[absent] == 0).all()


def test_a_policy_takes_its_scales_once_and_keeps_them_with_its_weights():
    policy, other = tamiyo_policy(LAYOUT), tamiyo_policy(LAYOUT)
    policy.heads.update_scales(some_features())
    first = policy.heads.scales.center.clone()
    assert first.any()
    policy.heads.update_scales(some_features(rng_seed=1))
    assert torch.equal(policy.heads.scales.center, first)
    other.load_state_dict(policy.state_dict())
    features = some_features(rng_seed=2)
    for part, same in zip(policy.heads.scales(features), other.heads.scales(features), strict=True):
        assert torch.equal(part, same)


def test_columns_of_the_previous_step_keep_their_zeros():
    """Divided by the root mean square of all rows so far, and not centred."""
    scales = RunningNormalizer(3, uncentered=2).double()
    rng = torch.Generator().manual_seed(0)
    rows = torch.rand(60, 3, generator=rng, dtype=torch.float64) + 2.0
    rows[::7, :2] = 0.0  # first steps
    for part in rows.split([10, 45, 5]):
        scales.update(part)
    scaled = scales.normalize(rows)
    assert torch.equal(scaled[::7, :2], torch.zeros_like(scaled[::7, :2]))
    torch.testing.assert_close(scaled[:, :2], rows[:, :2] / rows[:, :2].square().mean(0).sqrt())
    torch.testing.assert_close(scaled[:, 2].mean(), torch.zeros((), dtype=torch.float64))


def test_a_policy_starts_without_an_opinion_on_the_previous_step():
    space = FactoredActionSpace((Head("action", 3),))
    for options in ({}, {"encoder": torch.nn.Linear(4, 5)}, {"images": ((1, 8, 8),)}):
        policy = flat_policy(space, 5 + 4, num_previous=5, **options)
        rng = torch.Generator().manual_seed(0)
        features, frames = random_features(policy, 6, rng), random_frames(policy, 6, rng)
        other = features.clone()
        other[:, :5] = 0.0
        expected = policy.heads.encode(other, frames)
        torch.testing.assert_close(policy.heads.encode(features, frames), expected)
