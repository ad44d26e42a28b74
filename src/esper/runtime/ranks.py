"""The processes of one run under torchrun: sums, gathers and broadcasts over its ranks.

    ranks = join_ranks()                  # ALONE without torchrun
    total = ranks.sum(tensor)             # over all ranks, in place
    share = EnvShare.split(64, ranks)     # which of the run's 64 envs are here

Every rank makes the same calls in the same order. With one rank they return their arguments, so
code is written once. CPU tensors and objects travel over gloo, CUDA tensors over NCCL.
"""

import atexit
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from esper.runtime.files import is_running
from esper.runtime.plain_config import differences

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 1800.0  # of a collective; ESPER_TIMEOUT_S changes it
ROLL_CALL_S = 10.0  # in which ranks answer after another one was lost


class RankLost(ConnectionError):
    """Another rank ended or did not answer in time."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process among those of a run. The default is a run of one process."""

    rank: int = 0
    size: int = 1
    store: Any = field(default=None, repr=False)  # where ranks leave their process ids
    cpu_group: Any = field(default=None, repr=False)  # of CPU tensors; None: the default group

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, written to `tensor`."""
        if self.size > 1:
            self._call(dist.all_reduce, tensor, on_cuda=tensor.is_cuda)
        return tensor

    def sums(self, *values: Tensor | float) -> Sequence[Any]:
        """The sum of each number over ranks; the numbers themselves with one rank."""
        if self.size == 1:
            return values
        device = next((v.device for v in values if isinstance(v, Tensor)), None)
        numbers = [torch.as_tensor(v, dtype=torch.float64, device=device) for v in values]
        return self.sum(torch.stack(numbers)).unbind()

    def moments(self, rows: Tensor) -> tuple[int, Tensor, Tensor]:
        """Number, mean and variance of the rows `[R, ...]` of all ranks."""
        if self.size == 1:
            if len(rows) == 0:
                return 0, rows.new_zeros(rows.shape[1:]), rows.new_zeros(rows.shape[1:])
            variance, mean = torch.var_mean(rows, dim=0, correction=0)
            return len(rows), mean, variance
        exact = rows.double()
        totals = self.sum(torch.cat([exact.sum(dim=0).flatten(), exact.new_tensor([len(rows)])]))
        count = int(totals[-1])
        mean = totals[:-1].view(rows.shape[1:]) / max(count, 1)
        variance = self.sum((exact - mean).square().sum(dim=0)) / max(count, 1)
        return count, mean.to(rows), variance.to(rows)

    def sum_together(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over ranks in place, in one message per dtype and device."""
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors if self.size > 1 else ():
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for group in groups.values():
            flat = self.sum(torch.cat([tensor.flatten() for tensor in group]))
            sums = torch.split(flat, [tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [s.view_as(t) for s, t in zip(sums, group, strict=True)])

    def mean(self, tensors: list[Tensor]) -> None:
        """Average tensors over ranks in place."""
        if self.size > 1 and tensors:
            self.sum_together(tensors)
            torch._foreach_div_(tensors, self.size)

    def mean_gradients(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The means over ranks. None counts as zero; where no rank has a gradient, it stays None."""
        if self.size == 1 or not weights:
            return gradients
        given = zip(weights, gradients, strict=True)
        means = [torch.zeros_like(w) if g is None else g for w, g in given]
        known = torch.tensor([g is not None for g in gradients]).to(means[0])
        self.mean([*means, known])
        return [mean if n else None for mean, n in zip(means, known.tolist(), strict=True)]

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of rank 0."""
        for tensor in tensors if self.size > 1 else ():
            self._call(dist.broadcast, tensor, 0, on_cuda=tensor.is_cuda)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return bool(self.sum(torch.tensor(int(flag)))) if self.size > 1 else flag

    def gather(self, value: T, *, to_first: bool = False) -> list[T]:
        """The values of all ranks, on every rank; with `to_first`, on rank 0 only."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.is_first or not to_first else []
        if to_first:
            self._call(dist.gather_object, value, values or None)
        else:
            self._call(dist.all_gather_object, values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        values = [value]
        if self.size > 1:
            self._call(dist.broadcast_object_list, values)
        return values[0]

    def require_same(self, plain: Any) -> None:
        """Raise on every rank if one was started with other settings than rank 0."""
        first, *others = self.gather(plain)
        for rank, other in enumerate(others, start=1):
            if changed := differences(other, first, word="not"):
                raise ValueError(
                    f"rank {rank} has other settings than rank 0: {'; '.join(changed)}. Start every "
                    "rank with the same command"
                )

    def _call(self, collective: Callable[..., Any], *values: Any, on_cuda: bool = False) -> None:
        """Raises `RankLost`, with the name of the lost rank, if another one does not take part."""
        try:
            collective(*values, group=None if on_cuda else self.cpu_group)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0].partition(". ")[0]
            reason = re.sub(r"^\[\S*\] ", "", reason)  # a place in gloo's source
            raise RankLost(f"{self._roll_call()}, so rank {self.rank} stops ({reason})") from error

    def _roll_call(self) -> str:
        """Which rank is lost: its process has ended, or it does not answer."""
        deadline, silent = time.monotonic() + ROLL_CALL_S, "a message between ranks failed"
        try:
            self.store.set(f"esper/alive/{self.rank}", "")
            for rank in set(range(self.size)) - {self.rank}:
                host, process = self.store.get(f"esper/process/{rank}").decode().split()
                name = f"rank {rank} (process {process} on {host})"
                while not self.store.check([f"esper/alive/{rank}"]):
                    if host == socket.gethostname() and not is_running(int(process)):
                        return f"{name} has ended"
                    if time.monotonic() > deadline:
                        silent = f"{name} does not answer"
                        break
                    time.sleep(0.05)
        except RuntimeError:  # the store was in a rank that has ended
            return "rank 0 has ended"
        return silent


ALONE = Ranks()


class EnvShare(NamedTuple):
    """Which of a run's envs are on this rank."""

    total: int  # envs of all ranks
    ids: Tensor  # [n] of those here, ascending within the run

    @classmethod
    def split(cls, total: int, ranks: Ranks) -> "EnvShare":
        """Consecutive envs for each rank."""
        if total % ranks.size:
            raise ValueError(
                f"{total} envs do not split over {ranks.size} ranks; use a multiple of the ranks"
            )
        count = total // ranks.size
        return cls(total, ranks.rank * count + torch.arange(count))

    def local(self, env_ids: Tensor) -> Tensor:
        """The positions on this rank of some of the run's envs; those elsewhere are left out."""
        positions = torch.searchsorted(self.ids, env_ids).clamp(max=len(self.ids) - 1)
        return positions[self.ids[positions] == env_ids]

    def generator(self, device: torch.device, rng_seed: int) -> torch.Generator:
        """A generator for `noise`."""
        if len(self.ids) == self.total:
            return torch.Generator(device).manual_seed(rng_seed)
        generator = _ShareGenerator(device)
        generator.manual_seed(rng_seed)
        generator.share = self._replace(ids=self.ids.to(device))
        return generator

    def join(self, parts: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> dict[str, Any]:
        """Fields of all envs in order, from `(ids, fields)` of each rank: tensors and lists."""
        if len(parts) == 1:
            return dict(parts[0][1])
        order = torch.cat([ids for ids, _ in parts]).argsort()
        joined: dict[str, Any] = {}
        for name, first in parts[0][1].items():
            values = [fields[name] for _, fields in parts]
            if isinstance(first, Tensor):
                joined[name] = torch.cat(values)[order]
            else:
                flat = [entry for value in values for entry in value]
                joined[name] = [flat[env] for env in order.tolist()]
        return joined


class _ShareGenerator(torch.Generator):
    """Samples for all envs of a run and keeps the numbers of this rank's."""

    share: EnvShare


def noise(like: Tensor, draw: str, generator: torch.Generator | None) -> Tensor:
    """Random numbers in the shape of `like` `[N, ...]`; `draw` is such as "normal_".

    An env gets the same numbers however the run's envs are split over ranks.
    """
    if not isinstance(generator, _ShareGenerator):
        numbers: Tensor = getattr(torch.empty_like(like), draw)(generator=generator)
        return numbers
    total, ids = generator.share
    every = getattr(like.new_empty(total, *like.shape[1:]), draw)(generator=generator)
    return every.index_select(0, ids)  # type: ignore[no-any-return]


@cache
def join_ranks() -> Ranks:
    """This process's place in the run that torchrun started; `ALONE` without torchrun.

    Chooses the GPU of `LOCAL_RANK`, and connects the ranks. ESPER_TIMEOUT_S is the time that a rank
    waits for the others.
    """
    if dist.is_available() and dist.is_initialized():  # by the user's own script
        store = dist.distributed_c10d._get_default_store()
        has_gloo = "gloo" in str(dist.get_backend_config())
        group = None if has_gloo else dist.new_group(backend="gloo")
        return _registered(Ranks(dist.get_rank(), dist.get_world_size(), store, group))
    if (os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")) == ("1", "0"):
        return ALONE
    timeout, backend = _timeout(), _backend()
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        # torchrun may keep its store for a restart: the addresses of the ranks before are in there
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConnectionError(
            f"the ranks could not be connected: {reason}; torchrun sets WORLD_SIZE, RANK, "
            "MASTER_ADDR and MASTER_PORT"
        ) from error
    atexit.register(dist.destroy_process_group)
    return _registered(Ranks(rank, size, store))


def was_restarted() -> bool:
    """Whether torchrun started this process again after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _timeout() -> timedelta:
    text = os.environ.get("ESPER_TIMEOUT_S", str(DEFAULT_TIMEOUT_S))
    try:
        timeout = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        timeout = timedelta(0)
    if timeout <= timedelta(0):
        raise ValueError(f"ESPER_TIMEOUT_S={text!r}; use a number of seconds")
    return timeout


def _backend() -> str:
    """gloo, and NCCL if each rank here has a GPU; several ranks on one GPU use gloo."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_gpus:
        return "gloo"
    # torchrun sets them
    local_rank, local_size = (int(os.environ[n]) for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    torch.cuda.set_device(local_rank % num_gpus)
    return "gloo" if local_size > num_gpus else "cpu:gloo,cuda:nccl"


def _registered(ranks: Ranks) -> Ranks:
    if ranks.size == 1:
        return ALONE
    ranks.store.set(f"esper/process/{ranks.rank}", f"{socket.gethostname()} {os.getpid()}")
    return ranks
