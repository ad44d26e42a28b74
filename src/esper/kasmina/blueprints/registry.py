"""The registry of seed blueprints. A blueprint is a function from a site to layers.

    @blueprint(SiteKind.SERIES, SiteKind.IMAGE)
    def conv(site: Site) -> tuple[Layer, ...]:
        return (Conv(site.width),)

A seed keeps the shape of its site. The registry initialises its last layer with weights to zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from esper.kasmina.layers import Layer, Shape
from esper.kasmina.programs import Program
from esper.leyline.constants import SiteKind

_KIND_BY_AXES = {1: SiteKind.VECTOR, 2: SiteKind.SERIES, 3: SiteKind.IMAGE}


@dataclass(frozen=True)
class Site:
    """Where a seed grows: the shape `(width, *positions)` that flows through a slot."""

    shape: Shape

    @property
    def kind(self) -> SiteKind:
        return _KIND_BY_AXES[len(self.shape)]

    @property
    def width(self) -> int:
        return self.shape[0]


BuildLayers = Callable[[Site], tuple[Layer, ...]]


@dataclass(frozen=True)
class Blueprint:
    """A kind of seed: where it fits, and the program it runs at a site."""

    name: str
    kinds: tuple[SiteKind, ...]
    build_layers: BuildLayers

    def fits(self, site: Site) -> bool:
        return site.kind in self.kinds

    def program(self, site: Site) -> Program:
        """The seed's layers at a site, with their costs."""
        return _program(self, site)


@cache
def _program(blueprint: Blueprint, site: Site) -> Program:
    if not blueprint.fits(site):
        fitting = [kind.name for kind in blueprint.kinds]
        raise ValueError(
            f"blueprint {blueprint.name!r} fits {fitting}, not the {site.kind.name} {site.shape}"
        )
    program = Program(blueprint.build_layers(site), site.shape, silent=True)
    if program.output_shape != site.shape:
        raise ValueError(
            f"blueprint {blueprint.name!r} turns {site.shape} into {program.output_shape}; "
            "a seed must keep the shape of its site"
        )
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
