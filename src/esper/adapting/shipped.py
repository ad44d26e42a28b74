"""The controllers that come with Esper."""

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from esper.adapting.controller import AdaptationController

_FOLDER = resources.files("esper.adapting") / "controllers"


def controllers() -> dict[str, dict[str, Any]]:
    """The controllers in the package: name -> what it was trained on, and how it did."""
    files = (Path(str(entry)) for entry in _FOLDER.iterdir() if entry.name.endswith(".pt"))
    return {path.stem: _load(path).facts for path in sorted(files)}


def find_controller(controller: str | Path | AdaptationController) -> AdaptationController:
    """A controller given as itself, as the name of one that ships, or as a file."""
    if isinstance(controller, AdaptationController):
        return controller
    shipped = Path(str(_FOLDER / f"{controller}.pt"))
    if isinstance(controller, str) and shipped.exists():
        return _load(shipped)
    if not Path(controller).exists():
        raise ValueError(
            f"no controller {str(controller)!r}: there are {list(controllers())}, or give the path "
            "of a file from `esper train-adapt`"
        )
    return AdaptationController.load(controller)  # not cached: the file may be written again


@cache
def _load(path: Path) -> AdaptationController:
    return AdaptationController.load(path)
