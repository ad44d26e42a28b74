"""Gymnasium vector environments for the training loop, with one behaviour for all autoreset modes.

    envs = GymEnvs(vector_env, GymSpaces.of(vector_env), rng_seed=0)
    observed = envs.observe(row)             # features into a row of the rollout, and masks
    stepped = envs.step(row)                 # its actions; rewards and flags into the row

Three modes, read from `metadata["autoreset_mode"]`:
- NEXT_STEP: the step after an episode's end only resets, and its action is ignored. Such a filler
  is no real step, and is not stored.
- SAME_STEP: the reset happens within the step that ends the episode.
- DISABLED: the envs that have ended are reset here.

The environments of a `SyncVectorEnv` without wrappers are stepped directly and reset when they end:
the same episodes, without fillers (`DirectEnvs`).
"""

import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from esper.leyline.factored_actions import ActionMasks
from esper.simic.agent.rollout import RolloutRow
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.gym.direct_envs import DirectEnvs
from esper.simic.gym.gym_spaces import Array, GymSpaces, PolicyInput
from esper.simic.trainer import EnvSpec, Observed, PhaseClock, Stepped

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.vector import VectorEnv

    AnyEnv = str | Env[Any, Any] | VectorEnv[Any, Any, Any]

MaskOption = Literal["auto", "observation", "info", "method", "none"]

_DEFAULT_KEY = "action_mask"
RECENT_EPISODES = 100  # that the reported means are over


class Episode(NamedTuple):
    """An episode that has ended."""

    env: int
    total_reward: float
    length: int


class EpisodeLog:
    """Returns and lengths of episodes."""

    def __init__(self, num_envs: int, recent: Iterable[Episode] = ()):
        self.total_rewards = np.zeros(num_envs)  # of the unfinished episodes, as are the lengths
        self.lengths = np.zeros(num_envs, dtype=np.int64)
        self.ended: list[Episode] = []  # by the last step
        self.recent = deque(recent, maxlen=RECENT_EPISODES)  # before this round

    def add(self, rewards: Array, ended: Array, is_real_step: Array) -> None:
        self.total_rewards += rewards * is_real_step
        self.lengths += is_real_step
        self.ended = [
            Episode(int(env), float(self.total_rewards[env]), int(self.lengths[env]))
            for env in np.flatnonzero(ended)
        ]
        self.recent.extend(self.ended)
        self.total_rewards[ended] = 0.0
        self.lengths[ended] = 0


class GymEnvs:
    """N environments, each with a current observation and its masks."""

    masks: ActionMasks  # of the current observation
    pending: Array  # [N] bool: the next step is a filler that only resets

    def __init__(
        self,
        envs: "VectorEnv[Any, Any, Any]",
        spaces: GymSpaces,
        rng_seed: int,
        mask_source: MaskOption = "auto",
        mask_key: str = _DEFAULT_KEY,
        clock: PhaseClock | None = None,
    ):
        spaces.require_same(envs)
        self.spaces = spaces
        self.num_envs = envs.num_envs
        self.spec = EnvSpec(
            envs.num_envs, spaces.num_features, spaces.action_space, spaces.frame_size
        )
        self.clock = clock or PhaseClock()
        self.vector_env: Any = envs
        self._autoreset = _autoreset_mode(envs)
        self._stepped: Any = envs
        if type(self.vector_env) is _sync_vector_env():
            self._stepped = DirectEnvs(self.vector_env, mask_key)
            self._autoreset = "SAME_STEP"
        self._current = spaces.empty_input(envs.num_envs)
        self._all_legal = ActionMasks.all_legal(spaces.action_space, envs.num_envs)
        self._mask_key = mask_key
        self.rounds = 0
        self._where = ""  # the round that errors name
        observations, infos = self._reset(rng_seed)
        self.mask_source = self._find_mask_source(infos, mask_source)
        self._is_unmasked_by_chance = self.mask_source == "none" != mask_source
        self._note(observations, infos)
        self._check_masks(observations, infos)

    def _check_masks(self, observations: Any, infos: dict[str, Any]) -> None:
        """Raise or warn where masks were probably meant, and none were found."""
        if self._is_unmasked_by_chance and self._mask_key != _DEFAULT_KEY:
            names = [name for name in infos if not name.startswith("_")]
            first = observations[0] if isinstance(observations, list) else observations
            raise ValueError(
                f"mask_key={self._mask_key!r}: the first reset gave no such mask. The observation has "
                f"{[*first] if isinstance(first, dict) else 'no names'}, info {names}. "
                "Give the mask at every reset and step, or set masks='method' to use action_masks(), "
                "or masks='none' to learn without masks"
            )
        given = [head.name for head in self.spec.action_space if head.given]
        if given and self._is_unmasked_by_chance:
            warnings.warn(
                f"heads {given} depend on earlier heads, but the environment gives no masks, so all "
                f"choices are legal; give info[{self._mask_key!r}] at every reset and step, or set "
                "masks='none'",
                stacklevel=4,  # where the model is made
            )

    def _reset(self, rng_seed: int, recent: Iterable[Episode] = ()) -> tuple[Any, dict[str, Any]]:
        """Start new episodes; env i gets the seed plus i."""
        _require_usable(self.vector_env)
        self.log = EpisodeLog(self.num_envs, recent)
        self.pending = np.zeros(self.num_envs, dtype=bool)
        self._starts = np.ones(self.num_envs, dtype=bool)
        self._previous = np.zeros((self.num_envs, self.spaces.num_previous), dtype=np.float32)
        found: tuple[Any, dict[str, Any]] = self._stepped.reset(seed=rng_seed)
        return found

    # -- a round ------------------------------------------------------------------------------

    def begin_round(self) -> None:
        _require_usable(self.vector_env)
        self._where = f", round {self.rounds + 1}"

    def observe(self, row: RolloutRow) -> Observed:
        row.states.copy_(self._current.features)
        if self.spec.frame_size:
            row.frames.copy_(self._current.frames)
        masks = self.masks.to(row.states.device)
        return Observed(masks, torch.from_numpy(self._starts))

    def step(self, row: RolloutRow) -> Stepped:
        choices = row.actions.cpu()
        was_pending = self.pending
        actions = self.spaces.actions(choices)
        observations, rewards, terminated, truncated, infos = self._stepped.step(actions)
        truncated = truncated & ~terminated
        ended = terminated | truncated
        rewards = np.asarray(rewards, dtype=np.float32)
        self._previous = self.spaces.previous(choices.numpy(), rewards)
        final = self._final_input(observations, infos, truncated)
        reset_infos = None
        if self._autoreset == "NEXT_STEP":
            self._starts = was_pending
            self.pending = ended
        else:
            self._starts = ended
            if self._autoreset == "DISABLED" and ended.any():
                options = {"reset_mask": ended.copy()}
                observations, reset_infos = self._stepped.reset(options=options)
        self._previous[self._starts] = 0.0
        self._note(observations, infos, ended, reset_infos)
        self.log.add(rewards, ended, ~was_pending)
        row.rewards.copy_(torch.from_numpy(rewards))
        row.terminated.copy_(torch.from_numpy(terminated))
        row.truncated.copy_(torch.from_numpy(truncated))
        self.clock.lap("env")
        is_real = torch.from_numpy(~was_pending) if was_pending.any() else None
        if final is None:
            return Stepped(is_real, None)
        return Stepped(is_real, final.features, final_frames=final.frames)

    def end_round(self, buffer: TamiyoRolloutBuffer) -> dict[str, float]:
        self.rounds += 1
        recent = self.log.recent
        if not recent:
            return {}
        return {
            "episode/return": float(np.mean([episode.total_reward for episode in recent])),
            "episode/length": float(np.mean([episode.length for episode in recent])),
        }

    def _final_input(
        self, observations: Any, infos: dict[str, Any], truncated: Array
    ) -> PolicyInput | None:
        """What followed the step, before any reset, of N envs; None if nothing was cut."""
        if not truncated.any():
            return None
        if self._autoreset != "SAME_STEP":
            final = self.spaces.read(observations, self._previous)
        else:
            final = self.spaces.empty_input(self.num_envs)
            last = list(infos["final_obs"][truncated])
            before = self._previous[truncated]
            cut = torch.from_numpy(truncated)
            of_cut = self.spaces.read(last, before, one_by_one=True)
            final.features[cut] = of_cut.features
            final.frames[cut] = of_cut.frames
        self.spaces.require_finite(final.features, self._where)
        return final

    def _note(
        self,
        observations: Any,
        infos: dict[str, Any],
        ended: Array | None = None,
        reset_infos: dict[str, Any] | None = None,
    ) -> None:
        """Set the current features, pictures and masks."""
        one_by_one = isinstance(self._stepped, DirectEnvs)
        self.spaces.read(observations, self._previous, one_by_one=one_by_one, out=self._current)
        self.spaces.require_finite(self._current.features, self._where)
        if self.mask_source == "none":
            if self._is_unmasked_by_chance and self._mask_key in infos:
                raise ValueError(
                    f"info has {self._mask_key!r}, but the first reset gave none: give it at every "
                    "reset and step, or set masks='none' to learn without masks"
                )
            self.masks = self._all_legal
            return
        if self.mask_source == "observation":
            key = self._mask_key
            entries = [o[key] for o in observations] if one_by_one else observations[key]
            infos = {key: entries}
        # the last observation of an episode may allow nothing; no action is chosen for it
        sources = [(infos, ~self.pending)]
        if reset_infos is not None and ended is not None and self.mask_source == "info":
            sources = [(infos, ~ended), (reset_infos, ended)]  # new episodes: with their reset
        groups = [group.clone() for group in self._all_legal.groups]
        for source, needed in sources:
            if needed.any():
                found = self.spaces.masks(_rows(self._given_masks(source, needed), needed))
                for group, part in zip(groups, found.groups, strict=True):
                    group[torch.from_numpy(needed)] = part
        self.masks = ActionMasks(self.spec.action_space, groups)

    def _given_masks(self, infos: dict[str, Any], needed: Array) -> Any:
        """The masks of all envs as the environment gives them; raises if a needed one is missing."""
        if self.mask_source == "method":
            return self.vector_env.unwrapped.call("action_masks")
        key = self._mask_key
        given = infos.get(f"_{key}", np.full(self.num_envs, key in infos))
        if (needed & ~given).any():
            raise ValueError(
                f"envs {np.flatnonzero(needed & ~given).tolist()} gave no info[{key!r}]; "
                "with masks from info, every reset and step must give one"
            )
        return infos[key]

    def _find_mask_source(self, infos: dict[str, Any], asked: MaskOption) -> MaskOption:
        """Where masks come from: as asked, or the first source that the environment offers."""
        from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

        if asked in ("info", "none"):
            return asked
        if self.spaces.mask_entry is not None and asked != "method":
            return "observation"
        if asked == "observation":
            raise ValueError(
                f"the observation has no entry {self._mask_key!r} with the mask; use a Dict "
                "observation that has it, or set mask_key"
            )
        if asked == "auto" and self._mask_key in infos:
            return "info"
        inner = self.vector_env.unwrapped
        has_methods = isinstance(inner, SyncVectorEnv | AsyncVectorEnv)
        has_masks = inner.call("has_wrapper_attr", "action_masks") if has_methods else [False]
        if any(has_masks) and (asked == "method" or self._mask_key == _DEFAULT_KEY):
            if without := [env for env, has in enumerate(has_masks) if not has]:
                raise ValueError(
                    f"envs {without} have no action_masks() method, but the others do; add it to "
                    "all, or set masks='none' to learn without masks"
                )
            return "method"
        if asked == "method":
            raise ValueError(
                f"{self.vector_env} has no sub-environments with an action_masks() method; give "
                f"masks as info[{self._mask_key!r}] (masks='info')"
            )
        return "none"

    @property
    def kind(self) -> str:
        """The class of the environments without their wrappers."""
        return str(type(inner_envs(self.vector_env)[0]))

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        recent = [list(episode) for episode in self.log.recent]
        return {"recent_episodes": recent, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any], generator: torch.Generator) -> None:
        """Start new episodes, other ones than at the start of the run."""
        self.rounds = state["rounds"]
        recent = [Episode(*episode) for episode in state["recent_episodes"]]
        rng_seed = int(torch.randint(2**31, (), generator=generator))
        self._note(*self._reset(rng_seed, recent))


def _sync_vector_env() -> type:
    from gymnasium.vector import SyncVectorEnv

    return SyncVectorEnv


def _autoreset_mode(envs: "VectorEnv[Any, Any, Any]") -> str:
    from gymnasium.vector import AutoresetMode

    try:
        return AutoresetMode(envs.metadata.get("autoreset_mode")).name
    except ValueError as error:
        raise ValueError(
            f"{envs} does not declare how it resets; set metadata['autoreset_mode'] to a "
            "gymnasium.vector.AutoresetMode"
        ) from error


def _require_usable(envs: "VectorEnv[Any, Any, Any]") -> None:
    """Raise for an AsyncVectorEnv that an interruption or an error has left unusable."""
    from gymnasium.vector import AsyncVectorEnv
    from gymnasium.vector.async_vector_env import AsyncState

    inner = envs.unwrapped
    if not isinstance(inner, AsyncVectorEnv):
        return
    is_idle = inner._state == AsyncState.DEFAULT and None not in inner.parent_pipes
    if inner.closed or not is_idle or not all(p.is_alive() for p in inner.processes):
        what = "closed" if inner.closed else "interrupted or have failed"
        raise ValueError(
            f"the processes of {envs} were {what}, and cannot be used again; make new environments. "
            "A model continues in them with model.save(path), then PPO.load(path, them)"
        )


def _rows(masks: Any, envs: Array) -> Any:
    """The masks of some envs out of those of all."""
    if isinstance(masks, Mapping):  # for each head, gymnasium adds which envs gave it as "_head"
        return {name: _rows(m, envs) for name, m in masks.items() if not name.startswith("_")}
    return [*compress(masks, envs)] if isinstance(masks, tuple | list) else np.asarray(masks)[envs]


# -- making and comparing environments ------------------------------------------------------------


def vector_env(env: "AnyEnv", num_envs: int) -> "VectorEnv[Any, Any, Any]":
    """A vector environment: `num_envs` of an id, or the given one alone."""
    try:
        import gymnasium
        from gymnasium.vector import SyncVectorEnv, VectorEnv
    except ModuleNotFoundError as error:
        advice = f"esper.PPO needs {error.name}: pip install 'esper-lite[gym]'"
        raise ModuleNotFoundError(advice) from error
    if isinstance(env, VectorEnv):
        return env
    if isinstance(env, gymnasium.Env):
        return SyncVectorEnv([lambda: env])
    if not isinstance(env, str):
        raise ValueError(
            f"{env} is a {type(env).__name__}; use the id of an environment, a gymnasium.Env, or "
            "a vector environment such as gymnasium.vector.SyncVectorEnv([make_env] * 8)"
        )
    try:
        return gymnasium.make_vec(env, num_envs=num_envs, vectorization_mode="sync")
    except gymnasium.error.UnregisteredEnv as error:
        raise ValueError(f"{error} `gymnasium.pprint_registry()` lists all") from error
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise ValueError(f"{env} cannot be made: {error}") from error


def inner_envs(envs: "VectorEnv[Any, Any, Any]") -> list[Any]:
    """The environments without their wrappers, or the vector environment that computes them."""
    from gymnasium.vector import SyncVectorEnv

    inner = envs.unwrapped
    return [e.unwrapped for e in inner.envs] if isinstance(inner, SyncVectorEnv) else [inner]
