"""Blueprints: the kinds of seed that can grow in a slot. Importing this package registers them."""

from esper.kasmina.blueprints import seeds
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
    "menu_for",
    "seeds",
]
