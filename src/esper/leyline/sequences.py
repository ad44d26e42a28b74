"""The episodes of a rollout as packed sequences, for a recurrent policy.

A rollout is stored `[N, T, ...]`; one env's row may hold several episodes. A recurrent network
needs each episode as a separate sequence, all of them in one call, without padding. The packed
order sorts episodes by decreasing length and reads them time step by time step, like torch's
`PackedSequence`. `SequenceLayout.gather` brings any stored field into this order, so everything
downstream (encoder, LSTM, losses) sees stored steps only.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from esper.leyline.arrays import copy_together


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The episodes of a rollout, complete or cut by its ends, as CPU int64 tensors `[episodes]`."""

    num_envs: int
    max_steps: int
    env_ids: Tensor
    starts: Tensor  # the first stored step
    lengths: Tensor  # 1 or more
    _steps: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    @classmethod
    def from_flags(cls, ended: Tensor, step_counts: Tensor) -> "SequenceLayout":
        """The layout of a rollout from `ended` (bool `[N, T]`) and the stored steps per env."""
        num_envs, max_steps = ended.shape
        counts = step_counts.to("cpu", torch.int64)
        if counts.shape != (num_envs,) or bool(((counts < 0) | (counts > max_steps)).any()):
            raise ValueError(
                f"step_counts {counts.tolist()} for {num_envs} rows of {max_steps} steps; "
                f"expected one count of 0 to {max_steps} for each"
            )
        steps = torch.arange(max_steps)
        is_last_stored = steps == counts[:, None] - 1
        closes = (ended.cpu() | is_last_stored) & (steps < counts[:, None])
        env_ids, last_steps = closes.nonzero(as_tuple=True)
        starts = torch.zeros_like(last_steps)
        same_env = env_ids[1:] == env_ids[:-1]
        starts[1:] = torch.where(same_env, last_steps[:-1] + 1, 0)
        return cls(num_envs, max_steps, env_ids, starts, last_steps + 1 - starts)

    @property
    def num_episodes(self) -> int:
        return len(self.lengths)

    @cached_property
    def num_rows(self) -> int:
        """R: the number of stored steps, known without a synchronisation."""
        return int(self.lengths.sum())

    @cached_property
    def order(self) -> Tensor:
        """Episodes by decreasing length: the packed order."""
        return torch.argsort(self.lengths, descending=True, stable=True)

    @cached_property
    def batch_sizes(self) -> Tensor:
        """Number of episodes that have each time step: `PackedSequence.batch_sizes`."""
        steps = torch.arange(int(self.lengths.max()) if self.num_episodes else 0)
        return (self.lengths[:, None] > steps).sum(dim=0)

    @cached_property
    def step_starts(self) -> Tensor:
        """The first row of each time step in packed order, `[steps]`."""
        return self.batch_sizes.cumsum(dim=0) - self.batch_sizes

    @cached_property
    def rows(self) -> Tensor:
        """Flat indices (env * max_steps + step) of the stored steps in packed order, `[R]`."""
        first = (self.env_ids * self.max_steps + self.starts)[self.order]
        steps = torch.arange(len(self.batch_sizes))[:, None]
        padded_index = first + steps
        if padded_index.numel() == self.num_rows:  # all of one length
            return padded_index.flatten()
        return padded_index[steps < self.lengths[self.order]]

    @cached_property
    def padded_index(self) -> Tensor:
        """Flat indices of the rows in `[steps, episodes]`, episodes padded to the longest, `[R]`."""
        running = torch.arange(self.num_episodes) < self.batch_sizes[:, None]
        return running.flatten().nonzero().squeeze(1)

    @cached_property
    def has_prior_state(self) -> Tensor:
        """Whether a packed episode starts from its env's stored state, bool `[episodes]`.

        The others start with a zero state, after the end of another episode.
        """
        return self.starts[self.order] == 0

    def select(self, env_ids: Tensor) -> "SequenceLayout":
        """The episodes of some envs only, for a minibatch of whole rows; flat indices stay valid."""
        chosen = torch.zeros(self.num_envs, dtype=torch.bool)
        chosen[env_ids] = True
        keep = chosen[self.env_ids]
        return SequenceLayout(
            self.num_envs, self.max_steps, self.env_ids[keep], self.starts[keep], self.lengths[keep]
        )

    def gather(self, stored: Tensor) -> Tensor:
        """A stored field `[N, T, ...]` as `[R, ...]`, the stored steps in packed order."""
        return self._as_parts.gather(stored)

    def steps_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`step_starts` and the lengths of the packed episodes, on a device."""
        if device not in self._steps:
            self._as_parts.on(device)
        return self._steps[device]

    @cached_property
    def _as_parts(self) -> "SequenceParts":
        return SequenceParts((self,))


@dataclass(frozen=True, eq=False)
class SequenceParts:
    """Parts of one rollout (minibatches), gathered with one operation per field.

    Gathered rows are concatenated part by part, each part in its packed order.
    """

    layouts: tuple[SequenceLayout, ...]
    _tables: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict, init=False)

    def gather(self, stored: Tensor) -> Tensor:
        """A stored field `[N, T, ...]` as `[R, ...]`."""
        return stored.flatten(0, 1).index_select(0, self.on(stored.device)[0])

    def initial(self, stored: Tensor) -> Tensor:
        """The initial state of each episode, `[episodes, ...]`: its env's state or zeros.

        `stored` `[N, ...]` are the states before the envs' first stored steps.
        """
        _, env_ids, has_prior_state = self.on(stored.device)
        is_kept = has_prior_state.bool().view(-1, *[1] * (stored.dim() - 1))
        return torch.where(is_kept, stored.index_select(0, env_ids), 0.0)

    def split_rows(self, gathered: Tensor) -> tuple[Tensor, ...]:
        """Gathered rows, as one view per part."""
        return torch.split(gathered, [layout.num_rows for layout in self.layouts])

    def split_episodes(self, gathered: Tensor) -> tuple[Tensor, ...]:
        """Initial states, as one view per part."""
        return torch.split(gathered, [layout.num_episodes for layout in self.layouts])

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """`rows`, env ids and `has_prior_state` of the episodes as int64 on a device, cached.

        Also fills `steps_on` of each layout.
        """
        if device not in self._tables:
            layouts = self.layouts
            rows = torch.cat([layout.rows for layout in layouts])
            env_ids = torch.cat([layout.env_ids[layout.order] for layout in layouts])
            has_prior_state = torch.cat([layout.has_prior_state for layout in layouts])
            starts = [layout.step_starts for layout in layouts]
            lengths = [layout.lengths[layout.order] for layout in layouts]
            tensors = [rows, env_ids, has_prior_state.long(), *starts, *lengths]
            rows, env_ids, has_prior_state, *steps = copy_together(tensors, device)
            self._tables[device] = rows, env_ids, has_prior_state
            for layout, *pair in zip(
                layouts, steps[: len(starts)], steps[len(starts) :], strict=True
            ):
                layout._steps[device] = pair[0], pair[1]
        return self._tables[device]
