"""First-order evidence for seeds: how much would this model, on this data, learn with them now?

For a few training batches before a decision every possible seed is attached with its zero last
layer, so that the output does not change. The gradient of that layer says how much the seed's
features have in common with what the model gets wrong.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growing.network import GrowingNetwork
from esper.growing.pairs import units_of
from esper.growing.sites import ModelSite
from esper.growing.slots import Seed, Slot, new_seed
from esper.growing.widening import Branch
from esper.leyline.constants import BlendStyle, SiteKind

BATCHES = 8  # of each measurement
ROWS = 16  # of each batch, so that the seeds together cost little


class Evidence:
    """Measures the seeds that could grow in the empty slots of a network."""

    def __init__(self, network: GrowingNetwork):
        self._network = network
        self._probes: list[_Probe] = []
        self.step = 0  # the decision after which it was measured
        self.batches = 0
        self.wait = 0  # optimiser steps until the probes are attached

    def start(self, step: int, wait: int = 0) -> None:
        """Make a probe for every seed that could grow in an empty slot, and attach it later."""
        self.stop()
        self.step, self.batches, self.wait, self._probes = step, 0, wait, []
        generator = torch.Generator().manual_seed(step)  # a resumed run makes the same probes
        # between two dense layers new units do more than a dense seed of the same cost
        inside = {
            n for slot in self._network.slots if slot.site.pair for n in slot.site.pair.inside
        }
        for index, slot in enumerate(self._network.slots):
            is_dense = slot.site.kind in (SiteKind.VECTOR, SiteKind.TOKENS)
            if slot.seed is None and not (is_dense and slot.site.name in inside):
                self._probes += self._probes_of(index, slot.site, generator)
        self._attach()

    def _attach(self) -> None:
        if self.wait == 0 and self.batches < BATCHES:
            for probe in self._probes:
                probe.attach()

    def after_step(self) -> None:
        if self.wait > 0:
            self.wait -= 1
            self._attach()
        elif self._probes and self.batches < BATCHES:
            for probe in self._probes:
                probe.collect()
            self.batches += 1
            if self.batches == BATCHES:
                self.stop()

    def stop(self) -> None:
        """Detach the probes; what they have measured stays."""
        for probe in self._probes:
            probe.detach()

    def gains(self) -> Tensor:
        """Expected fall of the loss `[S, B]` for a unit step of every new weight; 0: not measured.

        The features of a seed count as if they were of size 1. The mean over all ranks.
        """
        gain = torch.zeros(len(self._network.slots), len(self._network.menu))
        for probe in self._probes:
            for blueprint, scale in probe.blueprints.items():
                gain[probe.index, blueprint] = probe.gain * scale
        self._network.ranks.mean([gain])
        return gain

    @property
    def macs(self) -> float:
        """Multiply-adds of the forward passes so far."""
        menu = self._network.menu
        return (ROWS * self.batches) * sum(
            probe.slot.site.macs_of(menu[next(iter(probe.blueprints))]) for probe in self._probes
        )

    def to_dict(self) -> dict[str, Any]:
        sums = [probe.sums for probe in self._probes]
        return {"step": self.step, "wait": self.wait, "batches": self.batches, "sums": sums}

    def load(self, saved: dict[str, Any]) -> None:
        if not saved["sums"]:
            return
        self.start(saved["step"], wait=-1)
        for probe, sums in zip(self._probes, saved["sums"], strict=True):
            probe.sums = sums
        self.batches, self.wait = saved["batches"], saved["wait"]
        self._attach()

    def _probes_of(self, index: int, site: ModelSite, generator: torch.Generator) -> "list[_Probe]":
        """A probe per blueprint; one for all sizes of a widening, whose units are all alike."""
        place = site.seed_site
        units = {
            b: units_of(place, entry)
            for b, entry in enumerate(self._network.menu)
            # a seed of one layer is linear: it adds little to the linear layer that follows
            if entry.fits(place) and entry.program(place).depth > 1
        }
        probes = []
        for b in list(units)[:1] if site.pair else units:
            scales = {o: n / units[b] for o, n in units.items()} if site.pair else {b: 1.0}
            program = self._network.menu[b].program(place)
            seed = new_seed(program, site, generator, self._network.model)
            probes.append(_Probe(index, scales, Slot(site, self._network.model), seed))
        return probes


class _Probe:
    """One seed that takes part in the forward pass without a change of the output."""

    def __init__(self, index: int, blueprints: dict[int, float], slot: Slot, seed: Seed | Branch):
        self.index, self.blueprints, self.slot = index, blueprints, slot
        seed.requires_grad_(False)
        self._last = seed.last if isinstance(seed, Branch) else seed.layers[-1]
        self._weight = self._last.get_parameter("weight").requires_grad_(True)
        slot.add_seed(_FirstRows(seed), BlendStyle.ADD)
        self._hook: RemovableHandle | None = None
        self._features = 0.0  # mean square in the last pass
        # batches; sums over them of the squared gradient and of the features' mean square
        self.sums = (0, 0.0, 0.0)

    def attach(self) -> None:
        self.slot.alpha = 1.0
        self._hook = self._last.register_forward_pre_hook(self._note_features)

    def detach(self) -> None:
        self.slot.alpha = 0.0
        if self._hook is not None:
            self._hook.remove()

    def _note_features(self, module: nn.Module, args: Any) -> None:
        self._features = float(args[0].detach().float().square().mean())

    def collect(self) -> None:
        """Add the gradient of the last step, if the seed was reached."""
        gradient, self._weight.grad = self._weight.grad, None
        if gradient is not None and bool(gradient.isfinite().all()):
            count, power, features = self.sums
            power += float(gradient.double().square().sum())
            self.sums = (count + 1, power, features + self._features)

    @property
    def gain(self) -> float:
        _, power, features = self.sums
        return math.sqrt(self._weight.numel() * power / features) if features else 0.0


class _FirstRows(nn.Module):
    """A seed that is applied to some rows of a batch."""

    def __init__(self, seed: nn.Module):
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.seed(x[:ROWS])
        rest = found.new_zeros(max(0, len(x) - ROWS), *found.shape[1:])
        return torch.cat((found, rest))

    def train(self, mode: bool = True) -> "_FirstRows":
        super().train(mode)
        self.seed.training = False  # no dropout: the model's randomness stays as it is
        return self
