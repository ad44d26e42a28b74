"""Who decides: the heuristic, a saved policy, or whatever the user brings."""

from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from esper.leyline.protocols import Controller
from esper.tamiyo.heuristic import HeuristicController
from esper.tamiyo.learned import LearnedController


@runtime_checkable
class Remembers(Protocol):
    """A controller whose memory of the run can be saved and brought back."""

    def memory(self) -> dict[str, Tensor]: ...

    def recall(self, memory: dict[str, Tensor]) -> None: ...


def make_controller(controller: str | Path | Controller) -> Controller:
    """The heuristic by its name, a learned policy by its file, or the controller itself."""
    if controller == "heuristic":
        return HeuristicController()
    if not isinstance(controller, str | Path):
        return controller
    if not Path(controller).is_file():
        raise ValueError(
            f"controller={str(controller)!r} is neither 'heuristic' nor a file; give the path of a "
            "saved policy, or a controller"
        )
    return LearnedController.load(controller)


def controller_name(controller: str | Path | Controller) -> str:
    if isinstance(controller, str | Path):
        return str(controller)
    return type(controller).__name__
