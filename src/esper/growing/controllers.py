"""Controllers for growth: the heuristic, a saved policy, or a custom one; and their reports."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from esper.leyline.factored_actions import ActionMasks
from esper.leyline.protocols import Controller
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleError
from esper.tamiyo.growth_rules import EvidenceController
from esper.tamiyo.learned import LearnedController

STATEFUL = (EvidenceController, LearnedController)  # their state is saved and restored


@runtime_checkable
class ExplainingController(Protocol):
    """A controller that gives reasons for its decisions."""

    def reasons(self, reports: Reports, masks: ActionMasks, actions: Tensor) -> list[str]:
        """One text per env; empty for no reason."""
        ...


def make_controller(controller: str | Path | Controller, steps: int) -> Controller:
    """The controller for "heuristic", the path of a saved policy, or a controller.

    Raises if `steps` decisions are too few for the heuristic to grow anything.
    """
    made: Any = EvidenceController() if controller == "heuristic" else controller
    if isinstance(made, str | Path) and Path(made).is_file():
        made = LearnedController.load(made)
    if isinstance(made, Path) or (isinstance(made, str) and Path(made).suffix):
        raise ValueError(
            f"controller={str(made)!r}: there is no such file; `esper train` writes one, "
            "controller.pt in the folder of its run. Or give 'heuristic'"
        )
    if not isinstance(made, Controller) or isinstance(made, type):
        raise ValueError(
            f"controller={controller!r}; give 'heuristic', the file of a saved policy, or an object "
            "with methods begin and decide"
        )
    if isinstance(made, EvidenceController) and (more := made.least_steps - steps) > 0:
        raise ValueError(
            f"the controller needs {made.least_steps} decisions to grow, judge and commit a seed, and "
            f"there are {steps} before the last one: nothing would grow; give it {more} more "
            f"decision{'s' if more > 1 else ''}"
        )
    return made


def blueprints_for(controller: Controller, names: Sequence[str] | None) -> Sequence[str] | None:
    """The blueprints to offer: those named, or those that a learned controller was trained with.

    It has learned nothing about others, so naming them warns.
    """
    known = getattr(controller, "menu", ())
    if names is None or not known:
        return known or names
    if others := [name for name in names if name not in known]:
        told = f"the controller was trained with {list(known)}, not with {others}; leave those out"
        warnings.warn(told, stacklevel=4)
    return names


def check_legal(actions: Tensor, masks: ActionMasks) -> None:
    """Raise for a choice that the masks forbid; a custom controller may ignore them."""
    space = masks.action_space
    if tuple(actions.shape) != (1, space.num_heads):
        raise ValueError(f"the actions have shape {(*actions.shape,)}, not (1, {space.num_heads})")
    for index, head in enumerate(space):
        row, choice = masks.row(index, actions)[0], int(actions[0, index])
        if bool(row.any()) and not (0 <= choice < head.size and bool(row[choice])):
            raise LifecycleError(
                f"the controller chose {choice} for {head.name!r}; legal now: "
                f"{row.nonzero().flatten().tolist()}"
            )
