"""A recurrent actor-critic for factored actions: `act` on one step, `evaluate` whole rollouts.

    policy = flat_policy(action_space, num_features=17)                    # plain_heads.py
    decision = policy.act(features, masks, state)                          # one step of N envs
    for steps, part in zip(policy.gather(..., parts, initial), parts.layouts):
        evaluation = policy.evaluate(steps, part)                          # stored rollouts

`gather` reads the parts of a rollout at once, with all that does not depend on the weights;
`evaluate` scores one part, as often as needed.

Features pass an encoder, then the core (an LSTM). Heads and value read the core state: the LSTM's
output plus its input. So the current observation reaches them from the first update on, and the
LSTM only has to learn what the past adds. Encoder and heads are injected (`Heads`).

Values on a GPU are checked without a synchronisation: `act` and `evaluate` record failures on the
device. Call `policy.raise_on_bad_values()` at the end of a rollout or an update to raise them. On a
CPU they raise at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from esper.leyline.constants import DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.leyline.sequences import SequenceLayout, SequenceParts
from esper.runtime.checks import require_whole
from esper.tamiyo.policy.distributions import (
    ChoiceChecks,
    LegalChoices,
    MaskedFactoredCategorical,
    check_floor,
    choose_actions,
)
from esper.tamiyo.policy.layers import POLICY_GAIN, init_lstm, linear
from esper.tamiyo.policy.packed_lstm import packed_lstm

Scene = tuple[Tensor, ...]  # what heads look up besides the core state; empty for plain heads


class Heads(Protocol):
    """Encoder and heads of a policy, an `nn.Module` that owns the scaling of its features."""

    feature_size: int  # F
    is_custom: bool  # True: with a user's encoder, which may do anything

    def encode(self, features: Tensor) -> tuple[Tensor, Scene]:
        """The core's input `[B, hidden]` from raw features `[B, F]`."""
        ...

    def logits(self, group: int, core: Tensor, scene: Scene, actions: Tensor) -> Tensor:
        """Logits `[B, choices]` of a head group after the first, given the earlier actions."""
        ...

    def update_scales(self, features: Tensor) -> None:
        """Adapt the scaling to the raw features `[R, F]` of a rollout."""
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


class StoredSteps(NamedTuple):
    """Steps of a rollout as `evaluate` reads them, in the order of `SequenceLayout.rows`."""

    features: Tensor  # [R, F]
    actions: Tensor  # [R, H], all in range
    masks: Tensor  # [R, C]
    legal: LegalChoices
    initial: RecurrentState  # of the packed episodes, [episodes, L, hidden]


class Evaluation(NamedTuple):
    """Stored steps scored with the current weights, in the order of `SequenceLayout.rows`."""

    log_probs: Tensor  # [R, H]
    entropies: Tensor  # [R, H], in nats
    normalized_entropies: Tensor  # [R, H], 0 to 1
    values: Tensor  # [R]
    distribution: MaskedFactoredCategorical


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

    def raise_on_bad_values(self) -> None:
        """Raise the first failed check since the last call; synchronises with a GPU once."""
        self.choice_checks.deferred.raise_if_failed()

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
        generator: torch.Generator | None = None,
        deterministic: bool = False,
    ) -> Decision:
        """One step for N envs from features `[N, F]`."""
        self.check_step(features, state, masks)
        with full_precision(self.device):
            core, scene, next_state = self._step(features, state)
            first_logits, values = self._read(core)

            def logits_of(group: int, actions: Tensor) -> Tensor:
                if group == 0:
                    return first_logits
                return self.heads.logits(group, core, scene, actions)

            actions, log_probs, rows = choose_actions(
                self.action_space,
                masks,
                logits_of,
                generator=generator,
                deterministic=deterministic,
                floor=self.config.floor,
                log_std=self.log_std,
            )
        self.choice_checks.check_fresh(actions, log_probs, rows)
        return Decision(actions, log_probs, rows, values, next_state)

    @torch.no_grad()
    def value(self, features: Tensor, state: RecurrentState) -> Tensor:
        """V(s) `[N]` of features `[N, F]`; the state is read, not advanced."""
        self.check_step(features, state)
        with full_precision(self.device):
            core, _, _ = self._step(features, state)
            return self._read(core)[1]

    @torch.no_grad()
    def rescale_value(self, factor: Tensor, shift: Tensor) -> None:
        """Replace V(s) by `factor * V(s) + shift`."""
        weight, bias = self.readout.weight[-1], self.readout.bias[-1:]
        weight.mul_(factor)
        bias.mul_(factor).add_(shift)

    def gather(
        self,
        features: Tensor,
        actions: Tensor,
        masks: Tensor,
        parts: SequenceParts,
        initial: RecurrentState,
    ) -> tuple[StoredSteps, ...]:
        """The steps of each part of a rollout `[N, T, ...]`, ready for `evaluate`.

        Only the rows of `parts` are read. An episode that began before the rollout starts from its
        env's `initial` state `[N, L, hidden]`, every other one from zeros. `masks` `[N, T, C]` are
        the rows that applied; later heads are given the stored choices.
        """
        taken, masks = parts.gather(actions), parts.gather(masks)
        actions = self.choice_checks.in_range(taken, masks, parts)
        legal = LegalChoices.from_masks(masks, self.action_space)
        states = (parts.initial(state) for state in initial)
        return tuple(
            map(
                StoredSteps,
                *map(parts.split_rows, (parts.gather(features), actions, masks)),
                map(LegalChoices, *map(parts.split_rows, legal)),
                map(RecurrentState, *map(parts.split_episodes, states)),
            )
        )

    def evaluate(self, steps: StoredSteps, layout: SequenceLayout) -> Evaluation:
        """Log-probs, entropies and values of stored steps; `layout` is their part's."""
        scores = self.score(steps, layout)
        self.choice_checks.check_stored(steps.actions, scores.log_probs, steps.masks, layout)
        return scores

    def score(self, steps: StoredSteps, layout: SequenceLayout) -> Evaluation:
        """`evaluate` without its check, so that a CUDA graph can hold it."""
        with full_precision(self.device):
            encoded, scene = self.heads.encode(steps.features)
            core = encoded
            if self.config.memory:
                h, c = (state.transpose(0, 1).contiguous() for state in steps.initial)
                core = encoded + packed_lstm(self.core, encoded, layout, (h, c))
            first_logits, values = self._read(core)
            later_logits = [
                self.heads.logits(group, core, scene, steps.actions)
                for group in range(1, len(self.action_space.head_groups))
            ]
        distribution = MaskedFactoredCategorical(
            self.action_space,
            torch.cat([first_logits, *later_logits], dim=-1) if later_logits else first_logits,
            steps.masks,
            legal=steps.legal,
            floor=self.config.floor,
            log_std=self.log_std,
        )
        log_probs = distribution.log_prob(steps.actions)
        entropies = distribution.entropy()
        normalized = distribution.normalize(entropies)
        return Evaluation(log_probs, entropies, normalized, values, distribution)

    def _step(
        self, features: Tensor, state: RecurrentState
    ) -> tuple[Tensor, Scene, RecurrentState]:
        """Core state `[N, hidden]`, the heads' scene, and the LSTM's next state."""
        encoded, scene = self.heads.encode(features)
        if not self.config.memory:
            return encoded, scene, state
        below, h, c = encoded, [], []
        for layer, weights in enumerate(self.core.all_weights):
            below, cell = torch.lstm_cell(below, (state.h[:, layer], state.c[:, layer]), *weights)
            h.append(below)
            c.append(cell)
        return encoded + below, scene, RecurrentState(_by_layer(h), _by_layer(c))

    def _read(self, core: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the first head group `[B, choices]` and values `[B]`."""
        logits, values = self.readout(core).split([self.readout.out_features - 1, 1], dim=-1)
        return logits, values.squeeze(-1)

    def check_step(
        self, features: Tensor, state: RecurrentState, masks: ActionMasks | None = None
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


def _by_layer(states: list[Tensor]) -> Tensor:
    """States `[N, hidden]` of each layer as `[N, L, hidden]`; one layer is not copied."""
    return states[0].unsqueeze(1) if len(states) == 1 else torch.stack(states, dim=1)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 products in full float32 inside the block: no TF32 on a GPU.

    PPO takes the ratio of old and new probabilities. They come from `act` and `evaluate`, which use
    different kernels, so both have to be exact. Run the backward pass inside as well: cuDNN reads
    the setting again there.
    """
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn  # torch sets its attributes at run time
    before = matmul.fp32_precision, cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision
    try:
        matmul.fp32_precision = cudnn.rnn.fp32_precision = cudnn.conv.fp32_precision = "ieee"
        yield
    finally:
        matmul.fp32_precision, cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision = before
