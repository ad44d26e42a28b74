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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from esper.leyline.constants import DEFAULT_GAE_LAMBDA, DEFAULT_GAMMA
from esper.leyline.factored_actions import ActionMasks
from esper.runtime.checks import require_fraction, require_positive, require_whole
from esper.simic.agent.cuda_graphs import AgentGraphs, CannotCapture
from esper.simic.agent.ppo_loss import Counts, MinibatchLoss, loss_names, ppo_loss
from esper.simic.agent.rollout import Rollout, RolloutRow
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.ranks import Ranks, print_once
from esper.tamiyo.policy.distributions import Choices, LegalChoices, draw_noise
from esper.tamiyo.policy.feature_scales import Moments, RunningNormalizer, SumOverRanks
from esper.tamiyo.policy.network import (
    Decision,
    FactoredRecurrentActorCritic,
    RecurrentState,
    Steps,
    full_precision,
)

Rng = torch.Generator | None  # None: the global generator of torch
MOSTLY_EMPTY = 1 / 3  # share of empty rows from which a line is printed
FIRST_RATIO_TOLERANCE = 1e-2  # rounding alone stays below 1e-5


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Hyper-parameters of the update; esper.PPO sets another lambda: see GymConfig."""

    learning_rate: float = 2e-3
    """Adam's step size at the start."""
    learning_rate_schedule: Literal["constant", "linear"] = "linear"
    """"linear" decays the learning rate to 0 at the end of training."""
    gamma: float = DEFAULT_GAMMA
    """Discount factor per step."""
    gae_lambda: float = DEFAULT_GAE_LAMBDA
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
    """A policy with its optimiser and normalisers: acts, and learns from rollouts.

    With `ranks`, it learns from the rollouts of all of them and stays equal on all.
    """

    def __init__(
        self,
        policy: FactoredRecurrentActorCritic,
        config: PPOConfig | None = None,
        ranks: Ranks | None = None,
    ):
        self.policy = policy
        self.ranks = ranks
        if ranks is not None:
            ranks.broadcast_([*policy.parameters(), *policy.buffers()])
        self._sum: SumOverRanks | None = None if ranks is None else ranks.sum_
        self.config = config or PPOConfig()
        self._parameters = list(policy.parameters())
        self.device = policy.device
        rate = self.config.learning_rate
        is_cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.Adam(
            self._parameters,
            lr=torch.tensor(rate, device=self.device) if is_cuda else rate,
            eps=1e-5,
            fused=True,
            capturable=is_cuda,
        )
        self.graphs = AgentGraphs(self) if is_cuda else None  # None: every operation is launched
        self.value_normalizer = RunningNormalizer(1, limit=float("inf")).to(self.device)
        self.failed_updates = 0
        weights = torch.ones(policy.action_space.num_heads, device=self.device)
        for head, weight in self.config.head_entropy_weights.items():
            weights[policy.action_space.index(head)] = weight
        self._relative_entropy_weights = weights
        self._entropy_weights = weights.clone()  # times what the schedule says
        self._has_warned = False  # of ratios that are not 1
        self._has_printed = False  # that many rows are empty

    # -- acting -------------------------------------------------------------------------------

    def act(
        self,
        features: Tensor,
        masks: ActionMasks,
        state: RecurrentState,
        *,
        frames: Tensor | None = None,
        noise: Tensor | None = None,
        generator: Rng = None,
        deterministic: bool = False,
        out: RolloutRow | None = None,
    ) -> Decision:
        """One decision per env, written to `out` if given; values are in units of the reward.

        On a GPU, with `out`, it is one CUDA graph, and the next call overwrites the returned state.
        """
        if self.graphs is not None and out is not None:
            if noise is None and not deterministic:
                noise = draw_noise(
                    self.policy.action_space, (len(features),), self.device, generator
                )
            try:
                return self.graphs.act(features, frames, masks, state, noise, out)
            except CannotCapture as error:
                self.run_without_graphs("act", error)
        return self.act_eagerly(
            features,
            masks,
            state,
            frames=frames,
            noise=noise,
            generator=generator,
            deterministic=deterministic,
            out=out,
        )

    def act_eagerly(
        self,
        features: Tensor,
        masks: ActionMasks,
        state: RecurrentState,
        *,
        frames: Tensor | None = None,
        noise: Tensor | None = None,
        generator: Rng = None,
        deterministic: bool = False,
        out: RolloutRow | None = None,
    ) -> Decision:
        """As `act`, operation by operation."""
        choices = None if out is None else Choices(out.actions, out.log_probs, out.masks)
        decision = self.policy.act(
            features,
            masks,
            state,
            frames=frames,
            noise=noise,
            generator=generator,
            deterministic=deterministic,
            out=choices,
        )
        scales = self.value_normalizer
        values = None if out is None else out.values
        values = torch.addcmul(scales.center, decision.values, scales.scale, out=values)
        return Decision(
            decision.actions, decision.log_probs, decision.masks, values, decision.state
        )

    def run_without_graphs(self, work: str, error: Exception) -> None:
        self.graphs = None
        print_once(f"{work} cannot be captured as a CUDA graph, so it is slower: {error}")

    def value(
        self, features: Tensor, state: RecurrentState, frames: Tensor | None = None
    ) -> Tensor:
        """V of an observation `[N]`, in units of the reward: the bootstrap of a row cut there."""
        return self._unscaled_values(self.policy.value(features, state, frames))

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
        num_steps = len(buffer)
        if num_steps == 0:
            raise ValueError("the rollout has no steps; add some before the update")
        buffer.compute_advantages_and_returns(last_values, config.gamma, config.gae_lambda)
        advantage = buffer.normalize_advantages(self._sum)
        rollout = buffer.rollout(self.device)
        self._note_empty_rows(num_steps, rollout)

        # `copy.deepcopy` takes ten times as long
        before = tree_map_only(Tensor, lambda value: value.detach().clone(), self.state_dict())
        try:
            self._set_schedules(progress)
            returns = rollout.stored(rollout.returns)  # [R], in units of the reward
            errors = returns - rollout.stored(rollout.values)
            self._rescale_values(returns)
            targets = self.value_normalizer.normalize(rollout.returns.unsqueeze(-1)).squeeze(-1)
            rollout.targets.copy_(targets)
            learned = self._run_passes(rollout, self._counts(rollout, buffer), generator)
            if not learned.are_scored:
                self.load_state_dict(before)
                self.policy.check_stored(steps_of(rollout), rollout.valid)
            if learned.is_finite:
                self.failed_updates = 0
                self._check_first_ratios(learned.first_ratio_error)
                self._update_scales(rollout)
        except BaseException:  # such as Ctrl-C: nothing may be half learned
            self.load_state_dict(before)
            raise
        if not learned.is_finite:
            self._undo(before)
        if self.ranks is not None:
            (num_steps,) = self.ranks.totals(num_steps)
        return_mean, variance = self._mean_and_variance(returns)
        _, variance_of_errors = self._mean_and_variance(errors)
        # 1: the critic predicts every return; 0: no better than their mean
        explained = torch.where(variance > 0, 1 - variance_of_errors / variance, torch.nan)
        numbers = torch.stack([advantage.mean, advantage.std, return_mean, explained]).tolist()
        names = ("advantage_mean", "advantage_std", "return_mean", "explained_variance")
        return {
            **learned.metrics,
            **dict(zip(names, numbers, strict=True)),
            "first_ratio_error": learned.first_ratio_error,
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "ppo_epochs_run": float(learned.num_passes),
            "rows": float(num_steps),
            "update_undone": float(not learned.is_finite),
        }

    def _update_scales(self, rollout: Rollout) -> None:
        if self.config.normalize_features:
            states, frames = rollout.stored(rollout.states), rollout.stored(rollout.frames)
            self.policy.heads.update_scales(states, frames, self._sum)

    def _mean_and_variance(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of values `[R]`, with those of the other ranks."""
        if self._sum is None:
            return values.mean(), values.var(correction=0)
        _, mean, variance = Moments.of(values.unsqueeze(1)).of_ranks(self._sum)
        return mean[0].float(), variance[0].float()

    def _counts(self, rollout: Rollout, buffer: TamiyoRolloutBuffer) -> Tensor:
        """Steps of each env, CPU `[N, 1]`; with ranks also those with a choice, `[N, 2]`."""
        if self.ranks is None:
            return buffer.step_counts.unsqueeze(1)
        legal = LegalChoices.from_masks(rollout.masks, self.policy.action_space)
        decides = (legal.has_choice > 0) & rollout.valid
        return torch.stack([buffer.step_counts, decides.sum(dim=0).cpu()], dim=1)

    def _run_passes(self, rollout: Rollout, counts: Tensor, generator: Rng) -> "_Learned":
        """Train on the rollout, pass after pass, until the policy has moved far enough."""
        names = [*loss_names(self.policy.action_space), "gradient_norm"]
        totals = torch.zeros(2, len(names), device=self.device)  # sums and weights of the metrics
        first_ratio_error = torch.zeros((), device=self.device)
        are_scored = torch.ones((), dtype=torch.bool, device=self.device)
        for number in range(1, self.config.ppo_epochs + 1):
            of_pass = torch.zeros_like(totals)
            minibatches = self._minibatches(counts, generator)
            for place, (env_ids, counts_of_ranks) in enumerate(minibatches):
                learned = self._learn_from_envs(rollout, env_ids, counts_of_ranks)
                if number == 1 and place == 0:
                    first_ratio_error = learned.ratio_error.clone()
                are_scored &= learned.are_scored
                of_pass += learned.measured
            if self.ranks is not None:
                are_scored = self._add_ranks(of_pass, are_scored)
            totals += of_pass
            sums, weights = of_pass
            # the only synchronisation of a pass
            is_finite = sums.isfinite().all() & are_scored
            kl, all_finite = torch.stack([(sums / weights)[names.index("kl")], is_finite]).tolist()
            if not all_finite or (self.config.target_kl is not None and kl > self.config.target_kl):
                break
        if self.ranks is not None:
            first_ratio_error = self.ranks.gather(first_ratio_error).max()
        sums, weights = totals
        # of a head that never had a choice there is no entropy; all else is 0 without a step
        none = torch.tensor([torch.nan if "entropy/" in name else 0.0 for name in names])
        means = torch.where(weights > 0, sums / weights, none.to(self.device))
        metrics = dict(zip(names, means.tolist(), strict=True))
        return _Learned(
            metrics, float(first_ratio_error), number, bool(all_finite), bool(are_scored)
        )

    def _add_ranks(self, measured: Tensor, are_scored: Tensor) -> Tensor:
        """Add what the other ranks measured; returns whether all choices of all ranks are scored."""
        num_unscored = (~are_scored).to(measured.dtype)
        assert self.ranks is not None
        self.ranks.sum_([measured, num_unscored])
        return num_unscored == 0

    def _minibatches(
        self, counts: Tensor, generator: Rng
    ) -> Iterator[tuple[Tensor, Counts | None]]:
        """Random minibatches: the ids of envs, all of whose rows it has.

        With ranks, each has a part of every minibatch: then with the counts of the whole. None is
        without a step.
        """
        order = torch.randperm(len(counts), generator=generator)
        if self.config.num_minibatches == 1:
            order = torch.arange(len(counts))
        parts = order.chunk(self.config.num_minibatches)
        totals = torch.stack([counts[env_ids].sum(dim=0) for env_ids in parts])
        if self.ranks is None:
            for env_ids, has_steps in zip(parts, totals.any(dim=1).tolist(), strict=True):
                if has_steps:
                    yield env_ids, None
            return
        self.ranks.sum_([totals])
        for env_ids, (num_steps, num_decided) in zip(parts, totals.tolist(), strict=True):
            if num_steps:
                yield env_ids, (num_steps, max(num_decided, 1))

    def _learn_from_envs(
        self, rollout: Rollout, env_ids: Tensor, counts: Counts | None
    ) -> "LearnedMinibatch":
        # a graph would hold the sum over ranks, and the counts as constants
        if self.graphs is not None and self.ranks is None:
            try:
                return self.graphs.learn(rollout, env_ids)
            except CannotCapture as error:
                self.run_without_graphs("learning", error)
        if len(env_ids) == rollout.valid.shape[1]:
            return self.learn_from(rollout, counts)
        minibatch = rollout.of_envs(env_ids.to(self.device, non_blocking=True))
        return self.learn_from(minibatch, counts)

    def learn_from(self, minibatch: Rollout, counts: Counts | None = None) -> "LearnedMinibatch":
        """One step of the optimiser on a minibatch; `counts` are those of all ranks together."""
        steps = steps_of(minibatch)
        outputs = self.policy.outputs(steps)
        loss = ppo_loss(
            self.policy, outputs, steps, minibatch, self._entropy_weights, self.config, counts
        )
        norm = self._optimizer_step(loss)
        of_norm = torch.stack([norm, torch.ones_like(norm)]).unsqueeze(1)
        measured = torch.cat([loss.measured, of_norm], dim=1)
        return LearnedMinibatch(measured, loss.ratio_error, loss.are_scored)

    def _optimizer_step(self, loss: MinibatchLoss) -> Tensor:
        """One step of the optimiser; returns the norm of the gradient before it was clipped."""
        for parameter in self._parameters:
            parameter.grad = None
        with full_precision(self.device):
            loss.backward()
        if self.ranks is not None:
            self._sum_gradients(self.ranks)
        norm = _clip_gradients(self._parameters, self.config.max_grad_norm)
        # With found_inf 1 the fused step does not change the weights, and needs no synchronisation.
        # They stay finite until the update is undone.
        self.optimizer.found_inf = (~(norm < torch.inf)).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        return norm

    def _sum_gradients(self, ranks: Ranks) -> None:
        """The gradient of the whole minibatch; each rank has that of its part."""
        for parameter in self._parameters:
            if parameter.grad is None:  # perhaps on this rank alone
                parameter.grad = torch.zeros_like(parameter)
        ranks.sum_([parameter.grad for parameter in self._parameters if parameter.grad is not None])

    def _note_empty_rows(self, num_steps: int, rollout: Rollout) -> None:
        share = 1 - num_steps / rollout.valid.numel()
        if share > MOSTLY_EMPTY and not self._has_printed:
            self._has_printed = True
            print_once(
                f"{share:.0%} of the rollout's rows hold no step and are computed for nothing: "
                "episodes of very different lengths in one round; a shorter horizon helps"
            )

    def _check_first_ratios(self, error: float) -> None:
        is_first_rank = self.ranks is None or self.ranks.is_first
        if error > FIRST_RATIO_TOLERANCE and is_first_rank and not self._has_warned:
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
        normalizer.update(returns.unsqueeze(1), self._sum)
        mean, std = normalizer.mean, normalizer.std
        factor = (old_std / std).masked_fill(is_first, 1.0)
        self.policy.rescale_value(factor, ((old_mean - mean) / std).masked_fill(is_first, 0.0))

    def _set_schedules(self, progress: float) -> None:
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress={progress}; use a number from 0 to 1")
        share = {"constant": 1.0, "linear": 1.0 - progress}
        rate_share = share[self.config.learning_rate_schedule]
        self._set_learning_rate(self.config.learning_rate * rate_share)
        entropy_share = share[self.config.entropy_schedule]
        torch.mul(self._relative_entropy_weights, entropy_share, out=self._entropy_weights)

    def prepare_optimizer(self) -> None:
        """Give the optimiser the moments of no step, which a graph's warm-up can return to."""
        if self.optimizer.state:
            return
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # by 0
        for moments in self.optimizer.state.values():
            moments["step"].zero_()

    def _set_learning_rate(self, rate: float) -> None:
        (group,) = self.optimizer.param_groups
        if isinstance(group["lr"], Tensor):  # a CUDA graph reads it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

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
        moments, (saved_settings,) = state["optimizer"].values()
        # the others are those of this agent: they differ between devices
        settings = self.optimizer.state_dict()["param_groups"]
        (group,) = self.optimizer.param_groups
        rate = group["lr"]  # of a GPU, a tensor that graphs read where it is
        self.optimizer.load_state_dict({"state": moments, "param_groups": settings})
        self.optimizer.param_groups[0]["lr"] = rate
        self._set_learning_rate(float(saved_settings["lr"]))
        self.value_normalizer.load_state_dict(state["value_normalizer"])
        self.failed_updates = state["failed_updates"]

    def tensors_of_acting(self) -> list[Tensor]:
        """All that acting reads besides what it is given."""
        modules = (self.policy, self.value_normalizer)
        buffers = [buffer for module in modules for buffer in module.buffers()]
        return [*self._parameters, *buffers]

    def tensors_of_learning(self) -> list[Tensor]:
        """All that learning from a minibatch reads or changes besides the rollout."""
        moments = [value for part in self.optimizer.state.values() for value in part.values()]
        return [*self.policy.parameters(), *self.policy.buffers(), *moments]

    def _unscaled_values(self, values: Tensor) -> Tensor:
        return self.value_normalizer.denormalize(values.unsqueeze(-1)).squeeze(-1)


class LearnedMinibatch(NamedTuple):
    """What a step of the optimiser gave."""

    measured: (
        Tensor  # [2, metrics]: sums and weights, those of `loss_names` and the gradient's norm
    )
    ratio_error: Tensor  # the largest |ratio - 1| of a step
    are_scored: Tensor  # bool: every stored choice can have been made


class _Learned(NamedTuple):
    """What the passes over a rollout gave."""

    metrics: dict[str, float]
    first_ratio_error: float
    num_passes: int
    is_finite: bool  # whether all losses and gradients were
    are_scored: bool  # whether all stored choices can have been made


def steps_of(rollout: Rollout) -> Steps:
    """What the policy reads of a rollout or a minibatch."""
    return Steps(
        rollout.states,
        rollout.actions,
        rollout.masks,
        rollout.starts,
        RecurrentState(rollout.initial_h, rollout.initial_c),
        rollout.frames,
    )


def _clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before.

    As `nn.utils.clip_grad_norm_`, whose checks take longer than the arithmetic of a small network.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
