"""Growth in DistributedDataParallel: one model on all ranks of a process group.

    torch.distributed.init_process_group()                   # in your script, under torchrun
    growth = esper.Growth(DistributedDataParallel(model), optimizer, ...)

Gradients are averaged over ranks. Rank 0 decides and writes files. All ranks make the same calls in
the same order. If one is lost, torch.distributed raises an error on the others.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from esper.surgery.inputs import batch_size, map_rows
from esper.surgery.sharding import check_not_sharded

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process among those that train one model; by default it is the only one."""

    rank: int = 0
    size: int = 1
    cpu_group: Any = field(default=None, repr=False)  # of objects and CPU tensors; None: default

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        if self.size == 1:
            return flag
        count = torch.tensor(int(flag))
        dist.all_reduce(count, group=self.cpu_group)
        return bool(count)

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, group=self.cpu_group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of the ranks."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of rank 0."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor, 0, group=self._group_of(tensor))

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over ranks, in one message per dtype and device."""
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors if self.size > 1 else ():
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for group in groups.values():
            flat = torch.cat([tensor.flatten() for tensor in group])
            dist.all_reduce(flat, group=self._group_of(flat))
            flat /= self.size
            means = torch.split(flat, [tensor.numel() for tensor in group])
            for tensor, mean in zip(group, means, strict=True):
                tensor.copy_(mean.view_as(tensor))

    def mean_gradients(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The means over ranks. None counts as zero; where no rank has a gradient, it stays None."""
        if self.size == 1 or not weights:
            return gradients
        given = zip(weights, gradients, strict=True)
        means = [torch.zeros_like(w) if g is None else g for w, g in given]
        known = torch.tensor([g is not None for g in gradients]).to(means[0])
        self.average([*means, known])
        return [mean if n else None for mean, n in zip(means, known.tolist(), strict=True)]

    def average_gradients(self, weights: Sequence[Tensor]) -> None:
        """Give weights the means of their gradients; a rank may have skipped some of them."""
        if self.size == 1:
            return
        gradients = self.mean_gradients(weights, [weight.grad for weight in weights])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient

    def _group_of(self, tensor: Tensor) -> Any:
        return None if tensor.is_cuda else self.cpu_group


ALONE = Ranks()


def connected_ranks() -> Ranks:
    """The ranks of the default process group; `ALONE` without one."""
    if not dist.is_initialized():
        return ALONE
    return Ranks(dist.get_rank(), dist.get_world_size(), _cpu_group(dist.group.WORLD))


@cache
def _cpu_group(world: Any) -> Any:
    """None if the default group takes CPU tensors, else a group beside it."""
    return None if "gloo" in str(dist.get_backend_config(world)) else dist.new_group(backend="gloo")


def unwrapped(model: nn.Module, ranks: Ranks) -> tuple[nn.Module, Ranks]:
    """The model inside DistributedDataParallel, and the ranks that train it together."""
    if isinstance(model, nn.Module):
        check_not_sharded(model, "it in DistributedDataParallel instead")
    connected = connected_ranks()
    if isinstance(model, DistributedDataParallel):
        return model.module, connected
    if ranks.size == 1 < connected.size:
        raise ValueError(
            f"{connected.size} ranks are connected, but each would grow another model; give Growth "
            "the DistributedDataParallel model, not the module inside"
        )
    return model, ranks


def warn_if_not_connected() -> None:
    if not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") != "1":
        warnings.warn(
            "torchrun has started several ranks that are not connected, so each grows its own model; "
            "call torch.distributed.init_process_group and use DistributedDataParallel",
            stacklevel=3,
        )


class SeedAverage:
    """Averages the gradients of seeds over ranks, once, at the end of every backward pass.

    `DistributedDataParallel` averages only the weights that it was made with. Averaging gradients
    twice changes nothing, so they may accumulate.
    """

    def __init__(self, ranks: Ranks, seed_weights: Callable[[], list[Tensor]]):
        self._ranks, self._seed_weights = ranks, seed_weights
        self._is_queued = False

    def follow(self, module: nn.Module) -> None:
        """Average after a backward pass that reaches any weight of this module.

        The model and every seed are followed: a rank may skip the module before a seed.
        """
        for weight in module.parameters() if self._ranks.size > 1 else ():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._queue)  # type: ignore[no-untyped-call]

    def _queue(self, _: Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._is_queued = False
        self._ranks.average_gradients(self._seed_weights())


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
