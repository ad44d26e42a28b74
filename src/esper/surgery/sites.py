"""Find where a model can grow, by tracing a forward pass on an example batch.

A seed keeps the shape of its input, so every module that returns a tensor with channels is a
candidate. The sites offered are those that all data flows through: the output of a residual block,
not of a layer that its skip connection bypasses; the output of a transformer block, not of its
queries. Of a layer, its norm and its activation the last one is the site. The output layer is not
a site: a seed after it could only change the answer's form.

Pairs of layers that can get wider are sites too, named "first->last" (`pairs.py`).
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, Site, Widening
from esper.kasmina.host_reports import SeedFacts
from esper.leyline.constants import SiteKind
from esper.surgery.eval_mode import eval_mode
from esper.surgery.inputs import batch_size, forward
from esper.surgery.pairs import LayerPair, Refused, pair_at
from esper.surgery.tracing import Call, Run, is_composed, is_cut, trace


@dataclass(frozen=True)
class ModelSite:
    """A module after which a seed can grow, or a pair of layers that can get wider."""

    name: str  # as in model.named_modules(); of a pair "first->last"
    module_class: str
    kind: SiteKind
    shape: tuple[int, ...]  # of the output, without the batch
    tokens: float  # vectors per example that a TOKENS seed works on; 1 elsewhere
    weights: str  # last module with weights before it; seeds use its optimizer settings
    dtype: torch.dtype  # of those weights
    device: torch.device
    pair: LayerPair | None = None
    varies: bool = False  # its positions differ between batches

    @property
    def seed_site(self) -> Site:
        """The input of a seed, except at a pair: at a TOKENS site the vector of one token."""
        if self.kind == SiteKind.TOKENS:
            return Site(self.shape[-1:])
        return Site(self.shape, varies=self.varies)

    @property
    def width(self) -> int:
        return self.seed_site.width if self.pair is None else self.pair.width

    def blueprints(self) -> tuple[Blueprint, ...]:
        """The blueprints that fit here."""
        return tuple(entry for entry in BLUEPRINTS.values() if self.fits(entry))

    def fits(self, blueprint: Blueprint) -> bool:
        if self.pair is not None:
            return isinstance(blueprint, Widening)
        return blueprint.fits(self.seed_site)

    def units_of(self, blueprint: Blueprint) -> int:
        """New units of the first layer of a pair; 0 at other sites."""
        if self.pair is None or not isinstance(blueprint, Widening):
            return 0
        return max(1, round(blueprint.share * self.pair.width))

    def facts_of(self, blueprint: Blueprint) -> SeedFacts:
        """Costs and extent of a seed that fits here."""
        if self.pair is not None:
            return self.pair.facts_of(self.units_of(blueprint))
        return SeedFacts.of(blueprint.program(self.seed_site), self.tokens)

    def params_of(self, blueprint: Blueprint) -> int:
        return self.facts_of(blueprint).params

    def macs_of(self, blueprint: Blueprint) -> int:
        """Multiply-adds per example."""
        return self.facts_of(blueprint).macs

    def check(self, x: Tensor, *, any_length: bool) -> None:
        """Raise if the site's output has another shape than in the example.

        With `any_length` it may have other positions.
        """
        given = x.shape[-1:] if self.kind == SiteKind.TOKENS else x.shape[1:]
        end = 1 if any_length else None
        if given[:end] != self.seed_site.shape[:end]:
            raise ValueError(
                f"site {self.name!r} gave {self.shape} per example when it was traced, and now "
                f"{tuple(x.shape[1:])}; this seed needs a fixed shape: resize the inputs, leave this "
                f"site out with exclude=[{self.name!r}], or name only seeds for any length, such as "
                'blueprints=["conv", "conv_conv"]'
            )


def count_macs(model: nn.Module, inputs: Any) -> int:
    """Multiply-adds per example in matrix products and convolutions, as torch counts them."""
    return round(_macs_by_module(model, inputs).get("Global", 0.0))


def _macs_by_module(model: nn.Module, inputs: Any) -> dict[str, float]:
    """The same of every module that has some, by name."""
    # with gradients and without fused attention: torch does not count some fused kernels
    recurrent = (torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten._cudnn_rnn)
    counter = FlopCounterMode(
        display=False, custom_mapping=dict.fromkeys(recurrent, _recurrent_flops)
    )
    with eval_mode(model, with_grad=True), sdpa_kernel(SDPBackend.MATH), counter:
        forward(model, inputs)
    root, halves = f"{type(model).__name__}.", 2 * batch_size(inputs)
    counts = counter.get_flop_counts().items()
    return {name.removeprefix(root): sum(flops.values()) / halves for name, flops in counts}


def _recurrent_flops(x: Sequence[int], weights: Any, *more: Any, **_: Any) -> int:
    """Of a fused recurrent layer, from the shapes of its arguments."""
    shapes = weights if isinstance(weights, list) else (weights, more[0])  # cuDNN: a list
    each: int = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    return 2 * each * math.prod(x[:-1])


def count_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def find_sites(
    model: nn.Module, example: Any, *others: Any, kind: Mapping[str, str] | None = None
) -> tuple[ModelSite, ...]:
    """The sites where `model` can grow, in forward order; they keep their width in all batches.

    `kind` names the kind of some sites, where the trace is wrong: `{"stem": "image"}`.
    """
    return trace_sites(model, example, *others, kind=kind).sites


def site_table(sites: Sequence[ModelSite]) -> str:
    """A text table: name, kind, shape and possible seeds of each site."""
    rows = [("site", "module", "kind", "shape", "possible seeds (parameters)")]
    for site in sites:
        grows = ", ".join(f"{b.name} {site.params_of(b):,}" for b in site.blueprints())
        kind = "PAIR" if site.pair else site.kind.name
        shape = f"({site.width}, any)" if site.varies else str(site.shape)
        rows.append((site.name, site.module_class, kind, shape, grows))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )


@dataclass(frozen=True)
class SiteTrace:
    """The sites of a model, and why other modules are not."""

    sites: tuple[ModelSite, ...]  # offered by default
    candidates: dict[str, ModelSite]  # all possible ones, by name, in forward order
    refused: dict[str, str]  # the other modules, with the reason
    not_wider: dict[str, str]  # layers that cannot get wider, with the reason

    def choose(self, include: Sequence[str] | None, exclude: Sequence[str]) -> list[ModelSite]:
        """The offered sites, or those named in `include` or inside a module named there.

        A name without an offered site inside may be any candidate.
        """
        for name in (*(include or ()), *exclude):
            self._check_name(name)
        chosen = list(self.sites)
        if include is not None:
            chosen = [site for site in self.candidates.values() if self._is_named(site, include)]
        kept = [site for site in chosen if not _is_in(site.name, exclude)]
        if not kept:
            raise ValueError(self._nothing_found(include, exclude))
        return kept

    def _is_named(self, site: ModelSite, names: Sequence[str]) -> bool:
        if site in self.sites:
            return _is_in(site.name, names)
        inner = (s.name for s in self.sites if s.pair is None)
        return site.name in names and not any(_is_in(name, [site.name]) for name in inner)

    def _check_name(self, name: str) -> None:
        if name in self.candidates or any(_is_in(site.name, [name]) for site in self.sites):
            return
        if name in self.refused:
            raise ValueError(f"nothing can grow at {name!r}: {self.refused[name]}")
        near = _near(name, (*self.candidates, *self.refused))
        raise ValueError(
            f"the model has no module {name!r}; did you mean {near!r}? "
            f"Sites: {[site.name for site in self.sites]}"
        )

    def _nothing_found(self, include: Sequence[str] | None, exclude: Sequence[str]) -> str:
        if self.sites:
            found = [site.name for site in self.sites]
            return f"no site is left of {found} with sites={include}, exclude={list(exclude)}"
        last = dict.fromkeys(self.candidates, "no layer with weights reads it")
        reasons = "".join(f"\n  {name}: {why}" for name, why in {**self.refused, **last}.items())
        return (
            "the model has no site: no module returns a tensor with channels and has a layer after "
            f"it. Modules:{reasons or ' no submodule was called'}"
        )


def _is_in(name: str, modules: Sequence[str]) -> bool:
    """Whether a site is that of one of these modules, or inside one."""
    return any(name == m or name.startswith((f"{m}.", f"{m}->")) for m in modules)


def trace_sites(
    model: nn.Module,
    example: Any,
    *others: Any,
    widens: bool = True,
    kind: Mapping[str, str] | None = None,
) -> SiteTrace:
    """Trace every example, the first one twice; sites must have the same shape in all traces.

    `widens`: with pairs of layers that can get wider. `kind`: as in `find_sites`.
    """
    if type(model).__module__.startswith("torch._dynamo"):  # torch.compile made it
        raise ValueError(
            "the model is compiled, so its modules are not called one by one and nothing can grow "
            "between them; grow the original model and compile the result"
        )
    batch = batch_size(example)
    runs = [trace(model, inputs) for inputs in (example, example, *others)]
    first = runs[0]
    candidates: dict[str, ModelSite] = {}
    refused: dict[str, str] = {}
    kinds = _checked_kinds(kind or {}, first)
    for name, calls in first.calls.items():
        try:
            site = _candidate(name, calls, batch, kinds.get(name))
            for other in runs[1:]:
                site = _in_other(site, other.calls.get(name, []))
            candidates[name] = site
        except Refused as why:
            if name in kinds:
                raise ValueError(f"kind={kind}: nothing can grow at {name!r}: {why}") from why
            refused[name] = str(why)
    uncalled = (name for name in first.modules if name and name not in first.calls)
    refused |= dict.fromkeys(uncalled, "it is not called in a forward pass")
    pairs, not_wider = _pair_sites(model, example, runs, batch) if widens else ({}, {})
    offered = (*_offered(first, candidates), *pairs.values())
    return SiteTrace(offered, candidates | pairs, refused, not_wider)


def _pair_sites(
    model: nn.Module, example: Any, runs: Sequence[Run], batch: int
) -> tuple[dict[str, ModelSite], dict[str, str]]:
    """The pairs of layers that can get wider, by name, and the reasons for other layers.

    A pair must be one in every trace.
    """
    macs = _macs_by_module(model, example)
    reasons: dict[str, str] = {}

    def pairs_of(run: Run) -> dict[str, LayerPair]:
        pairs = {}
        for name in run.calls:
            try:
                pair = pair_at(name, run, macs)
            except Refused as why:
                reasons[name] = str(why)
                continue
            if pair is not None:
                pairs[pair.name] = pair
        return pairs

    first, *others = map(pairs_of, runs)
    sites = {}
    for name, pair in first.items():
        if all(name in other for other in others):
            calls = [replace(call, weights=pair.first) for call in runs[0].calls[pair.first]]
            with suppress(Refused):
                sites[name] = replace(_candidate(name, calls, batch), pair=pair, tokens=1.0)
    return sites, reasons


_AXES = {SiteKind.VECTOR: 2, SiteKind.SERIES: 3, SiteKind.IMAGE: 4}  # of an output, with the batch


def _checked_kinds(given: Mapping[str, str], run: Run) -> dict[str, SiteKind]:
    """The kinds that a user has named, by module; raises for what cannot be."""
    if not isinstance(given, Mapping):
        raise ValueError(f"kind={given!r}; give a dict of names and kinds: {{'stem': 'image'}}")
    kinds = {}
    for name, kind in given.items():
        named = f"kind={{{name!r}: {kind!r}}}"
        if str(kind).upper() not in SiteKind.__members__:
            raise ValueError(f"{named}; there are {[known.name.lower() for known in SiteKind]}")
        if name not in run.calls:
            raise ValueError(f"{named}: it is not called; did you mean {_near(name, run.calls)!r}?")
        kinds[name] = SiteKind[str(kind).upper()]
    return kinds


def _near(name: str, names: Iterable[str]) -> str:
    return difflib.get_close_matches(name, list(names), n=1, cutoff=0.0)[0]


def _candidate(name: str, calls: list[Call], batch: int, kind: SiteKind | None = None) -> ModelSite:
    """The site after a module; raises if there is none."""
    call = calls[0]
    if len(calls) > 1:
        raise Refused(f"it is called {len(calls)} times in a forward pass")
    if not isinstance(call.output, tuple):
        raise Refused(f"its output is a {call.output}, not a tensor of floats")
    if not call.is_learning:
        raise Refused("the model calls it without gradients, so a seed could not learn there")
    if not call.weights:
        raise Refused("no layer with weights comes before it")
    if kind is None:
        by_axes = {axes: known for known, axes in _AXES.items()}
        kind = SiteKind.TOKENS if call.channels_last else by_axes.get(len(call.output))
    elif len(call.output) < 3 if kind == SiteKind.TOKENS else len(call.output) != _AXES[kind]:
        axes = _AXES.get(kind, "3 or more")
        raise Refused(
            f"its output has shape {call.output}; this kind has {axes} axes, with the batch"
        )
    if kind is None:
        raise Refused(f"its output has shape {call.output}, which no blueprint fits")
    if kind != SiteKind.TOKENS and call.output[0] != batch:
        raise Refused(f"its output has shape {call.output}, whose first axis is not the batch")
    is_tokens = kind == SiteKind.TOKENS
    tokens = math.prod(call.output[:-1]) / batch if is_tokens else 1.0
    weights = (call.weights, call.dtype, call.device)
    return ModelSite(name, type(call.module).__name__, kind, call.output[1:], tokens, *weights)


def _in_other(site: ModelSite, calls: list[Call]) -> ModelSite:
    """The site as it is in another trace too; raises if that trace differs."""
    shapes = [call.output for call in calls]
    if len(calls) != 1 or not isinstance(shapes[0], tuple):
        raise Refused(f"it is called once in one forward pass and {len(calls)} times in another")
    channel = -1 if site.kind == SiteKind.TOKENS else 1
    if len(shapes[0]) != len(site.shape) + 1 or shapes[0][channel] != site.width:
        raise Refused(f"its output changes shape: {site.shape}, then {shapes[0][1:]}")
    other_length = site.kind != SiteKind.TOKENS and shapes[0][1:] != site.shape
    return replace(site, varies=True) if other_length else site


def _offered(run: Run, candidates: dict[str, ModelSite]) -> tuple[ModelSite, ...]:
    """The candidates that all data flows through, one for each layer with weights.

    A model without any (skip connections from end to end) offers all its layers.
    """
    places: dict[Any, list[str]] = {}  # modules that return the same tensor are one place
    for name in candidates:
        places.setdefault(run.calls[name][0].node, []).append(name)
    used = run.used()
    inner = [
        (call, names)
        for call, names in ((run.calls[names[0]][0], names) for names in places.values())
        if call.num_weight_calls < run.num_weight_calls and call.node in used
    ]
    cuts = [(call, names) for call, names in inner if is_cut(call.node, run)]
    stages: list[tuple[Call, list[str]]] = []
    for call, names in cuts or inner:
        if not stages or call.num_weight_calls > stages[-1][0].num_weight_calls:
            stages.append((call, names))
        elif call.output == stages[-1][0].output:  # the norm or the activation after a layer
            stages[-1] = (call, names)

    def is_block(name: str) -> bool:
        """Whether it is a composed element of a stack."""
        module = run.calls[name][0].module
        is_element = name.rpartition(".")[2].isdigit() and not isinstance(module, nn.Sequential)
        return is_element and is_composed(module)

    # a block if there is one, else the innermost module
    return tuple(candidates[next(filter(is_block, names), names[0])] for _, names in stages)
