"""Rewards for growing: over an episode they add up to the gain in score."""

import torch
from torch import Tensor

ROLLBACK_PENALTY = -0.5


def growth_score(
    accuracy: Tensor,
    added_params: Tensor,
    host_params: Tensor,
    rent: Tensor,
    compute_charge: Tensor | float = 0.0,
) -> Tensor:
    """Accuracy minus the rent for added parameters and the charge for added compute."""
    return accuracy - rent * torch.log1p(added_params / host_params) - compute_charge


def siblings_mean(rewards: Tensor, siblings: int) -> Tensor:
    """The mean reward of each env's siblings, `[N]`; 0 if there are none.

    Siblings share the host, its data and its random numbers. Subtracting their mean reward cancels
    what the host would have reached anyway. The mean does not depend on the env's own actions, so
    it is a valid baseline if it covers the whole episode, even after the env's own episode ended.
    """
    if siblings == 1:
        return torch.zeros_like(rewards)
    families = rewards.view(-1, siblings)
    others = (families.sum(dim=1, keepdim=True) - families) / (siblings - 1)
    return others.flatten()
