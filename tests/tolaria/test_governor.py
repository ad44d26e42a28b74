"""A host that breaks goes back; the others do not notice."""

import math

import pytest
import torch

from esper.leyline.stages import SeedStage
from esper.tolaria import governor as governor_module
from esper.tolaria.governor import Breakage, Governor
from support import moves
from support.populations import grow, small_population, take_step


@pytest.fixture(autouse=True)
def snapshot_steps(monkeypatch):
    monkeypatch.setattr(governor_module, "SNAPSHOT_STEPS", 2)


def grown(num_steps=0, **options):
    population = small_population(**options)
    governor = Governor(population)
    grow(population, [0, 1, 1, 2], [0, 0, 2, 1], blueprint=torch.tensor([2, 2, 5, 7]))
    for step in range(num_steps):
        assert governor.check(take_step(population, step)) == ()
    return population, governor


@pytest.mark.parametrize("breakage", [Breakage.LOSS_NOT_FINITE, Breakage.WEIGHTS_NOT_FINITE])
def test_a_host_that_is_not_finite_goes_back_to_its_snapshot_alone(breakage):
    population, governor = grown(num_steps=2)  # a snapshot was taken at the end of the second
    saved = population.parameter_table.params[1].clone()
    twin, _ = grown(num_steps=2)
    losses, _ = take_step(population, 2), take_step(twin, 2)
    if breakage == Breakage.LOSS_NOT_FINITE:
        losses[1, 1] = math.inf
    else:
        population.parameter_table.moments[0][1, 5] = math.nan
    (event,) = governor.check(losses)
    assert (event.host, event.breakage) == (1, breakage)
    assert population.states.stage[1].tolist() == [
        SeedStage.EMBARGOED,
        SeedStage.DORMANT,
        SeedStage.EMBARGOED,
    ]
    host = population.parameter_table.layout.host_columns()
    assert torch.equal(population.parameter_table.params[1, host], saved[host])
    assert bool((population.parameter_table.params[1, host.stop :] == 0).all())
    others = [0, 2, 3]
    assert torch.equal(
        population.parameter_table.params[others], twin.parameter_table.params[others]
    )
    after, twins = take_step(population, 3), take_step(twin, 3)
    assert torch.equal(after[:, others], twins[:, others])
    assert torch.equal(
        population.parameter_table.params[others], twin.parameter_table.params[others]
    )


def test_a_host_that_runs_away_from_its_history_goes_back():
    population, governor = grown(num_steps=4)
    usual = take_step(population, 4)
    runaway = usual.clone()
    runaway[:, 2] *= 4
    (event,) = governor.check(runaway)
    assert (event.host, event.breakage) == (2, Breakage.DIVERGED)
    assert (
        f"the training loss was {float(runaway[:, 2].mean()):.3g}, more than 3 times"
        in event.reason
    )


def test_a_host_that_does_better_than_guessing_has_not_diverged():
    population, governor = grown()
    for step in range(4):
        assert governor.check(0.01 + 0 * take_step(population, step)) == ()
    much_more = 0 * take_step(population, 4) + 0.9 * math.log(5)
    assert governor.check(much_more) == ()


def test_a_history_is_the_hosts_own_and_starts_anew_after_a_rollback():
    population, governor = grown()
    level = torch.tensor([2.0, 20.0, 2.0, 2.0], dtype=torch.float64).expand(2, -1)
    for _ in range(3):
        assert governor.check(level) == ()
    broken = level.clone()
    broken[:, 0] = math.nan
    assert len(governor.check(broken)) == 1
    for _ in range(8):  # until its earlier losses are forgotten
        assert governor.check(level) == ()
    assert population.states.stage[1, 0] != SeedStage.EMBARGOED


def test_a_fossil_survives_a_rollback():
    population, governor = grown(num_steps=2)
    population.adopt(moves.fossilize(population.states, torch.tensor([1]), torch.tensor([0])))
    for step in range(2, 4):
        governor.check(take_step(population, step))
    broken = take_step(population, 4)
    broken[:, 1] = math.nan
    governor.check(broken)
    assert population.states.stage[1, 0] == SeedStage.FOSSILIZED
    assert population.states.stage[1, 2] == SeedStage.EMBARGOED


GUESSING = math.log(5)


def check_all(governor, *levels):
    """The events of steps in which all four hosts have these mean losses."""
    return [
        event
        for level in levels
        for event in governor.check(torch.full((2, 4), level, dtype=torch.float64))
    ]


def test_a_host_that_falls_back_to_guessing_is_restored_from_before_the_fall():
    population, governor = grown()  # a snapshot every second step
    usual, fallen = torch.full((2, 4), 0.5).double(), torch.full((2, 4), 0.5).double()
    fallen[:, 2] = GUESSING
    for _ in range(4):
        assert governor.check(usual) == ()
    saved = population.parameter_table.params[2].clone()
    population.parameter_table.params[2] += 1.0  # the collapse
    population.parameter_table.params[0] += 2.0
    assert governor.check(fallen) == ()
    assert governor.check(fallen) == ()  # a snapshot of the other hosts
    (event,) = governor.check(fallen)
    assert (event.host, event.breakage) == (2, Breakage.COLLAPSED)
    assert event.reason == (
        "the training loss was about ln(5) = 1.61 for 3 steps, after a best of 0.5"
    )
    host = population.parameter_table.layout.host_columns()
    assert torch.equal(population.parameter_table.params[2, host], saved[host])
    population.parameter_table.params[0, 0] = math.nan
    (other,) = governor.check(usual)
    assert other.host == 0


@pytest.mark.parametrize(
    "levels",
    [
        [GUESSING] * 20,  # never learned
        [0.8 * GUESSING] * 5 + [GUESSING] * 5,  # hardly learned
        [0.5, GUESSING] * 10,  # noisy
        [0.5] * 4 + [GUESSING, GUESSING, 0.5] * 5,  # noisy after it has learned
        [0.5] * 5 + [0.85 * GUESSING] * 10,  # worse, not guessing
    ],
)
def test_hosts_that_never_learned_or_are_noisy_have_not_collapsed(levels):
    _, governor = grown()
    assert check_all(governor, *levels) == []


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda losses, table: losses[:, 1].fill_(math.inf), "the training loss was inf"),
        (
            lambda losses, table: table.params[1, 0].fill_(math.nan),
            "a weight or an optimiser moment was not finite",
        ),
        (
            lambda losses, table: losses[:, 1].fill_(9.0),
            "the training loss was 9, more than 3 times its usual 2",
        ),
    ],
)
def test_a_rollback_gives_its_reason_in_words(spoil, reason):
    population, governor = grown()
    assert check_all(governor, 2.0, 2.0) == []
    losses = torch.full((2, 4), 2.0, dtype=torch.float64)
    spoil(losses, population.parameter_table)
    (event,) = governor.check(losses)
    assert event.reason == reason
