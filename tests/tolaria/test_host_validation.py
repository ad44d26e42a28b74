"""Validation of every host, and of every seed by switching it off."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from esper.tolaria import host_validation as evaluation
from esper.tolaria.host_validation import accuracy_on, validate_hosts
from support.populations import grow, random_task, small_population, take_step


def grown_population():
    task = random_task(num_views=2)
    population = small_population(task=task, view_ids=torch.tensor([1, 0, 1, 0]))
    hosts, slots = [0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 2, 1]
    blueprints, styles = torch.tensor([2, 5, 8, 5, 5, 1]), torch.tensor([0, 1, 2, 0, 0, 2])
    grow(population, hosts, slots, blueprints, styles)
    for step in range(3):
        take_step(population, step, count=15)
    return population


def alone(population, host, without=None):
    """A host's logits on its validation rows `[rows, classes]`, segment by segment."""
    view = population.view_ids[host]
    x = population.task.validation_x[view].movedim(0, -1).unsqueeze(0)
    row = population.parameter_table.params[host : host + 1]
    start = 0
    for slot, program in enumerate(population.host.programs):
        x = program.forward(row[:, start : start + program.num_params], x)
        start += program.num_params
        states = population.states
        if slot < population.num_slots and states.has_seed[host, slot] and slot != without:
            seed = population.menu[states.blueprint[host, slot]].program(
                population.host.sites[slot]
            )
            columns = population.parameter_table.layout.seed_columns(slot, seed.num_params)
            output, alpha = seed.forward(row[:, columns], x), states.alpha[host, slot]
            match int(states.style[host, slot]):
                case 0:
                    x = x + alpha * output
                case 1:
                    x = x * (1 + alpha * output.tanh())
                case 2:
                    x = x + alpha * x.sigmoid() * output
    return x[0].T


@pytest.mark.parametrize("chunk", [7, 1000])
def test_hosts_and_seeds_are_judged_as_one_by_one(chunk, monkeypatch):
    monkeypatch.setattr(evaluation, "CHUNK_ROWS", chunk)
    population = grown_population()
    found = validate_hosts(population)
    for host in range(4):
        labels = population.task.validation_y[population.view_ids[host]]
        logits = alone(population, host)
        correct = (logits.argmax(1) == labels).double()
        assert found.loss[host].item() == pytest.approx(F.cross_entropy(logits, labels).item())
        assert found.accuracy[host].item() == pytest.approx(correct.mean().item())
        for slot in range(3):
            known = bool(population.states.has_seed[host, slot])
            assert bool(found.contribution_known[host, slot]) == known
            if known:
                off = (alone(population, host, without=slot).argmax(1) == labels).double()
                gain = correct - off
                error = gain.std() / len(labels) ** 0.5
                assert found.contribution[host, slot].item() == pytest.approx(gain.mean().item())
                assert found.contribution_error[host, slot].item() == pytest.approx(error.item())
    assert bool((found.contribution != 0).any())


def test_a_seed_behind_its_host_has_no_contribution_yet():
    population = small_population()
    grow(population, [0], [1], blueprint=5, shadow_training=True)
    grow(population, [1], [1], blueprint=5)
    take_step(population)
    assert validate_hosts(population).contribution_known.nonzero().tolist() == [[1, 1]]


def test_fewer_rows_are_the_first_ones():
    population = grown_population()
    labels = population.task.validation_y[population.view_ids[2], :10]
    correct = (alone(population, 2)[:10].argmax(1) == labels).double()
    assert validate_hosts(population, num_rows=10).accuracy[2].item() == pytest.approx(
        correct.mean()
    )


def test_evaluation_changes_nothing():
    population = grown_population()
    before = population.parameter_table.params.clone(), population.parameter_table.grads.clone()
    validate_hosts(population)
    assert torch.equal(population.parameter_table.params, before[0])
    assert torch.equal(population.parameter_table.grads, before[1])


def test_accuracy_on_other_rows_is_that_of_each_host_on_its_view():
    population = grown_population()
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(2, 30, *population.task.input_shape, generator=rng).to(
        population.task.validation_x
    )
    labels = torch.randint(population.task.num_classes, (2, 30), generator=rng)
    found = accuracy_on(population, x, labels)
    for host in range(4):
        view = population.view_ids[host]
        with_rows = replace(population.task, validation_x=x, validation_y=labels)
        population.task = with_rows  # what alone() reads
        correct = (alone(population, host).argmax(1) == labels[view]).double()
        assert found[host].item() == pytest.approx(correct.mean().item())
    assert len(set(found.tolist())) > 1
