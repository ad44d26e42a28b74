"""Intervals and corrections, against formulas worked out otherwise."""

import numpy as np
import pytest
from scipy import stats

from growth_evaluation.estimates import estimate, estimate_over_groups, holm


def test_a_p_value_is_that_of_the_paired_test():
    values = np.random.default_rng(0).normal(0.02, 0.03, 40)
    for margin in (0.0, 0.01, 0.03):
        expected = stats.ttest_1samp(values, margin).pvalue
        assert estimate(values).p_value(margin) == pytest.approx(expected)
    assert estimate(np.full(8, 0.5)).p_value(0.4) == 0.0


def test_holms_correction_by_hand():
    """Sorted 0.005, 0.01, 0.03, 0.04: times 4, 3, 2, 1 gives 0.02, 0.03, 0.06, 0.04; the last is
    raised to the 0.06 before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def test_several_controllers_are_paired_host_by_host():
    rng = np.random.default_rng(4)
    values = rng.normal(0, 0.02, (1, 30)) + rng.normal(0, 0.01, (3, 30)) + [[0.0], [0.03], [0.06]]
    found = estimate(values)
    low, high = stats.ttest_1samp(values.mean(0), 0).confidence_interval(0.95)
    assert found.per_controller == pytest.approx(values.mean(1))
    assert found.low < low  # controllers differ, too
    assert found.high > high


def test_one_controllers_interval_is_the_paired_t_interval():
    rng = np.random.default_rng(0)
    values = rng.normal(0.02, 0.03, 40)
    found = estimate(values)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert found.mean == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9)


def test_controllers_that_differ_widen_the_interval():
    rng = np.random.default_rng(0)
    hosts, noise = rng.normal(0, 0.02, 64), rng.normal(0, 0.01, (4, 64))
    alike = estimate(hosts + noise)
    differing = estimate(hosts + noise + np.array([[-0.03], [0.03], [0.01], [-0.01]]))
    assert differing.high - differing.low > 3 * (alike.high - alike.low)


def test_a_two_way_interval_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(5)
    hits, trials = 0, 400
    for _ in range(trials):
        values = (
            rng.normal(0, 0.01, (4, 1))
            + rng.normal(0, 0.03, (1, 32))
            + rng.normal(0, 0.02, (4, 32))
        )
        found = estimate(values)
        hits += found.low <= 0 <= found.high
    assert 0.92 <= hits / trials <= 0.995


def test_equal_values_have_no_interval():
    found = estimate(np.full((2, 8), 0.25))
    assert (found.low, found.high) == (0.25, 0.25)


def test_one_host_is_no_sample():
    with pytest.raises(ValueError, match="two hosts"):
        estimate(np.array([0.1]))


def test_groups_that_differ_do_not_widen_the_interval_of_their_mean():
    rng = np.random.default_rng(3)
    noise = rng.normal(0, 0.02, (3, 8))
    values = noise + np.array([[0.2], [0.5], [0.9]])
    found = estimate_over_groups(values)
    variances = values.var(axis=1, ddof=1) / 8 / 9
    degrees = variances.sum() ** 2 / (variances**2 / 7).sum()
    half = stats.t.ppf(0.975, degrees) * variances.sum() ** 0.5
    assert found.mean == pytest.approx(values.mean())
    assert found.high - found.mean == pytest.approx(half, rel=1e-9)
