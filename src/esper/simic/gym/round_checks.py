"""Checks of what environments give: at once on a CPU, at the end of the round on a GPU."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

_NEVER = 2**62


class RoundChecks:
    """Where each check first failed, noted on the device: asking at every step would wait for it.

    All tensors stay where they are, so that CUDA graphs can write to them.
    """

    def __init__(self, device: torch.device | str = "cpu", *, names_steps: bool = False) -> None:
        """With `names_steps`, errors name the step of the round."""
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._names_steps = names_steps
        self._env_ids: Tensor | None = None  # None: all envs are checked
        self._first_steps: dict[str, Tensor] = {}  # [N], by message

    def of_envs(self, env_ids: Tensor) -> "RoundChecks":
        """Checks of some envs, on a CPU."""
        checks = copy.copy(self)
        checks._env_ids = env_ids
        return checks

    def require(self, message: str, ok: Tensor, details: Callable[[], str] | None = None) -> None:
        """`ok` `[N]` must hold for every env; on a CPU `details` makes a more exact message."""
        if ok.device.type == "cpu":
            if not ok.all():
                env = int((~ok).nonzero()[0])
                if self._env_ids is not None:
                    env = int(self._env_ids[env])
                step = int(self._step)
                raise self._error(env, step, message if details is None else details())
            return
        if message not in self._first_steps:
            self._first_steps[message] = torch.full_like(ok, _NEVER, dtype=torch.int64)
        first = self._first_steps[message]
        failed = torch.where(ok, _NEVER, self._step.to(ok.device))
        first.copy_(torch.minimum(first, failed))

    def start_round(self) -> None:
        """What was noted of the current observation stays."""
        self._step.zero_()

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
        for first in self._first_steps.values():
            first.fill_(_NEVER)
        if int(first_steps.min()) == _NEVER:
            return
        check, env = divmod(int(first_steps.argmin()), first_steps.shape[1])
        step = int(first_steps[check, env])
        raise self._error(env, step, list(self._first_steps)[check])

    def _error(self, env: int, step: int, message: str) -> ValueError:
        where = f"env {env}, step {step}" if self._names_steps else f"env {env}"
        return ValueError(f"{where}: {message}")
