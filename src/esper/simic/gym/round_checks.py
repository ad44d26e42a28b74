"""Checks of what environments give: at once on a CPU, at the end of the round on a GPU."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

_NEVER = 2**62


class RoundChecks:
    """Where each check first failed, noted on the device: asking at every step would wait for it."""

    def __init__(self) -> None:
        self.step = 0  # of the round
        self._names_step = False  # there are no steps before `start`, as in `predict`
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
                raise self._error(env, self.step, message if details is None else details())
            return
        failed = torch.where(ok, _NEVER, self.step)
        before = self._first_steps.setdefault(message, failed)
        torch.minimum(before, failed, out=before)

    def start(self) -> None:
        """Forget what failed before."""
        self._first_steps = {}
        self._names_step = True
        self.step = 0

    def finish(self) -> None:
        """Raise the earliest failure of the round; waits for the device once."""
        if not self._first_steps:
            return
        first_steps = torch.stack(list(self._first_steps.values()))  # [checks, N]
        if int(first_steps.min()) == _NEVER:
            self._first_steps = {}
            return
        place = int(first_steps.argmin())
        check, env = divmod(place, first_steps.shape[1])
        step = int(first_steps[check, env])
        raise self._error(env, step, list(self._first_steps)[check])

    def _error(self, env: int, step: int, message: str) -> ValueError:
        where = f"env {env}, step {step}" if self._names_step else f"env {env}"
        return ValueError(f"{where}: {message}")
