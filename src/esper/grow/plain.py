"""The grown model as an ordinary one: committed seeds are part of its modules, slots are gone."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from esper.grow.slots import Seed, Slot, blend_one, with_first
from esper.leyline.constants import BlendStyle


class Grown(nn.Module):
    """A site and the seed that was committed there: `blend(site(...), seed(site(...)))`.

    Whatever else is asked of it, the site answers: some models read attributes of their layers.
    """

    def __init__(self, site: nn.Module, seed: Seed, alpha: float, style: BlendStyle):
        super().__init__()
        self.site = site
        self.seed = seed
        self.alpha = alpha
        self.style = style
        # torch's fused encoder reads its layers' weights past their forward, except where there
        # are hooks
        self.register_forward_pre_hook(_be_called)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return with_first(self.site(*args, **kwargs), self._blended)

    def _blended(self, x: Tensor) -> Tensor:
        return blend_one(x, self.seed(x), self.alpha, self.style)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("site"), name)


def _be_called(module: nn.Module, args: Any) -> None:
    """A hook that is there to be seen."""


def plain_model(model: nn.Module, slots: Sequence[Slot]) -> nn.Module:
    """A copy of `model` in which the committed seeds of its slots are part of their sites.

    Seeds that are not committed are left out, and so are all hooks of growth.
    """
    with ExitStack() as stack:
        for slot in slots:
            stack.enter_context(slot.at(0.0))
        copies: dict[int, Any] = {}  # deepcopy's memo: where each module's copy is found
        plain = copy.deepcopy(model, copies)
    for slot in slots:
        if slot.seed is None or not slot.is_committed:
            continue
        site = copies[id(slot.module)]
        grown = Grown(site, copy.deepcopy(slot.seed), slot.alpha, slot.style)
        for parent in list(plain.modules()):
            for name, child in list(parent.named_children()):
                if child is site and parent is not grown:
                    setattr(parent, name, grown)
    return plain
