"""Known gains: types of data take turns, the best plans are the best, noise is what was asked for."""

import math
from itertools import product

import pytest
import torch

from esper.kasmina.lifecycle import Transition
from support.synthetic_hosts import (
    BLUEPRINT_PARAMS,
    FOUR_TYPES,
    HOST_ACCURACY,
    HOST_PARAMS,
    SITE_SHARES,
    SyntheticHosts,
)


def planted(*host_batch, **settings):
    """A host_batch in its first episode."""
    host_batch = SyntheticHosts(*host_batch, **settings)
    host_batch.reset(torch.Generator().manual_seed(0))
    return host_batch


def score(seeds, gains, rent):
    """Of a host with these blueprints in its slots, None for no seed."""
    grown = [(share, b) for share, b in zip(SITE_SHARES, seeds, strict=True) if b is not None]
    gain = sum(share * gains[b] for share, b in grown)
    added = sum(BLUEPRINT_PARAMS[b] for _, b in grown)
    return HOST_ACCURACY + gain - rent * math.log(1 + added / HOST_PARAMS)


def test_types_take_turns_between_families_and_are_told_by_locality_and_rows():
    host_batch = SyntheticHosts(12, FOUR_TYPES[:3], siblings=2)
    plan = host_batch.reset(torch.Generator())
    told = [FOUR_TYPES[i] for i in (0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2)]
    assert plan["train_rows"].tolist() == [each.train_rows for each in told]
    torch.testing.assert_close(plan["locality"], torch.tensor([each.locality for each in told]))


def test_the_best_scores_are_those_of_every_set_of_seeds_tried_by_hand():
    host_batch = planted(4, FOUR_TYPES)
    rents = [0.02, 0.05, 0.1, 0.25]
    sets = list(product((None, *range(6)), repeat=3))
    best, best_blind = [], []
    for own, rent in zip(FOUR_TYPES, rents, strict=True):
        best.append(max(score(seeds, own.gains, rent) for seeds in sets))
        blind = max(sets, key=lambda s: sum(score(s, each.gains, rent) for each in FOUR_TYPES))
        best_blind.append(score(blind, own.gains, rent))
    rent = torch.tensor(rents)
    torch.testing.assert_close(host_batch.best_scores(rent), torch.tensor(best))
    torch.testing.assert_close(host_batch.best_blind_scores(rent), torch.tensor(best_blind))
    assert (host_batch.best_scores(rent) > host_batch.best_blind_scores(rent) + 0.005).any()


def test_with_one_type_there_is_nothing_to_know():
    host_batch, rent = planted(5), torch.linspace(0.02, 0.3, 5)
    assert torch.equal(host_batch.best_scores(rent), host_batch.best_blind_scores(rent))


def test_noise_has_the_deviation_asked_for_and_differs_between_siblings_and_steps():
    host_batch = planted(4000, FOUR_TYPES, siblings=4, noise=0.02)
    measured = [
        host_batch.train_step(Transition.of(host_batch.states)).accuracy,
        host_batch.train_step(Transition.of(host_batch.states)).accuracy,
    ]
    for accuracy in (*measured, host_batch.committed_accuracy()):
        noise = accuracy - HOST_ACCURACY
        assert noise.std().item() == pytest.approx(0.02, rel=0.1)
        assert abs(noise.mean()) < 0.002
        assert (noise.view(-1, 4).std(dim=1) > 0).all()
    assert (measured[0] != measured[1]).float().mean() > 0.99


def test_without_noise_accuracies_are_exact_and_no_random_number_is_drawn():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    host_batch = SyntheticHosts(8, FOUR_TYPES)
    host_batch.reset(generator)
    assert torch.equal(
        host_batch.train_step(Transition.of(host_batch.states)).accuracy,
        torch.full((8,), HOST_ACCURACY),
    )
    assert torch.equal(generator.get_state(), before)


def test_envs_that_do_not_split_into_siblings_are_refused():
    with pytest.raises(ValueError, match="num_envs=6 does not split into siblings=4"):
        SyntheticHosts(6, siblings=4)
