"""What a round of training leaves behind for whoever keeps records of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundRecord:
    """N episodes of up to T decisions each, and what was learned from them; all on the CPU.

    Of `[N, T]` tensors, env n has the first `step_counts[n]` entries; the rest means nothing.
    """

    round: int  # from 1
    metrics: Mapping[str, float]  # by the names in docs/metrics.md
    # per episode
    hosts: Sequence[str]  # the architectures, by their widths
    variants: Sequence[str]  # of the data
    rent: Tensor  # [N], as are those below
    host_params: Tensor
    scores: Tensor  # nan where the governor ended the episode
    rolled_back: Tensor
    step_counts: Tensor
    # per decision
    actions: Tensor  # [N, T, H]
    legal: Tensor  # [N, T, C]: the choices there were, given the earlier heads' choices
    cost_params: Tensor  # [N, T]: parameters of the seed that was germinated, or 0
    accuracy: Tensor  # [N, T]: validation, after the step; of the committed network at the end
    added_params: Tensor  # [N, T]: likewise
    rewards: Tensor  # [N, T]
    values: Tensor  # [N, T]: the reward that was still expected
    # a sample
    observed_envs: Tensor  # [K]
    observations: Tensor  # [K, T, F]: the features that decisions were based on
