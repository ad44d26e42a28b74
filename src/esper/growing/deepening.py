"""Another block in a stack of equal blocks: a copy of one, after it, that changes nothing at first.

In a copy of a residual block some layers are zero: the last one of every branch that has a skip
connection. Then the copy returns its input. Such a copy is not blended in: it is on or off.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.growing.eval_mode import eval_mode
from esper.growing.inputs import forward
from esper.growing.pairs import PartSite
from esper.growing.tracing import without_graphs
from esper.kasmina.blueprints import Blueprint, Site, no_layers


@dataclass(frozen=True, eq=False)
class Copied:
    """A block of a stack that can be copied."""

    block: str
    zeros: tuple[str, ...]  # names inside the block: layers that are zero in a new copy
    num_params: int
    macs: int  # per example
    depth = 2
    reach = 0.0
    width = 1
    is_block = True

    @property
    def first(self) -> str:
        return self.block

    last = first

    @property
    def stack(self) -> str:
        return self.block.rpartition(".")[0]

    @property
    def name(self) -> str:
        return f"{self.block}->copy"


class Deepening(Blueprint):
    def fits(self, site: Site) -> bool:
        return isinstance(site, PartSite) and site.part.is_block

    def program(self, site: Site) -> Any:
        assert isinstance(site, PartSite)
        return site.part


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

    def insert_into(self, root: nn.Module, stack: Any, block: nn.Module) -> None:
        """Make the copy an element of the stack, after the block."""
        place = [id(element) for element in stack].index(id(block)) + 1
        _number(self.block, lambda _: 1 + min(_numbers(block), default=0))
        for element in list(stack)[place:]:
            _number(element, lambda number: number + 1)
        stack.insert(place, self.block)
        configs = {id(c): c for m in root.modules() if (c := vars(m).get("config")) is not None}
        for config in configs.values():  # as models of transformers have
            if getattr(config, "num_hidden_layers", None) == len(stack) - 1:
                config.num_hidden_layers = len(stack)
                if kinds := getattr(config, "layer_types", None):
                    kinds.insert(place, kinds[place - 1])


def without_caches(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments without caches of keys and values: a growing model has no place there for a copy."""

    def kept(value: Any) -> Any:
        return None if type(value).__name__.endswith("Cache") else value

    return tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}


def new_copy(copied: Copied, modules: Callable[[str], nn.Module]) -> BlockCopy:
    """A copy of a block that returns its input. Hooks of growth must be removed before."""
    block = modules(copied.block)
    made = BlockCopy(copied, copy.deepcopy(block, without_graphs(block)))
    with torch.no_grad():
        for layer in made.zero_layers:
            for parameter in layer.parameters(recurse=False):
                parameter.zero_()
    return made


def _numbers(block: nn.Module) -> Iterator[int]:
    return (vars(m)["layer_idx"] for m in block.modules() if "layer_idx" in vars(m))


def _number(block: nn.Module, change: Callable[[int], int]) -> None:
    """Change the numbers by which models of transformers tell their blocks apart."""
    for module in block.modules():
        if "layer_idx" in vars(module):
            vars(module)["layer_idx"] = change(vars(module)["layer_idx"])


def find_copied(
    model: nn.Module, example: Any, macs: Mapping[str, float]
) -> tuple[list[Copied], dict[str, str]]:
    """The blocks that can be copied, in forward order, and the reason for other blocks of stacks."""
    calls: dict[str, list[tuple[Any, Any, Any]]] = {}
    blocks = {f"{path}.{i}".lstrip("."): block for path, i, block in _stacked(model)}
    handles = [
        block.register_forward_hook(
            lambda _, args, kwargs, output, name=name: calls.setdefault(name, []).append(
                (args, kwargs, output)
            ),
            with_kwargs=True,
        )
        for name, block in blocks.items()
    ]
    frozen = {n for n, b in blocks.items() if not all(p.requires_grad for p in b.parameters())}
    found, refused = [], dict.fromkeys(frozen, "it is frozen")
    try:
        with eval_mode(model, with_grad=True):
            forward(model, example)
            for handle in handles:
                handle.remove()
            for name, given in ((n, c) for n, c in calls.items() if n not in frozen):
                copied = _copied(name, blocks[name], given, macs)
                if isinstance(copied, str):
                    refused[name] = copied
                else:
                    found.append(copied)
    finally:
        for handle in handles:
            handle.remove()
    return found, refused


def _stacked(model: nn.Module) -> Iterator[tuple[str, int, nn.Module]]:
    """The composed modules that are next to one of the same class in a list."""
    for path, stack in model.named_modules():
        if isinstance(stack, nn.ModuleList | nn.Sequential):
            blocks = list(stack)
            for i, block in enumerate(blocks):
                near = blocks[max(0, i - 1) : i + 2]
                has_parts = any(True for _ in block.children())
                if has_parts and sum(type(other) is type(block) for other in near) > 1:
                    yield path, i, block


def _copied(
    name: str, block: nn.Module, calls: list[tuple[Any, Any, Any]], macs: Mapping[str, float]
) -> Copied | str:
    """The block, or the reason why it cannot be copied."""
    (args, kwargs, output), *more = calls
    x = output[0] if isinstance(output, tuple) else output
    if more:
        return f"it is called {len(calls)} times in a forward pass"
    if not (args and isinstance(args[0], Tensor) and isinstance(x, Tensor)):
        return "its first argument or its output is not a tensor"
    if args[0].shape != x.shape:
        return "its output has another shape than its input"
    args, kwargs = without_caches(args[1:], kwargs)
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    trial = copy.deepcopy(block, without_graphs(block)).requires_grad_(False)
    x = x.detach()

    def is_same() -> bool:
        output = trial(x, *args, **kwargs)
        return torch.equal(output[0] if isinstance(output, tuple) else output, x)

    order: list[str] = []  # of the calls inside
    hooks = [
        m.register_forward_pre_hook(lambda _, __, n=n: order.append(n))
        for n, m in trial.named_modules()
    ]
    trial(x, *args, **kwargs)
    for hook in hooks:
        hook.remove()
    # a layer that torch does not call as a module belongs to the one around it
    layers = {n: list(m.parameters(recurse=False)) for n, m in trial.named_modules()}
    layers = {n: layers[n] for n in sorted(layers, key=partial(_place, order)) if layers[n]}
    for weights in layers.values():
        _fill(weights, 0.0)
    if not is_same():
        return "it is not residual: without its weights it does not return its input"
    zeros = []
    for n, weights in layers.items():
        _fill(weights, 1.0)  # not the block's own weights: a zero bias of it may hide a change
        if not is_same():
            _fill(weights, 0.0)
            zeros.append(n)
    if not zeros:
        return "its weights do not change its output"
    params = sum(p.numel() for p in block.parameters())
    return Copied(name, tuple(zeros), params, round(macs.get(name, 0.0)))


def _place(order: list[str], name: str) -> int:
    """The number of the first call of a module, or of the one around it that is called."""
    while name and name not in order:
        name = name.rpartition(".")[0]
    return order.index(name)


def _fill(weights: list[nn.Parameter], scale: float) -> None:
    for weight in weights:
        weight.data.uniform_(0, 1).mul_(scale)
