"""The built-in blueprints: for positions in a neighbourhood, for vectors, and for all positions.

Menus list blueprints in this order, the cheapest first within each part.
"""

from esper.kasmina.blueprints.registry import Site, blueprint
from esper.kasmina.layers import Attention, Conv, Layer, Linear, MixPositions, Norm, Relu
from esper.leyline.constants import SiteKind

MIN_HIDDEN = 4  # one normalised unit is a constant and two are a sign: too little to learn with


# Seeds that see a neighbourhood of each position.


@blueprint(SiteKind.SERIES, SiteKind.IMAGE)
def depthwise7(site: Site) -> tuple[Layer, ...]:
    return (Conv(site.width, kernel=7, depthwise=True),)


@blueprint(SiteKind.SERIES, SiteKind.IMAGE)
def pointwise(site: Site) -> tuple[Layer, ...]:
    return (Conv(site.width, kernel=1),)


@blueprint(SiteKind.SERIES, SiteKind.IMAGE)
def separable(site: Site) -> tuple[Layer, ...]:
    return (Conv(site.width, depthwise=True), Norm(), Relu(), Conv(site.width, kernel=1))


@blueprint(SiteKind.SERIES, SiteKind.IMAGE)
def conv(site: Site) -> tuple[Layer, ...]:
    return (Conv(site.width),)


@blueprint(SiteKind.SERIES, SiteKind.IMAGE)
def conv_bottleneck(site: Site) -> tuple[Layer, ...]:
    half = max(1, site.width // 2)
    return (Conv(half), Norm(), Relu(), Conv(site.width))


@blueprint(SiteKind.SERIES, SiteKind.IMAGE)
def conv_conv(site: Site) -> tuple[Layer, ...]:
    return (Conv(site.width), Norm(), Relu(), Conv(site.width))


@blueprint(SiteKind.SERIES)
def conv5_conv5(site: Site) -> tuple[Layer, ...]:
    return (Conv(site.width, kernel=5), Norm(), Relu(), Conv(site.width, kernel=5))


# Seeds for vectors.


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


# Seeds that see all positions of a series, for data without local structure.


@blueprint(SiteKind.SERIES)
def mixer(site: Site) -> tuple[Layer, ...]:
    return (MixPositions(), Norm(), Relu(), Conv(site.width, kernel=1))


@blueprint(SiteKind.SERIES)
def attention(site: Site) -> tuple[Layer, ...]:
    return (Norm(), Attention(site.width), Conv(site.width, kernel=1))
