"""Storage for a rollout, from collecting it to learning from it.

Storage is `[num_envs, max_steps, ...]`, allocated once. Moving a rollout to another device is one
copy of all fields but the per-step hidden states. Control data (`step_counts`, env ids, episode
boundaries) is on the CPU, so adding a step never synchronises with a GPU.

    buffer.add_batch(step)                            # one step of every env, or of some
    buffer.compute_advantages_and_returns(last_values)
    buffer.normalize_advantages()
    batch = buffer.get_batched_sequences(device)      # [N, T, ...] and a valid_mask
    layout = buffer.sequence_layout()                 # where each episode is stored
    buffer.reset()
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from esper.leyline.arrays import TensorFields
from esper.leyline.constants import DEFAULT_GAE_LAMBDA, DEFAULT_GAMMA, DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.factored_actions import FactoredActionSpace
from esper.leyline.sequences import SequenceLayout
from esper.runtime.checks import require_at_least
from esper.simic.agent.gae import compute_gae

ADVANTAGE_STD_FLOOR = 1e-8
_DERIVED = ("advantages", "returns")
PROBLEMS_SHOWN = 5  # bad values that one error message lists
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_ACCEPTED = {  # by a field that is stored in a dtype
    torch.float32: ("floating point", _FLOATS),
    torch.int64: ("integers", _INTEGERS),
    torch.bool: ("bool", (torch.bool,)),
}

_Method = TypeVar("_Method", bound=Callable[..., Any])


class TamiyoRolloutStep(NamedTuple):
    """One transition of one env, or of a batch of envs with a leading axis.

    Shapes are those of one env; F features, H heads, C choices, L LSTM layers.
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

    def select(self, envs: Tensor) -> "TamiyoRolloutStep":
        """The step of some envs of a batch, by their indices in it."""
        devices = {part.device for part in self if part is not None}
        places = {device: envs.to(device, non_blocking=True) for device in devices}
        parts = (None if part is None else part[places[part.device]] for part in self)
        return TamiyoRolloutStep(*parts)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch(TensorFields):
    """A rollout as tensors on one device; on the buffer's device they are its storage."""

    states: Tensor  # [N, T, F]
    actions: Tensor  # [N, T, H]
    log_probs: Tensor  # [N, T, H]
    masks: Tensor  # [N, T, C]
    values: Tensor  # [N, T], like the fields below
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    bootstrap_values: Tensor
    advantages: Tensor
    returns: Tensor
    valid_mask: Tensor  # [N, T]: True for stored steps
    initial_hidden_h: Tensor  # [N, L, hidden]: the state before each env's first row
    initial_hidden_c: Tensor


class AdvantageStatistics(NamedTuple):
    """Mean and standard deviation before `normalize_advantages`, on the buffer's device."""

    mean: Tensor
    std: Tensor


class _StepField(NamedTuple):
    """How one field of a `TamiyoRolloutStep` is stored and checked."""

    argument: str  # its name in the step
    name: str  # its name in the buffer
    dtype: torch.dtype
    shape: tuple[int, ...] = ()  # of one env
    axes: str = "[envs]"  # for errors

    def checked(self, given: object, num_rows: int, device: torch.device) -> Tensor:
        """The field of `num_rows` envs, with the dtype and on the device that it is stored in."""
        expected = (num_rows, *self.shape)
        value = _as_tensor(self.argument, given)
        if value.requires_grad:
            value = value.detach()
        if value.shape == expected and value.dtype == self.dtype and value.device == device:
            return value
        if value.shape != expected:
            raise ValueError(
                f"{self.argument}: got shape {tuple(value.shape)}, expected {expected} = {self.axes}"
            )
        kind, accepted = _ACCEPTED[self.dtype]
        if value.dtype not in accepted:
            raise ValueError(f"{self.argument}: got {value.dtype}, expected {kind}")
        if value.device.type not in ("cpu", device.type):
            raise ValueError(
                f"{self.argument} is on {value.device}, the buffer on {device}; "
                "move it to the CPU or to the buffer's device"
            )
        # block for pinned memory: the caller may change it before a non-blocking copy has run
        must_block = value.device != device and value.is_pinned()
        return value.to(device, self.dtype, non_blocking=not must_block)


def _step_fields(
    action_space: FactoredActionSpace, state_dim: int, hidden: tuple[int, int]
) -> tuple[_StepField, ...]:
    """One row per field of `TamiyoRolloutStep`, in its order."""
    number, flag = torch.float32, torch.bool
    heads, choices = (action_space.num_heads,), (action_space.num_choices,)
    of_heads = f"[envs, H], heads {', '.join(action_space.names)}"
    sizes = ", ".join(f"{head.name}: {head.size}" for head in action_space)
    of_layers = "[envs, L, h], L layers, h hidden units"
    return (
        _StepField("state", "states", number, (state_dim,), "[envs, F]"),
        _StepField("actions", "actions", action_space.action_dtype, heads, of_heads),
        _StepField("log_probs", "log_probs", number, heads, of_heads),
        _StepField("masks", "masks", flag, choices, f"[envs, C], heads {sizes}"),
        _StepField("value", "values", number),
        _StepField("reward", "rewards", number),
        _StepField("terminated", "terminated", flag),
        _StepField("truncated", "truncated", flag),
        _StepField("bootstrap_value", "bootstrap_values", number),
        _StepField("hidden_h", "hidden_h", number, hidden, of_layers),
        _StepField("hidden_c", "hidden_c", number, hidden, of_layers),
    )


def _as_tensor(name: str, value: object) -> Tensor:
    """The value as a tensor; raises an error with its name if it is not one."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}: got {type(value).__name__}, expected a tensor or numbers ({error})"
        ) from error


def _not_compiled(method: _Method) -> _Method:
    """Leave a method out of torch.compile: it runs once per rollout and needs the CPU."""
    return cast(_Method, torch.compiler.disable(method))  # type: ignore[no-untyped-call]


class _Field:
    """A field of the storage as a read-only attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, buffer: "TamiyoRolloutBuffer", owner: type) -> Tensor:
        if self._name in _DERIVED:
            buffer._require_advantages()
        return buffer._fields[self._name]

    def __set__(self, buffer: "TamiyoRolloutBuffer", value: object) -> None:
        raise AttributeError(f"{self._name} cannot be replaced; use add_batch or copy_")


class TamiyoRolloutBuffer:
    """A fixed-size rollout of `num_envs` rows, each with its own number of stored steps.

    The fields are attributes `[N, T, ...]`: views of the storage, not copies. Where `valid_mask`
    is False they may hold anything. Two threads may add steps at once, but not of the same env.
    """

    states, actions, log_probs, masks = _Field(), _Field(), _Field(), _Field()
    values, rewards, terminated, truncated = _Field(), _Field(), _Field(), _Field()
    bootstrap_values, hidden_h, hidden_c = _Field(), _Field(), _Field()
    advantages, returns = _Field(), _Field()

    def __init__(
        self,
        num_envs: int,
        max_steps_per_env: int,
        state_dim: int,
        action_space: FactoredActionSpace,
        lstm_hidden_dim: int = DEFAULT_LSTM_HIDDEN_DIM,
        lstm_layers: int = 1,
        device: torch.device | str = "cpu",
    ):
        self.num_envs = num_envs
        self.max_steps_per_env = max_steps_per_env
        self.state_dim = state_dim
        self.lstm_hidden_dim = lstm_hidden_dim
        self.lstm_layers = lstm_layers
        require_at_least(self, 1, "num_envs", "max_steps_per_env", "state_dim")
        require_at_least(self, 1, "lstm_hidden_dim", "lstm_layers")
        self.action_space = action_space
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.step_counts = torch.zeros(num_envs, dtype=torch.int64, device="cpu")
        self._all_envs = torch.arange(num_envs, device="cpu")

        hidden = (lstm_layers, lstm_hidden_dim)
        self._step_fields = _step_fields(action_space, state_dim, hidden)
        stored = [*self._step_fields, *(_StepField("", name, torch.float32) for name in _DERIVED)]
        rows = (num_envs, max_steps_per_env)
        self._fields = {
            field.name: torch.zeros(*rows, *field.shape, dtype=field.dtype, device=self.device)
            for field in stored
        }
        self._rows = {s.name: self._fields[s.name].flatten(0, 1) for s in self._step_fields}
        self._columns: dict[int, list[Tensor]] = {}  # views of one step of every env, by step
        self._no_bootstraps = torch.full((num_envs,), torch.nan, device=self.device)

        self._layout: SequenceLayout | None = None
        self._has_advantages = False
        self._advantage_statistics: AdvantageStatistics | None = None

    def __len__(self) -> int:
        """Stored steps of all envs together."""
        return int(self.step_counts.sum())

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """Every field by name, `[N, T, ...]`: the storage itself, not a copy."""
        return MappingProxyType(self._fields)

    @property
    def valid_mask(self) -> Tensor:
        """True for stored steps, `[N, T]`."""
        steps = torch.arange(self.max_steps_per_env, device=self.device)
        return steps < self.step_counts.to(self.device, non_blocking=True)[:, None]

    # -- collecting ---------------------------------------------------------------------------

    def add(self, env_id: int, step: TamiyoRolloutStep) -> None:
        """Store one env's next step."""
        batched = (
            None if x is None else _as_tensor(name, x).unsqueeze(0)
            for name, x in zip(step._fields, step, strict=True)
        )
        self.add_batch(TamiyoRolloutStep(*batched), [env_id])  # type: ignore[arg-type]

    def add_batch(
        self, step: TamiyoRolloutStep, env_ids: Tensor | Sequence[int] | None = None
    ) -> None:
        """Store the next step of every env, or of `env_ids` only: one write per field.

        The inputs may be on the CPU or on the buffer's device. Shapes, dtypes and devices are
        checked before anything is written.
        """
        envs = self._checked_env_ids(env_ids)
        counts = self.step_counts.numpy()  # far quicker than torch for a few numbers
        steps = counts if envs is self._all_envs else counts[envs.numpy()]
        if (steps >= self.max_steps_per_env).any():
            full = envs.numpy()[steps >= self.max_steps_per_env].tolist()
            raise ValueError(
                f"envs {full} already hold max_steps_per_env={self.max_steps_per_env} steps; "
                "call reset() first or make the buffer longer"
            )
        if step.bootstrap_value is None:  # NaN: `_raise_on_bad_values` reports it if it is needed
            step = step._replace(bootstrap_value=self._no_bootstraps[: len(envs)])
        values = [
            spec.checked(value, len(envs), self.device)
            for spec, value in zip(self._step_fields, step, strict=True)
        ]

        first = int(steps[0]) if len(steps) else 0
        if steps is counts and (steps == first).all():
            if first not in self._columns:
                self._columns[first] = [self._fields[s.name][:, first] for s in self._step_fields]
            torch._foreach_copy_(self._columns[first], values)
        else:
            rows = envs * self.max_steps_per_env + torch.from_numpy(steps)
            rows = rows.to(self.device, non_blocking=True)
            for spec, value in zip(self._step_fields, values, strict=True):
                self._rows[spec.name].index_put_((rows,), value)
        counts[envs.numpy()] = steps + 1
        self._forget_derived()

    def mark_terminal_with_penalty(self, env_id: int, penalty: float) -> None:
        """Mark the env's last stored row as terminated, with the penalty as its reward."""
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
        """Empty the buffer. Only `step_counts` is zeroed; rows past it are never read."""
        self.step_counts.zero_()
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
        if last_values is not None:
            self._store_last_values(last_values)
        self._raise_on_bad_values()
        advantages, returns = compute_gae(
            self.rewards,
            self.values,
            self.terminated,
            self.truncated,
            self.bootstrap_values,
            step_counts=self.step_counts,
            gamma=gamma,
            gae_lambda=gae_lambda,
        )
        self._has_advantages = True
        self.advantages.copy_(advantages)
        self.returns.copy_(returns)
        self._advantage_statistics = None

    def normalize_advantages(self) -> AdvantageStatistics:
        """Scale the advantages of the stored rows to mean 0 and standard deviation 1.

        A second call changes nothing and returns the same statistics.
        """
        self._require_advantages()
        if self._advantage_statistics is None:
            advantages, valid = self.advantages, self.valid_mask
            exact = advantages.double()  # so that rounding does not spread equal advantages
            count = max(len(self), 1)  # on the CPU: no synchronisation
            mean = torch.where(valid, exact, 0.0).sum() / count
            squares = torch.where(valid, exact - mean, 0.0).square().sum()
            std = (squares / count).sqrt().clamp_min(ADVANTAGE_STD_FLOOR)
            advantages.copy_(torch.where(valid, (exact - mean) / std, 0.0))
            self._advantage_statistics = AdvantageStatistics(mean.float(), std.float())
        return self._advantage_statistics

    @_not_compiled
    def get_batched_sequences(self, device: torch.device | str | None = None) -> RolloutBatch:
        """The rollout on `device` (default: the buffer's device, without a copy).

        On another device it is one copy; on the buffer's device the tensors are its storage,
        valid until `reset()`. Of the hidden states, only the first of each env is included.
        """
        self._require_advantages()
        batch = RolloutBatch(
            **{n: v for n, v in self._fields.items() if n not in ("hidden_h", "hidden_c")},
            valid_mask=self.valid_mask,
            initial_hidden_h=self.hidden_h[:, 0],
            initial_hidden_c=self.hidden_c[:, 0],
        )
        return batch.to(self.device if device is None else device)

    @_not_compiled
    def sequence_layout(self) -> SequenceLayout:
        """Where each episode is stored, on the CPU. Cached: one synchronisation per rollout."""
        if self._layout is None:
            ended = self.terminated | self.truncated
            self._layout = SequenceLayout.from_flags(ended, self.step_counts)
        return self._layout

    @property
    def episode_boundaries(self) -> Tensor:
        """The episodes that have ended, CPU int64 `[episodes, 3]`: env, first step, end (exclusive)."""
        layout = self.sequence_layout()
        ended = (self.terminated | self.truncated).cpu()
        ends = layout.starts + layout.lengths
        boundaries = torch.stack([layout.env_ids, layout.starts, ends], dim=1)
        return boundaries[ended[layout.env_ids, ends - 1]]

    # -- checks -------------------------------------------------------------------------------

    def _checked_env_ids(self, env_ids: Tensor | Sequence[int] | None) -> Tensor:
        if env_ids is None:
            return self._all_envs
        envs = _as_tensor("env_ids", env_ids)
        if envs.ndim != 1 or (envs.numel() and envs.dtype not in _INTEGERS):
            raise ValueError(
                f"env_ids: got {envs.dtype} {tuple(envs.shape)}, expected integers of shape [K]"
            )
        if envs.device.type != "cpu":
            raise ValueError(f"env_ids are on {envs.device}; pass them on the CPU")
        envs = envs.long()
        if outside := [e for e in envs.tolist() if not 0 <= e < self.num_envs]:
            raise ValueError(f"env_ids {outside} are out of range for num_envs={self.num_envs}")
        if repeated := [e for e, count in Counter(envs.tolist()).items() if count > 1]:
            raise ValueError(f"env_ids {repeated} appear more than once in one batch")
        return envs

    def _store_last_values(self, last_values: Tensor) -> None:
        spec = _StepField("last_values", "bootstrap_values", torch.float32)
        last_values = spec.checked(last_values, self.num_envs, self.device)
        envs = self.step_counts.nonzero().squeeze(1)
        rows = envs * self.max_steps_per_env + self.step_counts[envs] - 1
        envs, rows = (index.to(self.device, non_blocking=True) for index in (envs, rows))
        ended = self._rows["terminated"][rows] | self._rows["truncated"][rows]
        bootstraps = self._rows["bootstrap_values"]
        bootstraps.index_put_((rows,), torch.where(ended, bootstraps[rows], last_values[envs]))

    def _raise_on_bad_values(self) -> None:
        """Check all values that learning uses, with one synchronisation."""
        valid = self.valid_mask
        is_last = valid.clone()
        is_last[:, :-1] &= ~valid[:, 1:]
        needs_bootstrap = ~self.terminated & (self.truncated | is_last)
        follows_end = torch.zeros_like(valid)
        follows_end[:, 1:] = (self.terminated | self.truncated)[:, :-1]
        # the largest magnitude of a row's state: 0 only if all are 0, not finite if any is not
        h, c = (
            torch.linalg.vector_norm(part, ord=torch.inf, dim=(-2, -1))
            for part in (self.hidden_h, self.hidden_c)
        )
        hidden = torch.maximum(h, c)
        bad = {
            "the state is not finite": ~self.states.isfinite().all(dim=-1),
            "a log-prob is not finite": ~self.log_probs.isfinite().all(dim=-1),
            "the reward is not finite": ~self.rewards.isfinite(),
            "the value is not finite": ~self.values.isfinite(),
            "a bootstrap value is needed, but none was given or it is not finite": needs_bootstrap
            & ~self.bootstrap_values.isfinite(),
            "the recurrent state is not finite": ~hidden.isfinite(),
            "the recurrent state was not reset after the episode that ended one step before; zero "
            "hidden_h and hidden_c [envs, layers, hidden] at episode ends": follows_end
            & (hidden != 0),
        }
        for head in self.action_space.unconditional:
            part = self.masks[..., self.action_space.slices[head]]
            name = self.action_space.names[head]
            bad[f"head {name!r} has no legal choice"] = ~part.any(dim=-1)
        problems = torch.stack(list(bad.values())) & valid
        if not bool(problems.any()):
            return
        found = problems.permute(1, 2, 0).nonzero().tolist()
        reasons = list(bad)
        shown = [f"env {e}, step {t}: {reasons[r]}" for e, t, r in found[:PROBLEMS_SHOWN]]
        if len(found) > PROBLEMS_SHOWN:
            shown.append(f"and {len(found) - PROBLEMS_SHOWN} more")
        raise ValueError("bad values in the rollout: " + "; ".join(shown))

    def _require_advantages(self) -> None:
        if not self._has_advantages:
            raise ValueError(
                "no advantages for this rollout; "
                "call compute_advantages_and_returns() after adding the last step"
            )

    def _forget_derived(self) -> None:
        self._layout = None
        self._has_advantages = False
        self._advantage_statistics = None
