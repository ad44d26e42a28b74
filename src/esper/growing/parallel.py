"""Growth on several ranks: which model is grown there, how its seeds train, which rows are read.

A seed is born after `DistributedDataParallel` has listed the weights that it averages. Its gradients
are averaged here, at the end of every backward pass: before a user clips or reads them. Averaging
what an earlier pass has averaged changes nothing, so gradients may accumulate.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler

from esper.growing.inputs import batch_size
from esper.leyline.ranks import ALONE, Ranks, join_ranks


def unwrapped(model: nn.Module) -> tuple[nn.Module, Ranks]:
    """The model inside DistributedDataParallel and its ranks; others as they are, alone."""
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, FSDPModule | FullyShardedDataParallel):
                raise ValueError(
                    "the model is sharded (fully_shard, FSDP), but a seed grows on whole weights; wrap "
                    "it in DistributedDataParallel instead"
                )
    if isinstance(model, DistributedDataParallel):
        return model.module, join_ranks()
    return model, ALONE


class SeedAverage:
    """Averages the gradients of seeds over ranks."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._weights: list[nn.Parameter] = []
        self._is_queued = False

    def watch(self, seed: nn.Module) -> None:
        if self._ranks.size > 1:
            for weight in seed.parameters():
                weight.register_post_accumulate_grad_hook(self._queue)  # type: ignore[no-untyped-call]
                self._weights.append(weight)

    def forget(self, seed: nn.Module) -> None:
        gone = {id(weight) for weight in seed.parameters()}
        self._weights = [weight for weight in self._weights if id(weight) not in gone]

    def _queue(self, _: Tensor) -> None:
        """Average once, when the backward pass ends."""
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._is_queued = False
        self._ranks.mean([w.grad for w in self._weights if w.grad is not None])


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
            f"a batch of {count} rows for {ranks.size} ranks; use larger batches or fewer ranks"
        )
    rows = torch.arange(ranks.rank, count, ranks.size)

    def own(tensor: Tensor) -> Tensor:
        is_batch = tensor.dim() > 0 and len(tensor) == count
        return tensor[rows.to(tensor.device)] if is_batch else tensor

    return pytree.tree_map_only(Tensor, own, batch), len(rows) * ranks.size / count
