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


class GrowthReward:
    """The change of score in each step; an episode's rewards sum to its last score.

    A step's reward comes after its action took effect and the host trained, and no sequence of
    actions can farm it: what one step gains, undoing it loses.
    """

    def __init__(self, num_envs: int, *, penalty: float = ROLLBACK_PENALTY):
        self.penalty = penalty
        self.scores = torch.zeros(num_envs)

    def begin(self) -> None:
        self.scores = torch.zeros_like(self.scores)

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
