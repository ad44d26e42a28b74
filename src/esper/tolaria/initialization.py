"""Initial weights of hosts and seeds, sampled for many at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import Blueprint
from esper.kasmina.hosts import Host
from esper.tolaria.parameter_table import TableLayout
from esper.tolaria.randomness import uniform


class InitDistributions:
    """Centre and spread of the initial weights of a host and of every seed on its menu."""

    def __init__(
        self, host: Host, menu: Sequence[Blueprint], layout: TableLayout, device: torch.device
    ):
        self._host = torch.stack(host.init()).to(device)
        programs = [
            [b.program(site) if b.fits(site) else None for b in menu] for site in host.sites
        ]
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
