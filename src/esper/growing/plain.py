"""The grown model as an ordinary one: committed seeds are part of its modules, slots are gone."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.growing.copying import without_graphs
from esper.growing.measuring import resting
from esper.growing.sites import ModelSite, forward
from esper.growing.slots import Seed, Slot, blend_one, with_first
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
    committed = [(slot, slot.alpha) for slot in slots if slot.is_committed]
    committed.sort(key=lambda entry: len(list(entry[0].module.modules())))  # inner sites first
    copies = without_graphs(model)  # and what stands for each module, wherever it is kept
    with ExitStack() as stack:
        for slot in slots:
            stack.enter_context(slot.with_alpha(0.0))
        for slot, alpha in committed:
            assert slot.seed is not None
            site = copy.deepcopy(slot.module, copies)
            grown = Grown(site, copy.deepcopy(slot.seed), alpha, slot.style)
            copies[id(slot.module)] = grown
        return copy.deepcopy(model, copies)


def check_plain(model: nn.Module, sites: Sequence[ModelSite], example: Any) -> None:
    """Raise for sites whose seeds a plain model would lose, before any training is spent.

    It would where the model looks at the class of a module, or reaches it past what is copied.
    """
    slots = [Slot(site, model.get_submodule(site.name)) for site in sites]
    if _is_felt_in_plain(model, slots, example):
        return
    alone = [slot for slot in slots if not _is_felt_in_plain(model, [slot], example)]
    names = [slot.site.name for slot in alone or slots]
    raise ValueError(
        f"what grows at {names} would be lost in the plain model: the model looks at the class of "
        "a module there, or reaches it by a way that a copy does not keep. Leave it out with "
        f"exclude={names}, or call the module whatever its class"
    )


def _is_felt_in_plain(model: nn.Module, slots: Sequence[Slot], example: Any) -> bool:
    """Whether the plain model computes what the growing one does, with a trial at each site."""
    try:
        for slot in slots:
            # not linear: no norm that comes after hides it
            slot.add_seed(Seed(nn.Sequential(nn.Identity()), per_token=False), BlendStyle.MULTIPLY)
            slot.alpha, slot.is_committed = 1.0, True
        with resting(model):
            expected = forward(model, example)
        with resting(model):  # the same randomness once more
            got = forward(plain_model(model, slots).eval(), example)
    finally:
        for slot in slots:
            slot.clear()
    leaves = (pytree.tree_leaves(output) for output in (expected, got))
    pairs = zip(*leaves, strict=True)
    return all(_is_close(want, have) for want, have in pairs if isinstance(want, Tensor))


def _is_close(want: Tensor, have: Tensor) -> bool:
    if not want.is_floating_point():
        return torch.equal(want, have)
    tolerance = max(1e-4, 16 * torch.finfo(want.dtype).eps)
    return torch.allclose(have, want, tolerance, tolerance, equal_nan=True)
