"""The training loop: collect a round in N environments, learn from it, save, resume.

    trainer = Trainer(envs, agent, horizon=128)
    while trainer.progress.steps < 50_000:
        trainer.collect()
        metrics = trainer.learn()

Gymnasium environments and growing hosts use the same loop. Both meet it behind `TrainingEnvs`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.nissa.health import HealthMonitor
from esper.runtime.files import require_same_layout
from esper.simic.agent.ppo import PPOAgent, TrainingFailed
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, TamiyoRolloutStep
from esper.tamiyo.policy.network import RecurrentState


class Outcome(NamedTuple):
    """The result of one step. Flags are CPU tensors: reading them does not synchronise."""

    rewards: Tensor  # [N] float32
    terminated: Tensor  # [N] bool: the task ended
    truncated: Tensor  # [N] bool: a limit cut the episode; never where terminated
    is_real_step: Tensor  # [N] bool; False: the action was ignored and the step is not stored
    is_first: Tensor  # [N] bool: the current observation is the first of an episode
    final_features: Tensor  # [N, F] of the observation that followed, before any reset


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
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds


class TrainingEnvs(Protocol):
    """N environments, each with a current observation that an action is chosen for."""

    num_envs: int
    num_features: int
    action_space: FactoredActionSpace
    features: Tensor  # [N, F] of the current observation
    masks: ActionMasks
    round_over: bool  # whether no env has a step left in this round
    clock: PhaseClock  # times the trainer's phases and those of the environments

    def begin_round(self) -> Tensor:
        """Called before a round; returns which envs start a new episode, `[N]` bool."""
        ...

    def step(self, actions: Tensor) -> Outcome:
        """Take the heads' choices `[N, H]` (on the CPU) in every env."""
        ...

    def end_round(self, buffer: TamiyoRolloutBuffer) -> None:
        """Called after a round, to correct what only the whole round shows."""
        return None

    def metrics(self, seconds: float) -> dict[str, float]:
        """Metrics of the episodes of a round that took so long, by the names in docs/metrics.md."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next round needs, without the episodes that are going on."""
        ...

    def load_state_dict(self, state: dict[str, Any], generator: torch.Generator) -> None:
        """Restore a state. Episodes start again; `generator` seeds them."""
        ...


@dataclass
class Progress:
    """How far a run has come."""

    steps: int = 0  # of all envs together, stored ones only
    rounds: int = 0
    episodes: int = 0
    round_steps: int = 0  # calls of `envs.step` in this round
    steps_before_round: int = 0


class Trainer:
    """Environments, an agent and the rollout buffer between them."""

    def __init__(self, envs: TrainingEnvs, agent: PPOAgent, *, horizon: int, rng_seed: int = 0):
        config = agent.policy.config
        self.envs, self.agent, self.horizon = envs, agent, horizon
        sizes = envs.num_envs, horizon, envs.num_features
        hidden = config.lstm_hidden_dim, config.lstm_layers
        self.buffer = TamiyoRolloutBuffer(*sizes, envs.action_space, *hidden, agent.device)
        self.state = agent.policy.initial_state(envs.num_envs)
        self.action_rng = torch.Generator(agent.device).manual_seed(rng_seed)
        self.shuffle_rng = torch.Generator().manual_seed(rng_seed)
        self.progress = Progress()
        self.clock = envs.clock
        self.health = HealthMonitor(agent.config.ppo_epochs)
        self._in_round = self._is_abandoned = False
        self._mark_round_start()

    # -- the loop -----------------------------------------------------------------------------

    def run_round(
        self, schedule: float = 0.0, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Collect and learn; returns the metrics, or None if stopped before the round's end."""
        return self.learn(schedule) if self.collect(should_stop) else None

    def collect(
        self, should_stop: Callable[[], bool] = lambda: False, *, deterministic: bool = False
    ) -> bool:
        """Fill the buffer with one round; False if `should_stop()`, checked before each step.

        A round is `horizon` steps, or fewer if the environments end it. After an exception the round
        is collected again, in new episodes.
        """
        try:
            return self._collect(should_stop, deterministic)
        except BaseException:  # KeyboardInterrupt too: some envs took a step that was not stored
            self.abandon_round()
            raise

    def _collect(self, should_stop: Callable[[], bool], deterministic: bool) -> bool:
        envs, agent, lap, rng = self.envs, self.agent, self.clock.lap, self.action_rng
        act = agent.prepared_act()
        if self._is_abandoned:
            self._restore(self._round_start)
        if not self._in_round:
            self.buffer.reset()
            vars(self.progress).update(self._round_start["progress"])
            self.state = zero_rows(self.state, envs.begin_round())
            self._in_round = True
        while self.progress.round_steps < self.horizon and not envs.round_over:
            if should_stop():
                return False
            features, masks = envs.features.to(agent.device), envs.masks.to(agent.device)
            decision = act(features, masks, self.state, generator=rng, deterministic=deterministic)
            actions = decision.actions.cpu()
            lap("act")
            outcome = envs.step(actions)
            bootstrap = None
            if outcome.truncated.cpu().numpy().any():
                # V of the final observation, before the state is reset
                bootstrap = agent.value(outcome.final_features.to(agent.device), decision.state)
                lap("act")
            step = TamiyoRolloutStep(
                state=features,
                actions=decision.actions,
                log_probs=decision.log_probs,
                masks=decision.masks,
                value=decision.values,
                reward=outcome.rewards,
                terminated=outcome.terminated,
                truncated=outcome.truncated,
                bootstrap_value=bootstrap,
                hidden_h=self.state.h,
                hidden_c=self.state.c,
            )
            self._store(step, outcome.is_real_step)
            self.state = zero_rows(decision.state, outcome.is_first)
            lap("buffer")
        envs.end_round(self.buffer)
        self._in_round = False
        return True

    def learn(self, schedule: float = 0.0) -> dict[str, float]:
        """Update the agent from the round; returns metrics, by the names in docs/metrics.md.

        `schedule` is the share of training that is over, from 0 to 1.
        """
        agent, envs, progress = self.agent, self.envs, self.progress
        last_values = None  # no row is unfinished
        if not envs.round_over:
            last_values = agent.value(envs.features.to(agent.device), self.state)
        rng = self.shuffle_rng
        learned = agent.update(self.buffer, last_values, progress=schedule, generator=rng)
        self.clock.lap("update")
        num_steps = progress.steps - progress.steps_before_round
        progress.steps_before_round = progress.steps
        progress.rounds, progress.round_steps = progress.rounds + 1, 0
        self._mark_round_start()
        seconds = self.clock.take()
        total = sum(seconds.values())
        metrics = {
            **envs.metrics(total),
            **{f"ppo/{name}": value for name, value in learned.items()},
            **{f"time/{phase}": s for phase, s in seconds.items()},
            **{f"time_share/{phase}": s / total for phase, s in seconds.items()},
            "time/steps_per_second": num_steps / total,
            "progress/rounds": progress.rounds,
            "progress/episodes": progress.episodes,
        }
        self.health.check(metrics)
        return metrics

    def abandon_round(self) -> None:
        """Collect the current round again, in new episodes, as a resumed run does."""
        self._is_abandoned = True
        vars(self.progress).update(self._round_start["progress"])

    def _store(self, step: TamiyoRolloutStep, is_real_step: Tensor) -> None:
        is_real = is_real_step.cpu().numpy()
        if is_real.all():
            self.buffer.add_batch(step)
        else:
            rows = is_real_step.nonzero().squeeze(1)
            self.buffer.add_batch(step.select(rows), rows)
        self.progress.round_steps += 1
        self.progress.steps += int(is_real.sum())
        ended = (step.terminated.cpu().numpy() | step.truncated.cpu().numpy()) & is_real
        self.progress.episodes += int(ended.sum())

    # -- files --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of the run, for a checkpoint; within a round, as it was at its start."""
        for name, weight in self.agent.policy.named_parameters():
            if not weight.isfinite().all():
                raise TrainingFailed(f"the policy's {name} is not finite, so it was not saved")
        return {
            "agent": self.agent.state_dict(),
            **self._round_start,
        }

    def load_state_dict(self, saved: Mapping[str, Any], path: str | Path) -> None:
        """Continue a saved run with its next round; errors name `path`."""
        load_agent(self.agent, saved["agent"], path)
        self._restore(saved)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Return to the start of a round, and start new episodes."""
        vars(self.progress).update(saved["progress"])
        self.shuffle_rng.set_state(saved["shuffle_rng"])
        if self.agent.device.type == saved["device"]:
            self.action_rng.set_state(saved["action_rng"])
        else:  # generators of another kind of device have another state
            self.action_rng.manual_seed(int(torch.randint(2**31, (), generator=self.shuffle_rng)))
        self.envs.load_state_dict(saved["envs"], self.shuffle_rng)
        self.state = self.agent.policy.initial_state(self.envs.num_envs)
        self._in_round = self._is_abandoned = False
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


def load_agent(agent: PPOAgent, saved: Mapping[str, Any], path: str | Path) -> None:
    """Load weights, normalisers and optimiser; another layout raises an error that names `path`."""
    # the optimiser's state is empty before the first update, so its layout is not compared
    expected = agent.state_dict() | {"optimizer": saved["optimizer"]}
    require_same_layout(saved, expected, path)
    agent.load_state_dict(saved)


def zero_rows(state: RecurrentState, rows: Tensor) -> RecurrentState:
    """The recurrent state with zeros in `rows` `[N]` bool: every episode starts from zeros."""
    if not rows.cpu().numpy().any():
        return state
    keep = ~rows.to(state.h.device)[:, None, None]
    return RecurrentState(torch.where(keep, state.h, 0.0), torch.where(keep, state.c, 0.0))
