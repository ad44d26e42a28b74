"""The best of k runs, against means over all subsets."""

from itertools import combinations

import numpy as np
import pytest

from growth_evaluation.random_search import RandomSearch


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_best_of_k_is_the_mean_over_all_subsets(k):
    rng = np.random.default_rng(k)
    choose_by, read = rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    expected = np.zeros(3)
    for host in range(3):
        picks = [
            read[max(chosen, key=lambda run: choose_by[run, host]), host]
            for chosen in combinations(range(5), k)
        ]
        expected[host] = np.mean(picks)
    np.testing.assert_allclose(RandomSearch(choose_by, read).best_of(k), expected)


def test_a_search_matches_once_it_holds_a_run_as_good():
    scores = np.tile(np.arange(1.0, 5.0)[:, None], (1, 6))  # every host: runs worth 1, 2, 3, 4
    # the mean best of k of 1..4 is k * 5 / (k + 1): 2.5, 3.33, 3.75, 4
    search = RandomSearch(scores, scores)
    found = search.runs_to_match(np.full(6, 3.5))
    assert (found.k, found.low, found.high, found.tried) == (3, 3, 3, 4)
    assert search.runs_to_match(np.full(6, 4.5)).k is None
    assert [search.best_of(k).mean() for k in (1, 2, 4)] == pytest.approx([2.5, 10 / 3, 4])
    with pytest.raises(ValueError, match="k=5 runs; there are 4"):
        search.best_of(5)
