"""Collecting on a GPU: acting and storing are CUDA graphs, and nothing waits for the device.

    collect = DeviceCollect(envs, agent, buffer)
    collect.begin_round(state, noise)
    for _ in range(horizon):
        collect.step()
    collect.value_cut_rows()                 # V of final observations: the round's one look

It works with environments whose tensors stay where they are (`EnvSpec.is_fixed`). They are stepped
as usual, between two graphs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from esper.simic.agent.cuda_graphs import CannotCapture, Captured
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.network import PolicyConfig, RecurrentState

if TYPE_CHECKING:
    from esper.simic.trainer import Environments, EnvSpec, PhaseClock, Stepped


def device_bytes(
    spec: "EnvSpec", horizon: int, policy: PolicyConfig, num_minibatches: int
) -> dict[str, int]:
    """Bytes that a round needs on a GPU, by purpose; docs/simulators.md explains them."""
    space = spec.action_space
    num_steps = horizon * spec.num_envs
    of_actions = (8 if space.continuous else 12) * space.num_heads
    of_observation = 4 * spec.num_features + spec.frame_size
    of_state = 8 * policy.lstm_layers * policy.lstm_hidden_dim  # h and c
    # masks and two copies of the random numbers; rewards, values, flags, advantages, targets
    of_step = of_observation + of_actions + 9 * space.num_choices + 29
    learned = 40 * policy.lstm_layers * policy.lstm_hidden_dim + of_step
    return {
        "rollout": num_steps * of_step,
        "final observations and states": num_steps * (of_observation + of_state),
        "learning": num_steps // num_minibatches * learned,
    }


class _CutRows(NamedTuple):
    """What the value of a final observation needs, of every step and env of a round."""

    truncated: Tensor  # [T, N] bool
    places: Tensor  # [T, N]: the row that holds the step
    features: Tensor  # [T, N, F]: what followed the step
    frames: Tensor  # [T, N, P]
    h: Tensor  # [T, N, L, hidden]: the state after the step
    c: Tensor


class DeviceCollect:
    """One step after the other, written to a row that stays where it is and stored from there."""

    def __init__(
        self,
        envs: "Environments",
        agent: PPOAgent,
        buffer: TamiyoRolloutBuffer,
        clock: "PhaseClock",
    ):
        self._envs = envs
        self._agent = agent
        self._buffer = buffer
        self._clock = clock
        self._row = buffer.staging_row()
        space = envs.spec.action_space
        device = agent.device
        size = (buffer.max_steps_per_env, envs.spec.num_envs, space.num_choices)
        self._noise = torch.zeros(size, device=device)  # of the round
        self._step = torch.zeros(1, dtype=torch.int64, device=device)  # of the round
        self.state = agent.policy.initial_state(envs.spec.num_envs)  # changed in place
        self._cut: _CutRows | None = None
        self._is_first_step = True  # of the round
        self._decide = Captured(self._decide_eagerly, self._read_by_decide, self._kept)
        self._stores: dict[int, tuple[Stepped, Captured[None]]] = {}

    def begin_round(self, state: RecurrentState, noise: Tensor) -> None:
        """`noise` `[T, N, C]` is that of the round, as in `PPOAgent.act`."""
        self._noise.copy_(noise)
        self.state.h.copy_(state.h)
        self.state.c.copy_(state.c)
        self._step.zero_()
        self._buffer.begin_staged()
        if self._cut is not None:
            self._cut.truncated.zero_()
        self._is_first_step = True

    def step(self) -> None:
        """One step of all envs."""
        self._run(self._decide, self._decide_eagerly)
        self._clock.lap("act")
        stepped = self._envs.step(self._row)
        self._keep_room(stepped)
        if not stepped.is_fixed:
            self._store(stepped)
        else:
            if id(stepped) not in self._stores:
                graph = Captured(lambda: self._store(stepped), self._read_by_store, self._kept)
                self._stores[id(stepped)] = (stepped, graph)
            self._run(self._stores[id(stepped)][1], lambda: self._store(stepped))
        self._buffer.count_staged()
        self._is_first_step = False
        self._clock.lap("buffer")

    def _run(self, graph: Captured[Any], eagerly: Callable[[], Any]) -> None:
        if self._agent.graphs is not None:
            try:
                if self._is_first_step or graph.is_new:
                    self._prepare(graph)
                graph.run_again()
                return
            except CannotCapture as error:
                self._agent.run_without_graphs("collecting", error)
        eagerly()

    def _prepare(self, graph: Captured[Any]) -> None:
        """Look at addresses: at the start of a round, and when a round is continued."""
        if graph.prepare() and graph is self._decide:
            self._stores = {}  # the environments may have been reset, and give other tensors

    def look_again(self) -> None:
        """Between two steps, weights or environments may have been replaced."""
        self._is_first_step = True

    def _decide_eagerly(self) -> None:
        """Observe and act; advances the state."""
        row = self._row
        observed = self._envs.observe(row)
        is_new = observed.starts[:, None, None]
        before = RecurrentState(
            self.state.h.masked_fill(is_new, 0.0), self.state.c.masked_fill(is_new, 0.0)
        )
        self._buffer.stage_initial_state(*before)
        noise = self._noise.index_select(0, self._step).squeeze(0)
        decision = self._agent.act_eagerly(
            row.states, observed.masks, before, frames=row.frames, noise=noise, out=row
        )
        self.state.h.copy_(decision.state.h)
        self.state.c.copy_(decision.state.c)

    def _store(self, stepped: "Stepped") -> None:
        """Store the row, and what the value of a final observation needs."""
        if stepped.final_features is not None:
            assert self._cut is not None
            is_cut = self._row.truncated
            if stepped.is_real is not None:
                is_cut = is_cut & stepped.is_real
            final_frames = stepped.final_frames
            now = _CutRows(
                is_cut,
                self._buffer.cursor,
                stepped.final_features,
                self._row.frames if final_frames is None else final_frames,
                self.state.h,
                self.state.c,
            )
            for stored, value in zip(self._cut, now, strict=True):
                if value.numel():
                    stored.index_copy_(0, self._step, value.unsqueeze(0))
        self._buffer.write_staged(stepped.is_real)
        self._step += 1

    def _keep_room(self, stepped: "Stepped") -> None:
        """Allocate room for final observations when the environments give the first."""
        if stepped.final_features is None or self._cut is not None:
            return
        row = self._row
        of_step = (row.truncated, self._buffer.cursor, row.states, row.frames, *self.state)
        num_steps = self._buffer.max_steps_per_env
        self._cut = _CutRows(*(x.new_zeros(num_steps, *x.shape) for x in of_step))

    def value_cut_rows(self) -> None:
        """Write V of the final observations of truncated episodes, in one batch."""
        if self._cut is None:
            return
        where = self._cut.truncated.nonzero(as_tuple=True)  # waits for the device
        if not len(where[0]):
            return
        cut = _CutRows(*(field[where] for field in self._cut))
        state = RecurrentState(cut.h, cut.c)
        values = self._agent.value(cut.features, state, cut.frames)
        self._buffer.bootstrap_values[where[1], cut.places] = values

    def _read_by_decide(self) -> list[Tensor]:
        return [*self._agent.tensors_of_acting(), *self._envs.observe(self._row).reads]

    def _read_by_store(self) -> list[Tensor]:
        return [] if self._cut is None else list(self._cut)

    def _kept(self) -> list[Tensor]:
        """What the runs before a capture may not change."""
        initial = (self._buffer.initial_hidden_h, self._buffer.initial_hidden_c)
        kept = [*self.state, *initial, self._buffer.cursor, self._step, self._row.bootstrap_values]
        return kept if self._cut is None else [*kept, self._cut.truncated]
