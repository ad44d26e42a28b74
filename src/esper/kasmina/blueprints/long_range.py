"""Seeds that see all positions of a series, for data without local structure."""

from esper.kasmina.blueprints.registry import Site, blueprint
from esper.kasmina.layers import Attention, Conv, Layer, MixPositions, Norm, Relu
from esper.leyline.constants import SiteKind


@blueprint(SiteKind.SERIES)
def mixer(site: Site) -> tuple[Layer, ...]:
    return (MixPositions(), Norm(), Relu(), Conv(site.width, kernel=1))


@blueprint(SiteKind.SERIES)
def attention(site: Site) -> tuple[Layer, ...]:
    return (Norm(), Attention(site.width), Conv(site.width, kernel=1))
