"""Rewards for growing: over an episode they add up to the gain in score."""

import torch
from torch import Tensor

from esper.leyline.protocols import StepOutcome
from esper.leyline.reports import Reports

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


class GrowthReward:
    """The change of score in each step: rewards sum to the last score minus `start_score`.

    `start_score` is the score of an untrained network, so that the first step is rewarded like any
    other. The reward is measured after the action took effect and the host trained. No sequence of
    actions can farm it: undoing an action loses what the action gained.
    """

    def __init__(self, num_envs: int, *, start_score: float = 0.0):
        self.start_score = start_score
        self.scores = torch.full((num_envs,), start_score)

    def begin(self) -> None:
        self.scores = torch.full_like(self.scores, self.start_score)

    def of(self, reports: Reports, outcome: StepOutcome) -> Tensor:
        """Rewards `[N]` of the step from `reports` to `outcome`; a rollback gets the penalty."""
        scores = growth_score(
            outcome.accuracy,
            outcome.added_params,
            reports.host_params,
            reports.rent,
            reports.compute_price * outcome.added_compute,
        )
        rewards = torch.where(outcome.rolled_back, ROLLBACK_PENALTY, scores - self.scores)
        self.scores = torch.where(outcome.rolled_back, self.scores, scores)
        return rewards
