"""PPO's clipped loss of a minibatch, and what is measured beside it.

    outputs = policy.outputs(steps)
    loss = ppo_loss(policy, outputs, steps, minibatch, entropy_weights, config)
    loss.backward()

`plain_loss` is the loss in torch. On a CPU one kernel computes the loss and its gradients for logits
and values: `kernels/loss/numba_loss.py`.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline.factored_actions import FactoredActionSpace
from esper.simic.agent.rollout import Rollout
from esper.tamiyo.policy.distributions import LOG_STD_BOUNDS, heads_table, normal_nodes
from esper.tamiyo.policy.network import (
    Evaluation,
    FactoredRecurrentActorCritic,
    Outputs,
    Steps,
)

if TYPE_CHECKING:
    from esper.simic.agent.ppo import PPOConfig


Counts = tuple[int, int]  # steps of a minibatch, and those in which a head had a choice; 1 or more
_OF_STEPS = ("loss", "policy_loss", "kl", "clip_fraction", "value_loss", "decided_fraction")
_OF_HEADS = ("entropy", "normalized_entropy", "choice_fraction")


class MinibatchLoss(NamedTuple):
    """The loss of a minibatch, with its metrics as sums and weights.

    A metric is a mean over the steps that it is about: divide the sums of all minibatches by the
    sums of their weights. `loss_names` names them.
    """

    loss: Tensor
    measured: Tensor  # [2, metrics]
    ratio_error: Tensor  # the largest |ratio - 1| of a step
    are_scored: Tensor  # bool: every stored choice can have been made
    roots: tuple[Tensor, ...]  # where the backward pass starts
    gradients: tuple[Tensor | None, ...]  # of the loss, for each root; None: it is the loss

    def backward(self) -> None:
        """Add the gradients of the loss to those of the policy's weights."""
        pairs = zip(self.roots, self.gradients, strict=True)
        learned = [(root, gradient) for root, gradient in pairs if root.requires_grad]
        if learned:  # else all of it is frozen
            roots, gradients = zip(*learned, strict=True)
            torch.autograd.backward(roots, gradients)


def loss_names(action_space: FactoredActionSpace) -> list[str]:
    """The metrics of a loss."""
    of_heads = [f"{kind}/{head}" for kind in _OF_HEADS for head in action_space.names]
    return [*_OF_STEPS, *of_heads]


def ppo_loss(
    policy: FactoredRecurrentActorCritic,
    outputs: Outputs,
    steps: Steps,
    minibatch: Rollout,
    entropy_weights: Tensor,
    config: "PPOConfig",
    counts: Counts | None = None,
) -> MinibatchLoss:
    """The loss of what `policy` made of the steps of a minibatch.

    If this is a part of a minibatch, `counts` are those of the whole: losses and gradients of all
    parts add up.
    """
    if outputs.logits.device.type == "cpu" and outputs.logits.dtype == torch.float32:
        return _compiled_loss(policy, outputs, minibatch, entropy_weights, config, counts)
    return plain_loss(policy.score(outputs, steps), minibatch, entropy_weights, config, counts)


def plain_loss(
    evaluation: Evaluation,
    minibatch: Rollout,
    entropy_weights: Tensor,
    config: "PPOConfig",
    counts: Counts | None = None,
) -> MinibatchLoss:
    """The loss in torch, on any device: what the kernel is compared with."""
    valid = minibatch.valid  # [T, B]
    has_choice = (evaluation.num_choices > 1) & valid.unsqueeze(-1)  # [T, B, H]
    decides = has_choice.any(dim=-1)  # steps with a single legal action train the critic only
    num_steps = valid.sum()
    num_decided = decides.sum()
    all_steps, all_decided = counts or (num_steps, num_decided.clamp(min=1))  # to divide by

    # 0 for heads with nothing to choose
    all_log_ratios = (evaluation.log_probs - minibatch.log_probs).sum(dim=-1)
    log_ratios = torch.where(decides, all_log_ratios, 0.0)
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - config.clip, 1 + config.clip)
    surrogate = torch.minimum(ratios * minibatch.advantages, clipped * minibatch.advantages)
    policy_loss = -torch.where(decides, surrogate, 0.0).sum() / all_decided

    bonus = evaluation.normalized_entropies @ entropy_weights
    entropy_bonus = torch.where(decides, bonus, 0.0).sum() / all_decided

    squared_errors = (evaluation.values - minibatch.targets).square()
    value_loss = 0.5 * torch.where(valid, squared_errors, 0.0).sum() / all_steps

    loss = policy_loss + config.value_coefficient * value_loss
    loss = loss - config.entropy_coefficient * entropy_bonus
    with torch.no_grad():
        ratio_error = torch.where(valid, all_log_ratios, 0.0).expm1().abs().max()
        kl_k3 = log_ratios.expm1() - log_ratios  # Schulman's k3 estimate of the KL
        is_clipped = (ratios != clipped).sum()
        of_heads = has_choice.sum(dim=(0, 1))  # [H]: steps in which the head had a choice
        entropies = torch.where(has_choice, evaluation.entropies, 0.0).sum(dim=(0, 1))
        normalized = torch.where(has_choice, evaluation.normalized_entropies, 0.0).sum(dim=(0, 1))
        sums = [loss * all_steps, policy_loss * all_decided, kl_k3.sum(), is_clipped]
        sums += [value_loss * all_steps, num_decided]
        weights = [num_steps, num_decided, num_decided, num_decided, num_steps, num_steps]
        measured = torch.stack(
            [
                torch.cat([torch.stack(sums), entropies, normalized, of_heads]),
                torch.cat(
                    [torch.stack(weights), of_heads, of_heads, num_steps.expand_as(of_heads)]
                ),
            ]
        )
    are_scored = (evaluation.is_scored | ~valid.unsqueeze(-1)).all()
    return MinibatchLoss(loss.detach(), measured, ratio_error, are_scored, (loss,), (None,))


def _compiled_loss(
    policy: FactoredRecurrentActorCritic,
    outputs: Outputs,
    minibatch: Rollout,
    entropy_weights: Tensor,
    config: "PPOConfig",
    counts: Counts | None,
) -> MinibatchLoss:
    from esper.kernels.loss.numba_loss import loss_and_gradients

    space = policy.action_space
    logits = outputs.logits.detach().view(-1, space.num_choices)
    values = outputs.values.detach().reshape(-1)
    rows = (
        _rows(minibatch.valid, 0),
        _rows(minibatch.masks, 1),
        _rows(minibatch.actions, 1),
        _rows(minibatch.log_probs, 1),
        _rows(minibatch.advantages, 0),
        _rows(minibatch.targets, 0),
    )
    numbers = list(space.continuous)
    log_stds = np.zeros(space.num_heads, dtype=np.float32)
    if policy.log_std is not None:
        log_stds[numbers] = policy.log_std.detach().clamp(*LOG_STD_BOUNDS).numpy()
    settings = (
        np.float32(config.clip),
        np.float32(config.value_coefficient),
        np.float32(config.entropy_coefficient),
        np.float32(policy.config.floor),
    )
    to_logits = torch.empty_like(logits)
    to_values = torch.empty_like(values)
    to_log_stds = np.empty_like(log_stds)
    measured = torch.empty(2, len(_OF_STEPS) + len(_OF_HEADS) * space.num_heads)
    ratio_error, are_scored = loss_and_gradients(
        logits.numpy(),
        values.numpy(),
        rows,
        heads_table(space),
        log_stds,
        normal_nodes(),
        entropy_weights.numpy(),
        settings,
        counts or (0, 0),
        to_logits.numpy(),
        to_values.numpy(),
        to_log_stds,
        measured.numpy(),
    )
    roots = [outputs.logits, outputs.values]
    gradients = [to_logits.view_as(outputs.logits), to_values.view_as(outputs.values)]
    if policy.log_std is not None:
        log_std = policy.log_std.detach()
        is_within = log_std == log_std.clamp(*LOG_STD_BOUNDS)
        roots.append(policy.log_std)
        gradients.append(torch.from_numpy(to_log_stds[numbers]) * is_within)
    loss = measured[0, 0] / (measured[1, 0] if counts is None else counts[0])
    return MinibatchLoss(
        loss,
        measured,
        torch.as_tensor(ratio_error),
        torch.as_tensor(are_scored),
        tuple(roots),
        tuple(gradients),
    )


def _rows(field: Tensor, num_axes: int) -> "np.ndarray[Any, Any]":
    """A field `[T, B, ...]` with one axis for its rows."""
    array: np.ndarray[Any, Any] = field.numpy()
    return array.reshape(-1, *array.shape[array.ndim - num_axes :])
