"""Storage for a rollout, from collecting it to learning from it.

    row = buffer.row()                                # views of the next row; write into them
    buffer.commit(row)
    buffer.add_batch(step)                            # the same write, checked
    buffer.compute_advantages_and_returns(last_values)
    buffer.normalize_advantages()
    rollout = buffer.rollout(device)                  # [T, N, ...], what PPO learns from

Storage is dense and time-major, `[T, N, ...]`, allocated once, in one arena: moving a rollout to
another device is one copy, and layouts never change. Nothing is packed or sorted. A step of an env
goes to that env's next row, so rows differ in length at their tails only: `step_counts` says how
many rows of an env hold a step. Episodes are known from the flags alone.

`step_counts` is on the CPU. Adding a step never synchronises with a GPU: what `commit` is told by
tensors of the GPU is counted there, in a cursor, until somebody reads `step_counts`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from esper.leyline.constants import DEFAULT_GAE_LAMBDA, DEFAULT_GAMMA, DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.factored_actions import FactoredActionSpace
from esper.runtime.checks import require_at_least
from esper.simic.agent.gae import compute_gae
from esper.simic.agent.rollout import LEARNED_FROM, Arena, Rollout, RolloutRow
from esper.simic.agent.rollout_checks import (
    check_step_counts,
    checked_env_ids,
    raise_on_bad_values,
)
from esper.simic.agent.rollout_fields import RolloutField, as_tensor, rollout_fields
from esper.tamiyo.policy.feature_scales import SumOverRanks

ADVANTAGE_STD_FLOOR = 1e-8
_Method = TypeVar("_Method", bound=Callable[..., Any])


class TamiyoRolloutStep(NamedTuple):
    """One transition of one env, or of a batch of envs with a leading axis.

    Shapes are those of one env; F features, H heads, C choices, L LSTM layers, P bytes.
    """

    state: Tensor  # [F]
    actions: Tensor  # [H] integers; floating point if a head is continuous
    log_probs: Tensor  # [H]
    masks: Tensor  # [C] bool: the mask rows that applied to the action, all heads concatenated
    value: Tensor  # []
    reward: Tensor  # []
    terminated: Tensor  # [] bool: the task ended
    truncated: Tensor  # [] bool: a limit cut the episode
    bootstrap_value: Tensor | None  # [] V(final observation); None if it is not known yet
    hidden_h: Tensor  # [L, hidden]: the recurrent state before the step
    hidden_c: Tensor  # [L, hidden]
    frames: Tensor | None = None  # [P] uint8: all pictures of an observation; None: there are none


class AdvantageStatistics(NamedTuple):
    """Mean and standard deviation before `normalize_advantages`, on the buffer's device."""

    mean: Tensor
    std: Tensor


def _not_compiled(method: _Method) -> _Method:
    """Leave a method out of torch.compile: it runs once per rollout and needs the CPU."""
    return cast(_Method, torch.compiler.disable(method))  # type: ignore[no-untyped-call]


class TamiyoRolloutBuffer:
    """A rollout of `num_envs` envs and up to `max_steps_per_env` steps of each.

    The fields are attributes `[N, T, ...]`: views of the time-major storage, not copies, and not
    contiguous. Where `valid_mask` is False they may hold anything. `initial_hidden_h` and
    `initial_hidden_c` `[N, L, hidden]` are the recurrent state before each env's first row.
    """

    def __init__(
        self,
        num_envs: int,
        max_steps_per_env: int,
        state_dim: int,
        action_space: FactoredActionSpace,
        lstm_hidden_dim: int = DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = 1,
        device: torch.device | str = "cpu",
        frame_size: int = 0,
    ):
        """`frame_size` is the bytes of an observation's pictures; only with them `state_dim` may be 0."""
        self.num_envs = num_envs
        self.max_steps_per_env = max_steps_per_env
        self.state_dim = state_dim
        self.frame_size = frame_size
        self.lstm_hidden_dim = lstm_hidden_dim
        self.lstm_layers = lstm_layers
        require_at_least(self, 1, "num_envs", "max_steps_per_env")
        require_at_least(self, 0, "frame_size")
        require_at_least(self, 0 if frame_size else 1, "state_dim")
        require_at_least(self, 1, "lstm_hidden_dim", "lstm_layers")
        self.action_space = action_space
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self._step_counts = torch.zeros(num_envs, dtype=torch.int64, device="cpu")
        self._all_envs = torch.arange(num_envs, device="cpu")
        # on a GPU: each env's next row, counted there while `_num_at_cursor` rows are committed
        self._cursor = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._envs_there = self._all_envs.to(self.device)
        self._num_at_cursor = 0

        hidden = (lstm_layers, lstm_hidden_dim)
        self._step_fields = rollout_fields(action_space, state_dim, frame_size, hidden)
        self._row_fields = [f for f in self._step_fields if f.name in RolloutRow._fields]
        self._used = [f.name for f in self._row_fields if 0 not in f.shape]  # hold anything
        size = (max_steps_per_env, num_envs)
        layout = {f.name: (f.dtype, (*size, *f.shape)) for f in self._row_fields}
        layout |= dict.fromkeys(("advantages", "returns", "targets"), (torch.float32, size))
        layout |= dict.fromkeys(("valid", "starts"), (torch.bool, size))
        layout["initial_h"] = layout["initial_c"] = (torch.float32, (num_envs, *hidden))
        self._arena = Arena.zeros(layout, self.device)
        self._tensors = self._arena.tensors
        by_time = [self._tensors[f.name] for f in self._row_fields]
        self._rows = [RolloutRow(*(field[t] for field in by_time)) for t in range(size[0])]
        # where policy and environments write while the envs' next rows differ
        self._spare = RolloutRow(*(torch.zeros_like(field[0]) for field in by_time))
        self._no_bootstraps = torch.full((num_envs,), torch.nan, device=self.device)

        self.states = self._by_env("states")
        self.actions = self._by_env("actions")
        self.log_probs = self._by_env("log_probs")
        self.masks = self._by_env("masks")
        self.values = self._by_env("values")
        self.rewards = self._by_env("rewards")
        self.terminated = self._by_env("terminated")
        self.truncated = self._by_env("truncated")
        self.bootstrap_values = self._by_env("bootstrap_values")
        self.frames = self._by_env("frames")
        self.initial_hidden_h = self._tensors["initial_h"]
        self.initial_hidden_c = self._tensors["initial_c"]

        self._advantage_statistics: AdvantageStatistics | None = None
        # rows with a recurrent state that cannot be right: see `_check_recurrent_state`
        self._bad_state = torch.zeros(size, dtype=torch.bool, device=self.device)
        self.reset()

    def _by_env(self, name: str) -> Tensor:
        return self._tensors[name].transpose(0, 1)

    @property
    def step_counts(self) -> Tensor:
        """Rows of each env that hold a step, CPU int64 `[N]`."""
        if self._num_at_cursor:
            self._step_counts.copy_(self._cursor)
            self._num_at_cursor = 0
        return self._step_counts

    @step_counts.setter
    def step_counts(self, counts: Tensor) -> None:
        self._step_counts = counts
        self._num_at_cursor = 0

    def __len__(self) -> int:
        """Stored steps of all envs together."""
        return int(self.step_counts.sum())

    @property
    def advantages(self) -> Tensor:
        self._require_advantages()
        return self._by_env("advantages")

    @property
    def returns(self) -> Tensor:
        self._require_advantages()
        return self._by_env("returns")

    @property
    def valid_mask(self) -> Tensor:
        """True for stored steps, `[N, T]`."""
        steps = torch.arange(self.max_steps_per_env, device=self.device)
        return steps < self.step_counts.to(self.device, non_blocking=True)[:, None]

    # -- collecting ---------------------------------------------------------------------------

    def row(self) -> RolloutRow:
        """The row that every env fills next: views of the storage, or of a spare row if they differ.

        Write all of it, then `commit`. A bootstrap that is not written is NaN.
        """
        counts = self.step_counts.numpy()
        first = int(counts[0])
        if first == self.max_steps_per_env and (counts == first).all():
            raise self._is_full(self._all_envs.tolist())
        if (counts == first).all():
            return self._rows[first]
        self._spare.bootstrap_values.fill_(torch.nan)
        return self._spare

    def spare_row(self) -> RolloutRow:
        """A row outside the rollout, for an observation that no action follows."""
        return self._spare

    def staging_row(self) -> RolloutRow:
        """The row that `write_staged` stores: it stays where it is, for CUDA graphs."""
        return self._spare

    def begin_staged(self) -> None:
        """Before the first `write_staged` of a round."""
        self._cursor.copy_(self.step_counts)
        self._spare.bootstrap_values.fill_(torch.nan)

    def write_staged(self, is_real: Tensor | None) -> None:
        """Store the staging row as each env's next; where `is_real` `[N]` is False, to be overwritten.

        It only launches work on the device: call `count_staged` as well.
        """
        last = self.max_steps_per_env - 1
        places = (self._cursor.clamp(max=last), self._envs_there)
        for name in self._used:
            self._tensors[name].index_put_(places, getattr(self._spare, name))
        self._cursor += 1 if is_real is None else is_real
        self._spare.bootstrap_values.fill_(torch.nan)

    def stage_initial_state(self, h: Tensor, c: Tensor) -> None:
        """As `set_initial_state`, for the staging row."""
        is_first = (self._cursor == 0)[:, None, None]
        self.initial_hidden_h.copy_(torch.where(is_first, h, self.initial_hidden_h))
        self.initial_hidden_c.copy_(torch.where(is_first, c, self.initial_hidden_c))

    @property
    def cursor(self) -> Tensor:
        """Each env's next row, int64 `[N]` on the device, for those who stage rows."""
        return self._cursor

    def count_staged(self) -> None:
        """Note that one more row was staged; raises if there is no room for it."""
        if self._num_at_cursor == self.max_steps_per_env:
            raise self._is_full(self._all_envs.tolist())
        self._num_at_cursor += 1
        self._forget_derived()

    def commit(self, row: RolloutRow, is_real: Tensor | None = None) -> None:
        """Count a row that was written; with `is_real` `[N]`, only for those envs."""
        is_real = None if is_real is None else is_real.cpu()
        counts = self.step_counts.numpy()
        real = None if is_real is None or bool(is_real.all()) else is_real
        if row is not self._spare:
            if real is None:
                counts += 1
            else:
                counts += real.numpy()
        else:
            envs = self._all_envs if real is None else real.nonzero().squeeze(1)
            self._require_room(envs)
            places = self._places(self.step_counts[envs], envs)
            for name in self._used:
                values = getattr(row, name)
                self._tensors[name].index_put_(places, values[places[1]])
            counts[envs.numpy()] += 1
        self._forget_derived()

    def _places(self, steps: Tensor, envs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and envs as indices into the storage, on its device."""
        return (
            steps.to(self.device, non_blocking=True),
            envs.to(self.device, non_blocking=True),
        )

    def set_initial_state(self, h: Tensor, c: Tensor) -> None:
        """The recurrent state `[N, L, hidden]` before the next row, of envs whose first row it is."""
        if self.step_counts.numpy().all():
            return
        is_first = self.step_counts == 0
        if bool(is_first.all()):
            self.initial_hidden_h.copy_(h)
            self.initial_hidden_c.copy_(c)
            return
        envs = is_first.nonzero().squeeze(1).to(self.device)
        self.initial_hidden_h[envs] = h[envs]
        self.initial_hidden_c[envs] = c[envs]

    def add(self, env_id: int, step: TamiyoRolloutStep) -> None:
        """Store one env's next step."""
        batched = (
            None if x is None else as_tensor(name, x).unsqueeze(0)
            for name, x in zip(step._fields, step, strict=True)
        )
        self.add_batch(TamiyoRolloutStep(*batched), [env_id])  # type: ignore[arg-type]

    def add_batch(
        self, step: TamiyoRolloutStep, env_ids: Tensor | Sequence[int] | None = None
    ) -> None:
        """Store the next step of every env, or of `env_ids` only.

        The inputs may be on the CPU or on the buffer's device. Shapes, dtypes and devices are
        checked before anything is written. Of the recurrent states, those before an env's first row
        are stored; learning computes the others again, from zeros at the start of an episode.
        """
        envs = self._checked_env_ids(env_ids)
        self._require_room(envs)
        if step.bootstrap_value is None:  # NaN: reported if it is needed
            step = step._replace(bootstrap_value=self._no_bootstraps[: len(envs)])
        if step.frames is None and not self.frame_size:
            step = step._replace(frames=self._spare.frames[: len(envs)])  # of width 0
        values = [
            field.checked(value, len(envs), self.device)
            for field, value in zip(self._step_fields, step, strict=True)
        ]
        *of_row, hidden_h, hidden_c, frames = values
        of_row.append(frames)
        counts = self.step_counts
        steps = counts[envs]
        places = self._places(steps, envs)
        self._check_recurrent_state(places, hidden_h, hidden_c)
        first = int(steps[0]) if len(steps) else 0
        if envs is self._all_envs and bool((steps == first).all()):
            torch._foreach_copy_(list(self._rows[first]), of_row)
        else:
            for field, value in zip(self._row_fields, of_row, strict=True):
                self._tensors[field.name].index_put_(places, value)
        is_first = places[0] == 0
        for stored, hidden in (
            (self.initial_hidden_h, hidden_h),
            (self.initial_hidden_c, hidden_c),
        ):
            kept = torch.where(is_first[:, None, None], hidden, stored[places[1]])
            stored.index_put_((places[1],), kept)
        counts.numpy()[envs.numpy()] += 1
        self._forget_derived()

    def _check_recurrent_state(
        self, places: tuple[Tensor, Tensor], hidden_h: Tensor, hidden_c: Tensor
    ) -> None:
        """Note states that are not finite, or not zero after an episode's end; raised later."""
        steps, envs = places
        ended = (self._tensors["terminated"] | self._tensors["truncated"])[(steps - 1, envs)]
        follows_end = (steps > 0) & ended
        # 0 only if all are 0, not finite if any is not
        size = torch.maximum(*(part.abs().amax(dim=(1, 2)) for part in (hidden_h, hidden_c)))
        self._bad_state[places] = (follows_end & (size != 0)) | ~size.isfinite()

    def mark_terminal_with_penalty(self, env_id: int, penalty: float) -> None:
        """Mark the env's last stored row as terminated, with the penalty as its reward."""
        self._check_step_counts()
        (env,) = self._checked_env_ids([env_id]).tolist()
        count = int(self.step_counts[env])
        if count == 0:
            raise ValueError(f"env {env} has no stored step; add one before a penalty")
        if not math.isfinite(penalty):
            raise ValueError(f"penalty={penalty} for env {env}; use a finite number")
        self.rewards[env, count - 1] = penalty
        self.terminated[env, count - 1] = True
        self.truncated[env, count - 1] = False
        self._forget_derived()

    def reset(self) -> None:
        """Empty the buffer. Rows past `step_counts` are never read."""
        self.step_counts.zero_()
        self._tensors["bootstrap_values"].fill_(torch.nan)
        self._bad_state.zero_()
        self._forget_derived()

    # -- learning -----------------------------------------------------------------------------

    @_not_compiled
    def compute_advantages_and_returns(
        self,
        last_values: Tensor | None = None,
        gamma: float = DEFAULT_GAMMA,
        gae_lambda: float = DEFAULT_GAE_LAMBDA,
    ) -> None:
        """Compute the advantages and returns of every stored row.

        `last_values` `[N]` are the values of the observations that followed each env's last row.
        They are the bootstraps of the episodes that have not ended.

        Raises a ValueError for bad values in the rollout: an empty mask of an unconditional head,
        or a state, log-prob, reward, value, recurrent state or needed bootstrap that is not finite.
        The recurrent state of the row after an episode end must be zero.
        """
        self._check_step_counts()
        if last_values is not None:
            self._store_last_values(last_values)
        raise_on_bad_values(self._tensors, self.valid_mask.t(), self._bad_state, self.action_space)
        self._tensors["valid"].copy_(self.valid_mask.t())
        compute_gae(
            self.rewards,
            self.values,
            self.terminated,
            self.truncated,
            self.bootstrap_values,
            step_counts=self.step_counts,
            gamma=gamma,
            gae_lambda=gae_lambda,
            out=(self._by_env("advantages"), self._by_env("returns")),
        )
        self._has_advantages = True
        self._advantage_statistics = None

    def normalize_advantages(self, sum_: SumOverRanks | None = None) -> AdvantageStatistics:
        """Scale the advantages of the stored rows to mean 0 and standard deviation 1.

        With `sum_`, the statistics are those of the rollouts of all ranks.

        A second call changes nothing and returns the same statistics.
        """
        self._require_advantages()
        if self._advantage_statistics is None:
            advantages = self.advantages
            valid = self.valid_mask
            count: Tensor | int = max(len(self), 1)
            exact = advantages.double()  # so that rounding does not spread equal advantages
            total = torch.where(valid, exact, 0.0).sum()
            if sum_ is not None:
                count = torch.tensor(float(count), dtype=torch.float64, device=self.device)
                sum_([count, total])
            mean = total / count
            squares = torch.where(valid, exact - mean, 0.0).square().sum()
            if sum_ is not None:
                sum_([squares])
            std = (squares / count).sqrt().clamp_min(ADVANTAGE_STD_FLOOR)
            advantages.copy_(torch.where(valid, (exact - mean) / std, 0.0))
            self._advantage_statistics = AdvantageStatistics(mean.float(), std.float())
        return self._advantage_statistics

    @_not_compiled
    def get_batched_sequences(self, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Every field `[N, T, ...]` on `device` (default: the buffer's device, without a copy).

        On another device it is one copy; on the buffer's device the tensors are views of its
        storage, valid until `reset()`. With them come `valid_mask` `[N, T]`, and the recurrent
        states before the envs' first rows.
        """
        self._require_advantages()
        arena = self._arena.to(self.device if device is None else torch.device(device))
        initial = {f"initial_hidden_{part}": arena.tensors[f"initial_{part}"] for part in "hc"}
        by_env = {
            name: field.transpose(0, 1)
            for name, field in arena.tensors.items()
            if not name.startswith("initial") and name not in ("starts", "targets")
        }
        by_env["valid_mask"] = by_env.pop("valid")
        return by_env | initial

    @_not_compiled
    def rollout(self, device: torch.device | str | None = None) -> Rollout:
        """What PPO learns from, `[T, N, ...]`, cut to the longest row; its `targets` are not set.

        Rows that hold no step get features, pictures, actions and masks of 0: whatever a loss
        selects, 0 times NaN is NaN in the gradient of a weight.
        """
        self._require_advantages()
        self._check_step_counts()
        counts = self.step_counts
        num_steps = int(counts.max())
        if int(counts.min()) < num_steps:
            empty = ~self.valid_mask.t()
            for name in ("states", "frames", "actions", "log_probs", "masks"):
                self._tensors[name].masked_fill_(empty.unsqueeze(-1), 0)
            self._tensors["values"].masked_fill_(empty, 0)
        starts, valid = self._tensors["starts"], self._tensors["valid"]
        ended = self._tensors["terminated"] | self._tensors["truncated"]
        starts[0] = False
        starts[1:] = ended[:-1] & valid[1:]
        arena = self._arena.to(self.device if device is None else torch.device(device))
        return Rollout(
            **{name: arena.tensors[name][:num_steps] for name in LEARNED_FROM},
            initial_h=arena.tensors["initial_h"],
            initial_c=arena.tensors["initial_c"],
            is_full=int(counts.min()) == num_steps,
        )

    @property
    def num_ended(self) -> int:
        """Episodes that have ended, of all envs together."""
        return int(((self.terminated | self.truncated) & self.valid_mask).sum())

    @property
    def episode_boundaries(self) -> Tensor:
        """The episodes that have ended, CPU int64 `[episodes, 3]`: env, first step, end (exclusive)."""
        ended = (self.terminated | self.truncated) & self.valid_mask
        env_ids, last_steps = ended.cpu().nonzero(as_tuple=True)  # by env, then by step
        first_steps = torch.zeros_like(last_steps)
        same_env = env_ids[1:] == env_ids[:-1]
        first_steps[1:] = torch.where(same_env, last_steps[:-1] + 1, 0)
        return torch.stack([env_ids, first_steps, last_steps + 1], dim=1)

    # -- checks -------------------------------------------------------------------------------

    def _checked_env_ids(self, env_ids: Tensor | Sequence[int] | None) -> Tensor:
        return self._all_envs if env_ids is None else checked_env_ids(env_ids, self.num_envs)

    def _check_step_counts(self) -> None:
        check_step_counts(self.step_counts, self.num_envs, self.max_steps_per_env)

    def _require_room(self, envs: Tensor) -> None:
        is_full = self.step_counts[envs] >= self.max_steps_per_env
        if bool(is_full.any()):
            raise self._is_full(envs[is_full].tolist())

    def _is_full(self, envs: list[int]) -> ValueError:
        return ValueError(
            f"envs {envs} already hold max_steps_per_env={self.max_steps_per_env} steps; "
            "call reset() first or make the buffer longer"
        )

    def _store_last_values(self, last_values: Tensor) -> None:
        """Keep V of what followed each env's last row, where the episode has not ended."""
        field = RolloutField("last_values", "last_values", torch.float32)
        last_values = field.checked(last_values, self.num_envs, self.device)
        envs = self.step_counts.nonzero().squeeze(1)
        places = self._places(self.step_counts[envs] - 1, envs)
        envs = places[1]
        ended = self._tensors["terminated"][places] | self._tensors["truncated"][places]
        bootstraps = self._tensors["bootstrap_values"]
        bootstraps.index_put_(places, torch.where(ended, bootstraps[places], last_values[envs]))

    def _require_advantages(self) -> None:
        if not self._has_advantages:
            raise ValueError(
                "no advantages for this rollout; "
                "call compute_advantages_and_returns() after adding the last step"
            )

    def _forget_derived(self) -> None:
        self._has_advantages = False
        self._advantage_statistics = None
