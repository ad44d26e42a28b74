"""Vector environments for the training loop, with one behaviour for all autoreset modes.

    envs = GymEnvs(vector_env, GymSpaces.of(vector_env), rng_seed=0)
    observed = envs.observe(row)             # features into a row of the rollout, and masks
    stepped = envs.step(row)                 # its actions; rewards and flags into the row

Environments speak NumPy or torch, on a CPU or a GPU: what the first reset gives says which. Tensors
stay on their device, and on a GPU nothing waits for it before the round's end.

Three modes, read from `metadata["autoreset_mode"]`:
- NEXT_STEP: the step after an episode's end only resets, and its action is ignored. Such a filler
  is no real step, and is not stored.
- SAME_STEP: the reset happens within the step that ends the episode.
- DISABLED: the envs that have ended are reset here, which asks a GPU at every step whether any has.

The environments of a `SyncVectorEnv` without wrappers are stepped directly and reset when they end:
the same episodes, without fillers (`DirectEnvs`).
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from esper.leyline.factored_actions import ActionMasks
from esper.simic.agent.cuda_graphs import CannotCapture, Captured, copy_all
from esper.simic.agent.rollout import RolloutRow
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.gym.direct_envs import DirectEnvs
from esper.simic.gym.entries import at, to_tensor
from esper.simic.gym.episode_log import Episode, EpisodeLog
from esper.simic.gym.gym_masks import DEFAULT_KEY, MaskOption, MaskReader, merged_masks
from esper.simic.gym.gym_spaces import CPU, GymSpaces, PolicyInput
from esper.simic.gym.round_checks import RoundChecks
from esper.simic.ranks import print_once
from esper.simic.trainer import EnvSpec, Observed, PhaseClock, Stepped

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.vector import VectorEnv

    AnyEnv = str | Env[Any, Any] | VectorEnv[Any, Any, Any]


_MOST_GRAPHS = 8  # of a step: with and without final observations, for one row or two


class GymEnvs:
    """N environments, each with a current observation and its masks."""

    masks: ActionMasks  # of the current observation
    pending: Tensor  # [N] bool: the next step is a filler that only resets
    device: torch.device  # of the environments' tensors

    def __init__(
        self,
        envs: "VectorEnv[Any, Any, Any]",
        spaces: GymSpaces,
        rng_seed: int,
        mask_source: MaskOption = "auto",
        mask_key: str = DEFAULT_KEY,
        clock: PhaseClock | None = None,
    ):
        spaces.require_same(envs)
        self.spaces = spaces
        self.num_envs = envs.num_envs
        self.clock = clock or PhaseClock()
        self.vector_env: Any = envs
        self._autoreset = _autoreset_mode(envs)
        self._stepped: Any = envs
        if type(self.vector_env) is _sync_vector_env():
            self._stepped = DirectEnvs(self.vector_env, mask_key)
            self._autoreset = "SAME_STEP"
        self._is_direct = isinstance(self._stepped, DirectEnvs)
        self._mask_key = mask_key
        self._can_capture = True
        self._has_printed = False  # that final observations are not given
        self.rounds = 0
        self._where = ""  # the round that errors name
        self.log = EpisodeLog(self.num_envs)
        infos = self._reset(rng_seed)
        self.spec = EnvSpec(
            envs.num_envs,
            spaces.num_features,
            spaces.action_space,
            spaces.frame_size,
            self.is_fixed,
        )
        self._mask_reader = MaskReader(envs, spaces, mask_source, mask_key, infos, self.device)
        self.mask_source = self._mask_reader.source
        self._check_masks(infos)
        self.masks = self._first_masks(infos)

    def _first_masks(self, infos: dict[str, Any]) -> ActionMasks:
        """The masks of the observations after a reset."""
        read_infos = self._mask_reader.infos_to_read(infos)
        masks = self._mask_reader.read(self._observations, read_infos, None, self.checks)
        return masks.to(self.device)

    def _check_masks(self, infos: dict[str, Any]) -> None:
        """Raise or warn where masks were probably meant, and none were found."""
        is_by_chance = self._mask_reader.is_unmasked_by_chance
        if is_by_chance and self._mask_key != DEFAULT_KEY:
            names = [name for name in infos if not name.startswith("_")]
            first = self._observations[0] if self._is_direct else self._observations
            raise ValueError(
                f"mask_key={self._mask_key!r}: the first reset gave no such mask. The observation has "
                f"{[*first] if isinstance(first, dict) else 'no names'}, info {names}. "
                "Give the mask at every reset and step, or set masks='method' to use action_masks(), "
                "or masks='none' to learn without masks"
            )
        given = [head.name for head in self.spec.action_space if head.given]
        if given and is_by_chance:
            warnings.warn(
                f"heads {given} depend on earlier heads, but the environment gives no masks, so all "
                f"choices are legal; give info[{self._mask_key!r}] at every reset and step, or set "
                "masks='none'",
                stacklevel=4,  # where the model is made
            )

    def _reset(self, rng_seed: int) -> dict[str, Any]:
        """Start new episodes; env i gets the seed plus i. Returns the infos."""
        _require_usable(self.vector_env)
        observations, infos = self._stepped.reset(seed=rng_seed)
        first = observations
        if not self._is_direct:
            first = at(observations, self.spaces.observation[0].path)
        self.is_torch = isinstance(first, Tensor)
        self.device = first.device if isinstance(first, Tensor) else CPU
        # DISABLED asks the device at every step, which a graph cannot
        self.is_fixed = self.device.type == "cuda" and self._autoreset != "DISABLED"
        self._observations = tree_map_only(Tensor, torch.clone, observations)
        self.pending = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self._starts = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._previous = torch.zeros(self.num_envs, self.spaces.num_previous, device=self.device)
        self._lacks_final = torch.zeros((), dtype=torch.bool, device=self.device)
        self.checks = RoundChecks(self.device, names_steps=True)
        self._graphs: dict[Any, tuple[list[Any], Captured[Stepped]]] = {}
        found: dict[str, Any] = infos
        return found

    # -- a round ------------------------------------------------------------------------------

    def begin_round(self) -> None:
        _require_usable(self.vector_env)
        self._where = f", round {self.rounds + 1}"
        self.checks.start_round()

    def observe(self, row: RolloutRow) -> Observed:
        """Write the current observation to the row."""
        if row.states.device == self.device:
            self._read(self._observations, PolicyInput(row.states, row.frames))
        else:
            read = self._read(self._observations)
            row.states.copy_(read.features)
            row.frames.copy_(read.frames)
        if self.device.type == "cpu":  # of others the whole round is looked at, at its end
            self._require_finite(row.states)
        masks = self.masks.to(row.states.device)
        if not self.is_fixed:
            return Observed(masks, self._starts)
        return Observed(masks, self._starts, [*_tensors_in(self._observations), *self._kept()])

    def step(self, row: RolloutRow) -> Stepped:
        choices = row.actions.to(self.device)
        actions = self.spaces.actions(choices, as_tensors=self.is_torch)
        observations, *outcome, infos = self._stepped.step(actions)
        read_infos = self._mask_reader.infos_to_read(infos)
        if "final_obs" in infos:
            read_infos["final_obs"] = infos["final_obs"]
        can_be_captured = self._can_capture and _holds_tensors_only(read_infos)
        if self.is_fixed and can_be_captured and row.states.device == self.device:
            stepped = self._digest_captured(row, observations, outcome, read_infos)
        else:
            stepped = self._digest(row, observations, outcome, read_infos)
        self.clock.lap("env")
        return stepped

    def _digest_captured(self, row: RolloutRow, *given: Any) -> Stepped:
        """As `_digest`, by a CUDA graph that reads copies of what was given."""
        leaves = list(_tensors_in(given))
        layouts = tuple((tensor.shape, tensor.dtype) for tensor in leaves)
        key = (layouts, tuple(given[-1]), row.rewards.data_ptr())
        if key not in self._graphs:
            if len(self._graphs) == _MOST_GRAPHS:
                return self._digest(row, *given)
            _, *others = tree_map_only(Tensor, torch.clone, given)
            fixed = (self._observations, *others)  # what `observe` reads stays where it is

            def work() -> Stepped:
                return self._digest(row, *fixed)._replace(is_fixed=True)

            graph = Captured(work, lambda: (), self._kept)
            self._graphs[key] = (list(_tensors_in(fixed)), graph)
        fixed_leaves, graph = self._graphs[key]
        copy_all(fixed_leaves, leaves)
        if graph.is_new:  # all that it reads stays where it is until a reset
            try:
                graph.prepare()
            except CannotCapture as error:
                print_once(f"steps cannot be captured as a CUDA graph, so they are slower: {error}")
                self._can_capture = False
                return self._digest(row, *given)
        return graph.run_again()

    def _kept(self) -> list[Tensor]:
        """What a step changes besides the row."""
        flags = [self.pending, self._starts, self._previous, self._lacks_final]
        return [*flags, *self.masks.groups, *self.checks.tensors()]

    def _digest(
        self, row: RolloutRow, observations: Any, outcome: Sequence[Any], infos: dict[str, Any]
    ) -> Stepped:
        """Write what a step gave to the row, and keep what the next one needs, in place."""
        rewards, terminated, truncated = self._checked_outcome(*outcome)
        truncated = truncated & ~terminated
        ended = terminated | truncated
        may_have_ended = self.device.type != "cpu" or bool(ended.any())
        row.rewards.copy_(rewards)
        row.terminated.copy_(terminated)
        row.truncated.copy_(truncated)
        if self.spaces.num_previous:
            choices = row.actions.to(self.device)
            self._previous.copy_(self.spaces.previous(choices, rewards))
        final = None
        if may_have_ended:
            final = self._final_input(observations, infos, row, truncated)

        is_real = None
        masked_infos: list[tuple[dict[str, Any], Tensor | None]] = [(infos, None)]
        if self._autoreset == "NEXT_STEP":
            if self.device.type != "cpu" or self.pending.any():
                is_real = ~self.pending
            self._starts.copy_(self.pending)
            self.pending.copy_(ended)
            # the last observation of an episode may allow nothing; no action is chosen for it
            masked_infos = [(infos, ~ended)]
        else:
            self._starts.copy_(ended)
            if self._autoreset == "DISABLED" and may_have_ended and ended.any():
                observations, reset_infos = self._reset_ended(ended)
                if self.mask_source == "info":
                    masked_infos = [(infos, ~ended), (reset_infos, ended)]
                else:  # the method answers for all envs
                    masked_infos = [(reset_infos, None)]
        if self.spaces.num_previous and (may_have_ended or is_real is not None):
            self._previous.masked_fill_(self._starts.unsqueeze(1), 0.0)
        if not self.is_fixed:
            self._observations = observations
        elif observations is not self._observations:  # which graphs read where it is
            copy_all(list(_tensors_in(self._observations)), list(_tensors_in(observations)))
        self.checks.end_step()
        self._read_masks(*masked_infos)
        if final is None:
            return Stepped(is_real, None)
        return Stepped(is_real, final.features, final_frames=final.frames)

    def _reset_ended(self, ended: Tensor) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in the envs whose episode has ended, `[N]`."""
        mask = ended.clone() if self.is_torch else ended.numpy().copy()
        observations, infos = self._stepped.reset(options={"reset_mask": mask})
        return observations, self._mask_reader.infos_to_read(infos)

    def _checked_outcome(self, rewards: Any, terminated: Any, truncated: Any) -> list[Tensor]:
        """Rewards and flags as tensors `[N]`."""
        outcome = []
        for name, value in (
            ("reward", rewards),
            ("terminated", terminated),
            ("truncated", truncated),
        ):
            if name == "reward" and not isinstance(value, Tensor):
                value = np.asarray(value, dtype=np.float32)  # of objects too
            tensor = to_tensor(name, value)
            if tensor.shape != (self.num_envs,):
                raise ValueError(
                    f"{name}: got shape {tuple(tensor.shape)}, expected (envs,) = ({self.num_envs},)"
                )
            if name == "reward":
                tensor = tensor.float()
            elif tensor.dtype != torch.bool:
                raise ValueError(f"{name} is {tensor.dtype}; the environment must give bools")
            outcome.append(tensor.to(self.device))
        return outcome

    def end_round(self, buffer: TamiyoRolloutBuffer) -> dict[str, float]:
        self.checks.finish()
        if self.device.type != "cpu":
            is_stored = buffer.valid_mask.t().unsqueeze(-1)
            stored = torch.where(is_stored, buffer.states.transpose(0, 1), 0.0)  # [T, N, F]
            self._require_finite(stored)
        if not self._has_printed and bool(self._lacks_final):
            self._has_printed = True
            print_once(
                "final observations: not given where a time limit cut an episode, so the value of "
                "the last observation is used; give info['final_obs'] (Isaac Lab: "
                "compute_final_obs=True)"
            )
        self.rounds += 1
        self.log.add_round(buffer)
        return self.log.means()

    def _final_input(
        self, observations: Any, infos: dict[str, Any], row: RolloutRow, truncated: Tensor
    ) -> PolicyInput | None:
        """What followed the step, before any reset, of N envs; None if nothing was cut."""
        if self.device.type == "cpu" and not truncated.any():
            return None
        if self._autoreset != "SAME_STEP":
            final = self._read(observations)
        elif "final_obs" not in infos:
            self._lacks_final |= truncated.any()
            last_value = torch.where(row.truncated, row.values, torch.nan)
            row.bootstrap_values.copy_(last_value)
            return None
        elif _is_one_by_one(infos["final_obs"]):
            if not truncated.any():
                return None
            final = self._read_some(infos["final_obs"], truncated)
        else:
            final = self._read(infos["final_obs"], one_by_one=False)
        if self.device.type == "cpu":
            self._require_finite(final.features.where(truncated.unsqueeze(1), 0.0))
        return final

    def _read_some(self, observations: Sequence[Any], chosen: Tensor) -> PolicyInput:
        """The observations of some envs, given one by one; zeros for the others."""
        of_chosen = [observations[env] for env in chosen.nonzero()[:, 0].tolist()]
        read = self.spaces.read(of_chosen, self._previous[chosen], one_by_one=True)
        everywhere = self.spaces.empty_input(self.num_envs, self.device)
        everywhere.features[chosen] = read.features
        everywhere.frames[chosen] = read.frames
        return everywhere

    def _read(
        self, observations: Any, out: PolicyInput | None = None, *, one_by_one: bool | None = None
    ) -> PolicyInput:
        is_list = self._is_direct if one_by_one is None else one_by_one
        return self.spaces.read(observations, self._previous, one_by_one=is_list, out=out)

    def _require_finite(self, features: Tensor) -> None:
        self.spaces.require_finite(features, self._where)

    def _read_masks(self, *sources: tuple[dict[str, Any], Tensor | None]) -> None:
        """Set the masks of the current observation: from infos, for the envs `[N]` given with each."""
        infos, needed = sources[0]
        masks = self._mask_reader.read(self._observations, infos, needed, self.checks)
        for infos, needed in sources[1:]:
            assert needed is not None
            later = self._mask_reader.read(self._observations, infos, needed, self.checks)
            masks = merged_masks(later, needed, masks)
        if not self.is_fixed:
            self.masks = masks
        elif self.mask_source != "none":  # graphs read them where they are
            copy_all(self.masks.groups, masks.groups)

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
        self.log = EpisodeLog(self.num_envs, recent)
        rng_seed = int(torch.randint(2**31, (), generator=generator))
        self.masks = self._first_masks(self._reset(rng_seed))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested dicts and sequences, in an order that does not depend on the dicts'."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _tensors_in(value[key])
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_in(part)


def _is_one_by_one(final: Any) -> bool:
    """Whether final observations are a list, or an array of objects: None where none is."""
    is_array = isinstance(final, np.ndarray) and final.dtype == object
    return is_array or isinstance(final, list)


def _holds_tensors_only(infos: Mapping[str, Any]) -> bool:
    """Whether a graph can read all of them: not what is on the CPU, such as arrays of objects."""
    return all(
        isinstance(value, Tensor) or (isinstance(value, Mapping) and _holds_tensors_only(value))
        for value in infos.values()
    )


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
    if isinstance(env, SpeaksLikeVectorEnv):
        return cast("VectorEnv[Any, Any, Any]", env)
    if isinstance(env, gymnasium.Env):
        if env.has_wrapper_attr("num_envs") and env.has_wrapper_attr("single_action_space"):
            return cast("VectorEnv[Any, Any, Any]", SpeaksLikeVectorEnv(env))
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


class SpeaksLikeVectorEnv:
    """A `gymnasium.Env` that computes many environments, as Isaac Lab's, as a vector environment."""

    def __init__(self, env: "Env[Any, Any]"):
        self._env = env
        self.unwrapped = env.unwrapped
        self.num_envs = int(env.get_wrapper_attr("num_envs"))
        self.single_action_space = env.get_wrapper_attr("single_action_space")
        self.single_observation_space = env.get_wrapper_attr("single_observation_space")
        self.metadata = env.metadata

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        return self._env.step(actions)

    def __str__(self) -> str:
        return str(self._env)


def inner_envs(envs: "VectorEnv[Any, Any, Any]") -> list[Any]:
    """The environments without their wrappers, or the vector environment that computes them."""
    from gymnasium.vector import SyncVectorEnv

    inner = envs.unwrapped
    return [e.unwrapped for e in inner.envs] if isinstance(inner, SyncVectorEnv) else [inner]
