"""The records of one training round, for databases and logs; all tensors are on the CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Episodes(NamedTuple):
    """Results of the N episodes of a round."""

    scores: Tensor  # [N] of the committed networks, NaN where the governor ended the episode
    rent: Tensor  # [N]
    host_params: Tensor  # [N]
    lengths: Tensor  # [N] steps
    rolled_back: Tensor  # [N]
    accuracy: Tensor  # [N, T] validation, after each step; of the committed network at the end
    added_params: Tensor  # [N, T] as accuracy
    cost_params: Tensor  # [N, T] of the seed that the step germinated, or 0


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundRecord:
    """N episodes of up to T decisions, and the metrics of the update.

    In `[N, T]` tensors, only the first `episodes.lengths[n]` entries of env n are defined.
    """

    round: int  # from 1
    metrics: Mapping[str, float]  # by the names in docs/metrics.md
    hosts: Sequence[str]  # the architectures, by their widths
    variants: Sequence[str]  # of the data
    rollback_reasons: Sequence[str | None]  # None if the host was not rolled back
    episodes: Episodes
    actions: Tensor  # [N, T, H]
    legal: Tensor  # [N, T, C]: legal choices, given the choices of earlier heads
    rewards: Tensor  # [N, T]
    values: Tensor  # [N, T]: value estimates
    probabilities: Tensor  # [N, T]: of the whole action, when it was sampled
    observed_envs: Tensor  # [K]
    observations: Tensor  # [K, T, F]: features
