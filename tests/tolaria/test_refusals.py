"""What a population and the tasks refuse; compiled code checks no bounds."""

from dataclasses import replace

import pytest
import torch

from esper.kasmina import lifecycle
from esper.kasmina.blueprints import blueprint_menu
from esper.kasmina.layers import Conv
from esper.kasmina.lifecycle import SlotStates, Transition
from esper.kernels.hosts.layer_table import has_kernels
from esper.tolaria.host_optimizer import AdamW
from esper.tolaria.population import Population
from esper.tolaria.tasks import few_rows, mnist1d, stack, task
from support import moves
from support.populations import grow, random_task, rows_for, small_population


@pytest.fixture
def population():
    return small_population(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_hosts=0), "num_hosts=0"),
        (dict(view_ids=torch.tensor([0, 0, 7])), r"view_ids \[0, 0, 7\]"),
        (dict(view_ids=torch.tensor([0])), "expected 3 numbers below 1"),
        (dict(host_ids=torch.tensor([0])), r"host_ids \(1,\)"),
        (dict(task=random_task(dtype=torch.float16)), "torch.float16"),
        (dict(task=random_task(input_shape=(1, 21))), "has inputs"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        small_population(**({"num_hosts": 3} | options))


def of_views(num_rows):
    """A population whose views are shorter than the table of rows."""
    task = random_task()
    both = stack([few_rows(task, num_rows), task])
    return small_population(2, both, view_ids=torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda p: p.train(rows_for(p) + 5000), "its view has 60 rows"),
        (lambda p: p.train(rows_for(p) - 100), "its view has 60 rows"),
        (lambda p: p.train(rows_for(p).float()), "torch.float32"),
        (lambda p: p.train(rows_for(p)[:0]), "at least one minibatch"),
        (lambda p: p.train(rows_for(p)[:, :2]), r"\[\.\., 3, 8\]"),
        (lambda p: of_views(20).train(torch.full((1, 2, 8), 30)), "host 0 .* row .* has 20 rows"),
        (lambda p: p.logits(p.task.held_out.open()[0]), "expected torch.float64 .hosts"),
        (lambda p: grow(p, [0], [0], blueprint=99), "host 0, slot 0: blueprint 99; .0, 1, 2.* fit"),
        (lambda p: p.adopt(Transition.of(SlotStates.dormant(1, 3))), r"states of \(1, 3\) hosts"),
    ],
)
def test_what_a_population_cannot_use_leaves_it_as_it_was(population, use, message):
    before = population.states
    with pytest.raises(ValueError, match=message):
        use(population)
    assert population.states is before


def test_a_blueprint_that_does_not_fit_a_slot_is_refused():
    menu = blueprint_menu("conv", "dense")
    population = Population(small_population(2).host, menu, random_task(), num_hosts=2)
    with pytest.raises(ValueError, match=r"host 1, slot 0: blueprint 1; \[0\] fit there"):
        grow(population, [1], [0], blueprint=1)


def test_a_slot_sown_again_between_two_calls_gets_a_new_seed(population):
    grow(population, [0], [0], blueprint=1)
    population.adopt(lifecycle.begin_step(population.states))
    population.train(rows_for(population))
    population.adopt(lifecycle.end_step(population.states))
    host, slot = torch.tensor([0]), torch.tensor([0])
    seed = {"blueprint": 1, "style": 0, "ramp_steps": 1, "alpha_target": 1.0, "curve": 0}
    transition = moves.prune(population.states, host, slot)
    for _ in range(3):
        transition = transition.then(lifecycle.end_step)
    transition = transition.then(lambda s: moves.germinate(s, host, slot, **seed))
    population.adopt(transition)
    assert population.parameter_table.steps[0, 1] == 0
    columns = population.parameter_table.layout.seed_columns(0)
    assert all(not moment[0, columns].any() for moment in population.parameter_table.moments)


def test_a_reset_brings_the_learning_rate_back(population):
    population.learning_rates.fill_(1e-5)
    population.reset(1)
    assert (population.learning_rates == population.optimizer.learning_rate).all()


class OwnConv(Conv):
    """Does something else than the compiled code would."""


class OwnAdamW(AdamW):
    """Likewise."""


def test_subclasses_are_not_taken_for_what_they_come_from():
    assert small_population(2, kernels=None).kernels == "compiled"
    assert small_population(2, kernels=None, optimizer=OwnAdamW()).kernels == "eager"
    program = small_population(2).host.segments[0]
    assert has_kernels(program)
    assert not has_kernels(replace(program, layers=(OwnConv(4),)))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: stack([random_task(), random_task((1, 21))]), "does not stack"),
        (lambda: few_rows(random_task(), 61), "num_rows=61"),
        (lambda: mnist1d(fresh_test_rows=100, fresh_rng_seed=42), "training rows again"),
        (lambda: mnist1d(fresh_test_rows=55), "multiple of 10"),
        (lambda: task(mnist1d), "task 'mnist1d' is registered already"),
    ],
)
def test_tasks_that_cannot_be_made_are_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use()
