"""The result of an adaptation: use it, take it back, save it, merge it, export it; its ledger."""

import copy
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.adapting.adapted import Adapted, nested_encoders, with_first_input
from esper.adapting.plans import HeadMode, Place, Places, Plan, What
from esper.growing.export import FORMATS, export
from esper.growing.ledger import Ledger, NetworkRecord, Verdict
from esper.growing.plain import ChangedSite
from esper.growing.sites import ModelSite, count_params
from esper.leyline.constants import SiteKind
from esper.leyline.files import UnreadableFile, read_file, write_file

_KIND, _VERSION = "adaptation", 2


@dataclass(frozen=True)
class AdaptationResult:
    """What `esper.adapt` did. `model` is the adapted model, with a copy of the original inside."""

    model: Adapted
    original: nn.Module = field(repr=False)
    rate: float
    accuracy: dict[str, float]  # on held-out rows: "adapted", "as it is", "head only", "LP-FT"
    validation_rows: int
    signals: dict[str, float]
    ledger: Ledger
    places: Places = field(repr=False)
    example: Any = field(repr=False)

    @property
    def plan(self) -> Plan:
        return self.model.plan

    @property
    def params(self) -> int:
        """Parameters of the change, the head's included."""
        return sum(tensor.numel() for tensor in self.model.changes().values())

    def remove(self) -> nn.Module:
        """The original model; adaptation never wrote to it."""
        return self.original

    def save(self, path: str | Path) -> None:
        """Write the change alone to a small file, for `esper.load_adaptation(model, path)`."""
        change = {name: tensor.detach().cpu() for name, tensor in self.model.changes().items()}
        contents = {
            "plan": [int(part) for part in self.plan],
            "places": _plain_places(self.places),
            "model": fingerprint(self.model.model),
            "change": change,
        }
        write_file(path, _KIND, contents, version=_VERSION)

    def plain_model(self) -> nn.Module:
        """A copy without Esper's wrapper: changed weights merged, seeds as ordinary modules."""
        return plain_copy(self.model)

    def export(self, path: str | Path, formats: Sequence[str] = FORMATS) -> dict[str, Path]:
        """Write the adapted model as files that do not need Esper, by format."""
        return export(self.plain_model(), self.example, path, formats)

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
            "keep the change: result.save(path); a plain module: result.plain_model()"
        )


def load_adaptation(model: nn.Module, path: str | Path) -> Adapted:
    """The model with the change in a file; raises if the file belongs to another model."""
    contents = read_file(path, _KIND, version=_VERSION)
    if contents["model"] != fingerprint(model):
        raise UnreadableFile(
            f"{path} changes another model: names, shapes or values of the weights differ. Load the "
            "weights that were adapted first"
        )
    place, what, head = contents["plan"]
    plan = Plan(Place(place), What(what), HeadMode(head))
    adapted = Adapted(model, _read_places(contents["places"], model), plan)
    own = adapted.changes()
    with torch.no_grad():
        for name, tensor in contents["change"].items():
            own[name].copy_(tensor)
    return adapted.own_copy()


def fingerprint(model: nn.Module) -> str:
    """A checksum of the names, shapes and values of a model's state."""
    total = 0
    for name, tensor in model.state_dict().items():
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
    """A model whose first input passes a branch."""

    def __init__(self, branch: nn.Module, model: nn.Module):
        super().__init__()
        self.branch, self.model = branch, model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_first_input(self.branch, (args, kwargs))
        return self.model(*args, **kwargs)


def plain_copy(adapted: Adapted) -> nn.Module:
    model = copy.deepcopy(adapted.model)
    state = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in adapted.weights().items():
            state[name].copy_(weight)
    for encoder in nested_encoders(model) if adapted.branch_sites else ():
        encoder.use_nested_tensor = False
    at_input = None
    for place, name in adapted.branch_sites.items():
        branch = copy.deepcopy(adapted.branch(place))
        if name:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Placed(model.get_submodule(name), branch))
        else:
            at_input = branch
    return (model if at_input is None else AtInput(at_input, model)).eval()


def _plain_places(places: Places) -> dict[str, Any]:
    by_place = {key: getattr(places, key) for key in ("weights", "layers", "biases")}
    return {
        "sites": {
            int(place): [s.name, s.module_class, int(s.kind), list(s.shape), s.tokens, s.weights]
            for place, s in places.sites.items()
        },
        **{k: {int(p): list(names) for p, names in held.items()} for k, held in by_place.items()},
        "head": list(places.head),
        "features": places.features,
    }


def _read_places(saved: dict[str, Any], model: nn.Module) -> Places:
    like = next(model.parameters())
    sites = {
        Place(place): ModelSite(
            name, layer, SiteKind(kind), tuple(shape), tokens, weights, like.dtype, like.device
        )
        for place, (name, layer, kind, shape, tokens, weights) in saved["sites"].items()
    }
    weights, layers, biases = (
        {Place(place): tuple(names) for place, names in saved[key].items()}
        for key in ("weights", "layers", "biases")
    )
    return Places(sites, weights, layers, biases, tuple(saved["head"]), saved["features"])


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
    places = [place for place in Place if f"{place.name.lower()}.probe_accuracy" in signals]
    shift = {p: signals.get(f"{p.name.lower()}.mean_shift", 0.0) for p in places}
    if signals["has_source"] and shift:
        most = max(shift, key=lambda place: shift[place])
        said.append(f"activations moved most at the place {most.name.lower()}")
    return ", ".join(said)


def new_ledger(model: nn.Module, controller: str, **facts: str) -> Ledger:
    """An empty ledger for an adaptation."""
    return Ledger(
        model=type(model).__name__,
        metric="accuracy",
        controller=controller,
        before=NetworkRecord(params=count_params(model), macs=0),
        facts=facts,
    )


def conclude(ledger: Ledger, kept: int) -> None:
    """Note which of the trials is kept, and the verdict against the first: the model as it is."""
    as_is, chosen = ledger.trials[0], replace(ledger.trials[kept], kept=True)
    ledger.trials[kept] = chosen
    ledger.after = replace(ledger.before, params=ledger.before.params + chosen.params)
    before, after = as_is.metric or 0.0, chosen.metric or 0.0
    ledger.headline = (
        f"{'Adapted' if kept else 'Not changed'}: {chosen.plan}, accuracy {ledger.show(before)} to "
        f"{ledger.show(after)} on held-out rows, {chosen.params:+,} parameters."
    )
    ledger.verdict = Verdict(grown=after, ungrown=before, returned="grown" if kept else "ungrown")
