"""What a population refuses before compiled code reads where there is nothing."""

from dataclasses import replace

import pytest
import torch

from esper.kasmina import lifecycle
from esper.kasmina.layers import Conv
from esper.kernels.hosts.layer_table import has_kernels
from esper.leyline.stages import SeedStage
from esper.tolaria.governor import Governor
from esper.tolaria.host_validation import validate_hosts
from esper.tolaria.optimizers import AdamW
from esper.tolaria.tasks import few_rows, mnist1d, stack
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
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        small_population(**({"num_hosts": 3} | options))


def test_rows_that_a_view_does_not_have_are_refused(population):
    rows = rows_for(population)
    for wrong, message in (
        (rows + 5000, "its view has 60 rows"),
        (rows - 100, "its view has 60 rows"),
        (rows.float(), "torch.float32"),
        (rows[:0], "at least one minibatch"),
        (rows[:, :2], r"\[\.\., 3, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            population.train(wrong)


def test_padding_of_a_short_view_is_never_read():
    task = random_task()
    both = stack([few_rows(task, 20), task])
    population = small_population(2, both, view_ids=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="host 0 is to read row .* its view has 20 rows"):
        population.train(torch.full((1, 2, 8), 30))


def test_inputs_of_another_shape_are_refused(population):
    x, _ = population.task.held_out.open()
    with pytest.raises(ValueError, match="expected torch.float64 .hosts"):
        population.logits(x)


def test_more_validation_rows_than_there_are_is_an_error(population):
    for num_rows in (0, -5, 61):
        with pytest.raises(ValueError, match="1 to 60 rows"):
            validate_hosts(population, num_rows)


def test_a_refused_birth_leaves_the_population_as_it_was(population):
    before = population.states
    with pytest.raises(ValueError, match="blueprint 99; use 0 to"):
        grow(population, [0], [0], blueprint=99)
    assert population.states is before
    with pytest.raises(ValueError, match="expected"):
        population.adopt(lifecycle.Transition.of(lifecycle.SlotStates.dormant(1, 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(blueprint=-5), "host 1, slot 0: blueprint -5; use 0 to"),
        (dict(blueprint=99), "host 1, slot 0: blueprint 99; use 0 to"),
    ],
)
def test_states_that_contradict_themselves_are_refused(population, change, message):
    before, states = population.states, lifecycle.SlotStates.dormant(3, 3)
    for name, value in ({"stage": int(SeedStage.HOLDING)} | change).items():
        getattr(states, name)[1, 0] = value
    with pytest.raises(ValueError, match=message):
        population.adopt(lifecycle.Transition.of(states))
    assert population.states is before


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(blueprint=-1), "blueprint=-1"),
        (dict(style=7), "style=7"),
        (dict(curve=9), "curve=9"),
        (dict(host_ids=torch.tensor([-1])), r"host ids \[-1\]"),
        (dict(slot_ids=torch.tensor([3])), r"slot ids \[3\]"),
    ],
)
def test_requests_out_of_range_are_refused(change, message):
    request = dict(host_ids=torch.tensor([0]), slot_ids=torch.tensor([0]), blueprint=0, style=0,
                   ramp_steps=1, alpha_target=1.0, curve=0)  # fmt: skip
    with pytest.raises(ValueError, match=message):
        moves.germinate(lifecycle.SlotStates.dormant(3, 3), **(request | change))


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


def test_a_step_without_minibatches_is_an_error(population):
    with pytest.raises(ValueError, match="losses is empty"):
        Governor(population).check(torch.zeros(0, 3))


def test_fresh_rows_that_are_the_training_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="training rows again"):
        mnist1d(data_dir=tmp_path, fresh_test_rows=100, fresh_rng_seed=42)
