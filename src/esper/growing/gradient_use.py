"""Notices a loop in which the seeds' gradients are dropped before the optimiser has used them.

`after_step` drops them, as the model's own `zero_grad` would not. Called for every part of an
accumulated batch, or before the optimiser's step, it leaves the optimiser little or nothing.
"""

import warnings
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import Tensor, nn


class GradientUse:
    """Counts between two decisions the calls of `after_step`, and how often seeds had moved."""

    def __init__(self) -> None:
        self._versions: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()
        self._calls = self._moves = 0
        self._has_warned = False

    def begin(self, seeds: Iterable[nn.Module]) -> None:
        """After a decision, with the seeds that are there now."""
        for seed in seeds:
            self._versions[seed] = _version(seed)
            self._before[seed] = [parameter.detach().clone() for parameter in seed.parameters()]

    def note(self, seeds: Iterable[nn.Module]) -> None:
        """At every call, before the gradients are dropped."""
        versions = {seed: _version(seed) for seed in seeds if seed in self._versions}
        self._calls += bool(versions)
        self._moves += any(self._versions[seed] != version for seed, version in versions.items())
        self._versions.update(versions)

    def check(self) -> None:
        """Warn, once, if at most every other call came after a step; then count anew."""
        is_wasted = self._calls >= 2 * max(1, self._moves)
        # an optimiser that writes through .data leaves no mark but the values
        is_wasted = is_wasted and (self._moves > 0 or not self._have_values_changed())
        if is_wasted and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"after_step() was called {self._calls} times and has dropped the seeds' "
                f"gradients, and the optimizer has moved their weights {self._moves} times: call "
                "it after optimizer.step(), as often as that, and not for every backward pass",
                stacklevel=3,
            )
        self._versions.clear()
        self._before.clear()
        self._calls = self._moves = 0

    def _have_values_changed(self) -> bool:
        return any(
            not bool((parameter == before).all())
            for seed, values in self._before.items()
            for parameter, before in zip(seed.parameters(), values, strict=True)
        )


def _version(seed: nn.Module) -> int:
    """Another one whenever a weight was written to."""
    return sum(parameter._version for parameter in seed.parameters())
