"""Train and evaluate on any Gymnasium vector environment.

    envs = gymnasium.make_vec("CartPole-v1", num_envs=8)
    agent = train(envs, total_steps=50_000)
    print(evaluate(agent, envs, episodes=20).returns.mean())
    agent.save("cartpole.pt")

Actions are Discrete or MultiDiscrete, observations a flat Box or Discrete; all three autoreset
modes work, and so do masks (`GymConfig.masks`). For choices whose legal values depend on earlier
ones, pass an `action_space` that says so and give the masks as a mapping from head to array.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline.factored_actions import FactoredActionSpace
from esper.leyline.files import (
    UnreadableFile,
    read_file,
    require_same_layout,
    write_file,
)
from esper.leyline.plain_config import from_plain, to_plain
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, TamiyoRolloutStep
from esper.simic.training.gym_agent import GymAgent, GymConfig
from esper.simic.training.gym_envs import (
    Episode,
    EpisodeLog,
    GymEnvs,
    Outcome,
    require_vector_env,
)
from esper.simic.training.gym_spaces import Array, GymSpaces
from esper.simic.training.phase_clock import PhaseClock
from esper.tamiyo.policy.network import Decision, RecurrentState

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

__all__ = ["EvaluationResult", "GymAgent", "GymConfig", "GymTraining", "evaluate", "train"]

RECENT_EPISODES = 100  # how many the reported means are over

RoundCallback = Callable[[int, dict[str, float]], None]
"""Called after each round with the steps taken so far and the round's metrics."""


def train(
    envs: "VectorEnv[Any, Any, Any]",
    total_steps: int,
    config: GymConfig | None = None,
    *,
    action_space: FactoredActionSpace | None = None,
    on_round: RoundCallback | None = None,
) -> GymAgent:
    """An agent that has learned from at least `total_steps` steps of the environments."""
    training = GymTraining(envs, total_steps, config, action_space=action_space)
    training.run(on_round)
    return training.agent


class EvaluationResult(NamedTuple):
    """One entry per episode."""

    returns: Array
    lengths: Array


def evaluate(
    agent: GymAgent,
    envs: "VectorEnv[Any, Any, Any]",
    episodes: int,
    *,
    rng_seed: int = 0,
    deterministic: bool = True,
) -> EvaluationResult:
    """Whole episodes of the agent as it is, without learning.

    Every env plays the same number of episodes (to within one): taking those that end first
    would favour short ones.
    """
    if episodes < 1:
        raise ValueError(f"episodes={episodes}; use 1 or more")
    _require_spaces(envs, agent.spaces)
    world = _open(envs, agent.config, agent.spaces.action_space, rng_seed)
    device = agent.ppo.device
    generator = torch.Generator(device).manual_seed(rng_seed)
    state, log = agent.ppo.policy.initial_state(world.num_envs), EpisodeLog(world.num_envs)
    quota = np.full(world.num_envs, episodes // world.num_envs)
    quota[: episodes % world.num_envs] += 1
    counted: list[Episode] = []
    while quota.any():
        decision = agent.ppo.act(
            world.features.to(device),
            world.masks.to(device),
            state,
            generator=generator,
            deterministic=deterministic,
        )
        outcome = world.step(decision.actions)
        state = _restart(decision.state, outcome.begins)
        for episode in log.add(outcome):
            if quota[episode.env]:
                quota[episode.env] -= 1
                counted.append(episode)
    return EvaluationResult(
        np.array([e.total_reward for e in counted]), np.array([e.length for e in counted])
    )


@dataclass
class Progress:
    """How far a run has come."""

    steps: int = 0  # of all envs together, fillers not counted
    rounds: int = 0
    episodes: int = 0
    round_steps: int = 0  # calls of the vector environment's step since the last update
    steps_before_round: int = 0
    episodes_before_round: int = 0

    def end_round(self) -> None:
        self.rounds += 1
        self.round_steps = 0
        self.steps_before_round, self.episodes_before_round = self.steps, self.episodes

    def restart_round(self) -> None:
        self.round_steps = 0
        self.steps, self.episodes = self.steps_before_round, self.episodes_before_round


class GymTraining:
    """A run under way: rounds of collecting a rollout and learning from it."""

    def __init__(
        self,
        envs: "VectorEnv[Any, Any, Any]",
        total_steps: int,
        config: GymConfig | None = None,
        *,
        action_space: FactoredActionSpace | None = None,
    ):
        if not isinstance(total_steps, int) or total_steps < 1:
            raise ValueError(f"total_steps={total_steps!r}; use a whole number, 1 or more")
        self.config = config = config or GymConfig()
        self.total_steps = total_steps
        self.envs = _open(envs, config, action_space, config.rng_seed)
        self.agent = GymAgent(self.envs.spaces, config)
        num_envs = self.envs.num_envs
        self.agent.ppo.check_split(num_envs)
        self.buffer = TamiyoRolloutBuffer(
            num_envs,
            config.horizon,
            self.envs.spaces.num_features,
            self.envs.spaces.action_space,
            config.policy.lstm_hidden_dim,
            config.policy.lstm_layers,
            self.agent.ppo.device,
        )
        self.state = self.agent.ppo.policy.initial_state(num_envs)
        self.action_rng = torch.Generator(self.agent.ppo.device).manual_seed(config.rng_seed)
        self.shuffle_rng = torch.Generator().manual_seed(config.rng_seed)
        self.progress = Progress()
        self.log = EpisodeLog(num_envs)
        self.recent: deque[Episode] = deque(maxlen=RECENT_EPISODES)
        self.clock = PhaseClock()

    @property
    def is_finished(self) -> bool:
        return self.progress.round_steps == 0 and self.progress.steps >= self.total_steps

    def run(
        self,
        on_round: RoundCallback | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train until `total_steps` are taken, or until `should_stop()`, asked before each step."""
        self.clock.start()
        while not self.is_finished:
            if should_stop():
                return
            self.step()
            if self.progress.round_steps == self.config.horizon:
                metrics = self.learn()
                if on_round is not None:
                    on_round(self.progress.steps, metrics)
                    self.clock.lap("report")

    # -- collecting ---------------------------------------------------------------------------

    def step(self) -> None:
        """One decision in every env."""
        envs, ppo = self.envs, self.agent.ppo
        features, before = envs.features.to(ppo.device), self.state
        decision = ppo.act(features, envs.masks.to(ppo.device), before, generator=self.action_rng)
        self.clock.lap("policy")
        outcome = envs.step(decision.actions)
        self.clock.lap("env")
        bootstrap = self._bootstrap(outcome, decision.state)
        self.clock.lap("policy")
        self._store(features, decision, before, outcome, bootstrap)
        self.state = _restart(decision.state, outcome.begins)
        self._count(outcome)
        self.clock.lap("buffer")

    def _bootstrap(self, outcome: Outcome, state: RecurrentState) -> Tensor | None:
        """V of the final observations, with the state that saw the whole episode."""
        if not outcome.truncated.any():
            return None
        ppo = self.agent.ppo
        return ppo.value(outcome.final_features.to(ppo.device), state)

    def _store(
        self,
        features: Tensor,
        decision: Decision,
        before: RecurrentState,
        outcome: Outcome,
        bootstrap: Tensor | None,
    ) -> None:
        step = TamiyoRolloutStep(
            state=features,
            actions=decision.actions,
            log_probs=decision.log_probs,
            masks=decision.masks,
            value=decision.values,
            reward=outcome.rewards,
            terminated=torch.from_numpy(outcome.terminated),
            truncated=torch.from_numpy(outcome.truncated),
            bootstrap_value=bootstrap,
            hidden_h=before.h,
            hidden_c=before.c,
        )
        if outcome.taken.all():
            self.buffer.add_batch(step)
            return
        rows = torch.from_numpy(np.flatnonzero(outcome.taken))
        self.buffer.add_batch(step.select(rows), rows)

    def _count(self, outcome: Outcome) -> None:
        over = self.log.add(outcome)
        self.progress.steps += int(outcome.taken.sum())
        self.progress.round_steps += 1
        self.progress.episodes += len(over)
        self.recent.extend(over)

    # -- learning -----------------------------------------------------------------------------

    def learn(self) -> dict[str, float]:
        """End the round with an update; returns its metrics, by the names in docs/metrics.md."""
        ppo, progress = self.agent.ppo, self.progress
        last_values = ppo.value(self.envs.features.to(ppo.device), self.state)
        learned = ppo.update(
            self.buffer,
            last_values,
            progress=min(progress.steps_before_round / self.total_steps, 1.0),
            generator=self.shuffle_rng,
        )
        self.buffer.reset()
        taken = progress.steps - progress.steps_before_round
        progress.end_round()
        self.clock.lap("update")
        seconds = self.clock.take()
        metrics = {f"ppo/{name}": value for name, value in learned.items()}
        metrics |= {f"time/{phase}": s for phase, s in seconds.items()}
        metrics["time/steps_per_second"] = taken / sum(seconds.values())
        metrics |= {"progress/rounds": progress.rounds, "progress/episodes": progress.episodes}
        if self.recent:
            metrics["episode/return"] = float(np.mean([e.total_reward for e in self.recent]))
            metrics["episode/length"] = float(np.mean([e.length for e in self.recent]))
        return metrics

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write all of the run, to be resumed at this very step.

        Environments that cannot save their state (`GymEnvs.can_save_state`) begin new episodes
        in the resumed run, which then collects this round anew.
        """
        contents = {
            "config": to_plain(self.config),
            "spaces": self.envs.spaces.to_plain(),
            "num_envs": self.envs.num_envs,
            "total_steps": self.total_steps,
            "agent": self.agent.ppo.state_dict(),
            "action_rng": self.action_rng.get_state(),
            "shuffle_rng": self.shuffle_rng.get_state(),
            "progress": asdict(self.progress),
            "recent_episodes": [list(episode) for episode in self.recent],
            "collecting": self._collecting() if self.envs.can_save_state else None,
        }
        write_file(path, _KIND, contents, version=_VERSION)

    @classmethod
    def resume(
        cls, path: str | Path, envs: "VectorEnv[Any, Any, Any]", *, device: str | None = None
    ) -> "GymTraining":
        """The run as it was saved, on environments made as they were then.

        On another kind of `device` than it was saved on, it goes on with another generator.
        """
        saved = read_file(path, _KIND, version=_VERSION)
        config = from_plain(GymConfig, saved["config"])
        spaces = GymSpaces.from_plain(saved["spaces"])
        _require_spaces(envs, spaces)
        training = cls(
            envs,
            saved["total_steps"],
            config if device is None else replace(config, device=device),
            action_space=spaces.action_space,
        )
        if saved["num_envs"] != training.envs.num_envs:
            raise UnreadableFile(
                f"{path} holds a run of {saved['num_envs']} envs; {training.envs.num_envs} were given"
            )
        training._load(saved, path)
        return training

    def _load(self, saved: dict[str, Any], path: str | Path) -> None:
        ppo, collecting = self.agent.ppo, saved["collecting"]
        # what the optimiser remembers of each weight is there only once it has been used
        agent = ppo.state_dict() | {"optimizer": saved["agent"]["optimizer"]}
        require_same_layout(saved["agent"], agent, path)
        ppo.load_state_dict(saved["agent"])
        self.shuffle_rng.set_state(saved["shuffle_rng"])
        if self.action_rng.device.type == torch.device(saved["config"]["device"]).type:
            self.action_rng.set_state(saved["action_rng"])
        else:
            self.action_rng.manual_seed(self._new_seed())
        self.progress = Progress(**saved["progress"])
        recent = [Episode(*episode) for episode in saved["recent_episodes"]]
        if collecting is None:
            of_round = self.progress.episodes - self.progress.episodes_before_round
            recent = recent[: max(len(recent) - of_round, 0)]
            self.progress.restart_round()
            self.envs.restart(self._new_seed())  # not the episodes that the run began with
        else:
            self._load_collecting(collecting, path)
        self.recent.extend(recent)

    def _new_seed(self) -> int:
        """The same for the same file."""
        return int(torch.randint(2**31, (), generator=self.shuffle_rng))

    def _collecting(self) -> dict[str, Any]:
        """The round under way."""
        return {
            "buffer": self.buffer.state_dict(),
            "recurrent_state": self.state._asdict(),
            "episode_rewards": torch.from_numpy(self.log.total_rewards),
            "episode_lengths": torch.from_numpy(self.log.lengths),
            "envs": self.envs.state_dict(),
        }

    def _load_collecting(self, saved: dict[str, Any], path: str | Path) -> None:
        if not self.envs.can_save_state:
            raise UnreadableFile(
                f"{path} holds the state of environments with get_state() and set_state(); "
                "the environments given do not have them"
            )
        expected = self._collecting()
        expected["envs"]["environments"] = saved["envs"]["environments"]
        require_same_layout(saved, expected, path)
        device = self.agent.ppo.device
        self.buffer.load_state_dict(saved["buffer"])
        self.state = RecurrentState(
            **{name: part.to(device) for name, part in saved["recurrent_state"].items()}
        )
        self.log.total_rewards[:] = saved["episode_rewards"].numpy()
        self.log.lengths[:] = saved["episode_lengths"].numpy()
        self.envs.load_state_dict(saved["envs"])


_KIND, _VERSION = "gymnasium run", 3


def _open(
    envs: "VectorEnv[Any, Any, Any]",
    config: GymConfig,
    action_space: FactoredActionSpace | None,
    rng_seed: int,
) -> GymEnvs:
    return GymEnvs(envs, rng_seed=rng_seed, action_space=action_space, mask_source=config.masks)


def _require_spaces(envs: "VectorEnv[Any, Any, Any]", spaces: GymSpaces) -> None:
    require_vector_env(envs)
    spaces.require_same(envs.single_observation_space, envs.single_action_space)


def _restart(state: RecurrentState, begins: Array) -> RecurrentState:
    """The state with zeros for the envs in which an episode begins."""
    if not begins.any():
        return state
    goes_on = torch.from_numpy(~begins).to(state.h.device)[:, None, None]
    return RecurrentState(torch.where(goes_on, state.h, 0.0), torch.where(goes_on, state.c, 0.0))
