"""A recurrent actor-critic for factored actions: `act` one step, `evaluate` whole rollouts.

    policy = FactoredRecurrentActorCritic(action_space, features=17)
    decision = policy.act(features, masks, state)                          # one step of N envs
    scores = policy.evaluate(features, actions, masks, layout, initial)    # stored rollouts

A learner that scores parts of a rollout again and again calls `gather` once for all of them and
`score` for each: what does not depend on weights is then done once.

Features pass an encoder, then the core (an LSTM); heads and value read the core state, which is
the LSTM's output plus its input: what the present observation says reaches them from the first
update on, and the LSTM only has to learn what the past adds.

Values on a device are checked without waiting for it: `act` and `evaluate` note what went wrong
on the device, and whoever owns the round calls `policy.raise_on_bad_values()` at the end of a
rollout or an update. On a CPU they raise at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline.constants import DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.factored_actions import (
    ActionMasks,
    FactoredActionSpace,
    tamiyo_action_space,
)
from esper.leyline.sequences import SequenceLayout, SequenceParts
from esper.leyline.stages import LifecycleOp
from esper.tamiyo.policy.distributions import LegalChoices, MaskedFactoredCategorical, decide
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.input_checks import (
    ChoiceChecks,
    check_masks,
    check_shape,
    sizes_by_name,
)
from esper.tamiyo.policy.packed_lstm import packed_lstm
from esper.tamiyo.policy.plain_heads import POLICY_GAIN, PlainHeads, Scene, init_lstm, linear
from esper.tamiyo.policy.slot_heads import OP_PRIOR, SlotHeads


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Sizes of a policy, and how much it explores."""

    lstm_hidden_dim: int = DEFAULT_LSTM_HIDDEN_DIM  # width of the core and of what is around it
    lstm_layers: int = 1
    encoder_layers: int = 1  # of the width of the core
    slot_dim: int = 64  # Tamiyo's slot embeddings
    blueprint_dim: int = 32  # and those of blueprints
    floor: float = 0.0  # share of every choice that is uniform over what is legal

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.type is int and getattr(self, entry.name) < 1:
                raise ValueError(f"{entry.name}={getattr(self, entry.name)}; use 1 or more")
        if not 0.0 <= self.floor < 1.0:
            raise ValueError(f"floor={self.floor} is not a share; use 0 or more and less than 1")


class RecurrentState(NamedTuple):
    """An LSTM's state per env, `[N, L, hidden]` each."""

    h: Tensor
    c: Tensor


class Decision(NamedTuple):
    """What `act` chose, and what the choice was based on."""

    actions: Tensor  # [N, H]
    log_probs: Tensor  # [N, H]
    masks: Tensor  # [N, C]: the rows that applied
    values: Tensor  # [N]
    state: RecurrentState  # after the step


class StoredSteps(NamedTuple):
    """Steps of a rollout as `score` reads them, in the order of `SequenceLayout.rows`."""

    features: Tensor  # [R, F]
    actions: Tensor  # [R, H], all in range
    masks: Tensor  # [R, C]
    legal: LegalChoices
    initial: RecurrentState  # of the packed episodes, [episodes, L, hidden]


class Evaluation(NamedTuple):
    """Stored steps scored anew, in the order of `SequenceLayout.rows`."""

    log_probs: Tensor  # [R, H]
    entropies: Tensor  # [R, H], in nats
    normalized_entropies: Tensor  # [R, H], 0 to 1
    values: Tensor  # [R]
    distribution: MaskedFactoredCategorical


class FactoredRecurrentActorCritic(nn.Module):
    """Encoder, LSTM core, heads that see the earlier choices they are given, and V(s).

    `features` is their number, for flat features and plain heads, or Tamiyo's layout: its weights
    then fit any number of slots and any menu of blueprints.
    """

    def __init__(
        self,
        action_space: FactoredActionSpace,
        features: int | FeatureLayout,
        config: PolicyConfig | None = None,
    ):
        super().__init__()
        self.action_space = action_space
        self.config = config = config or PolicyConfig()
        self.choice_checks = ChoiceChecks(action_space)
        width, layers = config.lstm_hidden_dim, config.encoder_layers
        self.heads: PlainHeads | SlotHeads
        if isinstance(features, FeatureLayout):
            self.feature_size = features.width
            self.heads = SlotHeads(
                action_space,
                features,
                width=width,
                layers=layers,
                slot_dim=config.slot_dim,
                blueprint_dim=config.blueprint_dim,
            )
        else:
            self.feature_size = features
            self.heads = PlainHeads(action_space, features, width=width, layers=layers)
        self.core = nn.LSTM(width, width, config.lstm_layers)
        init_lstm(self.core)
        # one layer for the first run of heads, which is given nothing, and for the value
        self.readout = linear(width, action_space.group_spaces[0].num_choices + 1, gain=POLICY_GAIN)
        # no value before anything is learned: a guess would be noise in the first returns, large
        # beside small rewards
        nn.init.zeros_(self.readout.weight.data[-1:])
        if isinstance(features, FeatureLayout):
            self.readout.bias.data[:-1] = torch.tensor([OP_PRIOR[op] for op in LifecycleOp])

    def raise_on_bad_values(self) -> None:
        """Raises what went wrong on the device since the last call; waits for it once."""
        self.choice_checks.deferred.raise_if_failed()

    @property
    def takes_any_scale(self) -> bool:
        """Whether features may be rescaled one by one: not where slots are to be treated alike."""
        return isinstance(self.heads, PlainHeads)

    @property
    def device(self) -> torch.device:
        return self.readout.weight.device

    def initial_state(self, num_envs: int) -> RecurrentState:
        """What every episode starts from: zeros."""
        shape = (num_envs, self.config.lstm_layers, self.config.lstm_hidden_dim)
        return RecurrentState(
            torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device)
        )

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
        self._check_step(features, state)
        check_masks(masks, self.action_space, len(features))
        with full_precision(self.device):
            core, scene, next_state = self._step(features, state)
            first_logits, values = self._read(core)

            def logits_of(run: int, actions: Tensor) -> Tensor:
                return first_logits if run == 0 else self.heads.logits(run, core, scene, actions)

            actions, log_probs, rows = decide(
                self.action_space,
                masks,
                logits_of,
                generator=generator,
                deterministic=deterministic,
                floor=self.config.floor,
            )
        self.choice_checks.check_fresh(actions, log_probs, rows)
        return Decision(actions, log_probs, rows, values, next_state)

    @torch.no_grad()
    def value(self, features: Tensor, state: RecurrentState) -> Tensor:
        """V(s) `[N]` of features `[N, F]`; the state is read, not advanced."""
        self._check_step(features, state)
        with full_precision(self.device):
            core, _, _ = self._step(features, state)
            return self._read(core)[1]

    @torch.no_grad()
    def rescale_value(self, factor: Tensor, shift: Tensor) -> None:
        """Let every V(s) be `factor * V(s) + shift` from now on."""
        weight, bias = self.readout.weight[-1], self.readout.bias[-1:]
        weight.mul_(factor)
        bias.mul_(factor).add_(shift)

    def shift_features(self, shift: Tensor) -> None:
        """Let features `[.., F]` be read as `features + shift` from now on."""
        assert isinstance(self.heads, PlainHeads), "slots are to be treated alike"
        self.heads.shift_features(shift)

    def fit_scales(self, features: Tensor) -> None:
        """Take the scales of a layout's features from features `[R, F]`, the first time."""
        assert isinstance(self.heads, SlotHeads), "flat features are scaled by whoever gives them"
        if not self.heads.scales.is_fitted:
            self.heads.scales.fit(features)

    def evaluate(
        self,
        features: Tensor,
        actions: Tensor,
        masks: Tensor,
        layout: SequenceLayout,
        initial: RecurrentState,
    ) -> Evaluation:
        """Scores stored steps `[N, T, ...]`; only the rows of `layout` are read.

        An episode that goes on from before the rollout starts from its env's `initial` state
        `[N, L, hidden]`, every other one from zeros. `masks` `[N, T, C]` are the rows that
        applied; the stored choices are what later heads are given.
        """
        parts = SequenceParts((layout,))
        (steps,) = self.gather(features, actions, masks, parts, initial)
        return self.score(steps, layout)

    def gather(
        self,
        features: Tensor,
        actions: Tensor,
        masks: Tensor,
        parts: SequenceParts,
        initial: RecurrentState,
    ) -> tuple[StoredSteps, ...]:
        """The steps of each part of a rollout, to be scored; arguments as those of `evaluate`."""
        self._check_rollout(features, actions, masks, parts, initial)
        taken, masks = parts.gather(actions), parts.gather(masks)
        actions = self.choice_checks.in_range(taken, masks, parts.rows, parts.layouts[0].max_steps)
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

    def score(self, steps: StoredSteps, layout: SequenceLayout) -> Evaluation:
        """Scores what `gather` gave for a layout."""
        with full_precision(self.device):
            encoded, scene = self.heads.encode(steps.features)
            core = encoded + self._unroll(encoded, layout, steps.initial)
            first_logits, values = self._read(core)
            later_logits = [
                self.heads.logits(run, core, scene, steps.actions)
                for run in range(1, len(self.action_space.head_groups))
            ]
        distribution = MaskedFactoredCategorical(
            self.action_space,
            torch.cat([first_logits, *later_logits], dim=-1) if later_logits else first_logits,
            steps.masks,
            legal=steps.legal,
            floor=self.config.floor,
        )
        log_probs = distribution.log_prob(steps.actions)
        self.choice_checks.check_stored(steps.actions, log_probs, steps.masks, layout)
        entropies = distribution.entropy()
        return Evaluation(
            log_probs,
            entropies,
            distribution.normalize(entropies),
            values,
            distribution,
        )

    def _step(
        self, features: Tensor, state: RecurrentState
    ) -> tuple[Tensor, Scene, RecurrentState]:
        """Core state `[N, hidden]`, what the heads look up, and the LSTM's next state."""
        encoded, scene = self.heads.encode(features)
        below, h, c = encoded, [], []
        for layer, weights in enumerate(self.core.all_weights):
            below, cell = torch.lstm_cell(below, (state.h[:, layer], state.c[:, layer]), *weights)
            h.append(below)
            c.append(cell)
        return encoded + below, scene, RecurrentState(_by_layer(h), _by_layer(c))

    def _unroll(self, encoded: Tensor, layout: SequenceLayout, initial: RecurrentState) -> Tensor:
        """The LSTM's output `[R, hidden]` for rows `[R, hidden]` in packed order."""
        h, c = (state.transpose(0, 1).contiguous() for state in initial)
        return packed_lstm(self.core, encoded, layout, (h, c))

    def _read(self, core: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the first run of heads `[B, choices]` and values `[B]`."""
        logits, values = self.readout(core).split([self.readout.out_features - 1, 1], dim=-1)
        return logits, values.squeeze(-1)

    def _check_step(self, features: Tensor, state: RecurrentState) -> None:
        num_envs = len(features)
        check_shape("features", features, (num_envs, self.feature_size), "N, F")
        self._check_state(state, num_envs)

    def _check_state(self, state: RecurrentState, num_envs: int) -> None:
        expected = (num_envs, self.config.lstm_layers, self.config.lstm_hidden_dim)
        for name, tensor in zip(state._fields, state, strict=True):
            check_shape(f"state {name}", tensor, expected, "N, L, hidden")

    def _check_rollout(
        self,
        features: Tensor,
        actions: Tensor,
        masks: Tensor,
        parts: SequenceParts,
        initial: RecurrentState,
    ) -> None:
        layout = parts.layouts[0]
        space, rollout = self.action_space, (layout.num_envs, layout.max_steps)
        heads = f"N, T, {sizes_by_name(space)}"
        check_shape("features", features, (*rollout, self.feature_size), "N, T, F")
        check_shape("actions", actions, (*rollout, space.num_heads), heads)
        check_shape("masks", masks, (*rollout, space.num_choices), heads)
        self._check_state(initial, layout.num_envs)
        if any(layout.num_episodes == 0 for layout in parts.layouts):
            raise ValueError("the layout holds no episode; there is nothing to score")


def _by_layer(states: list[Tensor]) -> Tensor:
    """States `[N, hidden]` of each layer as `[N, L, hidden]`, without a copy where there is one."""
    return states[0].unsqueeze(1) if len(states) == 1 else torch.stack(states, dim=1)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Float32 products inside are exact to float32: no TF32 on a GPU.

    Old and new log-probs of one action are compared by their ratio, so they must come out alike
    from `act` and from `evaluate`, which use different kernels. A learner puts its backward pass
    inside as well: cuDNN looks at the setting again there.
    """
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    rnn: Any = torch.backends.cudnn.rnn  # its attributes are set at run time
    before = matmul.fp32_precision, rnn.fp32_precision
    try:
        matmul.fp32_precision = rnn.fp32_precision = "ieee"
        yield
    finally:
        matmul.fp32_precision, rnn.fp32_precision = before


def flat_policy(
    action_space: FactoredActionSpace, num_features: int, config: PolicyConfig | None = None
) -> FactoredRecurrentActorCritic:
    """A policy for any action space, with `num_features` flat features."""
    return FactoredRecurrentActorCritic(action_space, num_features, config)


def tamiyo_policy(
    layout: FeatureLayout, config: PolicyConfig | None = None
) -> FactoredRecurrentActorCritic:
    """Tamiyo's policy; its weights fit any number of slots and any menu of blueprints."""
    space = tamiyo_action_space(layout.num_slots, layout.num_blueprints)
    return FactoredRecurrentActorCritic(space, layout, config)
