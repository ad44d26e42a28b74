"""A widened layer is a wider layer: of hosts, and of what a controller is told about them."""

import pytest
import torch

from esper.kasmina.blueprints import WIDENINGS, Site, blueprint_menu
from esper.kasmina.host_reports import site_facts
from esper.kasmina.hosts import HOSTS, build_host, host
from esper.kasmina.layers import Conv, Flatten, Linear, Relu
from esper.tolaria.population import Population
from support.populations import BATCH, grow, logits, random_task, rows_for, take_step

CASES = {
    "conv1d": {"input_shape": (1, 20), "widths": (4, 6, 5)},
    "conv2d": {"input_shape": (2, 9, 8), "widths": (4, 3)},
    "mlp": {"input_shape": (3, 4), "widths": (6, 5)},
}
UNITS = {"widen_quarter": (1, 2, 1), "widen_half": (2, 3, 2), "widen_full": (4, 6, 5)}


def population_of(kind, kernels="eager", norm=False):
    case = CASES[kind]
    network = build_host(kind, num_classes=5, norm=norm, **case)
    return Population(
        network,
        tuple(WIDENINGS.values()),
        random_task(case["input_shape"]),
        num_hosts=2,
        batch_size=BATCH,
        kernels=kernels,
    )


def parameters(program, row):
    """The tensors of a program without norm, from its row, two for each layer with weights."""
    parts = torch.split(row, program.sizes)
    specs = [spec for layer in program.parameters for spec in layer]
    return [part.view(spec.shape) for part, spec in zip(parts, specs, strict=True)]


@pytest.mark.parametrize("kind", CASES)
def test_a_committed_widening_is_a_wider_host(kind):
    """Seeds in all slots at alpha 1: units side by side, those of neighbours not connected."""
    population = population_of(kind)
    network, table = population.host, population.parameter_table
    slots = list(range(network.num_slots))
    grow(population, [0] * len(slots), slots, blueprint=1)
    for step in range(3):
        take_step(population, step)
    assert bool((population.states.alpha[0] == 1).all())

    seeds = []
    for slot, site in enumerate(network.sites):
        program = population.menu[1].program(site)
        columns = table.layout.seed_columns(slot, program.num_params)
        seeds.append(parameters(program, table.params[0, columns]))
    units = [len(seed[0]) for seed in seeds]
    widths = [w + k for w, k in zip(CASES[kind]["widths"], units, strict=True)]
    wide = build_host(kind, input_shape=network.input_shape, num_classes=5, widths=widths)
    starts = [0, *torch.tensor([p.num_params for p in network.programs]).cumsum(0).tolist()]
    rows = []
    for number, program in enumerate(network.programs):
        row = table.params[0, starts[number] : starts[number + 1]]
        weight, bias = parameters(program, row)
        if number > 0:  # inputs from the new units of the layer before
            _, _, weight_in, bias_in = seeds[number - 1]
            weight, bias = torch.cat((weight, weight_in), 1), bias + bias_in
        if number < network.num_slots:  # new units, which do not see those of the layer before
            new, new_bias = seeds[number][:2]
            unseen = new.new_zeros(len(new), weight.shape[1] - new.shape[1], *weight.shape[2:])
            weight = torch.cat((weight, torch.cat((new, unseen), 1)))
            bias = torch.cat((bias, new_bias))
        rows += [weight.flatten(), bias]
    row = torch.cat(rows)
    assert row.numel() == wide.num_params

    x = population.task.train_x[population.view_ids].movedim(1, -1)[:1]
    start = 0
    for program in wide.programs:
        x = program.forward(row[None, start : start + program.num_params], x)
        start += program.num_params
    assert bool(seeds[0][2].any())  # it has learned something
    torch.testing.assert_close(logits(population)[:1], x, rtol=0, atol=1e-12)


def test_units_and_costs_are_those_of_the_layers_around_the_slot():
    network = population_of("conv1d").host
    for name, units in UNITS.items():
        (entry,) = blueprint_menu(name)
        programs = [entry.program(site) for site in network.sites]
        assert tuple(program.layers[0].width for program in programs) == units
        first, second, third = units
        assert [program.num_params for program in programs] == [
            (5 + 1) * first + (3 * first + 1) * 6,
            (3 * 4 + 1) * second + (3 * second + 1) * 5,
            (3 * 6 + 1) * third + (3 * third + 1) * 5,  # three positions, behind Flatten
        ]
        assert programs[0].macs == 5 * first * 9 + 3 * first * 6 * 5
    facts = site_facts(network.sites, tuple(WIDENINGS.values()))
    assert bool(facts["fits"].all())
    assert facts["reach"].unique().tolist() == [0.0]  # as in models of users
    assert facts["depth"].unique().tolist() == [2.0]


def test_one_normalised_unit_of_a_vector_is_not_offered():
    site = build_host("mlp", input_shape=(9,), num_classes=5, widths=(6, 5), norm=True).sites[0]
    (quarter,) = blueprint_menu("widen_quarter")
    assert quarter.program(site).layers[1].width == 4


def test_only_a_layer_between_layers_is_widened():
    @host
    def unusual(input_shape, num_classes, widths, norm):
        return (
            (Conv(4), Relu(), Conv(4), Relu()),  # two layers: which one?
            (Relu(), Conv(4)),  # reads what is rectified first
            (Conv(4), Relu()),  # before a depthwise layer
            (Conv(4, depthwise=True), Relu()),
            (Conv(4), Relu()),
            (Flatten(), Linear(num_classes)),
        )

    try:
        network = build_host("unusual", input_shape=(1, 9), num_classes=5, widths=(4,))
    finally:
        del HOSTS["unusual"]
    for entry in WIDENINGS.values():
        fits = [entry.fits(site) for site in network.sites]
        assert fits == [False, False, False, False, True]
        assert not entry.fits(Site((4, 9)))


def test_the_branch_is_trained_and_can_be_pruned():
    """A host that had a widening and lost it is the one that never had it."""
    population = population_of("conv1d", kernels=None, norm=True)
    assert population.kernels == "compiled"
    grow(population, [0], [1], blueprint=2)
    before = logits(population)
    take_step(population)
    assert not torch.equal(logits(population)[0], before[0])
    columns = population.parameter_table.layout.seed_columns(1)
    assert bool(population.parameter_table.grads[0, columns].any())
    assert not bool(population.parameter_table.grads[1, columns].any())
    assert bool(population.train(rows_for(population)).isfinite().all())
