"""PPO for a factored, recurrent, masked policy (Schulman et al. 2017).

    decision = agent.act(features, masks, state, generator=rng)    # values in units of the reward
    buffer.add_batch(...)
    metrics = agent.update(buffer, last_values)

The rollout holds features as the environment gave them; acting and learning scale them with the
same statistics, which change only at the end of an update. So every ratio is 1 before the first
optimiser step.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_map_only

from esper.leyline.constants import DEFAULT_GAMMA
from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.leyline.sequences import SequenceLayout, SequenceParts
from esper.runtime.checks import require_fraction, require_positive, require_whole
from esper.simic.agent.captured import Captured
from esper.simic.agent.rollout_buffer import RolloutBatch, TamiyoRolloutBuffer
from esper.tamiyo.policy.feature_scales import RunningNormalizer
from esper.tamiyo.policy.network import (
    Decision,
    Evaluation,
    FactoredRecurrentActorCritic,
    RecurrentState,
    StoredSteps,
    full_precision,
)
from esper.tamiyo.policy.prepared_act import Act, prepared_act

Rng = torch.Generator | None  # None: the global generator of torch
FIRST_RATIO_TOLERANCE = 1e-2  # rounding alone stays below 1e-5


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Hyper-parameters of the update; all published results use the defaults."""

    learning_rate: float = 2e-3
    """Adam's step size at the start."""
    learning_rate_schedule: Literal["constant", "linear"] = "linear"
    """"linear" decays the learning rate to 0 at the end of training."""
    gamma: float = DEFAULT_GAMMA
    """Discount factor per step."""
    gae_lambda: float = 0.9
    """Lambda of generalised advantage estimation."""
    clip: float = 0.2
    """The joint ratio of all heads is clipped to 1 - clip .. 1 + clip."""
    ppo_epochs: int = 10
    """Passes over a rollout per update."""
    num_minibatches: int = 4
    """Minibatches per pass, each made of all steps of some envs; at most one for each env."""
    value_coefficient: float = 0.25
    """Weight of the value loss, on returns scaled to mean 0 and variance 1."""
    normalize_features: bool = True
    """Scale features to mean 0 and variance 1; what the policy makes of an observation does not
    change with the mean. Features of slots and blueprints are scaled once, after the first
    update, and all of a kind alike."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; entropy is scaled to 0..1 per head."""
    entropy_schedule: Literal["constant", "linear"] = "constant"
    """"linear" decays the entropy bonus to 0 at the end of training."""
    head_entropy_weights: Mapping[str, float] = field(default_factory=dict)
    """Relative weight of a head's entropy, by name; heads not named have weight 1."""
    target_kl: float | None = 0.03
    """Stop the update after a pass with a mean KL above this; None: never."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    max_failed_updates: int = 3
    """Stop training after this many failed updates in a row."""

    def __post_init__(self) -> None:
        require_whole(self, 1, "ppo_epochs", "num_minibatches", "max_failed_updates")
        weights = {f"head_entropy_weights.{n}": w for n, w in self.head_entropy_weights.items()}
        weights["value_coefficient"] = self.value_coefficient
        weights["entropy_coefficient"] = self.entropy_coefficient
        for name, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name}={weight}; use a finite number from 0 up")
        require_fraction(self, "gamma", "gae_lambda")
        require_positive(self, "learning_rate")
        for name in ("clip", "max_grad_norm", "target_kl"):  # infinite: no limit
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ValueError(f"{name}={limit}; use a number above 0")
        for name in ("learning_rate_schedule", "entropy_schedule"):
            if getattr(self, name) not in ("constant", "linear"):
                raise ValueError(f"{name}={getattr(self, name)!r}; use 'constant' or 'linear'")


class TrainingFailed(RuntimeError):
    """Several updates in a row failed; the weights are those of the last successful update."""


class PPOAgent:
    """A policy with its optimiser and normalisers: acts, and learns from rollouts."""

    def __init__(self, policy: FactoredRecurrentActorCritic, config: PPOConfig | None = None):
        self.policy = policy
        self.config = config or PPOConfig()
        self._parameters = list(policy.parameters())
        self.device = policy.device
        rate = self.config.learning_rate
        self.optimizer = torch.optim.Adam(self._parameters, lr=rate, eps=1e-5, fused=True)
        self.value_normalizer = RunningNormalizer(1, limit=float("inf")).to(self.device)
        self.failed_updates = 0
        weights = torch.ones(policy.action_space.num_heads, device=self.device)
        for head, weight in self.config.head_entropy_weights.items():
            weights[policy.action_space.index(head)] = weight
        self._entropy_weights = weights
        self._entropy_share = 1.0  # factor of the entropy bonus, set by the schedule
        self._has_warned = False  # of ratios that are not 1
        self._metrics = [*_metric_names(policy.action_space), "gradient_norm"]  # of a minibatch
        # a graph cannot hold what a user's encoder does
        can_capture = self.device.type == "cuda" and not policy.heads.is_custom
        self.captured = Captured(self._gradients, self._parameters) if can_capture else None

    # -- acting -------------------------------------------------------------------------------

    def act(
        self,
        features: Tensor,
        masks: ActionMasks,
        state: RecurrentState,
        *,
        generator: Rng = None,
        deterministic: bool = False,
    ) -> Decision:
        """One decision per env; values are in units of the reward."""
        decision = self.policy.act(
            features, masks, state, generator=generator, deterministic=deterministic
        )
        return decision._replace(values=self._unscaled_values(decision.values))

    def prepared_act(self) -> Act:
        """`act` with the current weights; faster for many steps. Use it before the next update."""
        scale = self.value_normalizer
        return prepared_act(self.policy, scale.mean.float(), scale.std.float()) or self.act

    def value(self, features: Tensor, state: RecurrentState) -> Tensor:
        """V of an observation `[N]`, in units of the reward: the bootstrap of a row cut there."""
        return self._unscaled_values(self.policy.value(features, state))

    # -- learning -----------------------------------------------------------------------------

    def update(
        self,
        buffer: TamiyoRolloutBuffer,
        last_values: Tensor | None = None,
        *,
        progress: float = 0.0,
        generator: Rng = None,
    ) -> dict[str, float]:
        """Learn from a rollout and return the metrics that docs/metrics.md lists.

        `progress` (0 to 1) sets the schedules, `generator` (on the CPU) the minibatches. An update
        with a loss or gradient that is not finite is undone.
        """
        config = self.config
        self.policy.raise_on_bad_values()  # of the rollout
        buffer.compute_advantages_and_returns(last_values, config.gamma, config.gae_lambda)
        advantage = buffer.normalize_advantages()
        batch, layout = buffer.get_batched_sequences(self.device), buffer.sequence_layout()
        if layout.num_rows == 0:
            raise ValueError("the rollout has no steps; add some before the update")

        # `copy.deepcopy` takes ten times as long
        before = tree_map_only(Tensor, lambda value: value.detach().clone(), self.state_dict())
        self._set_schedules(progress)
        returns = layout.gather(batch.returns)
        self._rescale_values(returns)
        scaled = self.value_normalizer.normalize(batch.returns.unsqueeze(-1)).squeeze(-1)
        batch = replace(batch, returns=scaled)
        try:
            passes, first_error, is_finite = self._run_epochs(batch, layout, generator)
            self.policy.raise_on_bad_values()
        except ValueError:  # the rollout has illegal actions: nothing may be learned from it
            self.load_state_dict(before)
            raise
        if is_finite:
            self.failed_updates = 0
            if config.normalize_features:
                self.policy.heads.update_scales(layout.gather(batch.states))
        else:
            self._undo(before)
        first_ratio_error = float(first_error)
        if is_finite:
            self._check_first_ratios(first_ratio_error)
        errors = returns - layout.gather(batch.values)
        columns = torch.stack([returns, errors], dim=1)
        (variance, unexplained), (mean_return, _) = torch.var_mean(columns, dim=0, correction=0)
        # 1: the critic predicts every return; 0: no better than their mean
        explained = torch.where(variance > 0, 1 - unexplained / variance, torch.nan)
        scalars = torch.stack([advantage.mean, advantage.std, mean_return, explained]).tolist()
        names = ("advantage_mean", "advantage_std", "return_mean", "explained_variance")
        return {
            **dict(zip(self._metrics, torch.cat(passes).mean(dim=0).tolist(), strict=True)),
            **dict(zip(names, scalars, strict=True)),
            "first_ratio_error": first_ratio_error,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "ppo_epochs_run": float(len(passes)),
            "rows": float(layout.num_rows),
            "update_undone": float(not is_finite),
        }

    def _run_epochs(
        self, rollout: RolloutBatch, layout: SequenceLayout, generator: Rng
    ) -> tuple[list[Tensor], Tensor | float, bool]:
        """Train on the rollout.

        Returns the metrics `[minibatches, metrics]` of each pass, the largest |ratio - 1| of the
        first minibatch, and whether all losses and gradients were finite.
        """
        passes: list[Tensor] = []
        first_error: Tensor | float = 0.0
        for _ in range(self.config.ppo_epochs):
            measured_rows: list[Tensor] = []
            for minibatch in self._minibatches(rollout, layout, generator):
                measured, log_ratios = self._backward(minibatch)
                # before the first optimiser step every ratio is 1, unless `act` and `score` differ
                if not passes and not measured_rows:
                    first_error = log_ratios.sum(dim=-1).expm1().abs().max()
                norm = nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm)
                # With found_inf 1 the fused step does not change the weights, and needs no
                # synchronisation. They stay finite until the update is undone.
                self.optimizer.found_inf = (~(norm < torch.inf)).float()  # type: ignore[attr-defined]
                self.optimizer.step()
                measured_rows.append(torch.cat([measured, norm.unsqueeze(0)]))
            passes.append(torch.stack(measured_rows))
            named = dict(zip(self._metrics, passes[-1].unbind(dim=1), strict=True))
            is_finite = torch.stack([named["loss"], named["gradient_norm"]]).isfinite().all()
            # the only synchronisation of a pass
            kl, all_finite = torch.stack([named["kl"].mean(), is_finite]).tolist()
            if not all_finite or (self.config.target_kl is not None and kl > self.config.target_kl):
                break
        return passes, first_error, bool(all_finite)

    def _backward(self, minibatch: "_Minibatch") -> tuple[Tensor, Tensor]:
        """Gradients of a minibatch; returns its metrics and log-ratios."""
        layout, steps, rows = minibatch
        for parameter in self._parameters:
            parameter.grad = None
        inputs = (steps, rows, self._entropy_share * self._entropy_weights)
        compute = self._gradients if self.captured is None else self.captured
        log_probs, measured = compute(inputs, layout)
        self.policy.choice_checks.check_stored(steps.actions, log_probs, steps.masks, layout)
        return measured, log_probs - rows.log_probs

    def _gradients(
        self, inputs: "tuple[StoredSteps, RolloutRows, Tensor]", layout: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """The backward pass; returns log-probs and metrics. No check: a graph may hold it."""
        steps, rows, entropy_weights = inputs
        evaluation, space = self.policy.score(steps, layout), self.policy.action_space
        loss, measured = ppo_loss(evaluation, rows, space, entropy_weights, self.config)
        with full_precision(self.device):
            loss.backward()  # type: ignore[no-untyped-call]
        return evaluation.log_probs.detach(), torch.stack(list(measured.values()))

    def _minibatches(
        self, rollout: RolloutBatch, layout: SequenceLayout, generator: Rng
    ) -> "Iterator[_Minibatch]":
        """Random minibatches of whole env rows; one gather per field for the whole pass."""
        order = torch.randperm(layout.num_envs, generator=generator)
        pieces = map(layout.select, order.chunk(self.config.num_minibatches))
        parts = SequenceParts(tuple(piece for piece in pieces if piece.num_rows))
        initial = RecurrentState(rollout.initial_hidden_h, rollout.initial_hidden_c)
        steps = self.policy.gather(rollout.states, rollout.actions, rollout.masks, parts, initial)
        rows = zip(*map(parts.split_rows, rollout_rows(rollout, parts)), strict=True)
        return zip(parts.layouts, steps, map(RolloutRows._make, rows), strict=True)

    def _check_first_ratios(self, error: float) -> None:
        if error > FIRST_RATIO_TOLERANCE and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"first_ratio_error is {error:.2g}, expected less than {FIRST_RATIO_TOLERANCE}: "
                "the policy gives the stored actions other probabilities than when it acted. "
                "Likely causes: the recurrent state was not reset at an episode end; the stored "
                "masks are not those that applied; features changed between acting and learning; "
                "this is a second update from one buffer",
                stacklevel=3,
            )

    @torch.no_grad()
    def _rescale_values(self, returns: Tensor) -> None:
        """Update the statistics of returns; the critic's unscaled predictions stay the same.

        The critic's last layer compensates for the new scale (PopArt, van Hasselt et al. 2016). The
        first update is applied as is, so that a new critic predicts the mean return.
        """
        normalizer = self.value_normalizer
        old_mean, old_std, is_first = normalizer.mean.clone(), normalizer.std, normalizer.count == 0
        normalizer.update(returns.unsqueeze(1))
        mean, std = normalizer.mean, normalizer.std
        factor = (old_std / std).masked_fill(is_first, 1.0)
        self.policy.rescale_value(factor, ((old_mean - mean) / std).masked_fill(is_first, 0.0))

    def _set_schedules(self, progress: float) -> None:
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress={progress}; use a number from 0 to 1")
        share = {"constant": 1.0, "linear": 1.0 - progress}
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * share[self.config.learning_rate_schedule]
        self._entropy_share = share[self.config.entropy_schedule]

    def _undo(self, before: dict[str, Any]) -> None:
        self.load_state_dict(before)
        self.failed_updates += 1
        if self.failed_updates >= self.config.max_failed_updates:
            raise TrainingFailed(
                f"{self.failed_updates} updates in a row were not finite and have been undone; "
                "lower learning_rate, or check for extreme rewards and features"
            )

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that learning changes, for checkpoints and for undoing an update."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "value_normalizer": self.value_normalizer.state_dict(),
            "failed_updates": self.failed_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.value_normalizer.load_state_dict(state["value_normalizer"])
        self.failed_updates = state["failed_updates"]

    def _unscaled_values(self, values: Tensor) -> Tensor:
        return self.value_normalizer.denormalize(values.unsqueeze(-1)).squeeze(-1)


class RolloutRows(NamedTuple):
    """The stored data of R steps that the loss needs."""

    log_probs: Tensor  # [R, H]
    advantages: Tensor  # [R]
    returns: Tensor  # [R], normalised


_Minibatch = tuple[SequenceLayout, StoredSteps, RolloutRows]


def rollout_rows(rollout: RolloutBatch, layout: SequenceLayout | SequenceParts) -> RolloutRows:
    """The stored steps of a rollout, in packed order."""
    return RolloutRows._make(layout.gather(getattr(rollout, name)) for name in RolloutRows._fields)


def ppo_loss(
    evaluation: Evaluation,
    rows: RolloutRows,
    action_space: FactoredActionSpace,
    entropy_weights: Tensor,
    config: PPOConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a minibatch, and its metrics."""
    legal = evaluation.distribution.legal
    # steps with a single legal action train the critic only
    has_choice = legal.has_choice
    weights = has_choice / has_choice.sum().clamp_min(1.0)  # mean over the steps with a choice

    # 0 for heads with nothing to choose
    log_ratios = (evaluation.log_probs - rows.log_probs).sum(dim=-1)
    ratios, advantages = log_ratios.exp(), rows.advantages
    with torch.no_grad():
        clipped = ratios.clamp(1 - config.clip, 1 + config.clip)
        is_unclipped = (ratios - clipped) * advantages <= 0  # min(ratio * A, clipped * A)
    surrogate = torch.where(is_unclipped, ratios, clipped) * advantages

    policy_loss = -(weights @ surrogate)
    entropy_bonus = weights @ (evaluation.normalized_entropies @ entropy_weights)
    value_loss = 0.5 * mse_loss(evaluation.values, rows.returns)
    loss = torch.add(policy_loss, value_loss, alpha=config.value_coefficient)
    loss = torch.sub(loss, entropy_bonus, alpha=config.entropy_coefficient)
    with torch.no_grad():
        kl_k3 = log_ratios.expm1() - log_ratios  # Schulman's k3 estimate of the KL
        kl, clip_fraction = torch.stack([kl_k3, (ratios != clipped).float()]) @ weights
        of_steps = [value_loss.detach(), has_choice.mean()]  # means over all steps
        has_choices = (legal.counts > 1).float()
        for values in (evaluation.entropies, evaluation.normalized_entropies, has_choices):
            of_steps += values.mean(dim=0).unbind()
        measured = (loss.detach(), policy_loss.detach(), kl, clip_fraction, *of_steps)
    return loss, dict(zip(_metric_names(action_space), measured, strict=True))


def _metric_names(action_space: FactoredActionSpace) -> list[str]:
    kinds = ("entropy", "normalized_entropy", "choice_fraction")
    of_heads = [f"{kind}/{name}" for kind in kinds for name in action_space.names]
    first = ["loss", "policy_loss", "kl", "clip_fraction"]
    return [*first, "value_loss", "decided_fraction", *of_heads]
