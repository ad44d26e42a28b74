"""Esper grows neural networks while they train."""

import sys

from esper.grow.budget import Budget
from esper.grow.growth import Growth
from esper.grow.run import GrowthResult, grow  # the function, in place of its package's name

# the package's modules are asked for by that name too: `import esper.grow.page as page`
grow.__dict__ = sys.modules["esper.grow"].__dict__

__version__ = "0.1.0"

__all__ = ["Budget", "Growth", "GrowthResult", "grow"]
