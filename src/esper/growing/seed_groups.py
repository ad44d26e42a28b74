"""Where new weights join a user's optimiser: beside each of its groups, an empty one like it.

The groups exist from the start, so that their number never changes under a scheduler, and a
schedule moves the new weights' settings as it moves those of the weights they grow on. A
scheduler that was made before growth is taught about them once.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

AnyScheduler = LRScheduler | ReduceLROnPlateau

# what torch's schedulers keep per parameter group, outside the groups themselves
_PER_GROUP = (
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
)


class SeedGroups:
    """The groups of an optimiser that new weights join and leave."""

    def __init__(self, optimizer: optim.Optimizer, scheduler: AnyScheduler | None = None):
        _check_optimizer(optimizer)
        self._optimizer = optimizer
        self.num_own = len(optimizer.param_groups)  # the user's; the others follow in their order
        driven = any("initial_lr" in group for group in optimizer.param_groups)
        if driven and scheduler is None:
            raise ValueError(
                "a learning-rate scheduler drives this optimizer: pass it as scheduler=..., so "
                "that new weights follow it too, or make it after Growth"
            )
        for group in list(optimizer.param_groups):
            settings = {name: value for name, value in group.items() if name != "params"}
            if "param_names" in settings:
                settings["param_names"] = []
            optimizer.add_param_group({**copy.deepcopy(settings), "params": []})
        if scheduler is not None:
            _teach(scheduler, self.num_own)

    def owner(self, weights: Iterable[nn.Parameter]) -> int:
        """The user's group with the first of these weights that is trained; else the first one."""
        groups = self._optimizer.param_groups[: self.num_own]
        index = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        return next((index[id(p)] for p in weights if id(p) in index), 0)

    def join(self, owner: int, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        group = self._optimizer.param_groups[self.num_own + owner]
        for name, parameter in named:
            group["params"].append(parameter)
            if "param_names" in group:
                group["param_names"].append(name)

    def leave(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes weights out, with their state; nothing else changes."""
        gone = {id(parameter) for parameter in parameters}
        for group in self._optimizer.param_groups[self.num_own :]:
            stays = [id(parameter) not in gone for parameter in group["params"]]
            for parameter in group["params"]:
                if id(parameter) in gone:
                    self._optimizer.state.pop(parameter, None)
            for name in ("params", "param_names"):
                if name in group:
                    group[name][:] = [x for x, s in zip(group[name], stays, strict=True) if s]


def _check_optimizer(optimizer: optim.Optimizer) -> None:
    # both look at their weights only once, when they are made
    if isinstance(optimizer, optim.Adagrad | optim.LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} takes in no new weights once it is made; use another "
            "optimizer, such as AdamW or SGD"
        )
    if isinstance(optimizer, optim.Muon):
        raise ValueError(
            "Muon trains matrices only, and seeds have biases too; use another optimizer, such as "
            "AdamW or SGD"
        )


def _teach(scheduler: Any, num_groups: int) -> None:
    """Every list that a scheduler keeps per group once more, for the groups added after them."""
    kept = vars(scheduler)
    for part in kept.get("_schedulers", ()):  # of a sequence or a chain
        _teach(part, num_groups)
    for name in _PER_GROUP:
        values = kept.get(name)
        if isinstance(values, Sequence) and len(values) == num_groups:
            setattr(scheduler, name, [*values, *copy.deepcopy(list(values))])
