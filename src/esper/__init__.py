"""Esper grows neural networks while they train."""

from esper.grow.budget import Budget
from esper.grow.growth import Growth
from esper.grow.run import GrowthResult, grow  # the function, in place of its package's name

__version__ = "0.1.0"

__all__ = ["Budget", "Growth", "GrowthResult", "grow"]
