"""A frozen model with a change: seeds at its places, low-rank updates, tuned copies of weights.

    adapted = Adapted(model, places, plan, rng_seed=0)
    adapted(x)  # bit-exact the model's output before training

The model itself is never written to. `weights()` merges all that changes weights.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.adapting.plans import Argument, HeadMode, Places, Plan, What
from esper.kasmina.blueprints import Blueprint, Site
from esper.kasmina.layers import Conv, Layer, Linear, Norm, Relu
from esper.leyline.constants import SiteKind
from esper.surgery.sites import ModelSite
from esper.surgery.slots import new_seed, with_first

MAX_RANK = 8


def _adapter_layers(site: Site) -> tuple[Layer, ...]:
    """Two layers with a quarter of the width between them; narrow sites get a wide adapter."""
    is_narrow = site.width < 8
    hidden = 16 if is_narrow else max(4, site.width // 4)
    if site.kind == SiteKind.VECTOR:
        return Linear(max(8, hidden)), Norm(), Relu(), Linear(site.width)
    kernel = 7 if is_narrow and site.kind == SiteKind.SERIES else 3
    return Conv(hidden, kernel), Norm(), Relu(), Conv(site.width, kernel)


ADAPTER = Blueprint("adapter", (SiteKind.VECTOR, SiteKind.SERIES, SiteKind.IMAGE), _adapter_layers)


SCALE_UNIT = 8.0  # one unit of a scale's or shift's parameter: few values have far to go


class ScaleShift(nn.Module):
    """A scale and a shift for each channel; zeros change nothing."""

    def __init__(self, site: ModelSite):
        super().__init__()
        extra = 0 if site.kind == SiteKind.TOKENS else len(site.shape) - 1
        shape = (site.width, *(1,) * extra)
        zeros = torch.zeros(shape, dtype=site.dtype, device=site.device)
        self.scale, self.shift = nn.Parameter(zeros), nn.Parameter(zeros.clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, x, self.scale, value=SCALE_UNIT) + SCALE_UNIT * self.shift


class SeedBranch(nn.Module):
    """A seed added to what flows through a place."""

    def __init__(self, site: ModelSite, generator: torch.Generator):
        super().__init__()
        self.seed = new_seed(ADAPTER.program(site.seed_site), site, generator)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.seed(x)
        return added


class LowRank(nn.Module):
    """An update `up @ down` of a weight, zero at first."""

    def __init__(self, weight: Tensor, generator: torch.Generator):
        super().__init__()
        rows, columns = len(weight), weight[0].numel()
        rank = max(1, min(MAX_RANK, min(rows, columns) // 8))
        down = torch.randn(rank, columns, generator=generator) / math.sqrt(columns)
        self.down = nn.Parameter(down.to(weight))
        self.up = nn.Parameter(weight.new_zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).view(weight.shape)


class Change(nn.Module):
    """Branches by place, low-rank updates and trained copies by the weight's name."""

    def __init__(self, branches: nn.ModuleDict, updates: nn.ModuleDict, tuned: nn.ParameterDict):
        super().__init__()
        self.branches, self.updates, self.tuned = branches, updates, tuned


class Adapted(nn.Module):
    """The model with the change of a plan. Parameters of the change start with `change.`."""

    def __init__(self, model: nn.Module, places: Places, plan: Plan, rng_seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(rng_seed)
        self.model, self.plan, self.argument = model, plan, places.argument
        self._sites: dict[str, str] = {}  # place of a branch -> module
        branches, updates, tuned = nn.ModuleDict(), nn.ModuleDict(), list[str]()
        for place in places.at(plan.place):
            names = places.weights.get(plan.what, {}).get(place, ())
            if plan.what in (What.SCALE, What.SEED):
                site = places.sites[place]
                self._sites[place.name] = site.name
                branches[place.name] = (
                    ScaleShift(site) if plan.what == What.SCALE else SeedBranch(site, generator)
                )
            elif plan.what == What.LORA:
                for name in names:
                    updates[_key(name)] = LowRank(model.get_parameter(name).detach(), generator)
            else:
                tuned += names
        tuned += places.head if plan.head != HeadMode.KEEP else ()
        copies = {_key(name): model.get_parameter(name).detach().clone() for name in tuned}
        self.change = Change(branches, updates, nn.ParameterDict(copies))
        self.head = frozenset(map(tuned_name, places.head))  # names among the changes

    def changes(self) -> dict[str, Tensor]:
        """The parameters of the change, by name."""
        return {n: p for n, p in self.named_parameters() if n.startswith("change.")}

    @property
    def num_added(self) -> int:
        """Parameters of the change besides the head."""
        return sum(t.numel() for n, t in self.changes().items() if n not in self.head)

    @property
    def trained_first(self) -> frozenset[str]:
        """The parameters that train alone for the first half of the steps."""
        return self.head if self.plan.head == HeadMode.FIRST else frozenset()

    def branches(self) -> dict[str, nn.Module]:
        """By the name of the module whose output they change; the input has an empty name."""
        return {self._sites[place]: branch for place, branch in self.change.branches.items()}

    def weights(self) -> dict[str, Tensor]:
        """The model's weights that the change replaces, by their names in the model."""
        changed = {_name(key): weight for key, weight in self.change.tuned.items()}
        for key, update in self.change.updates.items():
            owner, _, last = _name(key).rpartition(".")
            # not get_parameter: under functional_call it is a plain tensor
            changed[_name(key)] = update(getattr(self.model.get_submodule(owner), last))
        return changed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        changes = self.weights(), self.branches()
        return call_changed(self.model, *changes, self.argument, args, kwargs)


def call_changed(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    branches: Mapping[str, Callable[[Tensor], Tensor]],
    argument: Argument,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The model's output with other weights, and with branches as in `Adapted.branches`."""
    with ExitStack() as stack:
        for name, branch in branches.items():
            if not name:
                args, kwargs = argument.changed(branch, args, kwargs)
                continue

            def hook(_module: nn.Module, _args: Any, output: Any, branch: Any = branch) -> Any:
                return with_first(output, branch)

            stack.enter_context(model.get_submodule(name).register_forward_hook(hook))
        for encoder in nested_encoders(model) if any(branches) else ():
            encoder.use_nested_tensor = False
            stack.callback(setattr, encoder, "use_nested_tensor", True)
        return call_with(model, weights, args, kwargs)


def call_with(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """The model's output with tensors in place of its parameters and buffers, by name.

    A tensor that several modules share is replaced in each. Torch's `tie_weights` would also
    replace that of a module with two names twice, and then not restore it.
    """
    own: dict[str, int] = {}
    sharing: dict[int, list[str]] = {}
    for prefix, part in model.named_modules():
        for last, tensor in (*part._parameters.items(), *part._buffers.items()):
            name = f"{prefix}.{last}" if prefix else last
            own[name] = id(tensor)
            sharing.setdefault(id(tensor), []).append(name)
    every = {other: tensor for name, tensor in tensors.items() for other in sharing[own[name]]}
    return functional_call(model, every, args, kwargs, tie_weights=False)


def nested_encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    """Encoders that may pass nested tensors to their layers; branches do not support them."""
    encoders = (m for m in model.modules() if isinstance(m, nn.TransformerEncoder))
    return [encoder for encoder in encoders if encoder.use_nested_tensor]


def tuned_name(weight: str) -> str:
    """The name, among the changes, of a weight's trained copy."""
    return f"change.tuned.{_key(weight)}"


def _key(name: str) -> str:
    """A parameter's name as the key of a module dict, which allows no dots."""
    return name.replace(".", "/")


def _name(key: str) -> str:
    return key.replace("/", ".")
