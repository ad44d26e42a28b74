"""What growing is worth: rewards that add up to the score of the network that is committed."""

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
    """Accuracy less the rent for what was added and the charge for the compute it used."""
    return accuracy - rent * torch.log1p(added_params / host_params) - compute_charge


def siblings_mean(rewards: Tensor, siblings: int) -> Tensor:
    """For each env the mean reward `[N]` of its siblings, 0 where there are none.

    What a host would have reached anyway, its data and its luck are the same for all siblings: an
    env is rewarded less this mean, and they cancel. What it is compared with does not depend on
    what it did, as long as it is compared over the whole episode, however early its own ends.
    """
    if siblings == 1:
        return torch.zeros_like(rewards)
    families = rewards.view(-1, siblings)
    others = (families.sum(dim=1, keepdim=True) - families) / (siblings - 1)
    return others.flatten()


class GrowthReward:
    """The change of score in each step: rewards sum to an episode's last score less its start.

    The start is `start_score`, what a network scores that has learned nothing, so that the first
    step is paid like any other. A step's reward comes after its action took effect and the host
    trained, and no sequence of actions can farm it: what one step gains, undoing it loses.
    """

    def __init__(
        self, num_envs: int, *, start_score: float = 0.0, penalty: float = ROLLBACK_PENALTY
    ):
        self.start_score, self.penalty = start_score, penalty
        self.scores = torch.full((num_envs,), start_score)

    def begin(self) -> None:
        self.scores = torch.full_like(self.scores, self.start_score)

    def of(self, reports: Reports, outcome: StepOutcome) -> Tensor:
        """Rewards `[N]` of the step that led from `reports` to `outcome`."""
        scores = growth_score(
            outcome.accuracy,
            outcome.added_params,
            reports.host_params,
            reports.rent,
            reports.compute_price * outcome.added_compute,
        )
        rewards = torch.where(outcome.rolled_back, self.penalty, scores - self.scores)
        self.scores = torch.where(outcome.rolled_back, self.scores, scores)
        return rewards
