"""Parameter groups for new weights: for each group of a user's optimiser, an empty copy.

The groups exist from the start, so their number never changes under a scheduler, and a schedule
changes the settings of new weights like those of the weights that they grow on. A scheduler that
was made before growth is extended once.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

AnyScheduler = LRScheduler | ReduceLROnPlateau

# per-group lists of torch's schedulers
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
        self.num_own = len(
            optimizer.param_groups
        )  # the user's groups; their copies follow in the same order
        driven = any("initial_lr" in group for group in optimizer.param_groups)
        if driven and scheduler is None:
            raise ValueError(
                "this optimizer has a learning-rate scheduler: pass it as scheduler=..., so that new "
                "weights follow it too, or create it after Growth"
            )
        for group in list(optimizer.param_groups):
            settings = {name: value for name, value in group.items() if name != "params"}
            if "param_names" in settings:
                settings["param_names"] = []
            optimizer.add_param_group({**copy.deepcopy(settings), "params": []})
        if scheduler is not None:
            _extend(scheduler, self.num_own)

    def owner(self, weights: Iterable[nn.Parameter]) -> int:
        """The user's group of the first of these weights that is trained, or group 0."""
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
        """Remove weights with their optimiser state."""
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
    # both read their weights only at construction
    if isinstance(optimizer, optim.Adagrad | optim.LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} does not support adding weights later; use another "
            "optimizer, such as AdamW or SGD"
        )
    if isinstance(optimizer, optim.Muon):
        raise ValueError(
            "Muon trains matrices only, but seeds also have biases; use another optimizer, such as "
            "AdamW or SGD"
        )


def _extend(scheduler: Any, num_groups: int) -> None:
    """Repeat every per-group list of a scheduler for the groups that were added."""
    kept = vars(scheduler)
    for part in kept.get("_schedulers", ()):  # of SequentialLR or ChainedScheduler
        _extend(part, num_groups)
    for name in _PER_GROUP:
        values = kept.get(name)
        if isinstance(values, Sequence) and len(values) == num_groups:
            setattr(scheduler, name, [*values, *copy.deepcopy(list(values))])
