"""Who decides: the heuristic, a saved policy, or whatever the user brings."""

from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from esper.leyline.factored_actions import ActionMasks
from esper.leyline.protocols import Controller
from esper.leyline.stages import LifecycleError
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


def check_legal(actions: Tensor, masks: ActionMasks) -> None:
    """Raise for a choice that the masks forbid: a controller of one's own may not know them."""
    space = masks.action_space
    if tuple(actions.shape) != (1, space.num_heads):
        raise ValueError(
            f"the controller gave actions of shape {tuple(actions.shape)}; "
            f"expected (1, {space.num_heads})"
        )
    for index, head in enumerate(space):
        row, choice = masks.row(index, actions)[0], int(actions[0, index])
        if bool(row.any()) and not (0 <= choice < head.size and bool(row[choice])):
            raise LifecycleError(
                f"the controller chose {choice} for {head.name!r}; legal now: "
                f"{row.nonzero().flatten().tolist()}"
            )
