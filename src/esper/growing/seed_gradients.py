"""The gradients of seeds after an optimizer step: their norms, and whether they were used.

`Growth.after_step` clears these gradients because the model's `zero_grad` does not reach them.
Called for every part of an accumulated batch, or before `optimizer.step()`, it would keep the seeds
from learning. A step hook notices that.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, optim

from esper.growing.slots import Slot


class SeedGradients:
    def __init__(self, optimizer: optim.Optimizer, slots: Sequence[Slot]):
        self.norms: dict[int, Tensor] = {}  # by slot: root mean square in the last step
        self._slots = slots
        self._calls = self._uses = 0  # since the last check
        self._is_used = self._has_warned = False
        optimizer.register_step_pre_hook(self._before_optimizer_step)

    def _before_optimizer_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
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
