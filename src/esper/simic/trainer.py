"""The training loop: collect a round in N environments, learn from it, save, resume.

    trainer = Trainer(envs, agent, horizon=128)
    while trainer.progress.steps < 50_000:
        trainer.collect()
        metrics = trainer.learn()

Gymnasium environments and growing hosts use the same loop. Both meet it behind `Environments`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.nissa.health import HealthMonitor
from esper.runtime.devices import require_memory
from esper.runtime.files import require_same_layout
from esper.simic.agent.ppo import PPOAgent, TrainingFailed
from esper.simic.agent.rollout import RolloutRow
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.device_collect import DeviceCollect, device_bytes
from esper.tamiyo.policy.distributions import draw_noise
from esper.tamiyo.policy.network import Decision, RecurrentState


class EnvSpec(NamedTuple):
    """What a policy and a rollout for these environments have to fit."""

    num_envs: int
    num_features: int
    action_space: FactoredActionSpace
    frame_size: int = 0  # bytes of an observation's pictures
    # on a GPU: `observe` is the same work on the same tensors at every step, so that CUDA graphs hold it
    is_fixed: bool = False


class Observed(NamedTuple):
    """What `Environments.observe` returns besides the features that it writes."""

    masks: ActionMasks  # legal now
    starts: Tensor  # [N] bool: the observation is the first of an episode
    reads: Sequence[Tensor] = ()  # with `EnvSpec.is_fixed`: all that was read


class Stepped(NamedTuple):
    """What `Environments.step` returns besides the rewards and flags that it writes."""

    is_real: Tensor | None  # [N] bool; False: the action was ignored; None: all are real
    final_features: Tensor | None  # [N, F]: where an episode was truncated, what followed it
    round_over: bool = False  # no env has a step left in this round
    final_frames: Tensor | None = None  # [N, P]: with `final_features`, if there are pictures
    is_fixed: bool = False  # the same tensors at every step, which CUDA graphs may read


class Environments(Protocol):
    """N environments on one device: rows in, rows out. A row is a row of the rollout.

    A truncated row needs `final_features`, or the environments write `row.bootstrap_values`.
    """

    spec: EnvSpec

    def begin_round(self) -> None:
        """Called before a round."""
        ...

    def observe(self, row: RolloutRow) -> Observed:
        """Write the features of the current observation to `row.states`, pictures to `row.frames`."""
        ...

    def step(self, row: RolloutRow) -> Stepped:
        """Take `row.actions`; write rewards, terminated and truncated (never both).

        Where no final observation can be given, write what bootstraps a truncated row.
        """
        ...

    def end_round(self, buffer: TamiyoRolloutBuffer) -> dict[str, float]:
        """Correct what only the whole round shows; returns metrics of its episodes."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next round depends on; called between rounds."""
        ...

    def load_state_dict(self, state: dict[str, Any], generator: torch.Generator) -> None:
        """Restore a state; `generator` seeds episodes that have to start again."""
        ...


class PhaseClock:
    """Each lap adds the time since the previous one to a named phase."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = perf_counter()

    def start(self) -> None:
        """Discard the time since the last lap."""
        self._last = perf_counter()

    def lap(self, phase: str) -> None:
        now = perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last `take`."""
        seconds = dict(self.seconds)
        self.seconds = defaultdict(float)
        return seconds


@dataclass
class Progress:
    """How far a run has come."""

    steps: int = 0  # of all envs together, stored ones only
    rounds: int = 0
    episodes: int = 0


class Trainer:
    """Environments, an agent and the rollout buffer between them.

    If the agent has ranks, so has the trainer: each collects its own rollouts.
    """

    def __init__(
        self,
        envs: Environments,
        agent: PPOAgent,
        *,
        horizon: int,
        rng_seed: int = 0,
        clock: PhaseClock | None = None,
    ):
        """`clock` times the phases of a round; environments may share it."""
        clock = clock or PhaseClock()
        self.envs = envs
        self.agent = agent
        self.horizon = horizon
        config = agent.policy.config
        if agent.device.type == "cuda":
            needed = device_bytes(envs.spec, horizon, config, agent.config.num_minibatches)
            require_memory(
                needed, agent.device, "use fewer envs, a shorter horizon or more minibatches"
            )
        self.buffer = TamiyoRolloutBuffer(
            envs.spec.num_envs,
            horizon,
            envs.spec.num_features,
            envs.spec.action_space,
            config.lstm_hidden_dim,
            config.lstm_layers,
            agent.device,
            envs.spec.frame_size,
        )
        self.state = agent.policy.initial_state(envs.spec.num_envs)
        self._device_collect: DeviceCollect | None = None
        if agent.device.type == "cuda" and envs.spec.is_fixed:
            self._device_collect = DeviceCollect(envs, agent, self.buffer, clock)
        self.action_rng = torch.Generator(agent.device).manual_seed(rng_seed)
        self.shuffle_rng = torch.Generator().manual_seed(rng_seed)
        self.progress = Progress()
        self.clock = clock
        self.health = HealthMonitor(agent.config.ppo_epochs)
        self._last_values: Tensor | None = None  # of the observations that followed the round
        self._round_steps = 0  # calls of `envs.step` in this round
        self._episode_metrics: dict[str, float] = {}
        self._in_round = False
        self._is_abandoned = False
        self._mark_round_start()
        self._rngs_of_ranks = self._gathered_rngs()

    # -- the loop -----------------------------------------------------------------------------

    def run_round(
        self, schedule: float = 0.0, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Collect and learn; returns the metrics, or None if stopped before the round's end.

        If one rank is stopped, all are, and collect the round again later.
        """
        is_complete = self.collect(should_stop)
        ranks = self.agent.ranks
        if ranks is not None and ranks.any(not is_complete):
            self.abandon_round()
            return None
        return self.learn(schedule) if is_complete else None

    def collect(
        self, should_stop: Callable[[], bool] = lambda: False, *, deterministic: bool = False
    ) -> bool:
        """Fill the buffer with one round; False if `should_stop()`, checked before each step.

        A round is `horizon` steps, or fewer if the environments end it. After an exception the
        round is collected again.
        """
        try:
            return self._collect(should_stop, deterministic)
        except BaseException:  # KeyboardInterrupt too: some envs took a step that was not stored
            self.abandon_round()
            raise

    def _collect(self, should_stop: Callable[[], bool], deterministic: bool) -> bool:
        if self._is_abandoned:
            self._restore(self._round_start)
        if not self._in_round:
            self._begin_round()
        if self._device_collect is not None:
            self._device_collect.look_again()
        round_over = False
        while self._round_steps < self.horizon and not round_over:
            if should_stop():
                return False
            if self._device_collect is not None and not deterministic:
                self._device_collect.step()
                self._round_steps += 1
                continue
            row = self.buffer.row()
            masks = self._observe(row)
            noise = None if deterministic else self._noise[self._round_steps]
            decision = self.agent.act(
                row.states,
                masks,
                self.state,
                frames=row.frames,
                noise=noise,
                deterministic=deterministic,
                out=row,
            )
            self.clock.lap("act")
            stepped = self.envs.step(row)
            self._value_truncated_rows(row, stepped, decision)
            self.buffer.commit(row, stepped.is_real)
            self.state = decision.state
            self._round_steps += 1
            round_over = stepped.round_over
            self.clock.lap("buffer")
        if self._device_collect is not None and not deterministic:
            self._device_collect.value_cut_rows()
            self.state = self._device_collect.state
        self._last_values = None if round_over else self._values_after_round()
        self._episode_metrics = self.envs.end_round(self.buffer)
        self._in_round = False
        return True

    def _begin_round(self) -> None:
        self.buffer.reset()
        self.envs.begin_round()
        self._round_steps = 0
        space = self.envs.spec.action_space
        size = (self.horizon, self.envs.spec.num_envs)
        self._noise = draw_noise(space, size, self.agent.device, self.action_rng)
        if self._device_collect is not None:
            self._device_collect.begin_round(self.state, self._noise)
        self._in_round = True

    def _observe(self, row: RolloutRow) -> ActionMasks:
        """Let the environments write their features; the state is zero where episodes start."""
        observed = self.envs.observe(row)
        self.state = zero_rows(self.state, observed.starts)
        self.buffer.set_initial_state(*self.state)
        return observed.masks

    def _value_truncated_rows(self, row: RolloutRow, stepped: Stepped, decision: Decision) -> None:
        """V of the final observations of truncated episodes, with the state before any reset."""
        if stepped.final_features is None:
            return
        cut = row.truncated.nonzero().squeeze(1)
        final_features = stepped.final_features.to(self.agent.device)[cut]
        final_frames = stepped.final_frames
        if final_frames is not None:
            final_frames = final_frames.to(self.agent.device)[cut]
        state = RecurrentState(decision.state.h[cut], decision.state.c[cut])
        row.bootstrap_values[cut] = self.agent.value(final_features, state, final_frames)

    def _values_after_round(self) -> Tensor:
        """V of the observations that follow the round; they are observed again in the next one."""
        row = self.buffer.spare_row()
        self._observe(row)
        return self.agent.value(row.states, self.state, row.frames)

    def learn(self, schedule: float = 0.0) -> dict[str, float]:
        """Update the agent from the round; returns metrics, by the names in docs/metrics.md.

        `schedule` is the share of training that is over, from 0 to 1.
        """
        try:
            learned = self.agent.update(
                self.buffer, self._last_values, progress=schedule, generator=self.shuffle_rng
            )
        except BaseException:  # KeyboardInterrupt too: nothing was learned from this round
            self.abandon_round()
            raise
        self.clock.lap("update")
        num_steps, num_episodes, episode_metrics = self._of_round()
        progress = self.progress
        progress.steps += num_steps
        progress.episodes += num_episodes
        progress.rounds += 1
        self._mark_round_start()
        self._rngs_of_ranks = self._gathered_rngs()
        seconds = self.clock.take()
        total = sum(seconds.values())
        metrics = {
            **episode_metrics,
            **{f"ppo/{name}": value for name, value in learned.items()},
            **{f"time/{phase}": s for phase, s in seconds.items()},
            **{f"time_share/{phase}": s / total for phase, s in seconds.items()},
            "time/steps_per_second": num_steps / total,
            "progress/rounds": progress.rounds,
            "progress/episodes": progress.episodes,
        }
        if self.agent.ranks is None or self.agent.ranks.is_first:  # it warns
            self.health.check(metrics)
        return metrics

    def _of_round(self) -> tuple[int, int, dict[str, float]]:
        """Steps, ended episodes and metrics of the round, of all ranks together."""
        num_steps, num_episodes = len(self.buffer), self.buffer.num_ended
        ranks = self.agent.ranks
        if ranks is None:
            return num_steps, num_episodes, self._episode_metrics
        num_steps, num_episodes = ranks.totals(num_steps, num_episodes)
        return num_steps, num_episodes, ranks.mean_metrics(self._episode_metrics)

    def abandon_round(self) -> None:
        """Collect the current round again: its envs were used otherwise."""
        self._is_abandoned = True

    # -- files --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of the run, for a checkpoint; within a round, as it was at its start."""
        for name, weight in self.agent.policy.named_parameters():
            if not weight.isfinite().all():
                raise TrainingFailed(f"the policy's {name} is not finite, so it was not saved")
        state = {"agent": self.agent.state_dict(), **self._round_start}
        if self._rngs_of_ranks is not None:
            state["rngs_of_ranks"] = self._rngs_of_ranks
        return state

    def load_state_dict(self, saved: Mapping[str, Any], path: str | Path) -> None:
        """Continue a saved run with its next round; errors name `path`."""
        ranks = self.agent.ranks
        rngs = saved.get("rngs_of_ranks")
        num_saved = 1 if rngs is None else len(rngs["shuffle_rng"])
        num_now = 1 if ranks is None else ranks.size
        if num_saved != num_now:
            raise ValueError(
                f"{path} holds a run on num_ranks={num_saved}, but this is num_ranks={num_now}; "
                f"resume it with torchrun --nproc-per-node={num_saved}, or load it without "
                "environments to predict"
            )
        load_agent(self.agent, saved["agent"], path)
        if ranks is not None and rngs is not None:
            # clones: `Generator.set_state` reads a whole storage
            own_rngs = {name: states[ranks.rank].clone() for name, states in rngs.items()}
            saved = {**saved, **own_rngs}
        self._restore(saved)
        self._rngs_of_ranks = self._gathered_rngs()

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Return to the start of a round, and start new episodes."""
        self.progress = Progress(**saved["progress"])
        self.shuffle_rng.set_state(saved["shuffle_rng"])
        if self.agent.device.type == saved["device"]:
            self.action_rng.set_state(saved["action_rng"])
        else:  # generators of another kind of device have another state
            self.action_rng.manual_seed(int(torch.randint(2**31, (), generator=self.shuffle_rng)))
        self.envs.load_state_dict(saved["envs"], self.shuffle_rng)
        self.state = self.agent.policy.initial_state(self.envs.spec.num_envs)
        self._in_round = False
        self._is_abandoned = False
        self._mark_round_start()

    def _mark_round_start(self) -> None:
        """Keep what changes while a round is collected: a resumed run collects it again."""
        self._round_start: dict[str, Any] = {
            "progress": asdict(self.progress),
            "device": self.agent.device.type,
            "action_rng": self.action_rng.get_state(),
            "shuffle_rng": self.shuffle_rng.get_state(),
            "envs": self.envs.state_dict(),
        }

    def _gathered_rngs(self) -> dict[str, Tensor] | None:
        """States of the random numbers of all ranks, `[ranks, bytes]`; None without ranks.

        Gathered while all ranks are at the same place, so that rank 0 can write a file alone.
        """
        if self.agent.ranks is None:
            return None
        names = ("action_rng", "shuffle_rng")
        return {name: self.agent.ranks.gather(self._round_start[name]) for name in names}


def load_agent(agent: PPOAgent, saved: Mapping[str, Any], path: str | Path) -> None:
    """Load weights, normalisers and optimiser; another layout raises an error that names `path`."""
    # the optimiser's state is empty before the first update, so its layout is not compared
    expected = agent.state_dict() | {"optimizer": saved["optimizer"]}
    require_same_layout(saved, expected, path)
    agent.load_state_dict(saved)


def zero_rows(state: RecurrentState, rows: Tensor) -> RecurrentState:
    """The recurrent state with zeros in `rows` `[N]` bool: every episode starts from zeros."""
    if rows.device.type == "cpu" and not rows.numpy().any():
        return state  # on a GPU, asking would wait for it
    keep = ~rows.to(state.h.device)[:, None, None]
    return RecurrentState(torch.where(keep, state.h, 0.0), torch.where(keep, state.c, 0.0))
