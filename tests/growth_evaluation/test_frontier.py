"""The frontier, against formulas worked out otherwise."""

import numpy as np
import pytest
from scipy import stats

from growth_evaluation.frontier import Frontier


def test_the_frontier_is_straight_in_log_size_and_clamped():
    accuracies = np.zeros((3, 2, 4))
    accuracies[:, 0] = np.array([0.7, 0.9, 0.8])[:, None]
    accuracies[:, 1] = np.array([0.2, 0.4, 0.6])[:, None]
    sizes = np.array([[100.0, 10.0], [400.0, 20.0], [900.0, 80.0]])
    frontier = Frontier(sizes, accuracies)
    size = np.array([[50.0, 100.0, 200.0, 600.0, 900.0, 5000.0], [5.0, 20.0, 40.0, 80.0, 90.0, 1]])
    first, second = np.zeros(6, dtype=int), np.ones(6, dtype=int)
    np.testing.assert_allclose(frontier.at(size[0], first), [0.7, 0.7, 0.8, 0.85, 0.8, 0.8])
    np.testing.assert_allclose(frontier.at(size[1], second), [0.2, 0.4, 0.5, 0.6, 0.6, 0.2])
    assert frontier.covers(size[0], first) == 4 / 6
    assert frontier.covers(size[1], second) == 3 / 6
    assert frontier.covers(size, second) == 4 / 12  # of the others, 50 lies between 10 and 80


def test_a_frontier_of_many_sizes_is_numpys_interpolation_group_by_group():
    rng = np.random.default_rng(6)
    sizes = np.exp(np.sort(rng.normal(6, 1, (5, 4)), axis=0))
    accuracies, group = rng.uniform(size=(5, 4, 3)), rng.integers(4, size=20)
    size = np.exp(rng.normal(6, 1, (2, 20)))
    expected = np.empty((2, 20))
    for k, h in np.ndindex(2, 20):
        g = group[h]
        expected[k, h] = np.interp(
            np.log(size[k, h]), np.log(sizes[:, g]), accuracies[:, g].mean(-1)
        )
    np.testing.assert_allclose(Frontier(sizes, accuracies).at(size, group), expected)


def test_the_excess_over_a_frontier_counts_the_noise_of_both():
    """Half-way between two noisy points: var(mean of hosts) + var of the half-half mixture."""
    rng = np.random.default_rng(2)
    accuracies = rng.normal(0.8, 0.05, (2, 1, 12))
    frontier = Frontier(np.array([[100.0], [400.0]]), accuracies)
    grown = rng.normal(0.84, 0.02, 30)
    found = frontier.excess(grown, np.full(30, 200.0), np.zeros(30, dtype=int))
    mixture = accuracies[:, 0].mean(0)  # of each repeat
    var_hosts, var_frontier = grown.var(ddof=1) / 30, mixture.var(ddof=1) / 12
    variance = var_hosts + var_frontier
    degrees = variance**2 / (var_hosts**2 / 29 + var_frontier**2 / 11)
    half = stats.t.ppf(0.975, degrees) * variance**0.5
    assert found.mean == pytest.approx(grown.mean() - mixture.mean())
    assert found.degrees == pytest.approx(degrees)
    assert (found.low, found.high) == pytest.approx(
        (found.mean - half, found.mean + half), rel=1e-9
    )


def test_each_group_adds_noise_by_the_share_of_the_networks_that_it_is_compared_with():
    """By hand: 12 networks at the first size of one group, 4 half-way in another, none in a third;
    the frontier's mean varies by (12/16)^2 and (4/16)^2 of what those groups' do."""
    rng = np.random.default_rng(8)
    accuracies = rng.normal(0.8, 0.05, (2, 3, 5))
    sizes = np.array([[100.0, 10.0, 7.0], [400.0, 90.0, 8.0]])
    group = np.array([0] * 12 + [1] * 4)
    size = np.where(group == 0, 100.0, 30.0)
    grown = rng.normal(0.84, 0.02, 16)
    found = Frontier(sizes, accuracies).excess(grown, size, group)
    per_repeat = [accuracies[0, 0] * 12 / 16, accuracies[:, 1].mean(0) * 4 / 16]
    of_groups = [row.var(ddof=1) / 5 for row in per_repeat]
    excess = grown - np.where(group == 0, accuracies[0, 0].mean(), accuracies[:, 1].mean())
    of_hosts = excess.var(ddof=1) / 16
    variance = of_hosts + sum(of_groups)
    degrees = variance**2 / (of_hosts**2 / 15 + sum(part**2 / 4 for part in of_groups))
    assert found.mean == pytest.approx(excess.mean())
    assert found.standard_error == pytest.approx(variance**0.5)
    assert found.degrees == pytest.approx(degrees)


@pytest.mark.parametrize(("num_groups", "repeats"), [(3, 11), (24, 2), (24, 3)])
@pytest.mark.parametrize("num_controllers", [1, 3])
def test_an_interval_over_a_frontier_holds_the_truth_as_often_as_it_says(
    num_groups, repeats, num_controllers
):
    """Lines of slopes and sizes of their own, networks two points above; much of the noise is the
    frontier's. Neither far too narrow nor far too wide."""
    rng = np.random.default_rng(9)
    group = np.repeat(np.arange(num_groups), 48 // num_groups)
    sizes = np.exp(rng.uniform(5, 6, num_groups) + np.linspace(0, 1.5, 5)[:, None])
    slope = rng.uniform(0.02, 0.1, num_groups)
    hits, trials, degrees = 0, 400, []
    for _ in range(trials):
        noise = rng.normal(0, 0.03, (5, num_groups, repeats))
        frontier = Frontier(sizes, (slope * np.log(sizes))[..., None] + noise)
        size = sizes[0, group] * np.exp(rng.uniform(0, 1.5, (num_controllers, 48)))
        accuracy = (
            0.02
            + slope[group] * np.log(size)
            + (rng.normal(0, 0.004, (num_controllers, 1)) if num_controllers > 1 else 0.0)
            + rng.normal(0, 0.02, 48)
            + rng.normal(0, 0.01, (num_controllers, 48))
        )
        found = frontier.excess(accuracy, size, group)
        hits += found.low <= 0.02 <= found.high
        degrees.append(found.degrees)
    assert 0.93 <= hits / trials <= 0.995
    assert min(degrees) > 2


def test_hosts_are_compared_in_their_own_groups():
    accuracies = np.zeros((2, 2, 2))
    accuracies[:, 0], accuracies[:, 1] = 0.5, 0.9
    frontier = Frontier(np.array([[100.0, 100.0], [400.0, 400.0]]), accuracies)
    found = frontier.excess(np.array([0.6, 1.0]), np.array([100.0, 300.0]), np.array([0, 1]))
    assert found.mean == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("sizes", "repeats"),
    [([[1.0, 1.0], [2.0, 2.0]], 1), ([[1.0, 1.0]], 2), ([[1.0, 2.0], [2.0, 2.0]], 2)],
)
def test_a_frontier_needs_networks_and_sizes_that_rise_in_every_group(sizes, repeats):
    with pytest.raises(ValueError, match="two sizes or more, rising, with two networks each"):
        Frontier(np.array(sizes), np.zeros((len(sizes), 2, repeats)))
