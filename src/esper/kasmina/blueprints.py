"""Blueprints: the kinds of seed that can grow in a slot, and their registry.

    @blueprint(SiteKind.SERIES, SiteKind.IMAGE)
    def conv9(site: Site) -> tuple[Layer, ...]:
        return (Conv(site.width, kernel=9),)

A blueprint is a function from a site to layers; `_built_in` has those of Esper. A seed keeps the
shape of its site. Its last layer with weights is initialised to zero.

Widenings are the exception: new units of the layer A before the slot, as a branch from A's input
to the output of the next layer B. Without a norm between A and B, a committed one equals a host
with a wider A and B. With a norm, the branch has its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from esper.kasmina.layers import (
    Attention,
    Conv,
    Flatten,
    Layer,
    Linear,
    MixPositions,
    Norm,
    Program,
    Relu,
    Shape,
)
from esper.leyline.constants import SiteKind

MIN_HIDDEN = 4  # one normalised unit is a constant and two are a sign: too little to learn with

_KIND_BY_AXES = {1: SiteKind.VECTOR, 2: SiteKind.SERIES, 3: SiteKind.IMAGE}


@dataclass(frozen=True)
class Site:
    """Where a seed grows: the shape `(width, *positions)` that flows through a slot."""

    shape: Shape
    varies: bool = field(default=False, kw_only=True)  # the positions differ between batches

    @property
    def kind(self) -> SiteKind:
        return _KIND_BY_AXES[len(self.shape)]

    @property
    def width(self) -> int:
        return self.shape[0]

    def widened(self, share: float) -> Program | None:
        """New units for the layer before the slot, or None if it cannot have any."""
        return None


@dataclass(frozen=True)
class HostSite(Site):
    """A slot of a host: after a segment, before another one or the head."""

    segment: Program
    following: Program

    def widened(self, share: float) -> Program | None:
        before, after = self.segment.layers, self.following.layers
        first, last = _mixing_layer(before), _mixing_layer(after)
        if first is None or last is None:
            return None
        rest = before[first + 1 :]
        if not all(isinstance(layer, Flatten | Norm | Relu) for layer in rest):
            return None
        layer: Any = before[first]
        # a vector of one normalised unit is a constant
        least = MIN_HIDDEN if Norm() in rest and self.kind == SiteKind.VECTOR else 1
        units = replace(layer, width=max(least, round(share * layer.width)))
        layers = (*before[:first], units, *rest, *after[: last + 1])
        return Program(layers, self.segment.input_shape, silent=True, widens=True)


def _mixing_layer(layers: Sequence[Layer]) -> int | None:
    """Index of a Conv or Linear at the start or after Flatten; None if there is no such layer."""
    for number, layer in enumerate(layers[:2]):
        if isinstance(layer, Linear) or (isinstance(layer, Conv) and not layer.depthwise):
            return number
        if not isinstance(layer, Flatten):
            break
    return None


BuildLayers = Callable[[Site], tuple[Layer, ...]]


@dataclass(frozen=True)
class Blueprint:
    """A kind of seed: where it fits, and the program it runs at a site."""

    name: str
    kinds: tuple[SiteKind, ...]
    build_layers: BuildLayers

    def fits(self, site: Site) -> bool:
        if site.kind not in self.kinds:
            return False
        return not site.varies or self.program(Site(site.shape)).any_length

    def program(self, site: Site) -> Program:
        """The seed's layers at a site that it fits, with their costs."""
        return _program(self, site)


@cache
def _program(blueprint: Blueprint, site: Site) -> Program:
    assert blueprint.fits(site)
    program = Program(blueprint.build_layers(site), site.shape, silent=True)
    if program.output_shape != site.shape:
        raise ValueError(
            f"blueprint {blueprint.name!r} turns {site.shape} into {program.output_shape}; "
            "a seed must keep the shape of its site"
        )
    return program


@dataclass(frozen=True)
class Widening(Blueprint):
    """New units, as a share of those that a layer has."""

    share: float = 1.0

    def fits(self, site: Site) -> bool:
        return site.widened(self.share) is not None

    def program(self, site: Site) -> Program:
        program = site.widened(self.share)
        assert program is not None, f"{self.name!r} does not fit"
        return program


BLUEPRINTS: dict[str, Blueprint] = {}


def blueprint(*kinds: SiteKind) -> Callable[[BuildLayers], BuildLayers]:
    """Decorator: register a function as a blueprint, under its own name."""
    if not kinds:
        raise ValueError(
            "a blueprint needs the kinds of site that it fits: @blueprint(SiteKind.SERIES)"
        )

    def register(build_layers: BuildLayers) -> BuildLayers:
        name = build_layers.__name__
        if name in BLUEPRINTS:
            raise ValueError(f"blueprint {name!r} is registered already")
        BLUEPRINTS[name] = Blueprint(name, kinds, build_layers)
        return build_layers

    return register


def blueprint_menu(*names: str) -> tuple[Blueprint, ...]:
    """The blueprints of these names, in this order; a slot's `blueprint` is an index into it."""
    if unknown := [name for name in names if name not in BLUEPRINTS]:
        raise ValueError(f"no blueprints {unknown}; there are {list(BLUEPRINTS)}")
    return tuple(BLUEPRINTS[name] for name in names)


def menu_for(kind: SiteKind) -> tuple[Blueprint, ...]:
    """All registered blueprints that fit a kind of site, in the order of registration."""
    return tuple(entry for entry in BLUEPRINTS.values() if kind in entry.kinds)


def _built_in(width: int) -> dict[str, tuple[tuple[SiteKind, ...], tuple[Layer, ...]]]:
    """The built-in blueprints: the kinds of site that each fits, and its layers at this width.

    Menus list them in this order, the cheapest first within each part.
    """
    local = (SiteKind.SERIES, SiteKind.IMAGE)
    series, vector = (SiteKind.SERIES,), (SiteKind.VECTOR,)
    between = (Norm(), Relu())
    quarter, half = (Linear(max(MIN_HIDDEN, width // parts)) for parts in (4, 2))
    return {
        # seeds that see a neighbourhood of each position
        "depthwise7": (local, (Conv(width, kernel=7, depthwise=True),)),
        "pointwise": (local, (Conv(width, kernel=1),)),
        "separable": (local, (Conv(width, depthwise=True), *between, Conv(width, kernel=1))),
        "conv": (local, (Conv(width),)),
        "conv_bottleneck": (local, (Conv(max(1, width // 2)), *between, Conv(width))),
        "conv_conv": (local, (Conv(width), *between, Conv(width))),
        "conv5_conv5": (series, (Conv(width, kernel=5), *between, Conv(width, kernel=5))),
        # seeds for vectors
        "dense_narrow": (vector, (quarter, *between, Linear(width))),
        "dense": (vector, (Linear(width),)),
        "dense_bottleneck": (vector, (half, *between, Linear(width))),
        "dense_dense": (vector, (Linear(width), *between, Linear(width))),
        # seeds that see all positions of a series, for data without local structure
        "mixer": (series, (MixPositions(), *between, Conv(width, kernel=1))),
        "attention": (series, (Norm(), Attention(width), Conv(width, kernel=1))),
    }


def _builder(name: str) -> BuildLayers:
    return lambda site: _built_in(site.width)[name][1]


BLUEPRINTS |= {
    name: Blueprint(name, kinds, _builder(name)) for name, (kinds, _) in _built_in(1).items()
}


# Seeds that widen a layer. They fit a place in a host, not a kind of site.


def _no_layers(site: Site) -> tuple[Layer, ...]:
    raise AssertionError("new units are layers of the host's own kinds")


WIDENINGS = {
    name: Widening(name, (), _no_layers, share)
    for name, share in (("widen_quarter", 0.25), ("widen_half", 0.5), ("widen_full", 1.0))
}
BLUEPRINTS |= WIDENINGS


def seed_programs(sites: Sequence[Site], menu: Sequence[Blueprint]) -> list[list[Program | None]]:
    """What each blueprint would run at each site; None where it does not fit."""
    return [[entry.program(site) if entry.fits(site) else None for entry in menu] for site in sites]
