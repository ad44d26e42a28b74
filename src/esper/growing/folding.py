"""Fold committed seeds into neighbouring weights where the result is mathematically the same.

- ADD and GATE: alpha is folded into the seed's last layer.
- ADD with a single pointwise layer, after a plain linear or convolution layer: `y + alpha *
  seed(y)` with `y = site(x)` is one matrix product, so the seed disappears.
"""

import copy
from collections import Counter

import torch
from torch import nn

from esper.growing.copying import without_graphs
from esper.growing.plain import Grown
from esper.leyline.constants import BlendStyle

_LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def folded(model: nn.Module) -> nn.Module:
    """A copy of a grown model with every seed folded as far as possible."""
    model = copy.deepcopy(model, without_graphs(model))
    uses = Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Grown):
                is_tied = any(uses[id(p)] > 1 for p in child.site.parameters(recurse=False))
                merged = None if is_tied else _merged(child)
                setattr(parent, name, merged or _without_alpha(child))
    return model


def _without_alpha(grown: Grown) -> Grown:
    """Fold alpha into the seed's last layer, if the blend is linear in it."""
    last = grown.seed.layers[-1]
    if grown.style != BlendStyle.MULTIPLY and isinstance(last, _LINEAR_LAYERS):
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.mul_(grown.alpha)
        grown.alpha = 1.0
    return grown


def _merged(grown: Grown) -> nn.Module | None:
    """Site and seed as one layer of the site's class; None if that is not possible."""
    site, layers = grown.site, grown.seed.layers
    # a subclass may compute something else; a hook may read the output in between, or recompute the
    # weight before every call, as spectral norm does
    has_hooks = site._forward_hooks or site._forward_pre_hooks
    if type(site) not in _LINEAR_LAYERS or has_hooks or grown.style != BlendStyle.ADD:
        return None
    if len(layers) > 1 or not _is_pointwise(layers[0]) or getattr(site, "groups", 1) > 1:
        return None
    merged = copy.deepcopy(site)
    assert isinstance(merged, _LINEAR_LAYERS)
    parts = (layers[0].get_parameter(name) for name in ("weight", "bias"))
    matrix, added = (part.detach().double() * grown.alpha for part in parts)
    matrix = matrix.flatten(1) + torch.eye(len(matrix), device=matrix.device)
    weight = merged.weight.detach()
    bias = weight.new_zeros(len(weight)) if merged.bias is None else merged.bias.detach()
    product = (matrix @ weight.double().flatten(1)).view(weight.shape)
    merged.weight = nn.Parameter(product.to(weight.dtype))
    merged.bias = nn.Parameter((matrix @ bias.double() + added).to(weight.dtype))
    return merged


def _is_pointwise(layer: nn.Module) -> bool:
    """Whether a layer is just a square matrix product over the channels, with a bias."""
    if not isinstance(layer, _LINEAR_LAYERS) or layer.bias is None:
        return False
    return layer.weight[0].numel() == layer.weight.shape[1] == len(layer.weight)
