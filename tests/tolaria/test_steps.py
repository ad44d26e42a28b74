"""The ways to run a population agree."""

import pytest
import torch

from esper.kasmina.blueprints import BLUEPRINTS, blueprint, blueprint_menu, menu_for
from esper.kasmina.hosts import build_host
from esper.kasmina.layers import Conv
from esper.kernels.hosts import compiled
from esper.leyline.constants import SiteKind
from esper.tolaria.host_validation import validate_hosts
from esper.tolaria.population import Population
from esper.tolaria.tasks import minibatch_indices
from support.kernel_parity import HOSTS, assert_agree, build
from support.populations import BATCH, full_menu, grow, random_task, rows_for, small_population


@pytest.mark.parametrize("shadow_training", [False, True], ids=["in host", "behind host"])
@pytest.mark.parametrize("kind", HOSTS)
def test_compiled_code_trains_as_batched_operations_do(kind, shadow_training):
    fast, eager = build(kind, "compiled"), build(kind, "eager")
    assert_agree(fast, eager, num_steps=12, shadow_training=shadow_training)


def test_threads_change_nothing():
    one, three = build("conv1d", "compiled"), build("conv1d", "compiled")
    grow(one, [0, 2, 5], [0, 1, 2], blueprint=5)
    grow(three, [0, 2, 5], [0, 1, 2], blueprint=5)
    one.train(rows_for(one))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three.train(rows_for(three))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one.parameter_table.params, three.parameter_table.params)


@pytest.mark.parametrize("kind", HOSTS)
def test_what_was_in_the_memory_before_changes_nothing(kind):
    """Every blueprint in every slot, on minibatches that the kernels have to round up."""
    host = build_host(kind, num_classes=5, **HOSTS[kind])
    menu, task, batch = full_menu(host), random_task(host.input_shape), 13
    populations = []
    for remains in (0x00, 0xFF):  # zeros, and what reads as nan
        population = Population(
            host, menu, task, num_hosts=len(menu), batch_size=batch, kernels="compiled"
        )
        for slot in range(host.num_slots):
            hosts = torch.arange(len(menu))
            grow(population, hosts, torch.full_like(hosts, slot), blueprint=hosts)
        population.train(minibatch_indices(0, population.host_ids, range(1), batch, 60))
        compiled._threads.memory.fill(remains)
        population.train(minibatch_indices(0, population.host_ids, range(1, 3), batch, 60))
        compiled._threads.memory.fill(remains)
        loss = validate_hosts(population, num_rows=11).loss
        populations.append((population.parameter_table.params, loss))
    assert torch.equal(*(params for params, _ in populations))
    assert torch.equal(*(loss for _, loss in populations))


@pytest.mark.gpu
def test_a_broken_host_changes_no_other_on_cuda():
    populations = [build("conv1d", "eager", device="cuda") for _ in range(2)]
    for population in populations:
        grow(population, [0, 1, 2, 4], [0, 0, 0, 1], blueprint=torch.tensor([2, 2, 5, 5]))
    populations[1].parameter_table.params[0] = torch.nan
    for population in populations:
        population.train(rows_for(population, count=5).cuda())
    sound, broken = (population.parameter_table.params[1:] for population in populations)
    assert torch.equal(sound, broken)


def test_a_layer_of_ones_own_is_run_by_batched_operations():
    assert small_population(kernels=None).kernels == "compiled"

    @blueprint(SiteKind.SERIES)
    def with_own_layer(site):
        return (Conv(site.width), Negate(), Conv(site.width))

    class Negate:
        def output_shape(self, shape):
            return shape

        def parameters(self, shape):
            return ()

        def macs(self, shape):
            return 0

        def window(self, shape):
            return 1

        def forward(self, parameters, x):
            return -x

    try:
        host = build_host("conv1d", num_classes=5, **HOSTS["conv1d"])
        menu = (*menu_for(SiteKind.SERIES)[:3], *blueprint_menu("with_own_layer"))
        population = Population(
            host, menu, random_task(host.input_shape), num_hosts=2, batch_size=BATCH
        )
        assert population.kernels == "eager"
        grow(population, [0, 1], [0, 1], blueprint=3)
        assert bool(population.train(rows_for(population)).isfinite().all())
        with pytest.raises(ValueError, match="no compiled kernel for"):
            Population(host, menu, random_task(host.input_shape), num_hosts=2, kernels="compiled")
    finally:
        del BLUEPRINTS["with_own_layer"]
