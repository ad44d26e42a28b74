"""Tamiyo's features scaled to mean 0 and variance 1: every slot alike, every blueprint alike.

scales = FeatureScales(layout)
scales.fit(features)                       # once, from a first rollout
env, slots, blueprints = scales(features)
"""

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.features import FeatureLayout

LEAST_STD = 0.1  # amplify a near-constant feature at most 10x
LIMIT = 3.0  # clip to 3 standard deviations
_ONE = FeatureLayout(1, 1)  # scales of env, slot and blueprint, laid out as for one of each


class FeatureScales(nn.Module):
    """A centre and a scale for each feature of a block; 0 and 1 before `fit`, and for flags.

    They are part of the weights: a controller keeps the scales of its training on other data.
    Blueprints are scaled but not centred, because one that does not fit has to stay all 0.
    """

    center: Tensor
    scale: Tensor
    is_fitted: Tensor

    def __init__(self, layout: FeatureLayout):
        super().__init__()
        self.layout = layout
        self.register_buffer("center", torch.zeros(_ONE.width))
        self.register_buffer("scale", torch.ones(_ONE.width))
        self.register_buffer("is_fitted", torch.tensor(False))

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Scaled features of env, slots and blueprints, as `layout.split` returns them."""
        centers, scales = _ONE.split(self.center), _ONE.split(self.scale)
        blocks = zip(self.layout.split(features), centers, scales, strict=True)
        return tuple(((x - center) * scale).clamp_(-LIMIT, LIMIT) for x, center, scale in blocks)

    @torch.no_grad()
    def fit(self, features: Tensor) -> None:
        """Fit the scales to features `[R, F]`; blueprints that do not fit their slot are left out."""
        env, slots, blueprints = self.layout.split(features)
        rows = (env, slots.flatten(0, 1), blueprints[self.layout.blueprint_fits(blueprints)])
        is_flag = _ONE.is_flag().to(features.device)
        blocks = zip(rows, *map(_ONE.split, (self.center, self.scale, is_flag)), strict=True)
        for part, center, scale, flags in blocks:
            if len(part):
                std, mean = torch.std_mean(part, dim=0, correction=0)
                center.copy_(torch.where(flags, 0.0, mean))
                scale.copy_(torch.where(flags, 1.0, 1 / std.clamp(min=LEAST_STD)))
        _ONE.split(self.center)[2].zero_()
        self.is_fitted.fill_(True)
