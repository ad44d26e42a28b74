"""First-order evidence for seeds: how much would this model, on this data, learn with them now?

For a few training batches before a decision every possible seed is attached with its zero last
layer, so that the output does not change. The gradient of that layer says how much the seed's
features have in common with what the model gets wrong.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from esper.growing.growing_network import GrowingNetwork
from esper.leyline.constants import BlendStyle, SiteKind
from esper.surgery.branches import Branch
from esper.surgery.eval_mode import uncompiled
from esper.surgery.slots import Seed, Slot

BATCHES = 8  # of each measurement
ROWS = 16  # of each batch, on all ranks together, so that the seeds together cost little


class Evidence:
    """Measures the seeds that could grow in the empty slots of a network."""

    def __init__(self, network: GrowingNetwork, may_grow: Callable[[], Tensor]):
        """`may_grow` returns which seeds `[S, B]` fit into the network and the budget now."""
        self._network, self._may_grow = network, may_grow
        self._probes: list[_Probe] = []
        self._measuring = ExitStack()
        self.step = 0  # the decision after which it was measured
        self.steps_left = 0  # optimiser steps until it is complete

    def start(self, step: int, steps: int = BATCHES) -> None:
        """Measure every seed that could grow in an empty slot, at the end of so many steps."""
        self.clear()
        self.step, self.steps_left = step, max(steps, BATCHES)
        if self.steps_left == BATCHES:
            self._attach()

    def _attach(self) -> None:
        self._probes = probes = self._make_probes()
        if not probes:
            return
        self._measuring.enter_context(uncompiled(self._network.model))
        for probe in probes:
            probe.attach(self._measuring)

    def _make_probes(self) -> "list[_Probe]":
        """A probe per site and blueprint; one for all sizes of a widening: its units are alike."""
        network, menu = self._network, self._network.menu
        probes = []
        rows = max(1, ROWS // network.ranks.size)
        generator = torch.Generator().manual_seed(self.step)  # a resumed run makes the same probes
        # between two dense layers new units do more than a dense seed of the same cost
        inside = {n for slot in network.slots if slot.site.pair for n in slot.site.pair.inside}
        for index, (slot, fits) in enumerate(zip(network.slots, self._may_grow(), strict=True)):
            site = slot.site
            is_dense = site.kind in (SiteKind.VECTOR, SiteKind.TOKENS)
            if slot.seed is not None or (is_dense and site.name in inside):
                continue
            # a seed of one layer is linear: it adds little to the linear layer that follows
            deep = [b for b, entry in enumerate(menu) if fits[b] and site.facts_of(entry).depth > 1]
            groups = [{b: 1.0} for b in deep]
            if site.pair and deep:  # all widths share one probe: their units are alike
                units = [site.units_of(menu[b]) for b in deep]
                groups = [{b: count / units[0] for b, count in zip(deep, units, strict=True)}]
            for scales in groups:
                seed = network.new_seed(menu[next(iter(scales))], site, generator)
                probes.append(_Probe(index, scales, Slot(site, network.model), seed, rows))
        return probes

    def after_step(self) -> None:
        if self.steps_left > BATCHES:
            self.start(self.step, self.steps_left - 1)
        elif self._probes and self.steps_left > 0:
            # of the rows of all ranks, as one process computes them
            ranks = self._network.ranks
            ranks.average_gradients([w for probe in self._probes for w in probe.weights])
            ranks.average(probe.features for probe in self._probes)
            for probe in self._probes:
                probe.collect()
            self.steps_left -= 1
            if self.steps_left == 0:
                self.stop()

    def clear(self) -> None:
        """Forget what was measured."""
        self.stop()
        self.steps_left, self._probes = 0, []

    def stop(self) -> None:
        """Detach the probes; what they have measured stays."""
        self._measuring.close()

    def gains(self) -> Tensor:
        """Expected fall of the loss `[S, B]` for a unit step of every new weight; 0: not measured.

        The features of a seed count as if they were of size 1. The same on all ranks.
        """
        gain = torch.zeros(len(self._network.slots), len(self._network.menu))
        for probe in self._probes:
            for blueprint, scale in probe.blueprints.items():
                gain[probe.index, blueprint] = probe.gain * scale
        return gain

    @property
    def macs(self) -> float:
        """Multiply-adds so far; the gradients of last layers count as much as forward passes."""
        seeds = ((p, self._network.menu[next(iter(p.blueprints))]) for p in self._probes)
        batches = BATCHES - self.steps_left  # without probes it does not matter
        return 2 * batches * sum(p.rows * p.slot.site.macs_of(seed) for p, seed in seeds)

    def measured(self) -> list[tuple[float, float]]:
        """What each probe has measured, for a file; its seed is drawn again."""
        return [(probe.power, probe.power_of_features) for probe in self._probes]

    def load(self, measured: list[tuple[float, float]]) -> None:
        """Resume at the saved `step` and `steps_left`."""
        if measured:
            self._attach()
        for probe, sums in zip(self._probes, measured, strict=True):
            probe.power, probe.power_of_features = sums
        if self.steps_left == 0:
            self.stop()


class _Probe(nn.Module):
    """A seed that takes part in the forward pass of some rows without a change of the output."""

    def __init__(
        self, index: int, blueprints: dict[int, float], slot: Slot, seed: Seed | Branch, rows: int
    ):
        super().__init__()
        self.index, self.blueprints, self.slot, self.seed = index, blueprints, slot, seed
        self.rows = rows
        self.any_length = isinstance(seed, Seed) and seed.any_length
        self.last_layer = seed.last_layer
        seed.requires_grad_(False)
        for weight in self.weights:
            weight.requires_grad_(True)
        # the mean square of the last layer's inputs in the last pass
        self.features = torch.ones((), dtype=torch.float64)
        # sums over batches of the squared gradient and of that mean square
        self.power = self.power_of_features = 0.0
        slot.add_seed(self, BlendStyle.ADD)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights of the last layer; biases are few, and the model has some."""
        named = self.last_layer.named_parameters(recurse=False)
        return [weight for name, weight in named if name != "bias"]

    def attach(self, stack: ExitStack) -> None:
        """Take part until the stack is closed."""
        stack.enter_context(self.slot.with_alpha(1.0))
        stack.enter_context(self.last_layer.register_forward_pre_hook(self._note_features))

    def _note_features(self, module: nn.Module, args: Any) -> None:
        # a norm makes its own features, of size 1
        if not isinstance(module, nn.GroupNorm):
            self.features.fill_(float(args[0].detach().float().square().mean()))

    def collect(self) -> None:
        """Add the gradients of the last step, if the seed was reached."""
        gradients = [w.grad for w in self.weights if w.grad is not None]
        self.last_layer.zero_grad()
        power = sum(float(gradient.double().square().sum()) for gradient in gradients)
        if gradients and math.isfinite(power):
            self.power += power
            self.power_of_features += float(self.features)

    @property
    def gain(self) -> float:
        if not self.power_of_features:
            return 0.0
        size = sum(weight.numel() for weight in self.weights)
        return math.sqrt(size * self.power / self.power_of_features)

    def forward(self, x: Tensor) -> Tensor:
        # detached: through a zero layer the model gets no gradient
        found: Tensor = self.seed(x.detach()[: self.rows])
        rest = found.new_zeros(len(x) - len(found), *found.shape[1:])
        return torch.cat((found, rest))

    def train(self, mode: bool = True) -> "_Probe":
        super().train(mode)
        # no dropout between the layers of a branch; its norms are as the model's
        self.seed.training = False
        return self
