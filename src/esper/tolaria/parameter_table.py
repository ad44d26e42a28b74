"""The parameters of a population as one `[P, D]` tensor, with one more for each moment.

A row is a host: its own parameters, then a range of columns for each slot, as wide as the
largest seed that can grow there. Columns without a seed are zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from esper.kasmina.blueprints import Blueprint, Site
from esper.kasmina.hosts import Host
from esper.kasmina.layers import Program
from esper.tolaria.randomness import uniform

ALIGNMENT = 8  # elements; matrix kernels are faster on aligned rows


def seed_programs(sites: Sequence[Site], menu: Sequence[Blueprint]) -> list[list[Program | None]]:
    """What each blueprint would run at each site; None where it does not fit."""
    return [[entry.program(site) if entry.fits(site) else None for entry in menu] for site in sites]


@dataclass(frozen=True)
class TableLayout:
    """Which columns belong to the host (part 0) and to the seed in each slot (part 1 + slot)."""

    host_size: int
    widths: tuple[int, ...]  # of each part, multiples of `ALIGNMENT`

    @classmethod
    def of(cls, host: Host, menu: Sequence[Blueprint]) -> "TableLayout":
        """Room for the host and, in each slot, for the largest seed of the menu that fits."""
        seeds = (
            max((program.num_params for program in programs if program), default=0)
            for programs in seed_programs(host.sites, menu)
        )
        sizes = (host.num_params, *seeds)
        return cls(host.num_params, tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))

    @property
    def num_parts(self) -> int:
        return len(self.widths)

    @property
    def num_columns(self) -> int:
        """D."""
        return sum(self.widths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.widths[:-1]))

    def host_columns(self) -> slice:
        return slice(0, self.host_size)

    def seed_columns(self, slot: int, num_params: int | None = None) -> slice:
        """All columns of a slot, or those of a seed with this many parameters."""
        start, width = self.starts[1 + slot], self.widths[1 + slot]
        return slice(start, start + (width if num_params is None else num_params))

    def part_of_column(self) -> Tensor:
        """The part that each column belongs to, `[D]`."""
        return torch.arange(self.num_parts).repeat_interleave(torch.tensor(self.widths))


class ParameterTable:
    """Parameters, gradients and moments of P hosts and their seeds, and optimiser step counts."""

    def __init__(
        self, layout: TableLayout, num_hosts: int, device: torch.device, dtype: torch.dtype
    ):
        self.layout = layout
        self.num_hosts = num_hosts
        rows = (num_hosts, layout.num_columns)
        # parameters and moments are one tensor, so that a snapshot of a host is one row copy
        self._storage = torch.zeros(3, *rows, device=device, dtype=dtype)
        self.params = self._storage[0]
        self.all_moments = self._storage[1:]
        self.moments = self.all_moments.unbind()  # of AdamW
        self.grads = torch.zeros(*rows, device=device, dtype=dtype)
        self.steps = torch.zeros(num_hosts, layout.num_parts, device=device, dtype=dtype)

    def clear(self, host_ids: Tensor, columns: slice) -> None:
        """Set columns of some hosts to zero: parameters, moments and gradients."""
        self._storage[:, host_ids, columns] = 0
        self.grads[host_ids, columns] = 0

    def finite_rows(self) -> Tensor:
        """Hosts `[P]` whose parameters and moments are all finite."""
        return self._storage.isfinite().all(2).all(0)

    def save(self) -> tuple[Tensor, Tensor]:
        """A copy of parameters and moments, and of the step counts, of all hosts."""
        return self._storage.clone(), self.steps.clone()

    def restore(self, storage: Tensor, steps: Tensor, host_ids: Tensor) -> None:
        """Restore some hosts from what `save` returned; the others are not touched."""
        self._storage[:, host_ids] = storage[:, host_ids]
        self.steps[host_ids] = steps[host_ids]
        self.grads[host_ids] = 0


class InitDistributions:
    """Centre and spread of the initial weights of a host and of every seed on its menu."""

    def __init__(
        self, host: Host, menu: Sequence[Blueprint], layout: TableLayout, device: torch.device
    ):
        self._host = torch.stack(host.init()).to(device)
        programs = seed_programs(host.sites, menu)
        self.fits = torch.tensor([[p is not None for p in row] for row in programs])  # [S, B]
        self.sizes = torch.tensor([[p.num_params if p else 0 for p in row] for row in programs])
        self._seeds = []  # per slot: [2, B, the slot's columns], 0 past the seed's size
        for slot, row in enumerate(programs):
            width = layout.widths[1 + slot]
            table = torch.zeros(2, len(menu), width, dtype=torch.float64)
            for number, program in enumerate(row):
                if program is not None:
                    table[:, number, : program.num_params] = torch.stack(program.init())
            self._seeds.append(table.to(device))

    def hosts(self, keys: Tensor) -> Tensor:
        """Weights of new hosts `[K, host size]`, float64, on the device."""
        return _sample(keys.to(self._host.device), self._host.unsqueeze(1))

    def seeds(self, slot: int, blueprints: Tensor, keys: Tensor) -> Tensor:
        """Weights of new seeds `[K, columns of the slot]`, float64, on the device."""
        table = self._seeds[slot]
        blueprints, keys = torch.stack((blueprints, keys)).to(table.device).unbind()
        return _sample(keys, table[:, blueprints])


def _sample(keys: Tensor, distribution: Tensor) -> Tensor:
    """Uniform in centre +- spread, given as `[2, K or 1, D]`."""
    centre, spread = distribution
    sampled: Tensor = centre + spread * (2 * uniform(keys, distribution.shape[-1]) - 1)
    return sampled
