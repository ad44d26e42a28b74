"""The fused kernel trains as batched operations do: by the C++ compiler here, on CUDA where it is."""

from types import SimpleNamespace

import pytest
import torch

from esper.kasmina import lifecycle
from esper.kasmina.blueprints import BLUEPRINTS, blueprint, blueprint_menu
from esper.kasmina.hosts import build_host
from esper.kasmina.layers import Conv, MixPositions, Norm, Relu
from esper.kernels.hosts import fused
from esper.leyline.constants import BlendStyle, SiteKind
from esper.tolaria.host_validation import validate_hosts
from esper.tolaria.population import Population, fastest_kernels
from support.fused_on_cpu import allow_cpu, needs_compiler
from support.kernel_parity import HOSTS, assert_agree, build
from support.populations import BATCH, grow, random_task, rows_for

DEVICES = (
    pytest.param("cpu", marks=needs_compiler),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
on_every_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def cpu_is_allowed(monkeypatch):
    allow_cpu(monkeypatch)


def grow_at_once(population, hosts, slots, **choice):
    """New seeds that the hosts feel fully, and that have something to say."""
    grow(population, hosts, slots, **choice)
    population.adopt(lifecycle.begin_step(population.states))
    assert bool((population.states.alpha[hosts, slots] == 1).all())
    sizes = population.seed_params()
    for host, slot in zip(hosts, slots, strict=True):
        size = int(sizes[host, slot])
        columns = population.parameter_table.layout.seed_columns(slot, size)
        noise = 0.1 * torch.arange(size).sin()  # a last layer is zero at birth
        population.parameter_table.params[host, columns] += noise.to(
            population.parameter_table.params
        )


def assert_one_step_agrees(first, second, rows):
    """Losses, gradients, weights and evaluation after the same minibatches."""
    close = {"rtol": 0, "atol": 1e-9}
    losses = [population.train(rows.to(population.task.device)) for population in (first, second)]
    torch.testing.assert_close(*losses, **close)
    for table in ("grads", "params"):
        tables = [getattr(population.parameter_table, table) for population in (first, second)]
        torch.testing.assert_close(*tables, **close)
    found = [validate_hosts(population) for population in (first, second)]
    torch.testing.assert_close(found[0].loss, found[1].loss, **close)
    torch.testing.assert_close(found[0].contribution, found[1].contribution, **close)


@on_every_device
@pytest.mark.parametrize("shadow_training", [False, True], ids=["in host", "behind host"])
@pytest.mark.parametrize("kind", HOSTS)
def test_it_trains_as_batched_operations_do(kind, shadow_training, device):
    pair = [build(kind, kernels, device) for kernels in ("fused", "eager")]
    assert_agree(*pair, num_steps=8, shadow_training=shadow_training)


@on_every_device
@pytest.mark.parametrize("kind", HOSTS)
def test_every_blueprint_is_blended_in_every_style(kind, device):
    menu = len(build(kind, "eager").menu)
    hosts, slots = menu * len(BlendStyle), len(HOSTS[kind]["widths"])
    pair = [build(kind, kernels, device, hosts) for kernels in ("fused", "eager")]
    where = torch.cartesian_prod(torch.arange(hosts), torch.arange(slots))
    for population in pair:
        grow_at_once(
            population,
            *where.T.tolist(),
            blueprint=where.sum(1) % menu,
            style=where[:, 0] // menu,
        )
    assert_one_step_agrees(*pair, rows_for(pair[0], count=2))


@on_every_device
def test_layers_may_come_in_any_order(device):
    @blueprint(SiteKind.SERIES)
    def unusual(site):
        separate = Conv(site.width, depthwise=True)
        return (Relu(), Norm(), Relu(), separate, Relu(), separate, MixPositions(), Relu(), Norm(),
                Conv(site.width + 3, kernel=1), Relu(), Relu(), Conv(site.width))  # fmt: skip

    try:
        host = build_host("conv1d", num_classes=5, **HOSTS["conv1d"])
        task = random_task(host.input_shape).to(device, torch.float64)
        pair = [
            Population(
                host,
                blueprint_menu("unusual"),
                task,
                num_hosts=2,
                batch_size=BATCH,
                kernels=kernels,
            )
            for kernels in ("fused", "eager")
        ]
        for population in pair:
            grow_at_once(population, [0, 0, 1], [0, 2, 1])
        assert_one_step_agrees(*pair, rows_for(pair[0], count=4))
    finally:
        del BLUEPRINTS["unusual"]


@on_every_device
def test_a_minibatch_may_be_worked_on_in_pieces(monkeypatch, device):
    monkeypatch.setattr(fused, "MOST_EXAMPLES", 5)  # 8 rows: 4 and 4; 60: many
    pair = [build("conv1d", kernels, device) for kernels in ("fused", "eager")]
    assert_agree(*pair, num_steps=3, shadow_training=True)


@on_every_device
@pytest.mark.parametrize("num_kilobytes", [64, 160], ids=["no weights", "no gradients"])
def test_what_does_not_fit_into_shared_memory_lies_elsewhere(monkeypatch, num_kilobytes, device):
    monkeypatch.setattr(fused, "shared_bytes", lambda device: num_kilobytes * 1024)
    pair = []
    for kernels in ("fused", "eager"):
        host = build_host("mlp", input_shape=(12,), num_classes=5, widths=(48, 40))
        task = random_task(host.input_shape).to(device, torch.float64)
        menu = blueprint_menu("dense_dense")
        pair.append(Population(host, menu, task, num_hosts=2, batch_size=BATCH, kernels=kernels))
        grow_at_once(pair[-1], [0, 1, 1], [0, 0, 1])
    assert_one_step_agrees(*pair, rows_for(pair[0], count=3))


@on_every_device
def test_a_broken_host_changes_no_other(device):
    populations = [build("conv1d", "fused", device) for _ in range(2)]
    for population in populations:
        grow_at_once(population, [0, 1, 2, 4], [0, 0, 0, 1], blueprint=torch.tensor([2, 2, 5, 5]))
    populations[1].parameter_table.params[0] = torch.nan
    for population in populations:
        population.train(rows_for(population, count=5).to(device))
    sound, broken = (population.parameter_table.params[1:] for population in populations)
    assert torch.equal(sound, broken)
    assert bool(populations[1].parameter_table.params[0, :4].isnan().all())


def test_it_is_chosen_on_cuda_where_it_has_room(monkeypatch):
    population = build("conv1d", "eager")
    on_cuda = SimpleNamespace(device=torch.device("cuda"), element_size=lambda: 4)
    setup = SimpleNamespace(
        host=population.host,
        menu=population.menu,
        optimizer=population.optimizer,
        parameter_table=SimpleNamespace(params=on_cuda, layout=population.parameter_table.layout),
    )
    monkeypatch.setattr(fused, "shared_bytes", lambda device: 2**17)
    monkeypatch.setattr(fused, "max_blocks", lambda device: 100)
    assert fastest_kernels(setup) == "fused"
    monkeypatch.setattr(fused, "MAX_WORKSPACE_BYTES", 10**6)
    assert fastest_kernels(setup) == "eager"
    with pytest.raises(ValueError, match="use kernels='eager'"):
        fused.FusedSteps(setup)


@pytest.mark.gpu
def test_runs_are_the_same_to_the_bit_on_any_stream():
    alone = [build("conv1d", "fused", "cuda", dtype=torch.float32) for _ in range(2)]
    beside = [build("conv1d", "fused", "cuda", dtype=torch.float32) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in beside]
    for population in (*alone, *beside):
        grow_at_once(population, [0, 1, 2, 4], [0, 0, 1, 2], blueprint=torch.tensor([8, 2, 5, 6]))
    rows = rows_for(alone[0], count=20).cuda()
    torch.cuda.synchronize()
    for population in alone:
        population.train(rows)
    torch.cuda.synchronize()
    for population, stream in zip(beside, streams, strict=True):
        with torch.cuda.stream(stream):
            population.train(rows)
    torch.cuda.synchronize()
    for one, other in zip(alone, beside, strict=True):
        assert torch.equal(one.parameter_table.params, other.parameter_table.params)


@pytest.mark.gpu
def test_training_does_not_wait_for_the_device():
    population = build("conv1d", "fused", "cuda", dtype=torch.float32)
    rows = rows_for(population, count=5).cuda()
    population.train(rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        population.train(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
