"""Another block in a stack of equal blocks: a copy of one, after it, that changes nothing at first.

In a copy of a residual block some layers are zero: the last one of every branch that has a skip
connection. Then the copy returns its input. Such a copy is not blended in: it is on or off.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.growing.eval_mode import eval_mode
from esper.growing.pairs import Modules, NotAPair, Part, PartSite, UnitsProgram
from esper.growing.tracing import Run, is_composed, without_graphs
from esper.growing.widening import Enlarged, without_caches
from esper.kasmina.blueprints import Blueprint, Site, no_layers


@dataclass(frozen=True, eq=False)
class Copied(Part):
    """A block of a stack that can be copied; `first` and `last` are its name."""

    zeros: tuple[str, ...]  # names inside the block: layers that are zero in a new copy
    is_block = True


class Deepening(Blueprint):
    def fits(self, site: Site) -> bool:
        return isinstance(site, PartSite) and site.part.is_block

    def program(self, site: Site) -> Any:
        assert isinstance(site, PartSite)
        return UnitsProgram(site.part)


_STACKS = (nn.ModuleList, nn.Sequential)
DEEPENING = Deepening("deepen", (), no_layers)


class BlockCopy(nn.Module):
    """The copy, called with what the block returned and the block's other arguments."""

    def __init__(self, copied: Copied, block: nn.Module):
        super().__init__()
        self.copied, self.block = copied, block

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = without_caches(args, kwargs)
        return self.block(x, *args, **kwargs)

    @property
    def zero_layers(self) -> list[nn.Module]:
        return [self.block.get_submodule(name) for name in self.copied.zeros]

    def merge_into(self, modules: Callable[[str], nn.Module], alpha: float) -> list[Enlarged]:
        """Make the copy an element of the block's stack, after the block."""
        root, block = modules(""), modules(self.copied.first)
        stack = next(m for m in root.modules() if isinstance(m, _STACKS) and block in m)
        place = list(stack).index(block) + 1
        for module in _numbered(self.block):
            module.layer_idx = 1 + min(m.layer_idx for m in _numbered(block))
        for module in (module for element in list(stack)[place:] for module in _numbered(element)):
            module.layer_idx += 1
        stack.insert(place, self.block)
        configs = {id(c): c for m in root.modules() if (c := vars(m).get("config")) is not None}
        for config in configs.values():  # as models of transformers have
            if getattr(config, "num_hidden_layers", None) == len(stack) - 1:
                config.num_hidden_layers = len(stack)
                if kinds := getattr(config, "layer_types", None):
                    kinds.insert(place, kinds[place - 1])
        return []


def new_copy(copied: Copied, modules: Callable[[str], nn.Module]) -> BlockCopy:
    """A copy of a block that returns its input. Hooks of growth must be removed before."""
    block = modules(copied.first)
    made = BlockCopy(copied, copy.deepcopy(block, without_graphs(block)))
    with torch.no_grad():
        for layer in made.zero_layers:
            for parameter in layer.parameters(recurse=False):
                parameter.zero_()
    return made


def _numbered(block: nn.Module) -> list[Any]:
    """Modules with a number, by which models of transformers tell their blocks apart."""
    return [module for module in block.modules() if "layer_idx" in vars(module)]


def copy_at(name: str, modules: Modules, run: Run, macs: Mapping[str, float]) -> Copied | None:
    """A block to copy; None if it is not composed, or not next to one of its class in a stack."""
    block, (path, _, number) = modules[name], name.rpartition(".")
    if not (isinstance(modules[path], _STACKS) and number.isdigit() and is_composed(block)):
        return None
    near = list(modules[path])[max(0, int(number) - 1) : int(number) + 2]
    if [type(other) for other in near].count(type(block)) < 2:
        return None
    if not all(p.requires_grad for p in block.parameters()):
        raise NotAPair("it is frozen")
    costs = (sum(p.numel() for p in block.parameters()), macs.get(name, 0.0))
    with eval_mode(modules[""], with_grad=True):
        zeros = tuple(_zeros(name, block, run))
    return Copied(f"{name}->copy", name, name, *costs, frozenset([name]), zeros)


def _zeros(name: str, block: nn.Module, run: Run) -> list[str]:
    """The layers inside a block that are zero in a new copy."""
    (args, kwargs, output), *more = (call.given for call in run.calls[name])
    x = output[0] if isinstance(output, tuple) else output
    if more:
        raise NotAPair(f"it is called {1 + len(more)} times in a forward pass")
    if not (args and isinstance(args[0], Tensor) and isinstance(x, Tensor)):
        raise NotAPair("its first argument or its output is not a tensor")
    if args[0].shape != x.shape:
        raise NotAPair("its output has another shape than its input")
    given = without_caches(args[1:], kwargs)
    x, (args, kwargs) = pytree.tree_map_only(Tensor, Tensor.detach, (x, given))
    trial = copy.deepcopy(block, without_graphs(block)).requires_grad_(False)

    def is_same() -> bool:
        output = trial(x, *args, **kwargs)
        return torch.equal(output[0] if isinstance(output, tuple) else output, x)

    def place(layer: str) -> int:
        """Of its first call; a layer that torch does not call belongs to the module around it."""
        inner = f"{name}.{layer}".rstrip(".")
        while inner not in run.calls:
            inner = inner.rpartition(".")[0]
        return run.started.index(inner)

    layers = {n: list(m.parameters(recurse=False)) for n, m in trial.named_modules()}
    layers = {n: layers[n] for n in sorted(layers, key=place) if layers[n]}
    for weights in layers.values():
        _fill(weights, 0.0)
    if not is_same():
        raise NotAPair("it is not residual: without its weights it does not return its input")
    zeros = []
    for n, weights in layers.items():
        _fill(weights, 1.0)  # not the block's own weights: a zero bias of it may hide a change
        if not is_same():
            _fill(weights, 0.0)
            zeros.append(n)
    if not zeros:
        raise NotAPair("its weights do not change its output")
    return zeros


def _fill(weights: list[nn.Parameter], scale: float) -> None:
    for weight in weights:
        weight.data.uniform_(0, 1).mul_(scale)
