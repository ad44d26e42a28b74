"""What happens to weights when slots change. How hosts train is compared with an oracle elsewhere."""

import pytest
import torch

from esper.kasmina import lifecycle
from esper.leyline.constants import BlendStyle
from esper.tolaria.batched import group_seeds
from esper.tolaria.randomness import fold, uniform
from support import moves
from support.populations import (
    grow,
    logits,
    random_task,
    rows_for,
    small_population,
    take_step,
)

NUM_BLUEPRINTS = len(small_population().menu)


def columns(population, slot):
    return population.parameter_table.layout.seed_columns(slot)


def storage(population):
    """Parameters and moments of all hosts, `[kinds, P, D]`."""
    return torch.stack((population.parameter_table.params, *population.parameter_table.moments))


@pytest.mark.parametrize("style", BlendStyle)
@pytest.mark.parametrize("blueprint", range(NUM_BLUEPRINTS))
def test_a_new_seed_leaves_the_logits_as_they_were_to_the_bit(blueprint, style):
    population = small_population()
    take_step(population)
    before = logits(population)
    grow(population, [0, 1, 1, 2, 3], [0, 0, 2, 1, 2], blueprint, style)
    population.adopt(lifecycle.begin_step(population.states))  # alpha is 1 now
    assert population.states.alpha.max() == 1.0
    assert torch.equal(logits(population), before)


def test_a_new_seed_leaves_every_other_weight_and_moment_as_it_was():
    population = small_population()
    grow(population, [0, 2], [1, 1], blueprint=5)
    for step in range(2):
        take_step(population, step)
    before, steps = storage(population), population.parameter_table.steps.clone()
    grow(population, [0, 1], [0, 1], blueprint=3)
    after = storage(population)
    born = torch.zeros_like(before[0], dtype=torch.bool)
    born[0, columns(population, 0)] = True
    born[1, columns(population, 1)] = True
    assert torch.equal(after[:, ~born], before[:, ~born])
    assert bool((after[1:, born] == 0).all())  # fresh moments
    assert torch.equal(population.parameter_table.steps, steps)
    take_step(population, 2)
    assert population.parameter_table.steps[0].tolist() == [6, 2, 6, 0]


def test_a_pruned_seed_leaves_the_host_as_if_it_were_switched_off():
    population = small_population()
    grow(population, [0, 1, 2], [0, 1, 2], blueprint=torch.tensor([2, 5, 8]))
    for step in range(3):
        take_step(population, step)
    before = storage(population)
    x = population.task.train_x[population.view_ids].movedim(1, -1)
    copies, slots = population.ablated_logits(x)
    assert list(slots) == [0, 1, 2]
    with_all, without_slot_1 = copies[:, :, 0], copies[:, :, 2]
    assert not torch.equal(with_all[1], without_slot_1[1])
    population.adopt(
        moves.prune(population.states, torch.tensor([1]), torch.tensor([1]), ramp_steps=0)
    )
    after = storage(population)
    assert torch.equal(logits(population)[1], without_slot_1[1])
    assert torch.equal(logits(population)[[0, 2, 3]], with_all[[0, 2, 3]])
    gone = torch.zeros_like(before[0], dtype=torch.bool)
    gone[1, columns(population, 1)] = True
    assert torch.equal(after[:, ~gone], before[:, ~gone])
    assert bool((after[:, gone] == 0).all())


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_seed_behind_its_host_moves_its_own_weights_and_no_other(slot):
    watched, free = small_population(), small_population()
    for population in (watched, free):
        grow(population, [0], [(slot + 1) % 3], blueprint=2)  # another seed, felt by the host
        take_step(population)
    before = logits(watched)
    grow(watched, [0, 1], [slot, slot], blueprint=5, shadow_training=True)
    assert torch.equal(logits(watched), before)
    at_birth = storage(watched)[0, :2, columns(watched, slot)].clone()
    for step in range(1, 4):
        for population in (watched, free):
            take_step(population, step)
    seed = torch.zeros_like(watched.parameter_table.params, dtype=torch.bool)
    seed[:2, columns(watched, slot)] = True
    assert torch.equal(storage(watched)[:, ~seed], storage(free)[:, ~seed])
    moved = storage(watched)[0, :2, columns(watched, slot)] != at_birth
    assert bool((moved.sum(1) > 50).all())


def test_a_seed_behind_its_host_stays_of_the_hosts_order_of_magnitude():
    population = small_population()
    grow(population, range(4), [0] * 4, blueprint=5, shadow_training=True)
    for step in range(10):
        take_step(population, step, count=20)
    host = population.host
    x = population.task.train_x.expand(4, -1, -1, -1).movedim(1, -1)
    rows = population.parameter_table.params[:, : host.segments[0].num_params]
    activations = host.segments[0].forward(rows, x)
    program = population.menu[5].program(host.sites[0])
    layout = population.parameter_table.layout
    seeds = population.parameter_table.params[:, layout.seed_columns(0, program.num_params)]
    output = program.forward(seeds, activations)
    ratio = output.square().mean((1, 2, 3)).sqrt() / activations.square().mean((1, 2, 3)).sqrt()
    assert bool((ratio < 5).all())
    assert bool((ratio > 0.01).all())


def test_a_restored_host_is_as_it_was_and_no_other_is_touched():
    population = small_population()
    grow(population, [0, 1], [0, 1], blueprint=1)
    take_step(population)
    saved, before = population.save(), storage(population)
    before_logits, before_states = logits(population), population.states
    grow(population, [1, 2], [0, 0], blueprint=4)
    for step in range(1, 4):
        take_step(population, step)
    later, later_states = storage(population), population.states
    population.restore(saved, torch.tensor([1]))
    assert torch.equal(storage(population)[:, 1], before[:, 1])
    assert torch.equal(storage(population)[:, [0, 2, 3]], later[:, [0, 2, 3]])
    assert torch.equal(logits(population)[1], before_logits[1])
    assert torch.equal(population.states.stage[1], before_states.stage[1])
    assert torch.equal(population.states.alpha[[0, 2, 3]], later_states.alpha[[0, 2, 3]])


def test_a_diverging_host_changes_no_other_host_by_a_bit():
    sound, broken = small_population(), small_population()
    for population in (sound, broken):
        grow(population, [0, 1, 2, 3, 0], [0, 0, 0, 1, 2], blueprint=torch.tensor([2, 2, 5, 5, 8]))
        take_step(population)
    broken.parameter_table.params[0] = torch.nan  # host 0 is the one that padding reads
    for population in (sound, broken):
        take_step(population, 1)
    assert bool(broken.parameter_table.params[0].isnan().any())
    assert torch.equal(storage(broken)[:, 1:], storage(sound)[:, 1:])


def test_hosts_are_born_from_their_ids():
    many = small_population(num_hosts=4)
    few = small_population(num_hosts=2, host_ids=torch.tensor([3, 1]))
    assert torch.equal(few.parameter_table.params[0], many.parameter_table.params[3])
    assert torch.equal(few.parameter_table.params[1], many.parameter_table.params[1])
    grow(many, [3], [2], blueprint=5)
    grow(few, [0], [2], blueprint=5)
    assert torch.equal(few.parameter_table.params[0], many.parameter_table.params[3])


def test_a_slots_second_seed_differs_from_its_first():
    population = small_population()
    births = []
    for _ in range(2):
        grow(population, [0], [0], blueprint=5)
        births.append(population.parameter_table.params[0, columns(population, 0)].clone())
        take_step(population)
        transition = moves.prune(population.states, torch.tensor([0]), torch.tensor([0]))
        for _ in range(3):
            transition = transition.then(lifecycle.end_step)
        population.adopt(transition)
    assert not torch.equal(*births)


def test_reset_begins_again_with_other_weights():
    population, fresh = small_population(), small_population(rng_seed=5)
    grow(population, [0, 1], [0, 1], blueprint=5)
    take_step(population)
    population.reset(5)
    assert torch.equal(storage(population), storage(fresh))
    assert torch.equal(take_step(population), take_step(fresh))


def test_each_host_reads_its_own_view_of_the_data():
    task = random_task(num_views=2)
    apart = small_population(task=task, view_ids=torch.tensor([0, 1, 0, 1]))
    together = small_population(task=task)
    rows = rows_for(apart)
    first, second = apart.train(rows), together.train(rows)
    assert torch.equal(first[:, [0, 2]], second[:, [0, 2]])
    assert not torch.equal(first[:, [1, 3]], second[:, [1, 3]])


def test_a_learning_rate_of_zero_stops_that_host_alone():
    population = small_population()
    population.learning_rates[2] = 0
    before = storage(population)[0]
    take_step(population)
    moved = (storage(population)[0] != before).any(1)
    assert moved.tolist() == [True, True, False, True]


def test_gradient_norms_are_those_of_the_seeds():
    population = small_population()
    grow(population, [0, 2], [1, 0], blueprint=torch.tensor([3, 5]))
    take_step(population)
    norms = population.gradient_norms()
    grads = population.parameter_table.grads[2, columns(population, 0)]
    params = population.seed_params()[2, 0]
    assert norms[2, 0] == pytest.approx((grads.square().sum() / params).sqrt().item())
    assert (norms > 0).nonzero().tolist() == [[0, 1], [2, 0]]


def test_seeds_of_one_blueprint_in_one_slot_are_a_group():
    population = small_population()
    assert group_seeds(population.states) == {}
    grow(population, [0, 1, 2, 3], [0, 0, 0, 1], blueprint=torch.tensor([2, 2, 2, 7]))
    groups = group_seeds(population.states)
    assert {tuple(key): hosts.tolist() for key, hosts in groups.items()} == {
        (0, 2, False): [0, 1, 2],
        (1, 7, False): [3],
    }


def test_random_numbers_are_uniform_and_keys_are_apart():
    keys = fold(3, torch.arange(50), 1)
    numbers = uniform(keys, 400)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(numbers.var()) == pytest.approx(1 / 12, abs=0.005)
    assert float(torch.corrcoef(numbers).fill_diagonal_(0).abs().max()) < 0.25
    assert torch.equal(uniform(keys[7:8], 10)[0], numbers[7, :10])
