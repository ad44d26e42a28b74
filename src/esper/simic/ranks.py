"""The processes that train one policy together: under torchrun, one for each GPU.

    ranks = Ranks.of_torchrun()              # None in a single process
    ranks.sum_(gradients)                    # in place, over all ranks

Each rank has its own environments and random numbers. Sums over ranks keep weights and statistics
equal on all of them. Rank 0 prints and writes files. All ranks make the same calls in the same
order.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from statistics import fmean
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

# of a rank that hangs: others wait while one collects or evaluates. One that has ended is seen at
# once: gloo's connections close, and torchrun ends the others.
TIMEOUT = timedelta(minutes=5)


class RankLost(RuntimeError):
    """Another rank has ended, or does not answer."""


class Ranks:
    """This process among those that train one policy; at least two."""

    def __init__(self, rank: int, size: int, local_rank: int):
        self.rank = rank
        self.size = size
        self.local_rank = local_rank  # on this machine

    @classmethod
    def of_torchrun(cls, timeout: timedelta = TIMEOUT) -> Self | None:
        """The ranks that torchrun started, connected; None for a single process."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return None
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        has_gpu = ranks_here <= torch.cuda.device_count()  # the same answer on all of them
        if has_gpu:
            torch.cuda.set_device(local_rank)
        if not dist.is_initialized():
            # NCCL sums tensors on a GPU, gloo those on the CPU
            dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=timeout)
        elif "gloo" not in str(dist.get_backend_config()):
            raise ValueError(
                "torch.distributed was initialised without gloo, which sums numbers of the CPU; call "
                "init_process_group() without a backend, or leave it to esper.PPO"
            )
        return cls(dist.get_rank(), dist.get_world_size(), local_rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """ "cuda" is the GPU of this rank."""
        return f"cuda:{self.local_rank}" if name == "cuda" else name

    def require_own(self, device: torch.device) -> None:
        """Raise if this is the GPU of another rank: NCCL cannot sum over two ranks on one."""
        is_another = device.type == "cuda" and device.index not in (None, self.local_rank)
        if is_another and self.local_rank < torch.cuda.device_count():
            raise ValueError(
                f"rank {self.rank} would use {device}, which is not its own GPU; make its environments "
                f"on cuda:{self.local_rank}, the number in the environment variable LOCAL_RANK"
            )

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one device by their sums over ranks, in one message."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        _communicate(lambda: dist.all_reduce(flat))
        _copy_from(flat, tensors)

    @torch.no_grad()
    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of rank 0, in one message for each dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for same in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            _communicate(lambda flat=flat: dist.broadcast(flat, 0))  # type: ignore[misc]
            _copy_from(flat, same)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, `[ranks, ...]`."""
        gathered = tensor.new_zeros(self.size, *tensor.shape)
        gathered[self.rank] = tensor
        self.sum_([gathered])
        return gathered

    def totals(self, *counts: int) -> list[int]:
        """Sums of whole numbers over ranks."""
        sums = torch.tensor(counts, device="cpu")
        self.sum_([sums])
        return [int(total) for total in sums]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return self.totals(int(flag)) != [0]

    def mean_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The mean of each metric over the ranks that have it."""
        of_ranks: list[Any] = [None] * self.size
        _communicate(lambda: dist.all_gather_object(of_ranks, dict(metrics)))
        names = dict.fromkeys(name for found in of_ranks for name in found)
        return {name: fmean(found[name] for found in of_ranks if name in found) for name in names}

    def require_same(self, **settings: int) -> None:
        """Raise on all ranks if one has other settings."""
        values = self.gather(torch.tensor(list(settings.values()), device="cpu"))
        for name, of_ranks in zip(settings, values.t().tolist(), strict=True):
            if len(set(of_ranks)) > 1:
                raise ValueError(f"{name} is {of_ranks} on the ranks; use the same on all")

    def wait(self) -> None:
        """Return when all ranks have called this."""
        self.totals(0)


def print_once(text: str) -> None:
    """Print, but only on rank 0 if there are several."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text)


def _copy_from(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _communicate(work: Callable[[], object]) -> None:
    try:
        work()
    except RuntimeError as error:  # DistBackendError is one, too
        raise RankLost(
            "another rank has ended or does not answer, so this one ends as well; look for the "
            "first error among the messages of the other ranks"
        ) from error
