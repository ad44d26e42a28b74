"""Blending a seed's output into its host: alpha curves and blend styles.

Every style is `x + alpha * change(x, seed)`, where the change is 0 wherever the seed's output is 0.
So a seed whose last layer is zero leaves its host's output bit-exact in every style, and so does
any seed at alpha 0.
"""

import math

import torch
from torch import Tensor

from esper.leyline.constants import AlphaCurve, BlendStyle

SIGMOID_STEEPNESS = 10.0  # the sigmoid curve is a logistic over [-5, 5], stretched to [0, 1]


def curve(kind: Tensor, fraction: Tensor) -> Tensor:
    """Progress of alpha from start to target, 0 to 1, after a `fraction` of its ramp.

    `kind` is an `AlphaCurve` per element. Exactly 0 at 0 and 1 at 1, monotone in between.
    """
    inside = fraction.clamp(0.0, 1.0)
    cosine = 0.5 - 0.5 * torch.cos(math.pi * inside)
    half = SIGMOID_STEEPNESS / 4  # logistic(2z) = (1 + tanh z) / 2
    edge = torch.tanh(torch.full_like(inside, half))  # torch's tanh, so that the ends are exact
    sigmoid = 0.5 + 0.5 * torch.tanh(half * (2.0 * inside - 1.0)) / edge
    along = torch.where(kind == AlphaCurve.COSINE, cosine, inside)
    return torch.where(kind == AlphaCurve.SIGMOID, sigmoid, along)


def blend(x: Tensor, seed: Tensor, alpha: Tensor, style: Tensor) -> Tensor:
    """Activations `x` with the seeds' outputs blended in; both `[G, ...]` in any layout.

    `alpha` and `style` (a `BlendStyle`) are `[G]`, one per host. The styles are one formula, so no
    synchronisation is needed to find out which are present.
    """
    per_host = (-1, *(1 for _ in x.shape[1:]))
    alpha = alpha.to(x.dtype).view(per_host)
    multiply = (style == BlendStyle.MULTIPLY).view(per_host)
    add = (style == BlendStyle.ADD).view(per_host)
    weight = torch.where(add, alpha, alpha * torch.where(multiply, x, gate(x)))
    return torch.addcmul(x, weight, torch.where(multiply, torch.tanh(seed), seed))


def gate(x: Tensor) -> Tensor:
    """The weight of a seed's output in the GATE style; no parameters, the same at any site."""
    return torch.sigmoid(x)
