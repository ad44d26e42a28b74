"""Hosts: what they cost, and that many at once do what each does alone."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.hosts import HOSTS, build_host, host
from esper.kasmina.layers import Conv, Flatten, Linear, Relu
from esper.leyline.constants import SiteKind
from support.per_host import HostModule

CASES = {
    "conv1d": dict(input_shape=(1, 40), widths=(8, 4, 6)),
    "conv2d": dict(input_shape=(2, 9, 10), widths=(3, 4)),
    "mlp": dict(input_shape=(3, 7), widths=(8, 5)),
}
every_host = pytest.mark.parametrize(
    ("kind", "norm"), [(kind, norm) for kind in CASES for norm in (False, True)]
)


def build(kind, norm=False):
    return build_host(kind, num_classes=10, norm=norm, **CASES[kind])


@pytest.mark.parametrize(
    ("width", "params", "macs"),
    [(8, 858, 4040), (10, 1190, 5950), (12, 1570, 8220), (16, 2474, 13840), (25, 5210, 31750)],
)
def test_the_mnist1d_host_has_the_published_sizes(width, params, macs):
    found = build_host("conv1d", input_shape=(1, 40), num_classes=10, widths=(width,) * 3)
    assert (found.num_params, found.macs) == (params, macs)
    assert [site.shape for site in found.sites] == [(width, 19), (width, 10), (width, 5)]
    assert {site.kind for site in found.sites} == {SiteKind.SERIES}


@every_host
def test_costs_known_beforehand_are_those_of_the_module(kind, norm):
    found = build(kind, norm)
    module = HostModule(found)
    assert sum(p.numel() for p in module.parameters()) == found.num_params
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(1, *found.input_shape))
    assert counter.get_total_flops() == 2 * found.macs


@every_host
def test_many_hosts_at_once_compute_what_each_computes_alone(kind, norm):
    found = build(kind, norm)
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(3, found.num_params, dtype=torch.float64, generator=rng)
    x = torch.randn(3, *found.input_shape, 5, dtype=torch.float64, generator=rng)
    parts = torch.split(rows, [program.num_params for program in found.programs], dim=1)
    y = x
    for program, part in zip(found.programs, parts, strict=True):
        y = program.forward(part, y)
    for i in range(3):
        module = HostModule(found).double()
        vector_to_parameters(rows[i], module.parameters())
        torch.testing.assert_close(y[i].movedim(-1, 0), module(x[i].movedim(-1, 0)))


@every_host
def test_initial_weights_are_spread_like_those_of_torch(kind, norm):
    found = build(kind, norm)
    centre, spread = found.init()
    torch.manual_seed(0)
    drawn = torch.stack([parameters_to_vector(HostModule(found).parameters()) for _ in range(400)])
    drawn = drawn.detach().double()
    assert bool(((drawn - centre).abs() <= spread + 1e-7).all())
    torch.testing.assert_close(drawn.amax(0), centre + spread, rtol=0.05, atol=0)


def test_a_host_of_ones_own_takes_a_few_lines():
    @host
    def two_speeds(input_shape, num_classes, widths, norm):
        fast, slow = widths
        return (
            (Conv(fast, stride=4), Relu()),
            (Conv(slow), Relu()),
            (Flatten(), Linear(num_classes)),
        )

    try:
        found = build_host("two_speeds", input_shape=(1, 40), num_classes=3, widths=(4, 6))
        assert [site.shape for site in found.sites] == [(4, 10), (6, 10)]
        assert HostModule(found)(torch.randn(2, 1, 40)).shape == (2, 3)
    finally:
        del HOSTS["two_speeds"]


def test_mistakes_are_told_at_construction():
    with pytest.raises(ValueError, match="no host 'conv3d'; there are"):
        build_host("conv3d", input_shape=(1, 40), num_classes=10, widths=(8,))
    with pytest.raises(ValueError, match="one or more segments"):
        build_host("mlp", input_shape=(40,), num_classes=10, widths=())
    with pytest.raises(ValueError, match="one or two axes of positions"):
        build_host("conv1d", input_shape=(40,), num_classes=10, widths=(8,))
