"""How a seed's output joins its host's: the curve of an alpha ramp, and the blend itself.

Every blend is `x + alpha * change(x, seed)`, and the change is 0 wherever the seed's output is 0.
So a seed whose last layer is zero leaves its host as it was, to the bit, in every style; and so
does any seed at alpha 0.
"""

import math

import torch
from torch import Tensor

from esper.leyline.constants import AlphaCurve, BlendStyle

SIGMOID_STEEPNESS = 10.0  # the sigmoid curve is a logistic over [-5, 5], stretched to [0, 1]


def curve(kind: Tensor, fraction: Tensor) -> Tensor:
    """How far along its way alpha is, 0 to 1, when `fraction` of its ramp is over.

    `kind` holds an `AlphaCurve` per element. Exactly 0 at 0 and 1 at 1, monotone in between.
    """
    inside = fraction.clamp(0.0, 1.0)
    cosine = 0.5 - 0.5 * torch.cos(math.pi * inside)
    half = SIGMOID_STEEPNESS / 4  # logistic(2z) = (1 + tanh z) / 2
    edge = torch.tanh(torch.full_like(inside, half))  # torch's own, so that the ends are exact
    sigmoid = 0.5 + 0.5 * torch.tanh(half * (2.0 * inside - 1.0)) / edge
    along = torch.where(kind == AlphaCurve.COSINE, cosine, inside)
    return torch.where(kind == AlphaCurve.SIGMOID, sigmoid, along)


def blend(x: Tensor, seed: Tensor, alpha: Tensor, style: Tensor) -> Tensor:
    """Activations `x` with the seeds' outputs blended in; both `[G, ...]`, whatever the layout.

    `alpha` and `style` (a `BlendStyle`) are `[G]`: one per host, mixed freely. The three styles
    are one formula, so nothing waits to learn which are present.
    """
    per_host = (-1, *(1 for _ in x.shape[1:]))
    alpha = alpha.to(x.dtype).view(per_host)
    multiply = (style == BlendStyle.MULTIPLY).view(per_host)
    add = (style == BlendStyle.ADD).view(per_host)
    weight = torch.where(add, alpha, alpha * torch.where(multiply, x, gate(x)))
    return torch.addcmul(x, weight, torch.where(multiply, torch.tanh(seed), seed))


def gate(x: Tensor) -> Tensor:
    """How open the GATE style lets a seed act on each activation: wide where the host is active.

    It has no parameters, so that a blueprint costs the same in every style, and no reduction
    over channels or positions, so that it means the same at every kind of site.
    """
    return torch.sigmoid(x)
