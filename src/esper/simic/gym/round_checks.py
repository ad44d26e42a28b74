"""Checks of what environments give: at once on a CPU, at the end of the round on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

_NEVER = 2**62


class RoundChecks:
    """Where each check first failed, noted on the device: asking at every step would wait for it."""

    def __init__(self) -> None:
        self._first_steps: dict[str, Tensor] = {}  # [N], by message
        self.step = 0  # of the round

    def require(self, message: str, ok: Tensor, details: Callable[[], str] | None = None) -> None:
        """`ok` `[N]` must hold for every env; on a CPU `details` makes a more exact message."""
        if ok.device.type == "cpu":
            if not ok.all():
                env = int((~ok).nonzero()[0])
                raise ValueError(f"env {env}: {message if details is None else details()}")
            return
        failed = torch.where(ok, _NEVER, self.step)
        before = self._first_steps.setdefault(message, failed)
        torch.minimum(before, failed, out=before)

    def start(self) -> None:
        """Forget the round before."""
        self._first_steps = {}
        self.step = 0

    def finish(self) -> None:
        """Raise the earliest failure of the round; waits for the device once."""
        if not self._first_steps:
            return
        first_steps = torch.stack(list(self._first_steps.values()))  # [checks, N]
        if int(first_steps.min()) == _NEVER:
            return
        place = int(first_steps.argmin())
        check, env = divmod(place, first_steps.shape[1])
        step = int(first_steps[check, env])
        raise ValueError(f"env {env}, step {step}: {list(self._first_steps)[check]}")
