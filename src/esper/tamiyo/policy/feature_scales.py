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


class FeatureScales(nn.Module):
    """A centre and a scale per feature of a block; 0 and 1 before `fit`, and for flags.

    They are part of the weights: a controller keeps the scales of its training on other data.
    Blueprints are scaled but not centred, because one that does not fit has to stay all 0.
    """

    def __init__(self, layout: FeatureLayout):
        super().__init__()
        self.layout = layout
        widths = (layout.env_width, layout.slot_width, layout.blueprint_width)
        for block, width in zip(_BLOCKS, widths, strict=True):
            self.register_buffer(f"{block}_center", torch.zeros(width))
            self.register_buffer(f"{block}_scale", torch.ones(width))
        self.is_fitted: Tensor
        self.register_buffer("is_fitted", torch.tensor(False))

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Scaled features of env, slots and blueprints, as `layout.split` returns them."""
        return tuple(
            ((part - center) * scale).clamp_(-LIMIT, LIMIT)
            for part, (center, scale) in zip(
                self.layout.split(features), self._of_blocks(), strict=True
            )
        )

    @torch.no_grad()
    def fit(self, features: Tensor) -> None:
        """Fit the scales to features `[R, F]`; blueprints that do not fit their slot are left out."""
        env, slots, blueprints = self.layout.split(features)
        parts = (env, slots.flatten(0, 1), blueprints[self.layout.blueprint_fits(blueprints)])
        one = FeatureLayout(1, 1)
        flags = (part.view(-1).to(features.device) for part in one.split(one.is_flag()))
        for block, part, is_flag, (center, scale) in zip(
            _BLOCKS, parts, flags, self._of_blocks(), strict=True
        ):
            if len(part):
                std, mean = torch.std_mean(part, dim=0, correction=0)
                is_centred = ~is_flag if block != "blueprint" else torch.zeros_like(is_flag)
                center.copy_(torch.where(is_centred, mean, 0.0))
                scale.copy_(torch.where(is_flag, 1.0, 1 / std.clamp(min=LEAST_STD)))
        self.is_fitted.fill_(True)

    def _of_blocks(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (self.get_buffer(f"{block}_center"), self.get_buffer(f"{block}_scale"))
            for block in _BLOCKS
        ]


_BLOCKS = ("env", "slot", "blueprint")
