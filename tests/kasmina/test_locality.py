"""Locality against correlations pair by pair, on signals whose correlation is known."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina import locality as module
from esper.kasmina.locality import locality


def chain(num_rows, length, correlation, channels=1, rng_seed=0):
    """Rows in which each position correlates with the next as given: x' = c x + sqrt(1 - c^2) e."""
    rng = torch.Generator().manual_seed(rng_seed)
    noise = torch.randn(num_rows, channels, length, generator=rng)
    columns = [noise[..., 0]]
    for fresh in noise[..., 1:].unbind(-1):
        columns.append(correlation * columns[-1] + math.sqrt(1 - correlation**2) * fresh)
    return torch.stack(columns, dim=-1)


def pair_by_pair(rows):
    """The definition, in float64, one pair of neighbours at a time."""
    rows = rows.double().numpy()
    shape, found = rows.shape[1:], []
    for place in itertools.product(*map(range, shape)):
        for axis in range(1, len(shape)):
            other = tuple(p + (a == axis) for a, p in enumerate(place))
            if other[axis] == shape[axis]:
                continue
            one, two = rows[:, *place], rows[:, *other]
            if len(set(one)) > 1 and len(set(two)) > 1:
                a, b = one - one.mean(), two - two.mean()
                found.append((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))
    return sum(found) / len(found) if found else 0.0


@pytest.mark.parametrize("correlation", [0.9, 0.4, 0.0, -0.6])
def test_a_chain_of_known_correlation_has_it(correlation):
    rows = chain(4000, 30, correlation, channels=2)
    assert locality(rows) == pytest.approx(correlation, abs=0.01)


@given(
    st.sampled_from([(1, 7), (3, 5), (2, 1), (1, 3, 5), (2, 4, 1), (1, 2, 3, 4)]),
    st.integers(1, 9),
    st.integers(0, 2**31),
)
def test_it_is_the_mean_over_all_pairs_of_neighbours(shape, num_rows, rng_seed):
    rng = torch.Generator().manual_seed(rng_seed)
    rows = torch.randn(num_rows, *shape, generator=rng)
    offset, scale = torch.randn(2, *shape, generator=rng)
    rows = offset + scale * rows.cumsum(-1)  # every position has a mean and a scale of its own
    never_varies = torch.rand(shape, generator=rng) < 0.3
    rows = torch.where(never_varies, 0.1, rows)
    assert locality(rows) == pytest.approx(pair_by_pair(rows), abs=1e-9)


def test_permuting_positions_destroys_it():
    rows = chain(2000, 200, 0.8)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    assert locality(rows) > 0.75
    assert abs(locality(rows[..., order])) < 0.1


def test_images_have_neighbours_in_both_directions():
    columns_alike = chain(3000, 12, 0.0, channels=4).unsqueeze(-1).expand(-1, -1, -1, 9)
    assert locality(columns_alike) == pytest.approx(8 * 12 / (8 * 12 + 9 * 11), abs=0.01)
    assert locality(columns_alike.transpose(-1, -2)) == pytest.approx(locality(columns_alike))


def test_positions_that_are_not_finite_are_left_out():
    rows = chain(500, 10, 0.8)
    expected = locality(rows[..., 4:])
    rows[3, 0, 1], rows[5, 0, 2], rows[0, 0, 3] = torch.inf, torch.nan, -torch.inf
    rows[:, 0, 0] = torch.inf
    assert locality(rows) == pytest.approx(expected)


def test_without_positions_or_rows_to_compare_it_is_0():
    assert locality(torch.randn(50, 8)) == 0.0
    assert locality(torch.randn(1, 2, 8)) == 0.0
    assert locality(torch.randn(0, 2, 8)) == 0.0
    assert locality(torch.randn(50, 8, 1)) == 0.0


def test_only_as_many_rows_as_memory_allows_are_looked_at(monkeypatch):
    rows = chain(300, 10, 0.8, channels=2)
    monkeypatch.setattr(module, "MAX_VALUES", 100 * 20)
    assert locality(rows) == pytest.approx(pair_by_pair(rows[:100]), abs=1e-9)
    monkeypatch.setattr(module, "MAX_VALUES", 1)
    assert locality(rows) == pytest.approx(pair_by_pair(rows[:2]), abs=1e-9)
