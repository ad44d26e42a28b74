"""Seeds that see a neighbourhood of each position, the cheapest first."""

from esper.kasmina.blueprints.registry import Site, blueprint
from esper.kasmina.layers import Conv, Layer, Norm, Relu
from esper.leyline.constants import SiteKind


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
