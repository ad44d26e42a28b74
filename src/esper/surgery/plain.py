"""The grown model as an ordinary module tree: committed seeds become modules, slots are gone.

`folded` also folds seeds into neighbouring weights where the result is mathematically the same:

- ADD and GATE: alpha is folded into the seed's last layer.
- ADD with a single pointwise layer, after a plain linear or convolution layer: `y + alpha *
  seed(y)` with `y = site(x)` is one matrix product, so the seed disappears.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.constants import BlendStyle
from esper.surgery.branches import Branch, new_branch, scale
from esper.surgery.eval_mode import eval_mode
from esper.surgery.inputs import forward, tensors
from esper.surgery.pairs import LAYERS
from esper.surgery.sites import ModelSite
from esper.surgery.slots import Seed, Slot, blend_one, with_first
from esper.surgery.tracing import without_graphs


class ChangedSite(nn.Module):
    """A site whose output is changed by `change`, which subclasses define.

    Other attributes are those of the site: some models read attributes of their layers.
    """

    def __init__(self, site: nn.Module):
        super().__init__()
        self.site = site
        self.register_forward_pre_hook(_no_op)

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return with_first(self.site(*args, **kwargs), self.change)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("site"), name)


class Grown(ChangedSite):
    """A site with its committed seed: `blend(site(...), seed(site(...)))`."""

    def __init__(self, site: nn.Module, seed: Seed, alpha: float, style: BlendStyle):
        super().__init__(site)
        self.seed, self.alpha, self.style = seed, alpha, style

    def change(self, x: Tensor) -> Tensor:
        return blend_one(x, self.seed(x), self.alpha, self.style)


def _no_op(module: nn.Module, args: Any) -> None:
    """Its presence disables nn.TransformerEncoder's fused path, which would bypass `forward`."""


def plain_model(model: nn.Module, slots: Sequence[Slot]) -> nn.Module:
    """A copy of `model` with the committed seeds of its slots as modules.

    Uncommitted seeds and all hooks of growth are left out.
    """
    live = [(slot, slot.alpha) for slot in slots if slot.is_committed]
    committed = [entry for entry in live if entry[0].site.pair is None]
    committed.sort(key=lambda entry: len(list(entry[0].module.modules())))  # inner sites first
    copies = without_graphs(model)  # also replaces sites in lists and dicts of the model
    with ExitStack() as stack:
        for slot in slots:
            stack.enter_context(slot.with_alpha(0.0))
        for slot, alpha in committed:
            assert isinstance(slot.seed, Seed)
            site, seed = copy.deepcopy(slot.module, copies), copy.deepcopy(slot.seed)
            copies[id(slot.module)] = Grown(site, seed, alpha, slot.style)
        plain = copy.deepcopy(model, copies)

    def layer(name: str) -> nn.Module:
        found: nn.Module = copies[id(model.get_submodule(name))]
        return found.site if isinstance(found, Grown) else found

    for slot, alpha in live:
        if isinstance(slot.seed, Branch):
            branch = copy.deepcopy(slot.seed, without_graphs(slot.seed))
            branch.merge_into(layer, alpha)
    return plain


def working_sites(model: nn.Module, sites: Sequence[ModelSite], example: Any) -> list[ModelSite]:
    """The sites without the pairs that cannot get wider: the model's code needs their width."""
    kept = kept_sites(model, [site for site in sites if site.pair is not None], example)
    return [site for site in sites if site.pair is None or site in kept]


def kept_sites(model: nn.Module, sites: Sequence[ModelSite], example: Any) -> list[ModelSite]:
    """The sites without those whose seeds the plain model would ignore or could not call."""
    slots = [Slot(site, model) for site in sites]
    if not _works_in_plain(model, slots, example):
        slots = [slot for slot in slots if _works_in_plain(model, [slot], example)]
    return [slot.site for slot in slots]


def check_plain(model: nn.Module, sites: Sequence[ModelSite], example: Any) -> None:
    """Raise, before training, for sites whose seeds the plain model would ignore.

    This happens if the model checks the class of a module, or holds it in a way that is not copied.
    """
    sites = [site for site in sites if site.pair is None]
    kept = kept_sites(model, sites, example)
    if names := [site.name for site in sites if site not in kept]:
        raise ValueError(
            f"what grows at {names} would be lost in the plain model: the model checks the class of "
            "a module there, or calls it through a reference that is not copied. Leave it out with "
            f"exclude={names}, or call the module whatever its class is"
        )


def _works_in_plain(model: nn.Module, slots: Sequence[Slot], example: Any) -> bool:
    """Whether the plain model computes the same as the growing one, with a test seed per slot."""
    try:
        for slot in slots:
            # multiplicative, so that a norm after it does not cancel it
            slot.add_seed(_test_seed(slot, model), BlendStyle.MULTIPLY)
        for slot in slots:
            slot.alpha, slot.is_committed = 1.0, True
        with eval_mode(model, with_grad=True):
            expected = forward(model, example)
        with eval_mode(model, with_grad=True):  # again, with the same randomness
            plain = plain_model(model, slots)
            try:
                got = forward(plain.eval(), example)
            except (RuntimeError, ValueError, TypeError):
                return False  # the model's code needs the class or the width that it had
    finally:
        for slot in slots:
            slot.clear()
    want, have = tensors(expected), tensors(got)
    is_same = len(want) == len(have) and all(map(_is_close, want, have))
    return is_same and _shapes_in_training(plain, example) == _shapes_in_training(
        plain_model(model, ()), example
    )


def _shapes_in_training(model: nn.Module, example: Any) -> Any:
    """The shapes of a model's outputs in training mode; some layers are used only there."""
    with eval_mode(model):
        try:
            return [x.shape for x in tensors(forward(model.train(), example))]
        except Exception as error:
            return type(error)  # such as batch norm on one row, in both models


def _test_seed(slot: Slot, model: nn.Module) -> nn.Module:
    pair = slot.site.pair
    if pair is None:
        return Seed(nn.Sequential(nn.Identity()), per_token=False)
    generator = torch.Generator().manual_seed(0)
    branch = new_branch(pair, pair.width, model.get_submodule, generator)
    with torch.no_grad():
        for weight in branch.last_layer.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn / drawn[0].numel() ** 0.5)
    return branch


def _is_close(want: Tensor, have: Tensor) -> bool:
    if not want.is_floating_point():
        return torch.equal(want, have)
    tolerance = max(1e-4, 16 * torch.finfo(want.dtype).eps)
    return torch.allclose(have, want, tolerance, tolerance, equal_nan=True)


def folded(model: nn.Module) -> nn.Module:
    """A copy of a grown model with every seed folded as far as possible."""
    model = copy.deepcopy(model, without_graphs(model))
    uses = Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Grown):
                is_tied = any(uses[id(p)] > 1 for p in child.site.parameters(recurse=False))
                merged, last = None if is_tied else _merged(child), child.seed.layers[-1]
                if merged is not None:
                    setattr(parent, name, merged)
                elif child.style != BlendStyle.MULTIPLY and isinstance(last, LAYERS):
                    scale(last, child.alpha)  # the blend is linear in the last layer
                    child.alpha = 1.0
    return model


def _merged(grown: Grown) -> nn.Module | None:
    """Site and seed as one layer of the site's class; None if that is not possible."""
    site, layers = grown.site, grown.seed.layers
    # a subclass may compute something else; a hook may read the output in between, or recompute the
    # weight before every call, as spectral norm does
    has_hooks = site._forward_hooks or site._forward_pre_hooks
    if type(site) not in LAYERS or has_hooks or grown.style != BlendStyle.ADD:
        return None
    seed = layers[0]
    if len(layers) > 1 or not isinstance(seed, LAYERS) or getattr(site, "groups", 1) > 1:
        return None
    if seed.bias is None or not seed.weight[0].numel() == seed.weight.shape[1] == len(seed.weight):
        return None  # not a square matrix over the channels, with a bias
    merged = copy.deepcopy(site)
    assert isinstance(merged, LAYERS)
    matrix, added = (part.detach().double() * grown.alpha for part in (seed.weight, seed.bias))
    matrix = matrix.flatten(1) + torch.eye(len(matrix), device=matrix.device)
    weight = merged.weight.detach()
    bias = weight.new_zeros(len(weight)) if merged.bias is None else merged.bias.detach()
    product = (matrix @ weight.double().flatten(1)).view(weight.shape)
    merged.weight = nn.Parameter(product.to(weight.dtype))
    merged.bias = nn.Parameter((matrix @ bias.double() + added).to(weight.dtype))
    return merged
