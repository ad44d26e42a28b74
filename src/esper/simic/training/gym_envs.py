"""A Gymnasium vector environment as a learner wants it: the same whatever its autoreset mode.

    envs = GymEnvs(vector_env, rng_seed=0)
    outcome = envs.step(choices)             # for the observation in envs.features, envs.masks

Three modes, read from `metadata["autoreset_mode"]`:
- NEXT_STEP: the step after an episode's end only resets; its action is ignored. Such a filler is
  reported as not `taken`, and must not reach storage, statistics or the recurrent state.
- SAME_STEP: the reset happens within the step that ends the episode.
- DISABLED: the envs that have ended are reset here.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.simic.training.gym_spaces import Array, GymSpaces

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv
    from gymnasium.wrappers import TimeLimit

MaskSource = Literal["info", "method", "none"]


class Outcome(NamedTuple):
    """What a step led to. Flags are numpy: they steer the host and never touch a device."""

    rewards: Tensor  # [N] float32
    terminated: Array  # [N] bool
    truncated: Array  # [N] bool, never where terminated
    taken: Array  # [N] bool; False: a filler, the action was ignored
    begins: Array  # [N] bool: the observation at hand is the first of an episode
    final_features: Tensor  # [N, F]: of the observation that followed, before any reset


class Episode(NamedTuple):
    """An episode that has ended."""

    env: int
    total_reward: float
    length: int


class EpisodeLog:
    """Rewards and lengths of the episodes under way; tells when one is over."""

    def __init__(self, num_envs: int):
        self.total_rewards = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, dtype=np.int64)

    def add(self, outcome: Outcome) -> list[Episode]:
        """The episodes that this step ended."""
        self.total_rewards += outcome.rewards.numpy() * outcome.taken
        self.lengths += outcome.taken
        ended = outcome.terminated | outcome.truncated
        if not ended.any():
            return []
        over = [
            Episode(int(env), float(self.total_rewards[env]), int(self.lengths[env]))
            for env in np.flatnonzero(ended)
        ]
        self.total_rewards[ended] = 0.0
        self.lengths[ended] = 0
        return over


class GymEnvs:
    """N environments side by side, each with an observation and masks that wait for a decision."""

    features: Tensor  # [N, F]
    masks: ActionMasks
    pending: Array  # [N] bool: the next step is a filler

    def __init__(
        self,
        envs: "VectorEnv[Any, Any, Any]",
        *,
        rng_seed: int | None,
        action_space: FactoredActionSpace | None = None,
        mask_source: Literal["auto", "info", "method", "none"] = "auto",
    ):
        require_vector_env(envs)
        self.spaces = GymSpaces.of(
            envs.single_observation_space, envs.single_action_space, action_space
        )
        self.num_envs = envs.num_envs
        self._envs = envs
        self._autoreset = _autoreset_mode(envs)
        self._all_legal = ActionMasks.all_legal(self.spaces.action_space, self.num_envs)
        observations, infos = envs.reset(seed=rng_seed)
        self.mask_source = _mask_source(envs, infos, mask_source)
        self.pending = np.zeros(self.num_envs, dtype=bool)
        self._arrive(observations, infos)

    def restart(self, rng_seed: int) -> None:
        """Begin a new episode in every env."""
        observations, infos = self._envs.reset(seed=rng_seed)
        self.pending = np.zeros(self.num_envs, dtype=bool)
        self._arrive(observations, infos)

    def step(self, choices: Tensor) -> Outcome:
        """Take the heads' choices `[N, H]` in every env."""
        was_pending = self.pending
        observations, rewards, terminated, truncated, infos = self._envs.step(
            self.spaces.actions(choices)
        )
        truncated = truncated & ~terminated
        ended = terminated | truncated
        final_features: Tensor | None = None
        reset_infos = None
        if self._autoreset == "NEXT_STEP":
            begins, self.pending = was_pending, ended
        else:
            begins = ended
            if ended.any():
                final_features = self._final_features(observations, infos, ended)
                if self._autoreset == "DISABLED":
                    observations, reset_infos = self._envs.reset(
                        options={"reset_mask": ended.copy()}
                    )
        self._arrive(observations, infos, ended, reset_infos)
        return Outcome(
            torch.from_numpy(rewards.astype(np.float32)),
            terminated,
            truncated,
            ~was_pending,
            begins,
            self.features if final_features is None else final_features,
        )

    def _final_features(self, observations: Any, infos: dict[str, Any], ended: Array) -> Tensor:
        features = self.spaces.features(observations)
        if self._autoreset == "SAME_STEP":
            features[torch.from_numpy(ended)] = self.spaces.features(
                np.stack(list(infos["final_obs"][ended]))
            )
        return features

    def _arrive(
        self,
        observations: Any,
        infos: dict[str, Any],
        ended: Array | None = None,
        reset_infos: dict[str, Any] | None = None,
    ) -> None:
        """Make these the observation and masks at hand."""
        self.features = self.spaces.features(observations)
        if self.mask_source == "none":
            self.masks = self._all_legal
            return
        runs, given = self._read_masks(infos)
        if reset_infos is not None:  # after an end, the reset's word counts
            assert ended is not None
            reset_runs, reset_given = self._read_masks(reset_infos)
            for run, reset_run in zip(runs, reset_runs, strict=True):
                run[ended] = reset_run[ended]
            given = np.where(ended, reset_given, given)
        if not (given | self.pending).all():
            raise ValueError(
                f"envs {np.flatnonzero(~(given | self.pending)).tolist()} gave no "
                "info['action_mask']; with masks from info, every reset and step must give one"
            )
        for run in runs:
            run[self.pending] = True  # nothing depends on a filler's action
        self.masks = ActionMasks.from_groups(
            self.spaces.action_space, [torch.from_numpy(run) for run in runs]
        )

    def _read_masks(self, infos: dict[str, Any]) -> tuple[list[Array], Array]:
        """The runs' masks, all legal where an env gave none, and which envs gave one."""
        if self.mask_source == "method":
            masks: Any = _sub_environments(self._envs).call("action_masks")
            if isinstance(masks[0], Mapping):
                masks = {name: [mask[name] for mask in masks] for name in masks[0]}
            return self.spaces.mask_groups(masks), np.ones(self.num_envs, dtype=bool)
        given = infos.get("_action_mask", np.full(self.num_envs, "action_mask" in infos))
        if given.all():
            return self.spaces.mask_groups(_rows(infos["action_mask"], given)), given
        runs = [run.numpy().copy() for run in self._all_legal.groups]
        if given.any():
            given_runs = self.spaces.mask_groups(_rows(infos["action_mask"], given))
            for run, given_run in zip(runs, given_runs, strict=True):
                run[given] = given_run
        return runs, given

    # -- state --------------------------------------------------------------------------------

    @property
    def can_save_state(self) -> bool:
        """Whether every sub-environment has `get_state()` and `set_state(state)`.

        `get_state` returns all that the environment's future depends on (its random generator
        too) as plain containers, numbers, strings and tensors. A wrapper around it may remember
        things of its own, so it needs the two methods as well; only those that
        `gymnasium.make` adds are known.
        """
        from gymnasium.vector import SyncVectorEnv

        if not isinstance(self._envs, SyncVectorEnv):
            return False
        return all(_state_holders(env) is not None for env in self._envs.envs)

    def state_dict(self) -> dict[str, Any]:
        """The observation at hand and the environments themselves; needs `can_save_state`."""
        return {
            "features": self.features,
            "masks": list(self.masks.groups),
            "pending": torch.from_numpy(self.pending),
            "environments": [_environment_state(env) for env in self._sync().envs],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.features = state["features"]
        self.masks = ActionMasks.from_groups(self.spaces.action_space, state["masks"])
        self.pending = state["pending"].numpy()
        sync = self._sync()
        for env, env_state in zip(sync.envs, state["environments"], strict=True):
            _set_environment_state(env, env_state)
        # what the vector environment itself remembers: whose next step only resets
        sync._autoreset_envs = self.pending.copy()

    def _sync(self) -> "gymnasium.vector.SyncVectorEnv":
        return self._envs  # type: ignore[return-value]


def require_vector_env(envs: Any) -> None:
    from gymnasium.vector import VectorEnv

    if not isinstance(envs, VectorEnv):
        raise ValueError(
            f"{envs} is not a vector environment; use gymnasium.make_vec(ENV_ID, num_envs=8) or "
            "gymnasium.vector.SyncVectorEnv([make_env] * 8)"
        )


def _autoreset_mode(envs: "VectorEnv[Any, Any, Any]") -> str:
    from gymnasium.vector import AutoresetMode

    try:
        return AutoresetMode(envs.metadata.get("autoreset_mode")).name
    except ValueError as error:
        raise ValueError(
            f"{envs} does not say how it resets; set metadata['autoreset_mode'] to a "
            "gymnasium.vector.AutoresetMode"
        ) from error


def _mask_source(
    envs: "VectorEnv[Any, Any, Any]",
    infos: dict[str, Any],
    asked: Literal["auto", "info", "method", "none"],
) -> MaskSource:
    """Where masks come from: as asked, or the first source that is there."""
    if asked in ("info", "none"):
        return asked
    if asked == "auto" and "action_mask" in infos:
        return "info"
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    if isinstance(envs.unwrapped, SyncVectorEnv | AsyncVectorEnv) and all(
        envs.unwrapped.call("has_wrapper_attr", "action_masks")
    ):
        return "method"
    if asked == "method":
        raise ValueError(
            f"{envs} has no sub-environments with an action_masks() method; give masks as "
            "info['action_mask'] (masks='info')"
        )
    return "none"


def _sub_environments(
    envs: "VectorEnv[Any, Any, Any]",
) -> "gymnasium.vector.SyncVectorEnv | gymnasium.vector.AsyncVectorEnv":
    return envs.unwrapped  # type: ignore[return-value]


def _rows(masks: Any, envs: Array) -> Any:
    """The masks of some envs out of a vector environment's info."""
    if isinstance(masks, Mapping):  # beside each head, gymnasium notes who gave it as "_head"
        return {
            name: np.asarray(mask)[envs] for name, mask in masks.items() if not name.startswith("_")
        }
    return np.asarray(masks)[envs]


# -- the state of one environment -----------------------------------------------------------------


def _state_holders(
    env: "gymnasium.Env[Any, Any]",
) -> "tuple[list[TimeLimit[Any, Any]], Any] | None":
    """Time limits, and what has `get_state` and `set_state` below them; None: it cannot be saved."""
    from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

    limits: list[TimeLimit[Any, Any]] = []
    while not (hasattr(env, "get_state") and hasattr(env, "set_state")):
        if isinstance(env, TimeLimit):
            limits.append(env)
        elif not isinstance(env, OrderEnforcing | PassiveEnvChecker):
            return None
        env = env.env
    return limits, env


def _environment_state(env: "gymnasium.Env[Any, Any]") -> dict[str, Any]:
    holders = _state_holders(env)
    assert holders is not None, "asked for the state of an environment that cannot save it"
    limits, inner = holders
    return {
        "elapsed_steps": [limit._elapsed_steps for limit in limits],
        "environment": inner.get_state(),
    }


def _set_environment_state(env: "gymnasium.Env[Any, Any]", state: dict[str, Any]) -> None:
    holders = _state_holders(env)
    assert holders is not None, "given the state of an environment that cannot take it"
    limits, inner = holders
    for limit, elapsed in zip(limits, state["elapsed_steps"], strict=True):
        limit._elapsed_steps = elapsed
    inner.set_state(state["environment"])
