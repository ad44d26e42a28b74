"""Seeds for vectors."""

from esper.kasmina.blueprints.registry import Site, blueprint
from esper.kasmina.layers import Layer, Linear, Norm, Relu
from esper.leyline.constants import SiteKind

MIN_HIDDEN = 4  # one normalised unit is a constant and two are a sign: too little to learn with


@blueprint(SiteKind.VECTOR)
def dense_narrow(site: Site) -> tuple[Layer, ...]:
    return _two_layers(site, max(MIN_HIDDEN, site.width // 4))


@blueprint(SiteKind.VECTOR)
def dense(site: Site) -> tuple[Layer, ...]:
    return (Linear(site.width),)


@blueprint(SiteKind.VECTOR)
def dense_bottleneck(site: Site) -> tuple[Layer, ...]:
    return _two_layers(site, max(MIN_HIDDEN, site.width // 2))


@blueprint(SiteKind.VECTOR)
def dense_dense(site: Site) -> tuple[Layer, ...]:
    return _two_layers(site, site.width)


def _two_layers(site: Site, hidden: int) -> tuple[Layer, ...]:
    return (Linear(hidden), Norm(), Relu(), Linear(site.width))
