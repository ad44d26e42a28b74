"""The parameters of a population as one `[P, D]` tensor, with one more for each moment.

A row is a host: its own parameters, then a range of columns for each slot, as wide as the
largest seed that can grow there. Columns without a seed are zero.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from esper.kasmina.blueprints import Blueprint, seed_programs
from esper.kasmina.hosts import Host
from esper.tolaria.randomness import uniform

ALIGNMENT = 8  # elements; matrix kernels are faster on aligned rows


class TableLayout:
    """Which columns belong to the host (part 0) and to the seed in each slot (part 1 + slot).

    A slot has room for the largest seed of the menu that fits.
    """

    def __init__(self, host: Host, menu: Sequence[Blueprint]):
        self.host_size = host.num_params
        self.seed_programs = seed_programs(host.sites, menu)
        rows = [[p.num_params if p else 0 for p in programs] for programs in self.seed_programs]
        # [S, B], 0 where a blueprint does not fit
        self.seed_sizes = torch.tensor(rows, dtype=torch.int64)
        sizes = (self.host_size, *(max(row, default=0) for row in rows))
        self.widths = tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)  # of each part
        self.starts = (0, *accumulate(self.widths[:-1]))
        self.num_columns = sum(self.widths)  # D

    def host_columns(self) -> slice:
        return slice(0, self.host_size)

    def seed_columns(self, slot: int, num_params: int | None = None) -> slice:
        """All columns of a slot, or those of a seed with this many parameters."""
        start, width = self.starts[1 + slot], self.widths[1 + slot]
        return slice(start, start + (width if num_params is None else num_params))

    def part_of_column(self) -> Tensor:
        """The part that each column belongs to, `[D]`."""
        return torch.arange(len(self.widths)).repeat_interleave(torch.tensor(self.widths))


class ParameterTable:
    """Parameters, gradients and moments of P hosts and their seeds, and optimiser step counts."""

    def __init__(
        self,
        host: Host,
        menu: Sequence[Blueprint],
        num_hosts: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.layout = layout = TableLayout(host, menu)
        self.num_hosts = num_hosts
        rows = (num_hosts, layout.num_columns)
        # parameters and moments are one tensor, so that a snapshot of a host is one row copy
        self.storage = torch.zeros(3, *rows, device=device, dtype=dtype)
        self.params = self.storage[0]
        self.all_moments = self.storage[1:]
        self.moments = self.all_moments.unbind()  # of AdamW
        self.grads = torch.zeros(*rows, device=device, dtype=dtype)
        self.steps = torch.zeros(num_hosts, len(layout.widths), device=device, dtype=dtype)
        # centre and spread of initial weights
        self._host_init = host.init().to(device)
        self._seed_inits = []  # per slot: [2, B, the slot's columns], 0 past the seed's size
        for programs, width in zip(layout.seed_programs, layout.widths[1:], strict=True):
            table = torch.zeros(2, len(menu), width, dtype=torch.float64)
            for number, program in enumerate(programs):
                if program is not None:
                    table[:, number, : program.num_params] = program.init()
            self._seed_inits.append(table.to(device))

    def clear(self, host_ids: Tensor, columns: slice) -> None:
        """Set columns of some hosts to zero: parameters, moments and gradients."""
        self.storage[:, host_ids, columns] = 0
        self.grads[host_ids, columns] = 0

    def init_hosts(self, keys: Tensor) -> None:
        """Sample new weights of every host, by a key for each."""
        weights = _sample(keys.to(self.params.device), self._host_init.unsqueeze(1))
        self.params[:, self.layout.host_columns()] = weights.to(self.params)

    def init_seeds(self, slot: int, host_ids: Tensor, blueprints: Tensor, keys: Tensor) -> None:
        """Sample the weights of new seeds of some hosts."""
        blueprints, keys = torch.stack((blueprints, keys)).to(self.params.device).unbind()
        weights = _sample(keys, self._seed_inits[slot][:, blueprints])
        self.params[host_ids, self.layout.seed_columns(slot)] = weights.to(self.params)


def _sample(keys: Tensor, distribution: Tensor) -> Tensor:
    """Uniform in centre +- spread, given as `[2, K or 1, D]`."""
    centre, spread = distribution
    sampled: Tensor = centre + spread * (2 * uniform(keys, distribution.shape[-1]) - 1)
    return sampled
