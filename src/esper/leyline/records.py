"""The record of one training round, for databases and logs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundRecord:
    """N episodes of up to T decisions, and the metrics of the update; all on the CPU.

    In `[N, T]` tensors, only the first `step_counts[n]` entries of env n are defined.
    """

    round: int  # from 1
    metrics: Mapping[str, float]  # by the names in docs/metrics.md
    # per episode
    hosts: Sequence[str]  # the architectures, by their widths
    variants: Sequence[str]  # of the data
    rent: Tensor  # [N]
    host_params: Tensor  # [N]
    scores: Tensor  # [N]; nan where the governor ended the episode
    rollback_reasons: Sequence[str | None]  # None if the host was not rolled back
    step_counts: Tensor  # [N]
    # per decision
    actions: Tensor  # [N, T, H]
    legal: Tensor  # [N, T, C]: legal choices, given the choices of earlier heads
    cost_params: Tensor  # [N, T]: parameters of the seed that was germinated, or 0
    accuracy: Tensor  # [N, T]: validation, after the step; of the committed network at the end
    added_params: Tensor  # [N, T]: as accuracy
    rewards: Tensor  # [N, T]
    values: Tensor  # [N, T]: value estimates
    # of some envs
    observed_envs: Tensor  # [K]
    observations: Tensor  # [K, T, F]: features
