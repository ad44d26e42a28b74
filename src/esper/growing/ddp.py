"""Rows of a rank: what a model in DistributedDataParallel trains on."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from esper.runtime.ranks import Ranks
from esper.surgery.inputs import batch_size, map_rows


def is_split(loader: Iterable[Any] | None) -> bool:
    """Whether every rank reads other rows of a loader."""
    return isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler)


def rows_of(batch: Any, ranks: Ranks) -> tuple[Any, float]:
    """This rank's rows of a batch, and their weight in the mean of the ranks' mean losses."""
    count = batch_size(batch)
    if ranks.size == 1:
        return batch, 1.0
    if count < ranks.size:
        raise ValueError(
            f"a batch of {count} rows for {ranks.size} ranks; use larger batches, fewer ranks, or "
            "drop_last=True if only the last batch is so small"
        )
    own = torch.arange(ranks.rank, count, ranks.size)
    rows = map_rows(batch, lambda tensor: tensor[own.to(tensor.device)])
    return rows, len(own) * ranks.size / count
