"""A host that breaks goes back; the others do not notice."""

import math

import pytest
import torch

from esper.kasmina import lifecycle
from esper.leyline.stages import SeedStage
from esper.tolaria.governor import Breakage, Governor, GovernorConfig
from support.populations import grow, small_population, take_step


def grown(num_steps=0, **options):
    population = small_population(**options)
    governor = Governor(population, GovernorConfig(snapshot_every=2))
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
    assert (event.host, event.breakage, event.steps_lost) == (1, breakage, 1)
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
    assert event.loss == pytest.approx(float(runaway[:, 2].mean()))
    assert event.loss > 3 * event.usual_loss


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
    population.adopt(lifecycle.fossilize(population.states, torch.tensor([1]), torch.tensor([0])))
    for step in range(2, 4):
        governor.check(take_step(population, step))
    broken = take_step(population, 4)
    broken[:, 1] = math.nan
    governor.check(broken)
    assert population.states.stage[1, 0] == SeedStage.FOSSILIZED
    assert population.states.stage[1, 2] == SeedStage.EMBARGOED


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="snapshot_every=0"):
        GovernorConfig(snapshot_every=0)
