"""The result of an adaptation: use it, take it back, save it, merge it, export it."""

import copy
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.adapting.adapted import Adapted, nested_encoders, with_first_input
from esper.adapting.plans import HeadMode, Place, Places, Plan, What
from esper.growing.export import FORMATS, export
from esper.growing.inputs import tensors
from esper.growing.ledger import Ledger
from esper.growing.plain import ChangedSite
from esper.growing.sites import ModelSite
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
        others = ", ".join(
            f"{name} {100 * value:.1f}%"
            for name, value in self.accuracy.items()
            if name != "adapted"
        )
        if "result" in self.ledger.facts:
            return f"{self.ledger.facts['result']}"
        before, after = (100 * self.accuracy[name] for name in ("as it is", "adapted"))
        return (
            f"accuracy {before:.1f}% to {after:.1f}% on rows held out\n"
            f"plan: {self.plan}, learning rate {self.rate:g}, {self.params:,} parameters trained\n"
            f"on {self.validation_rows} held-out rows: adapted "
            f"{100 * self.accuracy['adapted']:.1f}%; {others}\n"
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
        values = (
            tensor.detach().cpu().contiguous().view(torch.uint8) if tensor.dim() else tensor.cpu()
        )
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
    return {
        "sites": {
            int(place): [s.name, s.module_class, int(s.kind), list(s.shape), s.tokens, s.weights]
            for place, s in places.sites.items()
        },
        "weights": {int(place): list(names) for place, names in places.weights.items()},
        "layers": {int(place): list(names) for place, names in places.layers.items()},
        "biases": {int(place): list(names) for place, names in places.biases.items()},
        "head": list(places.head),
        "features": places.features,
    }


def _read_places(saved: dict[str, Any], model: nn.Module) -> Places:
    like = tensors(list(model.parameters()))[0]
    sites = {
        Place(place): ModelSite(
            name,
            module_class,
            SiteKind(kind),
            tuple(shape),
            tokens,
            weights,
            like.dtype,
            like.device,
        )
        for place, (name, module_class, kind, shape, tokens, weights) in saved["sites"].items()
    }
    weights, layers, biases = (
        {Place(place): tuple(names) for place, names in saved[key].items()}
        for key in ("weights", "layers", "biases")
    )
    return Places(sites, weights, layers, biases, tuple(saved["head"]), saved["features"])
