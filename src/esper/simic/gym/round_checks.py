"""Checks of what environments give: at once on a CPU, at the end of the round on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

_NEVER = 2**62


class RoundChecks:
    """Where each check first failed, noted on the device: asking at every step would wait for it.

    All tensors stay where they are, so that CUDA graphs can write to them.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._step = torch.zeros((), dtype=torch.int64, device=device)  # of the round
        self._first_steps: dict[str, Tensor] = {}  # [N], by message

    def require(self, message: str, ok: Tensor, details: Callable[[], str] | None = None) -> None:
        """`ok` `[N]` must hold for every env; on a CPU `details` makes a more exact message."""
        if ok.device.type == "cpu":
            if not ok.all():
                env = int((~ok).nonzero()[0])
                raise ValueError(f"env {env}: {message if details is None else details()}")
            return
        if message not in self._first_steps:
            self._first_steps[message] = torch.full_like(ok, _NEVER, dtype=torch.int64)
        first = self._first_steps[message]
        failed = torch.where(ok, _NEVER, self._step.to(ok.device))
        first.copy_(torch.minimum(first, failed))

    def start_round(self) -> None:
        self._step.zero_()
        for first in self._first_steps.values():
            first.fill_(_NEVER)

    def end_step(self) -> None:
        self._step += 1

    def tensors(self) -> list[Tensor]:
        """All that changes."""
        return [self._step, *self._first_steps.values()]

    def finish(self) -> None:
        """Raise the earliest failure of the round; waits for the device once."""
        if not self._first_steps:
            return
        first_steps = torch.stack(list(self._first_steps.values()))  # [checks, N]
        if int(first_steps.min()) == _NEVER:
            return
        check, env = divmod(int(first_steps.argmin()), first_steps.shape[1])
        step = int(first_steps[check, env])
        raise ValueError(f"env {env}, step {step}: {list(self._first_steps)[check]}")
