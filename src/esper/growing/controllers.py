"""Controllers for growth: the heuristic, a saved policy, or a custom one."""

from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from esper.leyline.factored_actions import ActionMasks
from esper.leyline.protocols import Controller
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleError
from esper.tamiyo.heuristic import HeuristicController
from esper.tamiyo.learned import LearnedController


@runtime_checkable
class StatefulController(Protocol):
    """A controller whose state can be saved and restored."""

    def memory(self) -> dict[str, Tensor]: ...

    def recall(self, memory: dict[str, Tensor]) -> None: ...


@runtime_checkable
class ExplainingController(Protocol):
    """A controller that gives reasons for its decisions."""

    def reasons(self, reports: Reports, masks: ActionMasks, actions: Tensor) -> list[str]:
        """One text per env; empty for no reason."""
        ...


@runtime_checkable
class TimedController(Protocol):
    """A controller that grows nothing in a run with fewer steps than `least_steps`."""

    @property
    def least_steps(self) -> int: ...


def check_time(controller: Controller, steps: int) -> None:
    """Raise if the run is too short for the controller to grow anything."""
    if isinstance(controller, TimedController) and steps < controller.least_steps:
        missing = controller.least_steps - steps
        raise ValueError(
            f"{type(controller).__name__} needs {controller.least_steps} steps to grow, judge and "
            f"commit a seed, and there are {steps}: nothing would grow; give it {missing} more "
            f"decision{'' if missing == 1 else 's'}"
        )


def make_controller(controller: str | Path | Controller) -> Controller:
    """The controller for "heuristic", the path of a saved policy, or a controller."""
    if controller == "heuristic":
        return HeuristicController()
    if isinstance(controller, Controller) and not isinstance(controller, type):
        return controller
    if not isinstance(controller, str | Path):
        raise ValueError(
            f"controller={controller!r} has no methods begin and decide; give 'heuristic', the path "
            "of a saved policy, or a controller"
        )
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


def reason_of(controller: Controller, reports: Reports, masks: ActionMasks, actions: Tensor) -> str:
    """The controller's reason for its decision; empty if it gives none."""
    return (
        controller.reasons(reports, masks, actions)[0]
        if isinstance(controller, ExplainingController)
        else ""
    )


def check_legal(actions: Tensor, masks: ActionMasks) -> None:
    """Raise for a choice that the masks forbid; a custom controller may ignore them."""
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
