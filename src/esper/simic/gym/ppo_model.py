"""`esper.PPO`: recurrent, masked, factored PPO on Gymnasium environments.

    model = esper.PPO("CartPole-v1")
    model.learn(50_000)
    print(esper.evaluate(model, "CartPole-v1", episodes=20).returns.mean())
    model.save("cartpole.pt")

docs/ppo.md lists the spaces and shows masks, choices that depend on earlier ones, images, mixed
actions, evaluation, callbacks and resuming.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline.factored_actions import ActionMasks, Head
from esper.runtime.checks import require_positive, require_whole, whole_number
from esper.runtime.devices import usable_device
from esper.runtime.files import read_file, write_file
from esper.runtime.plain_config import from_plain, to_plain
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.gym.entries import at, to_tensor
from esper.simic.gym.evaluation import OWN_ENVS, evaluate
from esper.simic.gym.gym_envs import GymEnvs, inner_envs, vector_env
from esper.simic.gym.gym_masks import MaskOption, read_masks
from esper.simic.gym.gym_spaces import CPU, GymSpaces
from esper.simic.gym.round_checks import RoundChecks
from esper.simic.ranks import Ranks, print_once
from esper.simic.trainer import Trainer, load_agent, zero_rows
from esper.tamiyo.policy.network import PolicyConfig, RecurrentState
from esper.tamiyo.policy.plain_heads import flat_policy
from esper.tamiyo.policy.policy_layers import spread_time_constants

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from esper.simic.gym.gym_envs import AnyEnv

_KIND, _VERSION = "PPO model", 5
GYM_GAE_LAMBDA = 0.9


@dataclass(frozen=True, kw_only=True)
class GymConfig:
    """All settings of a PPO model; a saved model holds them."""

    num_envs: int = 8
    """Environments in parallel, if PPO is given the id of an environment; with several ranks, of
    each."""
    horizon: int = 128
    """Steps per env between two updates."""
    rng_seed: int = 0
    """Seeds the weights, the sampling, the shuffling and the environments."""
    device: str = "auto"
    """Where the policy acts and learns; "auto": where the environment's tensors are, else the CPU.
    Under torchrun, "cuda" is the GPU of the rank."""
    masks: MaskOption = "auto"
    """Legal actions: from the entry `mask_key` of a Dict observation, from info[mask_key], from the
    environments' action_masks(), or all. "auto" takes the first of these that the environment
    offers at its first reset; where it finds no masks, a line says so."""
    mask_key: str = "action_mask"
    """The name of the mask in the observation or in info."""
    previous_action: bool = True
    """A policy with memory also sees its previous action."""
    previous_reward: bool = False
    """A policy with memory also sees the previous reward; `predict` then needs `reward`. It helps
    where the reward tells what was right, such as in long tasks that repeat."""
    action_bound: float | None = None
    """Numbers of an action without bounds, as of many simulators, go from minus this to this."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ppo: PPOConfig = field(default_factory=lambda: PPOConfig(gae_lambda=GYM_GAE_LAMBDA))
    """Its default has a shorter trace than `PPOConfig`, gae_lambda=0.9: it helps all tasks in
    benchmarks/results/memory_2core-cpu.md."""

    def __post_init__(self) -> None:
        require_whole(self, 0, "rng_seed")
        if self.rng_seed >= 2**63:
            raise ValueError(f"rng_seed={self.rng_seed}; use less than 2**63")
        require_whole(self, 1, "num_envs")
        require_whole(self, 2, "horizon")  # with NEXT_STEP, 1 could be an autoreset step only
        if self.action_bound is not None:
            require_positive(self, "action_bound")
        if self.masks not in get_args(MaskOption):
            raise ValueError(f"masks={self.masks!r}; use one of {get_args(MaskOption)}")


class PolicyState(NamedTuple):
    """What `predict` keeps from one call to the next, for each env."""

    h: Tensor  # of the LSTM, [N, L, hidden]
    c: Tensor
    choices: Tensor  # [N, H]: of the previous step
    is_new: Tensor  # [N] bool: there was no previous step


class PPO:
    """A policy, and the environments that it learns in.

    Under torchrun every rank has its own environments, and all train one policy: docs/simulators.md.

    Args:
        env: the id of an environment, one environment, or a vector environment; it is reset with
            the config's `rng_seed`
        heads: the choices of an action and what they depend on, such as
            `(Head("row", 3), Head("column", 4, given=("row",)))`; by default independent
        config: all settings
        encoder: a custom module for the observation, `encoder(numbers, *images)` to `[B, width]`
    """

    def __init__(
        self,
        env: "AnyEnv",
        heads: Iterable[Head] | None = None,
        config: GymConfig | None = None,
        *,
        encoder: nn.Module | None = None,
    ):
        config = config or GymConfig()
        if not isinstance(config, GymConfig):
            raise ValueError(f"config is a {type(config).__name__}; use GymConfig(ppo=PPOConfig())")
        envs = vector_env(env, config.num_envs)
        mask_entry = config.mask_key if config.masks in ("auto", "observation") else None
        spaces = GymSpaces.of(envs, heads, mask_entry, config.action_bound)
        if config.policy.memory:
            action, reward = config.previous_action, config.previous_reward
            spaces = replace(spaces, previous_action=action, previous_reward=reward)
        ranks = Ranks.of_torchrun()
        rng_seed = _rng_seed_of(ranks, config.rng_seed, envs.num_envs)
        world = GymEnvs(envs, spaces, rng_seed, config.masks, config.mask_key)
        if config.masks == "auto" and world.mask_source == "none":
            print_once("masks: none found, all actions legal")
        self._build(config, spaces, encoder, world, ranks)

    def _build(
        self,
        config: GymConfig,
        spaces: GymSpaces,
        encoder: nn.Module | None,
        world: GymEnvs | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`world` are the environments to learn in, if there are any; `ranks` learn together."""
        self.config, self.spaces = config, spaces
        self._has_encoder = encoder is not None
        self.mask_source: MaskOption = world.mask_source if world else "auto"
        with torch.random.fork_rng(devices=[]):  # weights depend on rng_seed alone
            torch.manual_seed(config.rng_seed)
            policy = flat_policy(
                spaces.action_space,
                spaces.num_features,
                config.policy,
                num_previous=spaces.num_previous,
                images=spaces.images,
                encoder=encoder,
            )
        spread_time_constants(policy.core, config.policy.memory_steps)
        device = _device_for(config.device, world, ranks)
        policy = policy.to(device)
        if ranks is not None and world is not None:
            ranks.require_own(device)
            size = sum(parameter.numel() for parameter in policy.parameters())
            ranks.require_same(
                num_envs=world.num_envs,
                horizon=config.horizon,
                ppo_epochs=config.ppo.ppo_epochs,
                num_minibatches=config.ppo.num_minibatches,
                num_weights=size,
            )
        self.agent = PPOAgent(policy, config.ppo, ranks)
        self._trainer: Trainer | None = None
        if world is not None:
            self._trainer = Trainer(
                world,
                self.agent,
                horizon=config.horizon,
                rng_seed=_rng_seed_of(ranks, config.rng_seed, world.num_envs),
                clock=world.clock,
            )
        if self.agent.device.type == "cpu" and self._is_first_rank:
            from esper.kernels.numba_cache import announce_compilation

            announce_compilation()
        self._first_step = self.total_steps = 0  # where the last call of `learn` starts and ends
        self.is_learning = False
        self._loaded: dict[str, Any] = {}  # the file of a model without environments

    @property
    def _is_first_rank(self) -> bool:
        return self.agent.ranks is None or self.agent.ranks.is_first

    # -- learning -----------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise ValueError("this model was loaded without environments; use PPO.load(path, env)")
        return self._trainer

    @property
    def envs(self) -> GymEnvs:
        return cast(GymEnvs, self.trainer.envs)

    @property
    def num_steps(self) -> int:
        """Steps learned from so far, of all environments together."""
        return self.trainer.progress.steps

    @property
    def is_finished(self) -> bool:
        progress = self.trainer.progress
        return progress.steps >= self.total_steps

    def learn(
        self,
        steps: int | None = None,
        callback: Callable[[int, dict[str, float]], bool | None] | None = None,
        eval_env: "AnyEnv | None" = None,
        log_dir: str | Path | None = None,
        *,
        eval_every: int = 10,
        eval_episodes: int = 10,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Train for at least `steps` more steps, in whole rounds.

        Args:
            steps: of all environments together, on all ranks; None finishes a `learn` that was
                stopped
            callback: called as `callback(steps, metrics)` after each round, on every rank;
                training stops when one returns False. docs/metrics.md explains the metrics
            eval_env: other environments than those to learn in, or an id: every `eval_every`
                rounds `eval_episodes` are played, and the metrics hold "eval/return"
            log_dir: folder for TensorBoard's curves of all metrics; rank 0 writes
            should_stop: checked before each step; training stops when it returns True
        """
        trainer, progress = self.trainer, self.trainer.progress
        ranks = self.agent.ranks
        if steps is not None:
            steps = whole_number("steps", steps, 1)
            self._first_step, self.total_steps = progress.steps, progress.steps + steps
        elif not self.total_steps:
            raise ValueError("there is no `learn` to finish; give steps, such as learn(50_000)")
        whole_number("eval_every", eval_every, 1)
        whole_number("eval_episodes", eval_episodes, 1)
        if eval_env is not None:
            eval_env = vector_env(eval_env, self.envs.num_envs)
            if self.learns_in(eval_env):
                raise ValueError(OWN_ENVS)
            try:
                GymEnvs(eval_env, self.spaces, 0, self.mask_source, self.config.mask_key)
            except ValueError as error:
                raise ValueError(f"eval_env: {error}") from error
        with ExitStack() as stack:
            record: Callable[[int, dict[str, float]], None] = lambda *_: None  # noqa: E731
            if log_dir is not None and self._is_first_rank:
                from esper.nissa.tensorboard import TensorBoardSink

                sink = TensorBoardSink(log_dir, first_step=progress.steps + 1)
                record = stack.enter_context(sink).record
            self.is_learning = True
            stack.callback(setattr, self, "is_learning", False)
            trainer.clock.start()
            while not self.is_finished:
                done = max(progress.steps - self._first_step, 0)
                schedule = min(done / (self.total_steps - self._first_step), 1.0)
                metrics = trainer.run_round(schedule, should_stop)
                if metrics is None:
                    break
                if eval_env is not None and (progress.rounds % eval_every == 0 or self.is_finished):
                    result = evaluate(self, eval_env, eval_episodes)
                    metrics["eval/return"] = float(result.returns.mean())
                    metrics["eval/length"] = float(result.lengths.mean())
                record(progress.steps, metrics)
                answer = None if callback is None else callback(progress.steps, metrics)
                is_last = isinstance(answer, bool | np.bool_) and not answer
                if ranks is not None and callback is not None:
                    is_last = ranks.any(is_last)
                if is_last:
                    break
                trainer.clock.lap("telemetry")
        return self

    def learns_in(self, envs: "VectorEnv[Any, Any, Any]") -> bool:
        own = [] if self._trainer is None else inner_envs(self.envs.vector_env)
        return bool({id(env) for env in own} & {id(env) for env in inner_envs(envs)})

    # -- acting -------------------------------------------------------------------------------

    def predict(
        self,
        observation: Any,
        state: PolicyState | None = None,
        episode_start: Any = None,
        mask: Any = None,
        deterministic: bool = True,
        *,
        reward: Any = None,
    ) -> tuple[Any, PolicyState]:
        """The action for an observation, and the policy's state for the next one.

        Args:
            observation: of one env, or of N envs `[N, ...]` (entries of a Dict alike), which
                gives N actions
            state: returned by the previous call; None starts an episode
            episode_start: whether this observation is the first of an episode, bool `[N]`; the
                state of those envs is set to zeros
            mask: legal actions, `[N, ...]` for N envs; None takes the observation's mask entry,
                or else allows all
            deterministic: take the most likely action instead of sampling
            reward: of the previous action, `[N]` for N envs; not needed at an episode's start
        """
        is_single = (num_rows := self.spaces.num_rows(observation)) is None
        num_envs = 1 if num_rows is None else num_rows
        if state is None:
            space, device = self.spaces.action_space, self.agent.device
            size = (num_envs, space.num_heads)
            choices = torch.zeros(size, dtype=space.action_dtype, device=device)
            is_new = torch.ones(num_envs, dtype=torch.bool, device=device)
            state = PolicyState(*self.agent.policy.initial_state(num_envs), choices, is_new)
        is_state = isinstance(state, PolicyState)
        if not is_state or len(state.h) != num_envs:
            found = f"that of {len(state.h)} envs" if is_state else f"a {type(state).__name__}"
            raise ValueError(
                f"the state is {found}, the observation of {num_envs}; pass what predict returned "
                "for the same envs, or state=None at the start of episodes"
            )
        if episode_start is not None:
            is_first = _per_env("episode_start", episode_start, num_envs, torch.bool)
            is_first = is_first.to(self.agent.device)
            recurrent = zero_rows(RecurrentState(state.h, state.c), is_first)
            state = PolicyState(*recurrent, state.choices, state.is_new | is_first)
        previous = self._previous(state, reward)
        observations = [observation] if is_single else observation
        features, frames = self.spaces.read(observations, previous, one_by_one=is_single)
        self.spaces.require_finite(features)
        if mask is None and (entry := self.spaces.mask_entry) is not None:
            if entry not in observation:
                raise ValueError(f"the observation has no mask {entry!r}; add it, or pass mask=")
            mask = observation[entry]
        if mask is None and self.mask_source in ("info", "method"):
            warnings.warn(
                "this model learned with masks, but predict got none, so all actions are legal; "
                "pass mask=",
                stacklevel=2,
            )
        if mask is None:
            masks = ActionMasks.all_legal(self.spaces.action_space, num_envs)
        else:
            checks = RoundChecks()
            masks = read_masks(self.spaces.action_space, [mask] if is_single else mask, checks)
            checks.finish()
        device = self.agent.device
        recurrent = RecurrentState(state.h, state.c)
        decision = self.agent.act(
            features.to(device),
            masks.to(device),
            recurrent,
            frames=frames.to(device),
            deterministic=deterministic,
        )
        self.agent.policy.check(decision)
        speaks_torch = isinstance(at(observation, self.spaces.observation[0].path), Tensor)
        choices = decision.actions.to(features.device)
        actions = self.spaces.actions(choices[0] if is_single else choices, as_tensors=speaks_torch)
        is_new = torch.zeros(num_envs, dtype=torch.bool, device=device)
        return actions, PolicyState(*decision.state, decision.actions, is_new)

    def _previous(self, state: PolicyState, reward: Any) -> Tensor:
        """Features of the step before; zeros at the start of an episode."""
        num_envs = len(state.h)
        if reward is None and self.spaces.previous_reward and not state.is_new.all():
            warnings.warn(
                "this model learned with the previous reward, but predict got none, so 0 is used; "
                "pass reward=",
                stacklevel=3,
            )
        rewards = _per_env("reward", 0.0 if reward is None else reward, num_envs, torch.float32)
        previous = self.spaces.previous(state.choices, rewards.to(state.choices.device))
        return previous.masked_fill_(state.is_new.unsqueeze(1), 0.0)

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the model and its training run, as it was after its last round.

        It holds no environments: a resumed run continues with the next round, in new episodes.
        Rank 0 writes it, for all; on other ranks this does nothing.
        """
        if not self._is_first_rank:
            return
        contents = self._loaded or {
            "spaces": to_plain(self.spaces),
            "mask_source": self.mask_source,
            "environment": self.envs.kind,
            "num_envs": self.envs.num_envs,
            "learn": [self._first_step, self.total_steps],
            "trainer": self.trainer.state_dict(),
        }
        contents = contents | {
            "config": to_plain(self.config),
            "has_encoder": self._has_encoder,
        }
        write_file(path, _KIND, contents, version=_VERSION)

    @classmethod
    def load(
        cls,
        path: str | Path,
        env: "AnyEnv | None" = None,
        *,
        device: str | None = None,
        encoder: nn.Module | None = None,
    ) -> Self:
        """A saved model: without `env` to predict, with `env` to continue its training.

        `env` may be any environments with the same spaces; they are reset, and `learn()` finishes
        the saved run in them. An id makes as many as before. On another kind of `device` than the
        saved one, it continues with other random numbers. A custom `encoder` is passed again; its
        weights are loaded. With `env`, the number of ranks is that of the saved run.
        """
        ranks = None if env is None else Ranks.of_torchrun()
        if ranks is not None:
            ranks.wait()  # until rank 0 has written
        saved = read_file(path, _KIND, version=_VERSION)
        if saved["has_encoder"] and encoder is None:
            raise ValueError(f"{path} holds a model with a custom encoder; pass encoder=")
        config = from_plain(GymConfig, saved["config"])
        config = config if device is None else replace(config, device=device)
        spaces, run = from_plain(GymSpaces, saved["spaces"]), saved["trainer"]
        model = cls.__new__(cls)
        if env is None:
            model._build(config, spaces, encoder)
            load_agent(model.agent, run["agent"], path)
            model._loaded, model.mask_source = saved, saved["mask_source"]
        else:
            envs = vector_env(env, saved["num_envs"])
            rng_seed = _rng_seed_of(ranks, config.rng_seed, envs.num_envs)
            world = GymEnvs(envs, spaces, rng_seed, saved["mask_source"], config.mask_key)
            model._build(config, spaces, encoder, world, ranks)
            if saved["environment"] != world.kind:
                run["envs"]["recent_episodes"] = []  # their returns are of another task
            model.trainer.load_state_dict(run, path)
        model._first_step, model.total_steps = saved["learn"]
        return model


def _rng_seed_of(ranks: Ranks | None, rng_seed: int, num_envs: int) -> int:
    """The seed of a rank's environments and sampling; its env i gets this plus i."""
    return rng_seed if ranks is None else rng_seed + ranks.rank * num_envs


def _device_for(name: str, world: GymEnvs | None, ranks: Ranks | None) -> torch.device:
    """The device of this name; for "auto", that of the environments' tensors."""
    if name != "auto":
        return usable_device(name if ranks is None else ranks.device(name))
    return CPU if world is None else world.device


def _per_env(name: str, value: Any, num_envs: int, dtype: torch.dtype) -> Tensor:
    """A value for all envs, or one for each, as `[N]`."""
    values = to_tensor(name, value).to(dtype)
    if values.shape not in ((), (num_envs,)):
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected ({num_envs},)")
    return values.expand(num_envs)
