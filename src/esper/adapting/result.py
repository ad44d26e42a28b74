"""The result of an adaptation: use it, take it back, save it, merge it, export it; its ledger."""

import copy
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from esper.adapting.adapted import Adapted, nested_encoders
from esper.adapting.plans import SINGLE_PLACES, Argument, HeadMode, Place, Places, Plan, What
from esper.adapting.rows import first_float
from esper.leyline.constants import SiteKind
from esper.nissa.ledger import Ledger, Verdict
from esper.runtime.files import UnreadableFile, read_file, write_file
from esper.surgery.eval_mode import untouched_randomness
from esper.surgery.export import FORMATS, export
from esper.surgery.plain import ChangedSite
from esper.surgery.sites import ModelSite
from esper.surgery.tracing import without_graphs

_KIND, _VERSION = "adaptation", 2
_SAVED_WEIGHTS = {"weights": What.TUNE, "layers": What.LORA, "biases": What.BIAS}


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """A change of a model. `model` is the adapted one, an ordinary module in eval mode."""

    model: nn.Module = field(repr=False)
    original: nn.Module = field(repr=False)
    plan: Plan
    change: dict[str, Tensor] = field(repr=False)  # its parameters, by name
    places: Places = field(repr=False)
    example: Any = field(default=None, repr=False)  # a few rows

    @classmethod
    def of(
        cls,
        original: nn.Module,
        places: Places,
        plan: Plan,
        change: Mapping[str, Tensor],
        **more: Any,
    ) -> Self:
        """The change of a plan, merged into a copy of the original."""
        adapted = Adapted(original, places, plan)
        own = {name: tensor.detach() for name, tensor in adapted.changes().items()}
        for name, tensor in change.items():
            own[name].copy_(tensor)
        model = plain_copy(adapted)
        return cls(model=model, original=original, plan=plan, change=own, places=places, **more)

    @property
    def params(self) -> int:
        """Parameters of the change, the head's included."""
        return sum(tensor.numel() for tensor in self.change.values())

    def remove(self) -> nn.Module:
        """The original model; adaptation never wrote to it."""
        return self.original

    def save(self, path: str | Path) -> None:
        """Write the change alone to a small file, for `esper.load_adaptation(model, path)`."""
        contents = {
            "plan": [int(part) for part in self.plan],
            "places": _plain_places(self.places),
            "model": fingerprint(self.original),
            "change": {name: tensor.cpu() for name, tensor in self.change.items()},
        }
        write_file(path, _KIND, contents, version=_VERSION)

    def plain_model(self) -> nn.Module:
        """Another copy of the adapted model."""
        return copy.deepcopy(self.model)

    def export(
        self, path: str | Path, formats: Sequence[str] = FORMATS, *, example: Any = None
    ) -> dict[str, Path]:
        """Write the adapted model as files that do not need Esper, by format.

        `example` is a batch of inputs, which a loaded adaptation needs.
        """
        example = self.example if example is None else example
        if example is None:
            raise ValueError("a loaded adaptation has no rows; give example=, a batch of inputs")
        with untouched_randomness(self.model):
            return export(self.model, example, path, formats)


@dataclass(frozen=True, kw_only=True)
class AdaptationResult(Adaptation):
    """What `esper.adapt` did."""

    rate: float
    accuracy: dict[str, float]  # on held-out rows: "adapted", "as it is", "head only", "LP-FT"
    validation_rows: int
    signals: dict[str, float]
    ledger: Ledger

    def __str__(self) -> str:
        if "result" in self.ledger.facts:
            return self.ledger.facts["result"]
        shown = {name: f"{100 * value:.1f}%" for name, value in self.accuracy.items()}
        others = ", ".join(f"{name} {text}" for name, text in shown.items() if name != "adapted")
        if "full fine-tuning" not in shown:
            others += "; LP-FT and fine-tuning change more than the budget allows"
        return (
            f"accuracy {shown['as it is']} to {shown['adapted']} on rows held out\n"
            f"plan: {self.plan}, learning rate {self.rate:g}, {self.params:,} parameters trained\n"
            f"on {self.validation_rows} held-out rows: adapted {shown['adapted']}; {others}\n"
            "the original model is unchanged: result.remove()\n"
            "the adapted model: result.model; keep the change: result.save(path)"
        )


def load_adaptation(model: nn.Module, path: str | Path) -> Adaptation:
    """The change in a file, of this model; raises if the file belongs to another model."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; give the nn.Module first")
    contents = read_file(path, _KIND, version=_VERSION)
    if contents["model"] != fingerprint(model):
        raise UnreadableFile(
            f"{path} changes another model: names, shapes or values of the weights differ. Load the "
            "weights that were adapted first"
        )
    place, what, head = contents["plan"]
    plan = Plan(Place(place), What(what), HeadMode(head))
    return Adaptation.of(model, _read_places(contents["places"], model), plan, contents["change"])


def fingerprint(model: nn.Module) -> str:
    """A checksum of the names, shapes and values of a model's state."""
    total = 0
    state = model.state_dict().items()
    for name, tensor in ((name, value) for name, value in state if isinstance(value, Tensor)):
        total = zlib.crc32(f"{name} {tuple(tensor.shape)}".encode(), total)
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        total = zlib.crc32(values.numpy().tobytes(), total)
    return f"{total:08x}"


class Placed(ChangedSite):
    """A module followed by a branch."""

    def __init__(self, site: nn.Module, branch: nn.Module):
        super().__init__(site)
        self.branch = branch

    def change(self, x: Tensor) -> Tensor:
        changed: Tensor = self.branch(x)
        return changed


class AtInput(nn.Module):
    """A model of which one argument passes a branch."""

    def __init__(self, branch: nn.Module, model: nn.Module, argument: Argument):
        super().__init__()
        self.branch, self.model, self.argument = branch, model, argument

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.argument.changed(self.branch, args, kwargs)
        return self.model(*args, **kwargs)


def plain_copy(adapted: Adapted) -> nn.Module:
    """A copy of the model: changed weights merged, branches as ordinary modules."""
    branches, get = adapted.branches(), adapted.model.get_submodule
    sites = [(get(name), branch) for name, branch in branches.items() if name]
    sites.sort(key=lambda entry: len(list(entry[0].modules())))  # inner ones first
    copies = without_graphs(adapted.model)  # also replaces modules with two names
    for site, branch in sites:
        copies[id(site)] = Placed(copy.deepcopy(site, copies), copy.deepcopy(branch))
    model = copy.deepcopy(adapted.model, copies)
    with torch.no_grad():
        for name, weight in adapted.weights().items():
            copies[id(adapted.model.get_parameter(name))].copy_(weight)
    for encoder in nested_encoders(model) if branches else ():
        encoder.use_nested_tensor = False
    at_input = copy.deepcopy(branches.get(""))
    return (model if at_input is None else AtInput(at_input, model, adapted.argument)).eval()


def _plain_places(places: Places) -> dict[str, Any]:
    weights = {
        key: {int(place): names for place, names in places.weights[what].items()}
        for key, what in _SAVED_WEIGHTS.items()
    }
    return weights | {
        "sites": {
            int(place): [s.name, s.module_class, int(s.kind), s.shape, s.tokens, s.weights]
            for place, s in places.sites.items()
        },
        "head": places.head,
        "features": places.features,
        "argument": [*places.argument],
    }


def _read_places(saved: dict[str, Any], model: nn.Module) -> Places:
    like = first_float(model)
    first = [0, next(iter(signature(model.forward).parameters))]  # in files of version 0.2.0
    sites = {
        Place(place): ModelSite(
            name, layer, SiteKind(kind), tuple(shape), tokens, weights, like.dtype, like.device
        )
        for place, (name, layer, kind, shape, tokens, weights) in saved["sites"].items()
    }
    weights = {
        what: {Place(place): tuple(names) for place, names in saved[key].items()}
        for key, what in _SAVED_WEIGHTS.items()
    }
    argument = Argument(*saved.get("argument", first))
    return Places(sites, weights, tuple(saved["head"]), saved["features"], argument)


def reasons_for(signals: Mapping[str, float]) -> str:
    """The signals that matter most for the choice, in a sentence."""
    accuracy = signals["accuracy"]
    said = [f"the model is right on {accuracy:.0%} of them"]
    if signals["relabelling_gain"] > 0.1:
        said.append(f"{signals['relabelled_accuracy']:.0%} if its classes were renamed")
    if signals["classes_seen"] < 1:
        said.append(f"the labels name {signals['classes_seen']:.0%} of its classes")
    probe = signals["probe_accuracy"]
    if probe > accuracy + 0.1:
        said.append(f"a new head on its features would be right on {probe:.0%}")
    if signals["has_source"]:
        places = (place.name.lower() for place in SINGLE_PLACES)
        most = max(places, key=lambda place: signals[f"{place}.mean_shift"])
        said.append(f"activations moved most at the place {most}")
    return ", ".join(said)


def conclude(ledger: Ledger, plan: Plan, rate: float) -> dict[str, float]:
    """Note the trial that is kept, and the verdict against the first: the model as it is.

    Returns the accuracy of both.
    """
    tried = [(trial.plan, trial.rate) for trial in ledger.trials]
    kept = tried.index((str(plan), rate))
    as_is, chosen = ledger.trials[0], replace(ledger.trials[kept], kept=True)
    ledger.trials[kept] = chosen
    ledger.after = replace(ledger.before, params=ledger.before.params + chosen.params)
    before, after = as_is.metric or 0.0, chosen.metric or 0.0
    ledger.headline = (
        f"{'Adapted' if kept else 'Not changed'}: {chosen.plan}, accuracy {ledger.show(before)} to "
        f"{ledger.show(after)} on held-out rows, {chosen.params:+,} parameters."
    )
    ledger.verdict = Verdict(grown=after, ungrown=before, returned="grown" if kept else "ungrown")
    return {"adapted": after, "as it is": before}
