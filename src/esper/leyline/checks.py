"""Checks of values that lie on a device, without making the host wait for it.

    checks.require(log_probs.isfinite(), lambda env, head: f"env {env}, head {head}: not finite")
    ...                          # the rest of the rollout or update
    checks.raise_if_failed()     # one wait for all of them

Shapes are known to the host and are checked where they arrive; this is for what only the device
knows. On a CPU there is nothing to wait for, so a failed check raises at once.
"""

from collections.abc import Callable

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


def _first_failure(ok: Tensor) -> list[int]:
    indices: list[int] = (~ok).nonzero()[0].tolist()
    return indices
