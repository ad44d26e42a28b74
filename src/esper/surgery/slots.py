"""Seeds in a user's model: a forward hook on the site, and nothing in the module tree.

The model's classes, names and state_dict do not change. While a slot is empty, or its seed has
alpha 0, there is no hook either, so the model is unchanged and costs nothing extra.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina.blending import gate
from esper.kasmina.layers import Program
from esper.leyline.constants import BlendStyle, SiteKind
from esper.surgery.sites import ModelSite

# a module that is skipped at random (LayerDrop, stochastic depth) is called within this many steps
PATIENCE = 16


class Seed(nn.Module):
    """A blueprint's layers at a site, for one network; the output has the shape of the input.

    At a TOKENS site, where the channels come last, every token is a separate vector: the seed
    takes any number of tokens and sees no later token. It computes in the dtype of its weights, or
    in that of autocast.
    """

    def __init__(self, layers: nn.Sequential, per_token: bool, any_length: bool = False):
        super().__init__()
        self.layers = layers
        self.per_token, self.any_length = per_token, any_length

    @property
    def last_layer(self) -> nn.Module:
        """The layer that is zero in a new seed; only its gradient is not."""
        return self.layers[-1]

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(next(self.parameters(), x).dtype)
        if self.per_token:
            return self.layers(x.flatten(0, -2)).view_as(x)  # type: ignore[no-any-return]
        return self.layers(x)  # type: ignore[no-any-return]


def new_seed(program: Program, site: ModelSite, generator: torch.Generator) -> Seed:
    """A seed with initial weights; its last layer is zero.

    Only `generator` is used: torch's global random state does not change.
    """
    with torch.device("meta"):
        layers = program.module()
    layers = layers.to_empty(device="cpu")
    centre, spread = program.init()
    uniform = torch.rand(len(centre), dtype=torch.float64, generator=generator)
    nn.utils.vector_to_parameters(centre + spread * (2 * uniform - 1), layers.parameters())
    per_token = site.kind == SiteKind.TOKENS
    seed = Seed(layers, per_token, any_length=not per_token and program.any_length)
    return seed.to(device=site.device, dtype=site.dtype)


def blend_one(x: Tensor, seed: Tensor, alpha: float | Tensor, style: BlendStyle) -> Tensor:
    """`kasmina.blending.blend` for a single network and style."""
    seed = seed.to(x.dtype)
    if isinstance(alpha, Tensor):
        change = {BlendStyle.MULTIPLY: x * torch.tanh(seed), BlendStyle.GATE: gate(x) * seed}
        return x + alpha.to(x.dtype) * change.get(style, seed)
    if style == BlendStyle.MULTIPLY:
        return torch.addcmul(x, x, torch.tanh(seed), value=alpha)
    if style == BlendStyle.GATE:
        return torch.addcmul(x, gate(x), seed, value=alpha)
    return torch.add(x, seed, alpha=alpha)


def disable_nested_tensors(model: nn.Module, sites: Iterable[ModelSite]) -> None:
    """Turn nested tensors off in every `nn.TransformerEncoder` that contains a site.

    In evaluation it would pass them to its layers, and seeds do not support them.
    """
    names = [site.name for site in sites]
    for path, module in model.named_modules():
        inside = f"{path}." if path else ""
        if isinstance(module, nn.TransformerEncoder) and any(n.startswith(inside) for n in names):
            module.use_nested_tensor = False


def with_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's output with `change` applied to its tensor: the first element if it is a tuple."""
    if not isinstance(output, tuple):
        return change(output)
    parts = (change(output[0]), *output[1:])
    return parts if type(output) is tuple else type(output)._make(parts)  # type: ignore[attr-defined]


class Slot:
    """A site of the user's model, empty or with a seed.

    At a pair of layers the seed is a branch from the input of the first to the output of the last.
    """

    def __init__(self, site: ModelSite, model: nn.Module):
        self.site = site
        pair = site.pair
        self.module = model.get_submodule(pair.last if pair else site.name)
        self.source = model.get_submodule(pair.first) if pair else None
        self.seed: nn.Module | None = None
        self.style = BlendStyle.ADD
        self.is_committed = False
        self.is_called = False  # the seed, since the last step
        self._alpha = 0.0
        # the same for compiled code, where a number would be a constant
        self._alpha_tensor = torch.zeros((), device=site.device)
        self._has_been_called = False
        self._steps_active = 0
        self._hooks: list[RemovableHandle] = []
        self._input: Tensor | None = None  # of the first layer of a pair

    @property
    def alpha(self) -> float:
        """The seed's weight in the blend; setting it to 0 removes the hook."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._alpha = value
        self._alpha_tensor.fill_(value)
        if value == 0.0 or self.seed is None:
            for hook in self._hooks:
                hook.remove()
            self._hooks, self._input = [], None
        elif not self._hooks:
            # new units are part of the last layer, so they come before a seed there
            is_first = self.site.pair is not None
            self._hooks = [self.module.register_forward_hook(self, prepend=is_first)]
            if self.source is not None:
                keep = self.source.register_forward_pre_hook(self._keep_input, with_kwargs=True)
                self._hooks.append(keep)

    def add_seed(self, seed: nn.Module, style: BlendStyle) -> None:
        assert self.seed is None, f"site {self.site.name!r} has a seed"
        self.seed = seed
        # units of a layer are added to the others, whatever the style of other seeds
        self.style = style if self.site.pair is None else BlendStyle.ADD
        self._has_been_called, self._steps_active = False, 0

    def clear(self) -> None:
        self.alpha = 0.0
        self.seed = None
        self.is_committed = False

    def note_step(self) -> None:
        """Count an optimiser step; raises if the seed was not called in `PATIENCE` steps."""
        self._has_been_called |= self.is_called
        self._steps_active += 1
        self.is_called = False
        if self._steps_active >= PATIENCE and not self._has_been_called:
            raise ValueError(
                f"the model has not called its site {self.site.name!r} in {PATIENCE} steps, so the "
                "seed there has no effect; a model that is compiled or bypasses a module cannot grow "
                "there: compile the result instead, or exclude the site"
            )

    @contextmanager
    def with_alpha(self, alpha: float) -> Iterator[None]:
        """Set another alpha inside the block; 0 switches the seed off."""
        before, is_called = self.alpha, self.is_called
        self.alpha = alpha
        try:
            yield
        finally:
            self.alpha, self.is_called = before, is_called

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook: the site's output with the seed blended in."""
        seed = self.seed
        assert seed is not None
        self.is_called = True
        # compiled code does not compare: it would be compiled for each of the seed's modes
        if torch.compiler.is_compiling() or seed.training != module.training:
            seed.train(module.training)  # for dropout and batch norm
        if self.source is None:
            x = output[0] if isinstance(output, tuple) else output
            self.site.check(x, any_length=bool(seed.any_length))
        else:
            x, self._input = self._input, None
        added = seed(x)
        alpha = self._alpha_tensor if torch.compiler.is_compiling() else self._alpha
        return with_first(output, lambda x: blend_one(x, added, alpha, self.style))

    def _keep_input(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._input = args[0] if args else next(iter(kwargs.values()))
