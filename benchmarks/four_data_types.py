"""Four types of data that want different seeds, for `SyntheticHosts`; tests use them too."""

import torch
from torch import Tensor

from esper.tolaria.synthetic_hosts import PLAIN, DataType, SyntheticHosts

FOUR_TYPES = (
    PLAIN._replace(locality=0.8),
    DataType(0.1, 3200, (0.005, 0.005, 0.010, 0.010, 0.020, 0.070)),  # the last one is the best
    DataType(0.8, 450, (0.030, 0.010, 0.000, -0.020, -0.030, -0.010)),  # large seeds overfit
    DataType(0.5, 3200, (0.010, 0.050, 0.030, 0.020, 0.020, 0.010)),
)


def best_blind_scores(hosts: SyntheticHosts, rent: Tensor) -> Tensor:
    """As `hosts.best_scores`, for the set of seeds that is best on average over all types."""
    scores = hosts.scores_of_all_sets(rent)
    best = scores.mean(dim=0).argmax(dim=-1)
    return scores[hosts.type_ids, torch.arange(len(rent)), best]
