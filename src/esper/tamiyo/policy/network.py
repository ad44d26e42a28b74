"""A recurrent actor-critic for factored actions: `act` on one step, `evaluate` whole rollouts.

    policy = flat_policy(action_space, num_features=17)           # plain_heads.py
    decision = policy.act(features, masks, state)                 # one step of N envs
    evaluation = policy.evaluate(steps)                           # T stored steps of B envs

Features pass an encoder, then the core (an LSTM). Heads and value read the core state: the LSTM's
output plus its input. So the current observation reaches them from the first update on, and the
LSTM only has to learn what the past adds. Encoder and heads are injected (`Heads`).

On a CPU `act` raises for logits that are not finite and heads without a legal choice. On a GPU that
would wait for it: the rollout is checked as a whole, or call `policy.check(decision)`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from esper.leyline.constants import DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.runtime.checks import require_whole
from esper.tamiyo.policy.distributions import (
    ChoiceChecks,
    Choices,
    MaskedFactoredCategorical,
    check_floor,
    choose_actions,
    draw_noise,
)
from esper.tamiyo.policy.feature_scales import SumOverRanks
from esper.tamiyo.policy.policy_layers import POLICY_GAIN, init_lstm, linear
from esper.tamiyo.policy.recurrence import finish_cell, lstm_over_rollout

Scene = tuple[Tensor, ...]  # what heads look up besides the core state; empty for plain heads


class Heads(Protocol):
    """Encoder and heads of a policy, an `nn.Module` that owns the scaling of its features."""

    feature_size: int  # F
    frame_size: int  # P: bytes of an observation's pictures; 0 without

    def encode(self, features: Tensor, frames: Tensor | None = None) -> tuple[Tensor, Scene]:
        """The core's input `[B, hidden]` from raw features `[B, F]` and pictures `[B, P]`."""
        ...

    def logits(self, group: int, core: Tensor, scene: Scene, actions: Tensor) -> Tensor:
        """Logits `[B, choices]` of a head group after the first, given the earlier actions."""
        ...

    def update_scales(
        self,
        features: Tensor,
        frames: Tensor | None = None,
        sum_: SumOverRanks | None = None,
    ) -> None:
        """Adapt the scaling to the raw features `[R, F]` and pictures `[R, P]` of a rollout.

        With `sum_`, to those of all ranks.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Sizes of a policy, and its least exploration."""

    lstm_hidden_dim: int = DEFAULT_LSTM_HIDDEN_DIM  # width of encoder, core and heads
    lstm_layers: int = 1
    memory: bool = True  # False: the LSTM is not used, and only the current observation counts
    memory_steps: int = 64  # esper.PPO: cells keep what they saw for up to this long at first
    encoder_layers: int = 1
    slot_dim: int = 64  # width of Tamiyo's slot embeddings
    blueprint_dim: int = 32  # width of Tamiyo's blueprint embeddings
    floor: float = 0.0  # share of each distribution that is uniform over the legal choices

    def __post_init__(self) -> None:
        sizes = ("lstm_hidden_dim", "lstm_layers", "encoder_layers", "slot_dim", "blueprint_dim")
        require_whole(self, 1, *sizes, "memory_steps")
        check_floor(self.floor)


class RecurrentState(NamedTuple):
    """An LSTM's state per env, `[N, L, hidden]` each."""

    h: Tensor
    c: Tensor


class Decision(NamedTuple):
    """The result of `act`: the choices, and what PPO stores with them."""

    actions: Tensor  # [N, H]; numbers are before tanh
    log_probs: Tensor  # [N, H]
    masks: Tensor  # [N, C]: the mask rows that applied
    values: Tensor  # [N]
    state: RecurrentState  # after the step


class Steps(NamedTuple):
    """Stored steps of a rollout, as `evaluate` reads them: T rows of B envs."""

    features: Tensor  # [T, B, F]
    actions: Tensor  # [T, B, H]
    masks: Tensor  # [T, B, C]: the mask rows that applied
    starts: Tensor  # [T, B] bool: the row begins an episode
    initial: RecurrentState  # before the first row, [B, L, hidden]
    frames: Tensor | None = None  # [T, B, P] uint8: pictures, if the policy sees any


class Outputs(NamedTuple):
    """What the network gives for stored steps with its current weights."""

    logits: Tensor  # [T, B, C], each head's given the stored choices before it
    values: Tensor  # [T, B]


class Evaluation(NamedTuple):
    """Stored steps scored with the current weights."""

    log_probs: Tensor  # [T, B, H]
    entropies: Tensor  # [T, B, H], in nats
    normalized_entropies: Tensor  # [T, B, H], 0 to 1
    values: Tensor  # [T, B]
    num_choices: Tensor  # [T, B, H]: legal choices of each head; 2 for a number that is used
    is_scored: Tensor  # [T, B, H] bool: the stored choice can have been made


class FactoredRecurrentActorCritic(nn.Module):
    """Encoder, LSTM core, heads that see the earlier choices they are given, and V(s).

    `heads` bring the encoder; their width is `config.lstm_hidden_dim`. Builders:
    `plain_heads.flat_policy` for any environment, `slot_heads.tamiyo_policy` for growth.
    """

    def __init__(
        self, action_space: FactoredActionSpace, heads: Heads, config: PolicyConfig | None = None
    ):
        super().__init__()
        self.action_space = action_space
        self.config = config = config or PolicyConfig()
        self.choice_checks = ChoiceChecks(action_space)
        self.heads = heads
        self.feature_size = heads.feature_size
        self.frame_size = heads.frame_size
        width = config.lstm_hidden_dim
        self.core = nn.LSTM(width, width, config.lstm_layers)
        init_lstm(self.core)
        # one layer for the first head group, which is given no earlier choice, and for the value
        self.readout = linear(width, action_space.group_spaces[0].num_choices + 1, gain=POLICY_GAIN)
        # V(s) starts at 0: a random value would be noise in the first returns, large next to
        # small rewards
        nn.init.zeros_(self.readout.weight.data[-1:])
        # of the continuous heads, the same in every state; 1 before tanh is nearly uniform
        self.log_std: nn.Parameter | None = None
        if action_space.continuous:
            self.log_std = nn.Parameter(torch.zeros(len(action_space.continuous)))

    def check(self, decision: Decision) -> None:
        """Raise for logits that are not finite or a head without a legal choice; waits for a GPU."""
        self.choice_checks.check_fresh(decision.actions, decision.log_probs, decision.masks)

    def check_stored(self, steps: Steps, valid: Tensor) -> None:
        """Raise for a stored choice that cannot be scored, in rows that hold a step."""
        with torch.no_grad():
            evaluation = self.evaluate(steps)
        self.choice_checks.check_stored(steps.actions, evaluation.log_probs, steps.masks, valid)

    @property
    def device(self) -> torch.device:
        return self.readout.weight.device

    def initial_state(self, num_envs: int) -> RecurrentState:
        """The state that every episode starts from: zeros."""
        shape = (num_envs, self.config.lstm_layers, self.config.lstm_hidden_dim)
        return RecurrentState(*(torch.zeros(shape, device=self.device) for _ in "hc"))

    @torch.no_grad()
    def act(
        self,
        features: Tensor,
        masks: ActionMasks,
        state: RecurrentState,
        *,
        frames: Tensor | None = None,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        out: Choices | None = None,
    ) -> Decision:
        """One step for N envs from features `[N, F]`, and pictures `[N, P]` uint8 if it sees any.

        `noise` `[N, C]` is from `draw_noise`; without it, random numbers are drawn here. The choices
        are written to `out`, such as a row of a rollout, or to new tensors.
        """
        self.check_step(features, state, masks, frames)
        if deterministic:
            noise = None
        elif noise is None:
            noise = draw_noise(self.action_space, (len(features),), self.device, generator)
        with full_precision(self.device):
            core, scene, next_state = self._step(features, frames, state)
            first_logits, values = self._read(core)

            def logits_of(group: int, actions: Tensor) -> Tensor:
                if group == 0:
                    return first_logits
                return self.heads.logits(group, core, scene, actions)

            choices = choose_actions(
                self.action_space,
                masks,
                logits_of,
                noise=noise,
                floor=self.config.floor,
                log_std=self.log_std,
                checks=self.choice_checks,
                out=out,
            )
        return Decision(*choices, values, next_state)

    @torch.no_grad()
    def value(
        self, features: Tensor, state: RecurrentState, frames: Tensor | None = None
    ) -> Tensor:
        """V(s) `[N]` of features `[N, F]` and pictures `[N, P]`; the state is read, not advanced."""
        self.check_step(features, state, frames=frames)
        with full_precision(self.device):
            core, _, _ = self._step(features, frames, state)
            return self._read(core)[1]

    @torch.no_grad()
    def rescale_value(self, factor: Tensor, shift: Tensor) -> None:
        """Replace V(s) by `factor * V(s) + shift`."""
        weight, bias = self.readout.weight[-1], self.readout.bias[-1:]
        weight.mul_(factor)
        bias.mul_(factor).add_(shift)

    def evaluate(self, steps: Steps) -> Evaluation:
        """Log-probs, entropies and values of stored steps; later heads are given stored choices."""
        return self.score(self.outputs(steps), steps)

    def outputs(self, steps: Steps) -> Outputs:
        """Logits and values of stored steps."""
        num_steps, num_envs, _ = steps.features.shape
        frames = None if steps.frames is None else steps.frames.flatten(0, 1)
        with full_precision(self.device):
            encoded, scene = self.heads.encode(steps.features.flatten(0, 1), frames)
            core = encoded  # [T * B, hidden]
            if self.config.memory:
                rollout = encoded.view(num_steps, num_envs, -1)
                h, c = (part.transpose(0, 1).contiguous() for part in steps.initial)
                remembered = lstm_over_rollout(self.core, rollout, steps.starts, (h, c))
                core = encoded + remembered.flatten(0, 1)
            logits, values = self._read(core)
            if len(self.action_space.head_groups) > 1:
                actions = self.choice_checks.in_range(steps.actions).flatten(0, 1)
                later = (
                    self.heads.logits(group, core, scene, actions)
                    for group in range(1, len(self.action_space.head_groups))
                )
                logits = torch.cat([logits, *later], dim=-1)
        return Outputs(
            logits.view(num_steps, num_envs, -1),
            values.view(num_steps, num_envs),
        )

    def score(self, outputs: Outputs, steps: Steps) -> Evaluation:
        """What the outputs say of the stored choices."""
        distribution = MaskedFactoredCategorical(
            self.action_space,
            outputs.logits,
            steps.masks,
            floor=self.config.floor,
            log_std=self.log_std,
        )
        log_probs = distribution.log_prob(self.choice_checks.in_range(steps.actions))
        entropies = distribution.entropy()
        normalized = distribution.normalize(entropies)
        return Evaluation(
            log_probs,
            entropies,
            normalized,
            outputs.values,
            distribution.legal.counts,
            self.choice_checks.is_scored(steps.actions, log_probs),
        )

    def _step(
        self, features: Tensor, frames: Tensor | None, state: RecurrentState
    ) -> tuple[Tensor, Scene, RecurrentState]:
        """Core state `[N, hidden]`, the heads' scene, and the LSTM's next state."""
        encoded, scene = self.heads.encode(features, frames)
        if not self.config.memory:
            return encoded, scene, state
        below = encoded
        next_state = RecurrentState(torch.empty_like(state.h), torch.empty_like(state.c))
        for layer, weights in enumerate(self.core.all_weights):
            weight_ih, weight_hh, bias_ih, bias_hh = weights
            gates = torch.addmm(bias_ih + bias_hh, below, weight_ih.t())  # [N, 4 * hidden]
            gates.addmm_(state.h[:, layer], weight_hh.t())
            _finish_step(layer, gates, state.c, next_state)
            below = next_state.h[:, layer]
        return encoded + below, scene, next_state

    def _read(self, core: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the first head group `[B, choices]` and values `[B]`."""
        logits, values = self.readout(core).split([self.readout.out_features - 1, 1], dim=-1)
        return logits, values.squeeze(-1)

    def check_step(
        self,
        features: Tensor,
        state: RecurrentState,
        masks: ActionMasks | None = None,
        frames: Tensor | None = None,
    ) -> None:
        """Raise if shapes are not those that `act` reads."""
        num_envs = len(features)
        of_state = (num_envs, self.config.lstm_layers, self.config.lstm_hidden_dim)
        for name, tensor, shape, letters in (
            ("features", features, (num_envs, self.feature_size), "N, F"),
            ("state h", state.h, of_state, "N, L, hidden"),
            ("state c", state.c, of_state, "N, L, hidden"),
        ):
            if tensor.shape != shape:
                raise ValueError(f"{name}: got {tuple(tensor.shape)}, expected {shape} ({letters})")
        self._check_frames(frames, num_envs)
        if masks is None:
            return
        if masks.action_space != self.action_space:
            expected, got = self.action_space.sizes_by_name, masks.action_space.sizes_by_name
            wrong = [name for name in expected | got if expected.get(name) != got.get(name)]
            raise ValueError(
                f"masks are for heads {got}, expected {expected}; these differ: {wrong}"
            )
        if masks.num_envs != num_envs:
            raise ValueError(f"masks are for {masks.num_envs} envs, features for {num_envs}")

    def _check_frames(self, frames: Tensor | None, num_envs: int) -> None:
        """Raise if the pictures are not those that the encoder reads."""
        if frames is None:
            if self.frame_size:
                raise ValueError(
                    f"this policy sees pictures; pass them as frames=, uint8 {self.frame_size} bytes "
                    "for each env"
                )
            return
        if frames.shape != (num_envs, self.frame_size) or frames.dtype != torch.uint8:
            raise ValueError(
                f"frames: got {frames.dtype} {tuple(frames.shape)}, expected torch.uint8 "
                f"{(num_envs, self.frame_size)} (N, P): all pictures of an env, each flattened with "
                "its channels first"
            )


def _finish_step(layer: int, gates: Tensor, c: Tensor, next_state: RecurrentState) -> None:
    """Write a layer's state after a step; its products are in `gates` `[N, 4 * hidden]`."""
    if gates.device.type == "cpu" and gates.dtype == torch.float32:
        from esper.kernels.lstm.numba_lstm import finish_step

        finish_step(layer, gates, c, *next_state)
        return
    output, cell = finish_cell(gates, c[:, layer])
    next_state.h[:, layer] = output
    next_state.c[:, layer] = cell


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Compute float32 products in full float32 inside the block: no TF32 on a GPU.

    PPO takes the ratio of old and new probabilities. They come from `act` and `evaluate`, which use
    different kernels, so both have to be exact. Run the backward pass inside as well: cuDNN reads
    the setting again there.
    """
    return _without_tf32() if device.type == "cuda" else nullcontext()


@contextmanager
def _without_tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn  # torch sets its attributes at run time
    before = matmul.fp32_precision, cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision
    try:
        matmul.fp32_precision = cudnn.rnn.fp32_precision = cudnn.conv.fp32_precision = "ieee"
        yield
    finally:
        matmul.fp32_precision, cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision = before
