"""Seeds that become part of the model: more units, more heads, another block.

While they grow they are a branch whose output is added, or a block that is called after another.

- Units between two layers (`pairs.py`).
- Heads of attention, or units of a gated layer. The output of attention is a sum over heads, that of
  a gated layer a sum over units. New ones are a copy of the module with other layers. Modules whose
  code does not work with more of them are found by a test.
- Another block in a stack of equal blocks: a copy of one, after it. In a copy of a residual block
  some layers are zero: the last one of every branch that has a skip connection. Then the copy
  returns its input. Such a copy is not blended in: it is on or off.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from esper.surgery.eval_mode import eval_mode
from esper.surgery.pairs import Pair, Part, Refused, Step, check_layer, is_transposed
from esper.surgery.tracing import Run, is_composed, without_graphs


@dataclass(frozen=True, eq=False)
class Heads(Part):
    """A module that can have more heads or units; `first` and `last` are its name."""

    layers: tuple[str, ...]  # queries, keys, values; or gate and values; and the output
    size: int  # of a head

    @property
    def features(self) -> int:
        return self.size


@dataclass(frozen=True, eq=False)
class Copied(Part):
    """A block of a stack that can be copied; `first` and `last` are its name."""

    zeros: tuple[str, ...]  # names inside the block: layers that are zero in a new copy
    is_block = True


class Chain(nn.ModuleList):
    """The layers of a pair and the functions between them, with the new units alone."""

    def __init__(self, layers: Iterable[nn.Module], steps: tuple[Step, ...]):
        super().__init__(layers)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        layers = iter(self)
        x = next(layers)(x)
        for step in self.steps:
            x = next(layers)(x) if isinstance(step, str) else step(x, self.training)
        return next(layers)(x)  # type: ignore[no-any-return]


class Branch(nn.Module):
    """A seed that becomes part of the model: new units or heads, or the copy of a block.

    Units and heads are called with the arguments of the part's first module, a copy with the output
    of its block and the block's other arguments. `body` is a chain, or a copy of the user's module.
    `names` are layers in it: those that enlarge the part's, of which the last one is zero at first;
    of a block, all that are zero at first.
    """

    def __init__(self, part: Part, body: nn.Module, names: Sequence[str]):
        super().__init__()
        self.part, self.body, self._names = part, body, names

    @property
    def layers(self) -> list[nn.Module]:
        return [self.body.get_submodule(name) for name in self._names]

    @property
    def zero_layers(self) -> list[nn.Module]:
        return self.layers if self.part.is_block else self.layers[-1:]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = without_caches(args, kwargs)
        output = self.body(*args, **kwargs)
        return output[0] if isinstance(output, tuple) and not self.part.is_block else output

    def merge_into(self, modules: Callable[[str], nn.Module], alpha: float) -> "list[Enlarged]":
        """Make it part of the model's layers or stacks, which then compute the same without it."""
        part = self.part
        if not isinstance(part, Pair | Heads):
            _insert(self.body, modules(part.first), modules(""))
            return []
        *before, last = self.layers
        scale(last, alpha)
        if isinstance(part, Heads):
            added = before[0].out_features // part.size  # type: ignore[operator]
            _set_heads(modules(part.first), part, part.width + int(added))
        changed = enlarge(modules(part.layers[-1]), last, 1)
        for name, layer in zip(part.layers, before, strict=False):
            changed += enlarge(modules(name), layer, 0)
        return changed


def new_branch(
    part: Part, units: int, modules: Callable[[str], nn.Module], generator: torch.Generator
) -> Branch:
    """A branch with initial weights; only `generator` is used. Hooks of growth must be removed."""
    module = modules(part.first)
    if isinstance(part, Copied):
        copied = Branch(part, copy.deepcopy(module, without_graphs(module)), part.zeros)
        for layer in copied.zero_layers:
            for parameter in layer.parameters(recurse=False):
                nn.init.zeros_(parameter)
        return copied
    assert isinstance(part, Pair | Heads)
    layers = [layer_like(modules(name), outputs=units * part.size) for name in part.layers[:-1]]
    for layer in layers:
        draw(layer, generator)
    layers.append(layer_like(modules(part.layers[-1]), inputs=units * part.features))
    nn.init.zeros_(layers[-1].get_parameter("weight"))
    if isinstance(part, Pair):
        return Branch(part, Chain(layers, part.steps), [str(n) for n in range(len(layers))])
    names = [name.rpartition(".")[2] for name in part.layers]
    body = copy.deepcopy(module, without_graphs(module))
    for name, layer in zip(names, layers, strict=True):
        setattr(body, name, layer)
    _set_heads(body, part, units)
    return Branch(part, body, names)


def draw(layer: nn.Module, generator: torch.Generator) -> None:
    """Initial weights by torch's default, from a generator."""
    if isinstance(layer, _BatchNorm):
        layer.reset_parameters()
        return
    bound = layer.get_parameter("weight")[0].numel() ** -0.5
    for parameter in layer.parameters():
        drawn = torch.rand(parameter.shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            parameter.copy_(bound * (2 * drawn - 1))


def scale(layer: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(factor)


# the sizes that a layer remembers, by axis of its weights
_SIZES = (
    ("out_features", "out_channels", "num_features", "nf"),
    ("in_features", "in_channels", "nx"),
)


def layer_like(layer: Any, inputs: int | None = None, outputs: int | None = None) -> nn.Module:
    """A layer with the settings of another and other sizes, its weights not yet set.

    None: as it has. A last layer, with the outputs that it has, gets no bias: the model's has one.
    """
    device = next((t.device for t in layer.state_dict().values()), torch.device("cpu"))
    dtype = next((p.dtype for p in layer.parameters()), None)
    kind, settings = type(layer), settings_of(layer)
    if is_transposed(layer):
        kind, settings = nn.Linear, {"in_features": layer.nx, "out_features": layer.nf}
    for names, size in zip(_SIZES, (outputs, inputs), strict=True):
        settings |= {name: size for name in names if name in settings and size is not None}
    if settings.get("groups", 1) > 1:  # a depthwise convolution
        settings["in_channels"] = settings["groups"] = outputs
    if outputs is None:
        settings["bias"] = False
    with torch.device("meta"):
        new: nn.Module = kind(**settings)
    return new.to(dtype=dtype).to_empty(device=device)


def settings_of(layer: nn.Module) -> dict[str, Any]:
    """The constructor arguments that a layer stores as attributes, and whether it has a bias."""
    known = vars(layer) | {"bias": getattr(layer, "bias", None) is not None}
    return {
        name: known[name] for name in inspect.signature(type(layer)).parameters if name in known
    }


@dataclass(frozen=True)
class Enlarged:
    """A parameter that was replaced by a larger one."""

    old: nn.Parameter
    new: nn.Parameter
    part: nn.Parameter  # the seed's
    join: Callable[[Tensor, Tensor], Tensor]  # what belongs to `old` and to `part`

    def moments(self, old: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """The optimiser's state of the larger parameter: that of both, zero where there is none.

        State of another shape, such as Adafactor's of rows and columns, starts from scratch.
        """
        sizes = {v.shape for v in old.values() if isinstance(v, Tensor) and v.dim() > 0}
        if sizes - {self.old.shape}:
            return {}
        state, none = copy.deepcopy(old), torch.zeros_like(self.part)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[key] = self.join(value, part.get(key, none))
        return state


def joined(old: Tensor, part: Tensor, axis: int, is_transposed: bool = False) -> Tensor:
    """`old` with `part` after it along an axis; zero where `part` is smaller along the others."""
    part, shape = part.t() if is_transposed else part, list(old.shape)
    shape[axis] += part.shape[axis]
    larger = old.new_zeros(shape)
    larger[tuple(slice(n) for n in old.shape)] = old.detach()
    place = [slice(n) for n in part.shape]
    place[axis] = slice(old.shape[axis], None)
    larger[tuple(place)] = part.detach().to(old.dtype)
    return larger


def enlarge(module: Any, part: nn.Module, axis: int) -> list[Enlarged]:
    """Join the weights and buffers of a part to those of a module, along an axis."""
    changed = []
    for name, added in part.named_parameters():
        old, flips = getattr(module, name), is_transposed(module) and added.dim() > 1
        join = partial(joined, axis=1 - axis if flips else axis, is_transposed=flips)
        new = nn.Parameter(join(old, added), old.requires_grad)
        setattr(module, name, new)
        changed.append(Enlarged(old, new, added, join))
    for name, statistics in part.named_buffers():
        if statistics.dim() > 0:
            setattr(module, name, joined(getattr(module, name), statistics, 0))
    size = next(vars(part)[name] for name in _SIZES[axis] if name in vars(part))
    for name in _SIZES[axis]:
        if name in vars(module):
            setattr(module, name, vars(module)[name] + size)
    if vars(module).get("groups", 1) > 1:  # a depthwise convolution
        module.in_channels = module.groups = module.out_channels
    return changed


_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
)
_GATED = (("gate_proj", "up_proj"), ("w1", "w3"), ("wi_0", "wi_1"))  # a head is one unit
_OUTPUTS = ("down_proj", "w2", "o_proj", "out_proj", "to_out", "out_lin", "wo", "o", "out", "proj")
_HEAD_SIZES = ("head_dim", "attention_head_size", "dim_head", "d_head")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_TOTALS = ("all_head_size", "inner_dim", "intermediate_size")


def _set_heads(attention: nn.Module, pair: Heads, heads: int) -> None:
    known = vars(attention)
    known |= {name: heads for name in _COUNTS if name in known}
    known |= {name: heads * pair.size for name in _TOTALS if name in known}


def heads_at(name: str, run: Run, macs: Mapping[str, float]) -> Heads | None:
    """An attention module or gated layer that can be larger; None if it is none."""
    module = run.modules[name]
    if isinstance(module, nn.MultiheadAttention):
        raise Refused("nn.MultiheadAttention has its layers in one weight")
    inputs = next((names for names in (*_INPUTS, *_GATED) if _are_linear(module, names)), None)
    output = next((n for n in _OUTPUTS if _are_linear(module, (n,))), None)
    if inputs is None or output is None:
        return None
    layers = tuple(f"{name}.{child}" for child in (*inputs, output))
    for layer in layers:
        check_layer(layer, run)
    *before, after = parts = [run.modules[layer] for layer in layers]
    known, widths = vars(module), {layer.out_features for layer in before}
    is_gated, width = inputs in _GATED, max(widths)
    sizes = [known[n] for n in _HEAD_SIZES if known.get(n)]
    sizes += [width // known[n] for n in _COUNTS if known.get(n)]
    size = 1 if is_gated else next(iter(sizes), 0)
    if widths != {after.in_features}:
        raise Refused("its layers have different sizes, such as fewer keys than queries")
    if not size or width % size:
        raise Refused("the size of its heads is not known; it has no attribute head_dim")
    total = sum(p.numel() for part in parts for p in part.parameters())
    if total < sum(p.numel() for p in module.parameters()):
        raise Refused("it has other weights, which new heads would have to share")
    total -= 0 if after.bias is None else after.bias.numel()
    heads, label = width // size, f"{name}->{'units' if is_gated else 'heads'}"
    costs = (total // heads, macs.get(name, 0.0) / heads)
    return Heads((heads,), label, name, name, *costs, frozenset(layers[:-1]), layers, size)


def without_caches(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments without caches of keys and values: a growing model has no place there for a copy."""

    def kept(value: Any) -> Any:
        return None if type(value).__name__.endswith("Cache") else value

    return tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}


def _are_linear(module: nn.Module, names: Iterable[str]) -> bool:
    children = dict(module.named_children())
    return all(type(children.get(name)) is nn.Linear for name in names)


_STACKS = (nn.ModuleList, nn.Sequential)


def _insert(made: nn.Module, block: nn.Module, root: nn.Module) -> None:
    """Make the copy of a block the next element of the block's stack."""
    stack = next(m for m in root.modules() if isinstance(m, _STACKS) and block in m)
    place = list(stack).index(block) + 1
    for module in _numbered(made):
        module.layer_idx = 1 + min(m.layer_idx for m in _numbered(block))
    for module in (module for element in list(stack)[place:] for module in _numbered(element)):
        module.layer_idx += 1
    stack.insert(place, made)
    configs = {id(c): c for m in root.modules() if (c := vars(m).get("config")) is not None}
    for config in configs.values():  # as models of transformers have
        if getattr(config, "num_hidden_layers", None) == len(stack) - 1:
            config.num_hidden_layers = len(stack)
            if kinds := getattr(config, "layer_types", None):
                kinds.insert(place, kinds[place - 1])


def _numbered(block: nn.Module) -> list[Any]:
    """Modules with a number, by which models of transformers tell their blocks apart."""
    return [module for module in block.modules() if "layer_idx" in vars(module)]


def copy_at(name: str, run: Run, macs: Mapping[str, float]) -> Copied | None:
    """A block to copy; None if it is not composed, or not next to one of its class in a stack."""
    modules, (path, _, number) = run.modules, name.rpartition(".")
    block = modules[name]
    if not (isinstance(modules[path], _STACKS) and number.isdigit() and is_composed(block)):
        return None
    near = list(modules[path])[max(0, int(number) - 1) : int(number) + 2]
    if [type(other) for other in near].count(type(block)) < 2:
        return None
    if not all(p.requires_grad for p in block.parameters()):
        raise Refused("it is frozen")
    costs = (sum(p.numel() for p in block.parameters()), macs.get(name, 0.0))
    with eval_mode(modules[""], with_grad=True):
        zeros = tuple(_zeros(name, block, run))
    return Copied((1,), f"{name}->copy", name, name, *costs, frozenset([name]), zeros)


def _zeros(name: str, block: nn.Module, run: Run) -> list[str]:
    """The layers inside a block that are zero in a new copy."""
    args, kwargs, output = run.calls[name][0].given
    x = output[0] if isinstance(output, tuple) else output
    before = args[0] if args else None
    if not (isinstance(before, Tensor) and isinstance(x, Tensor) and before.shape == x.shape):
        raise Refused("its first argument and its output are not tensors of the same shape")
    given = without_caches(args[1:], kwargs)
    x, (args, kwargs) = pytree.tree_map_only(Tensor, Tensor.detach, (x, given))
    trial = copy.deepcopy(block, without_graphs(block)).requires_grad_(False)

    def is_same() -> bool:
        output = trial(x, *args, **kwargs)
        return torch.equal(output[0] if isinstance(output, tuple) else output, x)

    def place(layer: str) -> int:
        """Of the first call of the layer, or of the module around it that torch calls."""
        path = f"{name}.{layer}.".replace("..", ".")
        return max(
            run.started.index(called) for called in run.calls if path.startswith(f"{called}.")
        )

    layers = {n: list(m.parameters(recurse=False)) for n, m in trial.named_modules()}
    layers = {n: layers[n] for n in sorted(layers, key=place) if layers[n]}
    for weights in layers.values():
        _fill(weights, 0.0)
    if not is_same():
        raise Refused("it is not residual: without its weights it does not return its input")
    zeros = []
    for n, weights in layers.items():
        _fill(weights, 1.0)  # not the block's own weights: a zero bias of it may hide a change
        if not is_same():
            _fill(weights, 0.0)
            zeros.append(n)
    if not zeros:
        raise Refused("its weights do not change its output")
    return zeros


def _fill(weights: list[nn.Parameter], scale: float) -> None:
    for weight in weights:
        weight.data.uniform_(0, 1).mul_(scale)
