"""Checks of configs, and of values on a device without waiting for it.

    checks.require(log_probs.isfinite(), lambda env, head: f"env {env}, head {head}: not finite")
    ...                          # the rest of the rollout or update
    checks.raise_if_failed()     # one wait for all of them

`DeferredChecks` is for values that only the device knows; shapes are checked where they arrive. On
a CPU a failed check raises at once.
"""

import math
from collections.abc import Callable
from numbers import Integral, Real

import torch
from torch import Tensor

MOST_PENDING = 512  # checks held before somebody has to look: an agent may act without learning


class DeferredChecks:
    """Checks made so far and not yet looked at; the owner of a round looks at its end."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Tensor, Callable[..., str]]] = []

    def require(self, ok: Tensor, describe: Callable[..., str]) -> None:
        """All of `ok` (bool) must hold; `describe` makes a message from the indices of a failure.

        `describe` is called after the fact, if ever: what it reads must not have changed.
        """
        if ok.device.type == "cpu":
            if not ok.all():
                raise ValueError(describe(*_first_failure(ok)))
        else:
            self._pending.append((ok.all(), ok, describe))
            if len(self._pending) >= MOST_PENDING:
                self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Waits for the device once and raises a ValueError for the earliest failed check."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        passed = torch.stack([flag for flag, _, _ in pending]).tolist()
        if not all(passed):
            _, ok, describe = pending[passed.index(False)]
            raise ValueError(describe(*_first_failure(ok)))


def require_at_least(config: object, least: float, *names: str) -> None:
    """Raise unless each named field of `config` is `least` or more; NaN is refused."""
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(f"{name}={getattr(config, name)}; use {least} or more")


def whole_number(name: str, value: object, least: float = -math.inf) -> int:
    """`value` as an int; raise unless it is a whole number, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}={value!r}; use a whole number")
    if value < least:
        raise ValueError(f"{name}={value}; use {least} or more")
    return int(value)


def require_whole(config: object, least: int, *names: str) -> None:
    """Raise unless each named field of `config` is a whole number, `least` or more."""
    for name in names:  # NumPy's become int: files hold no others
        vars(config)[name] = whole_number(name, getattr(config, name), least)


def require_positive(config: object, *names: str) -> None:
    """Raise unless each named field of `config` is finite and above 0."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, Real) or not 0 < float(value) < math.inf:
            raise ValueError(f"{name}={value}; use a finite number above 0")


def require_fraction(config: object, *names: str) -> None:
    """Raise unless each named field of `config` is from 0 to 1."""
    for name in names:
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise ValueError(f"{name}={getattr(config, name)}; use a number from 0 to 1")


def _first_failure(ok: Tensor) -> list[int]:
    indices: list[int] = (~ok).nonzero()[0].tolist()
    return indices
