"""Blueprints: the kinds of seed that can grow in a slot. Importing this package registers them."""

from esper.kasmina.blueprints import convolution, dense, long_range
from esper.kasmina.blueprints.registry import (
    BLUEPRINTS,
    Blueprint,
    Site,
    blueprint,
    blueprint_menu,
    menu_for,
)

__all__ = [
    "BLUEPRINTS",
    "Blueprint",
    "Site",
    "blueprint",
    "blueprint_menu",
    "convolution",
    "dense",
    "long_range",
    "menu_for",
]
