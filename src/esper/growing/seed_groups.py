"""Seeds in a user's optimiser: their parameter groups and their gradients.

For each group of the optimiser there is an empty copy, for new weights. The groups exist from the
start, so their number never changes under a scheduler, and a schedule changes the settings of new
weights like those of the weights that they grow on. A scheduler that was made before growth is
extended once.
"""

import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from esper.surgery.branches import Enlarged
from esper.surgery.slots import Slot

AnyScheduler = LRScheduler | ReduceLROnPlateau

# per-group lists of torch's schedulers
_PER_GROUP = (
    *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs"),
    *("base_momentums", "max_momentums"),
)


class SeedGroups:
    """The groups of an optimiser that new weights join and leave."""

    def __init__(self, optimizer: optim.Optimizer, scheduler: AnyScheduler | None = None):
        name, why = type(optimizer).__name__, ""
        if isinstance(optimizer, optim.Adagrad | optim.LBFGS):
            why = "does not support adding weights later"
        elif isinstance(optimizer, optim.Muon):
            why = "trains matrices only, but seeds also have biases"
        if why:
            raise ValueError(f"{name} {why}; use another optimizer, such as AdamW or SGD")
        self._optimizer = optimizer
        # the user's groups; their copies follow in the same order
        self.num_own = len(optimizer.param_groups)
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

    def replace(self, changed: Iterable[Enlarged]) -> None:
        """Put larger parameters in the place of the model's own; the seed's leave."""
        state = self._optimizer.state
        for entry in changed:
            for group in self._optimizer.param_groups[: self.num_own]:
                group["params"][:] = [entry.new if p is entry.old else p for p in group["params"]]
            if entry.old in state:
                state[entry.new] = entry.moments(state.pop(entry.old), state.get(entry.part, {}))
            self.leave([entry.part])

    def leave(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remove weights with their optimiser state."""
        gone = {id(p): self._optimizer.state.pop(p, None) for p in parameters}
        for group in self._optimizer.param_groups[self.num_own :]:
            stays = [id(parameter) not in gone for parameter in group["params"]]
            for name in ("params", "param_names"):
                if name in group:
                    group[name][:] = [x for x, s in zip(group[name], stays, strict=True) if s]


def _extend(scheduler: Any, num_groups: int) -> None:
    """Repeat every per-group list of a scheduler for the groups that were added."""
    kept = vars(scheduler)
    for part in kept.get("_schedulers", ()):  # of SequentialLR or ChainedScheduler
        _extend(part, num_groups)
    for name in _PER_GROUP:
        values = kept.get(name)
        if isinstance(values, Sequence) and len(values) == num_groups:
            setattr(scheduler, name, [*values, *copy.deepcopy(list(values))])


def group_settings(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of each group's settings, such as its learning rate."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


class SeedGradients:
    def __init__(self, optimizer: optim.Optimizer, slots: Sequence[Slot]):
        self.norms: dict[int, Tensor] = {}  # by slot: root mean square in the last step
        self._slots = slots
        self._calls = self._uses = 0  # since the last check
        self._is_used = self._has_warned = False
        # after the step: a step with a closure computes the gradients itself
        optimizer.register_step_post_hook(self._after_optimizer_step)

    def _after_optimizer_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._is_used |= any(self._gradients(slot) for slot in self._slots)

    def after_step(self) -> None:
        """Keep the norms of the gradients and clear them."""
        has_gradients = False
        for index, slot in enumerate(self._slots):
            if gradients := self._gradients(slot):
                has_gradients = True
                count = sum(gradient.numel() for gradient in gradients)
                norm = torch.nn.utils.get_total_norm(gradients) / math.sqrt(count)
                self.norms[index] = norm.detach()
                assert slot.seed is not None
                slot.seed.zero_grad()
        self._calls += self._is_used or has_gradients
        self._uses += self._is_used
        self._is_used = False

    def check(self) -> None:
        """Warn once if half of the gradients or more were not used; then count from 0."""
        if self._calls >= 2 * max(1, self._uses) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"after_step() was called {self._calls} times, but the optimizer used the seeds' "
                f"gradients {self._uses} times: call it once after each optimizer.step(), not "
                "after each backward pass",
                stacklevel=3,
            )
        self._calls = self._uses = 0

    @staticmethod
    def _gradients(slot: Slot) -> list[Tensor]:
        parameters = () if slot.seed is None else slot.seed.parameters()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]
