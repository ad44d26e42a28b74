"""`esper.PPO`: recurrent, masked, factored PPO on Gymnasium vector environments.

    envs = gymnasium.make_vec("CartPole-v1", num_envs=8)
    model = esper.PPO(envs)
    model.learn(50_000)
    print(esper.evaluate(model, envs, episodes=20).returns.mean())
    model.save("cartpole.pt")

Actions are Discrete or MultiDiscrete, observations a flat Box or Discrete. All three autoreset
modes and action masks are supported. For choices whose legal values depend on earlier ones, pass
`heads` with `given`; the environment then gives its masks as a mapping from head to array.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_args

import numpy as np
import torch

from esper.leyline.checks import require_at_least
from esper.leyline.devices import usable_device
from esper.leyline.factored_actions import ActionMasks, Head
from esper.leyline.files import read_file, write_file
from esper.leyline.plain_config import from_plain, to_plain
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.training.gym_envs import Episode, GymEnvs, MaskOption
from esper.simic.training.gym_spaces import Array, GymSpaces
from esper.simic.training.trainer import Trainer, load_agent, zero_rows
from esper.tamiyo.policy.network import PolicyConfig, RecurrentState
from esper.tamiyo.policy.plain_heads import flat_policy

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

RoundCallback = Callable[[int, dict[str, float]], None]
"""Called after each round with the steps taken so far and the round's metrics."""

_KIND = "PPO model"


@dataclass(frozen=True, kw_only=True)
class GymConfig:
    """All settings of a PPO model; a saved model holds them."""

    horizon: int = 128
    """Steps per env between two updates."""
    rng_seed: int = 0
    """Seeds the weights, the sampling, the shuffling and the environments."""
    device: str = "cpu"
    """Where the policy acts and learns."""
    masks: MaskOption = "auto"
    """Legal actions: from info["action_mask"], from the environments' action_masks(), or all.
    "auto" takes the first of these that the environment offers at its first reset."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.rng_seed < 2**63:
            raise ValueError(f"rng_seed={self.rng_seed}; use a number from 0 to 2**63 - 1")
        require_at_least(self, 2, "horizon")  # with NEXT_STEP, 1 could be an autoreset step only
        if self.masks not in get_args(MaskOption):
            raise ValueError(f"masks={self.masks!r}; use 'auto', 'info', 'method' or 'none'")


class PPO:
    """A policy, and the environments that it learns in.

    Args:
        envs: a Gymnasium vector environment; it is reset with the config's `rng_seed`
        config: all settings
        heads: the choices of an action and what they depend on, such as
            `(Head("row", 3), Head("column", 4, given=("row",)))`; by default independent
    """

    def __init__(
        self,
        envs: "VectorEnv[Any, Any, Any]",
        config: GymConfig | None = None,
        heads: Iterable[Head] | None = None,
    ):
        config = config or GymConfig()
        if not isinstance(config, GymConfig):
            raise ValueError(f"config is a {type(config).__name__}; use GymConfig(ppo=PPOConfig())")
        self._build(config, _open(envs, GymSpaces.of(envs, heads), config))

    def _build(self, config: GymConfig, envs: GymEnvs | GymSpaces) -> None:
        """`envs` are the environments to learn in, or only their spaces."""
        self.config = config
        self.spaces = envs.spaces if isinstance(envs, GymEnvs) else envs
        with torch.random.fork_rng(devices=[]):  # weights depend on rng_seed alone
            torch.manual_seed(config.rng_seed)
            policy = flat_policy(self.spaces.action_space, self.spaces.num_features, config.policy)
        self.agent = PPOAgent(policy.to(usable_device(config.device)), config.ppo)
        self._trainer: Trainer | None = None
        if isinstance(envs, GymEnvs):
            self._trainer = Trainer(
                envs, self.agent, horizon=config.horizon, rng_seed=config.rng_seed
            )
        self._first_step = self.total_steps = 0  # where the last call of `learn` starts and ends
        self._loaded_trainer: dict[str, Any] = {}  # of a model without environments

    # -- learning -----------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise ValueError("this model was loaded without environments; use PPO.load(path, envs)")
        return self._trainer

    @property
    def envs(self) -> GymEnvs:
        envs = self.trainer.envs
        assert isinstance(envs, GymEnvs)
        return envs

    @property
    def num_steps(self) -> int:
        """Steps learned from so far, of all environments together."""
        return self.trainer.progress.steps

    @property
    def is_finished(self) -> bool:
        progress = self.trainer.progress
        return progress.round_steps == 0 and progress.steps >= self.total_steps

    def learn(
        self,
        total_steps: int | None = None,
        callback: RoundCallback | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Train for at least `total_steps` more steps, in whole rounds.

        Args:
            total_steps: of all environments together; None finishes a `learn` that was stopped
            callback: called as `callback(steps, metrics)` after each round; docs/metrics.md
                explains the metrics
            should_stop: checked before each step; training stops when it returns True
        """
        trainer, progress = self.trainer, self.trainer.progress
        if total_steps is not None:
            if not isinstance(total_steps, int) or total_steps < 1:
                raise ValueError(f"total_steps={total_steps!r}; use a whole number, 1 or more")
            self._first_step, self.total_steps = progress.steps, progress.steps + total_steps
        trainer.clock.start()
        while not self.is_finished:
            done = max(progress.steps_before_round - self._first_step, 0)
            schedule = min(done / (self.total_steps - self._first_step), 1.0)
            metrics = trainer.run_round(schedule, should_stop)
            if metrics is None:
                break
            if callback is not None:
                callback(progress.steps, metrics)
                trainer.clock.lap("telemetry")
        return self

    # -- acting -------------------------------------------------------------------------------

    def predict(
        self,
        observation: Any,
        state: RecurrentState | None = None,
        episode_start: Any = None,
        mask: Any = None,
        deterministic: bool = True,
    ) -> tuple[Any, RecurrentState]:
        """The action for an observation, and the recurrent state for the next one.

        Args:
            observation: of one env, or of N envs `[N, ...]`, which gives N actions
            state: returned by the previous call; None starts an episode
            episode_start: whether this observation is the first of an episode, bool `[N]`; the
                state of those envs is set to zeros
            mask: legal actions, `[N, ...]` for N envs; None allows all
            deterministic: take the most likely action instead of sampling
        """
        expected_dim = 0 if self.spaces.first_observation is not None else 1
        is_single = np.ndim(observation) == expected_dim
        features = self.spaces.features(np.asarray(observation)[None] if is_single else observation)
        state = state or self.agent.policy.initial_state(len(features))
        if episode_start is not None:
            is_first = np.broadcast_to(np.asarray(episode_start, dtype=bool), len(features))
            state = zero_rows(state, torch.tensor(is_first))
        decision = self.agent.act(
            features.to(self.agent.device),
            self._masks(mask, len(features), is_single).to(self.agent.device),
            state,
            deterministic=deterministic,
        )
        actions = self.spaces.actions(decision.actions)
        return (actions[0] if is_single else actions), decision.state

    def _masks(self, mask: Any, num_envs: int, is_single: bool) -> ActionMasks:
        if mask is None:
            return ActionMasks.all_legal(self.spaces.action_space, num_envs)
        if is_single and isinstance(mask, Mapping):
            mask = {name: np.asarray(part)[None] for name, part in mask.items()}
        elif is_single:
            mask = np.asarray(mask)[None]
        return self.spaces.masks(mask)

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the model and its training run, as it was after its last round.

        A resumed run collects the current round again: bit-exact if the environments have
        `get_state()` and `set_state()`, else with new episodes.
        """
        contents = {
            "config": to_plain(self.config),
            "spaces": to_plain(self.spaces),
            "learn": [self._first_step, self.total_steps],
            "trainer": self._trainer.state_dict() if self._trainer else self._loaded_trainer,
        }
        write_file(path, _KIND, contents)

    @classmethod
    def load(
        cls,
        path: str | Path,
        envs: "VectorEnv[Any, Any, Any] | None" = None,
        *,
        device: str | None = None,
    ) -> Self:
        """A saved model: without `envs` to predict, with `envs` to continue its training.

        `envs` must be made as they were for the saved run; `learn()` then finishes it. On another
        kind of `device` than the saved one, it continues with other random numbers.
        """
        saved = read_file(path, _KIND, resumes=envs is not None)
        config = from_plain(GymConfig, saved["config"])
        config = config if device is None else replace(config, device=device)
        spaces = from_plain(GymSpaces, saved["spaces"])
        model = cls.__new__(cls)
        if envs is None:
            model._build(config, spaces)
            load_agent(model.agent, saved["trainer"]["agent"], path)
            model._loaded_trainer = saved["trainer"]
        else:
            model._build(config, _open(envs, spaces, config))
            model.trainer.load_state_dict(saved["trainer"], path)
        model._first_step, model.total_steps = saved["learn"]
        return model


class EvaluationResult(NamedTuple):
    """One entry per episode."""

    returns: Array
    lengths: Array


def evaluate(
    model: PPO,
    envs: "VectorEnv[Any, Any, Any]",
    episodes: int,
    *,
    rng_seed: int = 0,
    deterministic: bool = True,
) -> EvaluationResult:
    """Play whole episodes without learning.

    Every env plays the same number of episodes (to within one). Counting those that end first
    would favour short episodes. `envs` may be those that the model learns in: its next steps are
    then the first of new episodes.
    """
    if episodes < 1:
        raise ValueError(f"episodes={episodes}; use 1 or more")
    world = _open(envs, model.spaces, model.config, rng_seed)
    agent, num_envs = model.agent, world.num_envs
    generator = torch.Generator(agent.device).manual_seed(rng_seed)
    state = agent.policy.initial_state(num_envs)
    quota = np.full(num_envs, episodes // num_envs)
    quota[: episodes % num_envs] += 1
    counted: list[Episode] = []
    while quota.any():
        decision = agent.act(
            world.features.to(agent.device),
            world.masks.to(agent.device),
            state,
            generator=generator,
            deterministic=deterministic,
        )
        outcome = world.step(decision.actions)
        state = zero_rows(decision.state, outcome.is_first)
        for episode in world.log.ended:
            if quota[episode.env]:
                quota[episode.env] -= 1
                counted.append(episode)
    if model._trainer is not None and model.envs.vector_env.unwrapped is envs.unwrapped:
        model.envs.restart(model.trainer.shuffle_rng)
        model.trainer.abandon_round()
    return EvaluationResult(
        np.array([e.total_reward for e in counted]), np.array([e.length for e in counted])
    )


def _open(
    envs: "VectorEnv[Any, Any, Any]",
    spaces: GymSpaces,
    config: GymConfig,
    rng_seed: int | None = None,
) -> GymEnvs:
    rng_seed = config.rng_seed if rng_seed is None else rng_seed
    return GymEnvs(envs, spaces, rng_seed=rng_seed, mask_source=config.masks)
