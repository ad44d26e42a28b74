"""One suite for every blueprint at every kind of site it fits."""

import pytest
import torch
from torch.nn.utils import vector_to_parameters
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.blending import blend
from esper.kasmina.blueprints import BLUEPRINTS, Site, blueprint, blueprint_menu, menu_for
from esper.kasmina.layers import Conv, Norm, Relu
from esper.leyline.constants import BlendStyle, SiteKind

SITES = (Site((8, 19)), Site((6, 5)), Site((1, 4)), Site((4, 6, 7)), Site((12,)), Site((2,)))
CASES = [(entry, site) for site in SITES for entry in menu_for(site.kind)]
every_seed = pytest.mark.parametrize(
    ("entry", "site"), CASES, ids=[f"{entry.name}-{site.shape}" for entry, site in CASES]
)


def at_birth(program, num_seeds=3):
    centre, spread = program.init()
    rng = torch.Generator().manual_seed(0)
    noise = torch.rand(num_seeds, len(centre), dtype=torch.float64, generator=rng)
    return centre + spread * (2 * noise - 1)


def activations(shape, num_hosts=3, batch=5, rng_seed=1):
    rng = torch.Generator().manual_seed(rng_seed)
    return torch.randn(num_hosts, *shape, batch, dtype=torch.float64, generator=rng)


def test_there_are_enough_of_them_spread_in_cost():
    series = [entry.program(Site((8, 19))) for entry in menu_for(SiteKind.SERIES)]
    assert len(series) >= 8
    assert max(p.num_params for p in series) > 8 * min(p.num_params for p in series)
    assert len(menu_for(SiteKind.IMAGE)) >= 5
    assert len(menu_for(SiteKind.VECTOR)) >= 3


def test_the_measured_seed_has_416_parameters():
    (entry,) = blueprint_menu("conv_conv")
    program = entry.program(Site((8, 19)))
    assert (program.num_params, program.macs, program.depth) == (416, 7296, 2)
    assert program.reach == pytest.approx(5 / 19)


@every_seed
def test_a_seed_keeps_the_shape_of_its_site(entry, site):
    program = entry.program(site)
    x = activations(site.shape)
    assert program.forward(at_birth(program), x).shape == x.shape
    assert program.module()(torch.randn(2, *site.shape)).shape == (2, *site.shape)


@every_seed
def test_costs_known_beforehand_are_those_of_the_module(entry, site):
    program = entry.program(site)
    module = program.module()
    assert sum(p.numel() for p in module.parameters()) == program.num_params
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(1, *site.shape))
    assert counter.get_total_flops() == 2 * program.macs


@every_seed
def test_reach_is_the_share_of_positions_that_move_an_output(entry, site):
    program = entry.program(site)
    # weights are all positive and norms are left out: they look everywhere, but not by weights
    layers = [layer for layer in program.layers if not isinstance(layer, Norm)]
    rows = torch.rand(1, program.num_params, dtype=torch.float64)
    parts = iter(torch.split(rows, list(program.sizes), dim=1))
    x = activations(site.shape, num_hosts=1, batch=1).abs().requires_grad_()
    y = x
    for layer, specs in zip(program.layers, program.parameters, strict=True):
        values = [next(parts).view(-1, *spec.shape) for spec in specs]
        y = layer.forward(values, y) if layer in layers else y
    middle = tuple(length // 2 for length in site.shape[1:])
    (grad,) = torch.autograd.grad(y[(0, slice(None), *middle, 0)].sum(), x)
    moves = grad[0, ..., 0].abs().sum(0) > 0
    assert moves.double().mean().item() == pytest.approx(program.reach) or (
        # a long kernel reaches over the ends of a short site from its middle
        program.reach == 1.0 and moves.double().mean() > 0.7
    )


@every_seed
@pytest.mark.parametrize("style", BlendStyle)
def test_a_new_seed_leaves_the_host_as_it_was_to_the_bit(entry, site, style):
    program = entry.program(site)
    x = activations(site.shape)
    output = program.forward(at_birth(program), x)
    alpha, styles = torch.rand(3, dtype=torch.float64), torch.full((3,), style)
    assert torch.equal(blend(x, output, alpha, styles), x)


@every_seed
@pytest.mark.parametrize("style", BlendStyle)
def test_a_new_seed_can_learn_in_every_style(entry, site, style):
    program = entry.program(site)
    rows = at_birth(program).requires_grad_()
    x = activations(site.shape)
    styles = torch.full((3,), style)
    y = blend(x, program.forward(rows, x), torch.ones(3, dtype=torch.float64), styles)
    (grad,) = torch.autograd.grad(y, rows, activations(site.shape, rng_seed=2))
    last = max(len(row) for row in program.parameters) and program.sizes[-2] + program.sizes[-1]
    assert bool((grad[:, -last:].abs().sum(1) > 0).all())


@every_seed
def test_seeds_of_many_hosts_compute_what_each_computes_alone(entry, site):
    program = entry.program(site)
    rng = torch.Generator().manual_seed(3)
    rows = torch.randn(3, program.num_params, dtype=torch.float64, generator=rng).requires_grad_()
    x = activations(site.shape).requires_grad_()
    pull = activations(site.shape, rng_seed=4)
    y = program.forward(rows, x)
    grad_rows, grad_x = torch.autograd.grad(y, (rows, x), pull)
    for i in range(3):
        module = program.module().double()
        vector_to_parameters(rows[i].detach(), module.parameters())
        alone = x[i].detach().movedim(-1, 0).requires_grad_()
        output = module(alone)
        expected_x, *expected = torch.autograd.grad(
            output, [alone, *module.parameters()], pull[i].movedim(-1, 0)
        )
        torch.testing.assert_close(y[i].movedim(-1, 0), output)
        torch.testing.assert_close(grad_x[i].movedim(-1, 0), expected_x)
        torch.testing.assert_close(grad_rows[i], torch.cat([g.flatten() for g in expected]))


@every_seed
def test_a_seed_with_more_than_one_layer_has_a_norm(entry, site):
    program = entry.program(site)
    assert program.depth == 1 or any(isinstance(layer, Norm) for layer in program.layers)


def test_a_blueprint_of_ones_own_takes_a_few_lines():
    @blueprint(SiteKind.SERIES)
    def wide(site):
        return (Conv(2 * site.width), Norm(), Relu(), Conv(site.width))

    try:
        (entry,) = blueprint_menu("wide")
        program = entry.program(Site((4, 9)))
        x = activations((4, 9))
        assert bool((program.forward(at_birth(program), x) == 0).all())
    finally:
        del BLUEPRINTS["wide"]


def test_mistakes_are_told_at_registration_or_before_a_seed_is_built():
    with pytest.raises(ValueError, match=r"no blueprints \['cnov'\]; there are"):
        blueprint_menu("conv", "cnov")

    def pointwise(site):
        return (Conv(site.width),)

    with pytest.raises(ValueError, match="registered already"):
        blueprint(SiteKind.SERIES)(pointwise)
    with pytest.raises(ValueError, match="needs the kinds"):
        blueprint()

    @blueprint(SiteKind.SERIES)
    def shrinks(site):
        return (Conv(site.width, padding=0),)

    try:
        with pytest.raises(ValueError, match="must keep the shape"):
            BLUEPRINTS["shrinks"].program(Site((4, 9)))
    finally:
        del BLUEPRINTS["shrinks"]
