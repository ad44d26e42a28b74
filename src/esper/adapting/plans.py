"""What an adaptation can change: a plan is a place, what changes there, and what the head does.

    places = find_places(model, example)
    plan = Plan(Place.INPUT, What.SEED, HeadMode.FIRST)

A model has up to four places: its input, and the outputs of its blocks after about one third, two
thirds and all of the layers before the head. Fixed rules that people use are plans too: full
fine-tuning, LP-FT, LoRA in every layer, the head alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from inspect import signature
from math import ceil
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from esper.leyline.constants import SiteKind
from esper.surgery.inputs import arguments
from esper.surgery.plain import kept_sites
from esper.surgery.sites import ModelSite, trace_sites
from esper.surgery.tracing import Run, trace


class Place(IntEnum):
    """Where the model changes."""

    NOWHERE = 0
    INPUT = 1
    EARLY = 2
    MIDDLE = 3
    LATE = 4
    EVERYWHERE = 5


class What(IntEnum):
    """What changes at a place."""

    NOTHING = 0
    SCALE = 1  # a scale and a shift for every channel
    SEED = 2  # a residual adapter of two layers
    LORA = 3  # a low-rank update of every layer since the place before
    TUNE = 4  # all weights of these layers
    BIAS = 5  # biases and the weights of norms


class HeadMode(IntEnum):
    """What happens to the output layer."""

    KEEP = 0
    ALONGSIDE = 1  # trained with the rest
    FIRST = 2  # trained alone for the first half of the steps, then with the rest


RATES = (1e-3, 4e-3, 1.6e-2)  # learning rates to choose from
SINGLE_PLACES = (Place.INPUT, Place.EARLY, Place.MIDDLE, Place.LATE)
_KINDS = {1: SiteKind.VECTOR, 2: SiteKind.SERIES, 3: SiteKind.IMAGE}


class Plan(NamedTuple):
    place: Place
    what: What
    head: HeadMode

    def __str__(self) -> str:
        known = {plan: name for name, plan in KNOWN_RULES.items()}
        if self in known:
            return known[self]
        head = {HeadMode.KEEP: "", HeadMode.ALONGSIDE: " + head", HeadMode.FIRST: ", head first"}
        return f"{self.what.name.lower()} {self.place.name.lower()}{head[self.head]}"


def _all_plans() -> tuple[Plan, ...]:
    plans = [Plan(Place.NOWHERE, What.NOTHING, h) for h in (HeadMode.KEEP, HeadMode.ALONGSIDE)]
    for place in (*SINGLE_PLACES, Place.EVERYWHERE):
        for what in (What.SCALE, What.SEED, What.LORA, What.TUNE):
            if place != Place.INPUT or what in (What.SCALE, What.SEED):
                plans += [Plan(place, what, head) for head in HeadMode]
    return *plans, Plan(Place.EVERYWHERE, What.BIAS, HeadMode.ALONGSIDE)


KNOWN_RULES = {
    "nothing": Plan(Place.NOWHERE, What.NOTHING, HeadMode.KEEP),
    "head only": Plan(Place.NOWHERE, What.NOTHING, HeadMode.ALONGSIDE),
    "full fine-tuning": Plan(Place.EVERYWHERE, What.TUNE, HeadMode.ALONGSIDE),
    "LP-FT": Plan(Place.EVERYWHERE, What.TUNE, HeadMode.FIRST),
    "LoRA everywhere": Plan(Place.EVERYWHERE, What.LORA, HeadMode.ALONGSIDE),
    "seeds everywhere": Plan(Place.EVERYWHERE, What.SEED, HeadMode.ALONGSIDE),
    "scales everywhere": Plan(Place.EVERYWHERE, What.SCALE, HeadMode.ALONGSIDE),
    "norms and biases": Plan(Place.EVERYWHERE, What.BIAS, HeadMode.ALONGSIDE),
}
PLANS = _all_plans()
# What controllers choose from: the other plans were never much better than one of these.
MENU = tuple(
    plan
    for plan in PLANS
    if plan.what in (What.NOTHING, What.SEED)
    or (plan.place == Place.EVERYWHERE and plan.what != What.BIAS)
    or (plan.what == What.TUNE and plan.place != Place.MIDDLE)
)


class Argument(NamedTuple):
    """An argument of a model: the input that a branch at the input changes."""

    position: int
    name: str

    def changed(
        self, change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with `change` applied to this one."""
        if self.name in kwargs:
            return args, kwargs | {self.name: change(kwargs[self.name])}
        if self.position >= len(args):
            raise TypeError(f"the argument {self.name!r} is missing, which the adaptation changes")
        before, after = args[: self.position], args[self.position + 1 :]
        return (*before, change(args[self.position]), *after), kwargs


@dataclass(frozen=True)
class Places:
    """The places of a model, and the weights that belong to each."""

    sites: dict[Place, ModelSite]
    # since the place before. TUNE: all; LORA: those that multiply; BIAS: those with one axis
    weights: dict[What, dict[Place, tuple[str, ...]]]
    head: tuple[str, ...]  # the weights of the output layer
    features: str  # the module whose input is what the head reads
    argument: Argument  # the first one that is a tensor

    def offers(self, plan: Plan) -> bool:
        """Whether the model has what the plan changes."""
        if plan.head != HeadMode.KEEP and not self.head:
            return False
        if plan.what == What.NOTHING:
            return True
        held: Mapping[Place, object] = self.weights.get(plan.what, self.sites)
        return bool(held) if plan.place == Place.EVERYWHERE else plan.place in held

    def at(self, place: Place) -> tuple[Place, ...]:
        """The single places that a plan's place stands for."""
        return tuple(self.sites) if place == Place.EVERYWHERE else (place,)


def find_places(model: nn.Module, example: Any) -> Places:
    """Trace the model and find its places and its head."""
    found = kept_sites(model, trace_sites(model, example, widens=False).sites, example)
    run = trace(model, example)
    chosen = {}
    argument, first = first_argument(model, example)
    if (at_input := _input_site(model, found, first)) is not None:
        chosen[Place.INPUT] = at_input
    blocks = [site for site in found if site.name != getattr(at_input, "name", None)]
    for third, place in ((3, Place.LATE), (1, Place.EARLY), (2, Place.MIDDLE)):
        at = blocks[ceil(len(blocks) * third / 3) - 1] if blocks else None
        if at is not None and at not in chosen.values():  # of few blocks the last one is late
            chosen[place] = at
    chosen = dict(sorted(chosen.items()))
    head = _head_weights(model, run.weights)
    rest = {n: p for n, p in model.named_parameters() if n not in head and p.is_floating_point()}
    changeable = {
        What.TUNE: [*rest],
        What.LORA: [name for name in rest if _multiplies(model, name)],
        What.BIAS: [name for name, parameter in rest.items() if parameter.dim() == 1],
    }
    weights = {what: _by_place(run, chosen, names) for what, names in changeable.items()}
    return Places(chosen, weights, head, run.weights, argument)


def first_argument(model: nn.Module, inputs: Any) -> tuple[Argument, Tensor | None]:
    """The first argument of the model that is a tensor, in the order of its signature."""
    names = [*signature(model.forward).parameters]
    args, kwargs = arguments(inputs)
    places = {name: place for place, name in enumerate(names)}
    given = [(Argument(i, names[min(i, len(names) - 1)]), value) for i, value in enumerate(args)]
    given += [(Argument(places.get(key, len(names)), key), kwargs[key]) for key in kwargs]
    found = sorted((entry for entry in given if isinstance(entry[1], Tensor)), key=lambda e: e[0])
    return found[0] if found else (Argument(0, names[0]), None)


def _input_site(model: nn.Module, found: list[ModelSite], first: Tensor | None) -> ModelSite | None:
    """The site of the inputs; of token ids the first one after their embeddings, if there is one."""
    if first is None or not first.is_floating_point():
        layers = ((site, type(model.get_submodule(site.weights)).__name__) for site in found)
        return next((site for site, layer in layers if "Embedding" in layer), None)
    if first.dim() - 1 not in _KINDS:
        return None
    kind, shape = _KINDS[first.dim() - 1], tuple(first.shape[1:])
    return ModelSite("", "input", kind, shape, 1.0, "", first.dtype, first.device)


def _by_place(
    run: Run, chosen: dict[Place, ModelSite], weights: list[str]
) -> dict[Place, tuple[str, ...]]:
    """Names of the weights used after the place before and up to each place."""
    ends = {p: run.calls[site.name][0].order for p, site in chosen.items() if site.name}
    found: dict[Place, list[str]] = {place: [] for place in chosen}
    last = max(ends, key=lambda place: ends[place], default=None)
    for name in weights:
        owner = name.rpartition(".")[0]
        while owner and owner not in run.calls:
            owner = owner.rpartition(".")[0]
        order = run.calls[owner][0].order if owner else -1
        place = next((p for p in sorted(ends) if order <= ends[p]), last)
        if place is not None:
            found[place].append(name)
    return {place: tuple(names) for place, names in found.items() if names}


def _head_weights(model: nn.Module, owner: str) -> tuple[str, ...]:
    """Names of the output layer's weights; one that an earlier layer shares belongs there."""
    if not owner and not isinstance(model, nn.Linear):
        return ()
    own = model.get_submodule(owner).named_parameters(owner, recurse=False)
    known = {name for name, _ in model.named_parameters()}
    return tuple(name for name, _ in own if name in known)


def _multiplies(model: nn.Module, name: str) -> bool:
    """Whether a weight is the matrix of a linear or convolution layer."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    return last == "weight" and isinstance(module, nn.Linear | _ConvNd)
