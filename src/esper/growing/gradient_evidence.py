"""First-order evidence for seeds: how much would this model, on this data, learn with them now?

For a few training batches before a decision every possible seed is attached with its zero last
layer, so that the output does not change. The gradient of that layer says how much the seed's
features have in common with what the model gets wrong.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from esper.growing.network import GrowingNetwork, average_gradients
from esper.leyline.constants import BlendStyle, SiteKind
from esper.surgery.branches import Branch
from esper.surgery.eval_mode import uncompiled
from esper.surgery.inputs import tensors
from esper.surgery.pairs import units_of
from esper.surgery.slots import Seed, Slot, with_first

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
        model, stack = self._network.model, self._measuring
        stack.enter_context(uncompiled(model))
        note = partial(_note_examples, probes)
        stack.enter_context(model.register_forward_pre_hook(note, with_kwargs=True))
        for probe in probes:
            probe.attach(stack)

    def _make_probes(self) -> "list[_Probe]":
        """A probe per site and blueprint; one for all sizes of a widening: its units are alike."""
        network, probes = self._network, []
        rows = max(1, ROWS // network.ranks.size)
        generator = torch.Generator().manual_seed(self.step)  # a resumed run makes the same probes
        # between two dense layers new units do more than a dense seed of the same cost
        inside = {n for slot in network.slots if slot.site.pair for n in slot.site.pair.inside}
        for index, (slot, fits) in enumerate(zip(network.slots, self._may_grow(), strict=True)):
            site, place = slot.site, slot.site.seed_site
            is_dense = site.kind in (SiteKind.VECTOR, SiteKind.TOKENS)
            if slot.seed is not None or (is_dense and site.name in inside):
                continue
            units = {
                b: units_of(place, entry)
                for b, entry in enumerate(network.menu)
                # a seed of one layer is linear: it adds little to the linear layer that follows
                if fits[b] and entry.program(place).depth > 1
            }
            for b in list(units)[:1] if site.pair else units:
                scales = {o: n / units[b] for o, n in units.items()} if site.pair else {b: 1.0}
                seed = network.new_seed(network.menu[b], site, generator)
                probes.append(_Probe(index, scales, Slot(site, network.model), seed, rows))
        return probes

    def after_step(self) -> None:
        if self.steps_left > BATCHES:
            self.start(self.step, self.steps_left - 1)
        elif self._probes and self.steps_left > 0:
            # of the rows of all ranks, as one process computes them
            ranks, layers = self._network.ranks, (layer for p in self._probes for layer in p.zeros)
            average_gradients([weight for layer in layers for weight in _weights(layer)], ranks)
            ranks.mean([probe.features for probe in self._probes])
            for probe in self._probes:
                probe.collect()
            self.steps_left -= 1
            if self.steps_left == 0:
                self.stop()

    def clear(self) -> None:
        """Forget what was measured, and the copies of blocks."""
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
        return 2 * batches * sum(p.used * p.slot.site.macs_of(seed) for p, seed in seeds)

    def measured(self) -> list[Any]:
        """What each probe has measured, for a file."""
        # the weights of a copied block as it was copied; other seeds are drawn again
        return [(p.sums, p.used, p.seed.state_dict() if p.is_block else {}) for p in self._probes]

    def load(self, measured: list[Any]) -> None:
        """Resume at the saved `step` and `steps_left`."""
        if measured:
            self._attach()
        for probe, (sums, used, weights) in zip(self._probes, measured, strict=True):
            probe.sums, probe.used = sums, used
            if weights:
                probe.seed.load_state_dict(weights)
        if self.steps_left == 0:
            self.stop()


class _Probe(nn.Module):
    """A seed that takes part in the forward pass without a change of the output.

    It is applied to some rows of a batch, or to all if it is not sure what they are.
    """

    def __init__(
        self, index: int, blueprints: dict[int, float], slot: Slot, seed: Seed | Branch, rows: int
    ):
        super().__init__()
        self.index, self.blueprints, self.slot, self.seed = index, blueprints, slot, seed
        part = slot.site.part
        self.is_of_module = part is not None and part.is_module
        self.is_block = part is not None and part.is_block
        self.any_length = isinstance(seed, Seed) and seed.any_length
        self.examples = 0  # in the model's last batch; 0: not known
        self.rows = self.used = rows  # `used`: examples of the last pass
        seed.requires_grad_(False)
        self.zeros = seed.zero_layers
        for weight in (weight for layer in self.zeros for weight in _weights(layer)):
            weight.requires_grad_(True)
        # by layer: the mean square of its inputs in the last pass; 1 where torch does not call it
        self.features = torch.ones(len(self.zeros), dtype=torch.float64)
        # by layer: sums over batches of the squared gradient and of that mean square
        self.sums = [(0.0, 0.0) for _ in self.zeros]
        slot.add_seed(self, BlendStyle.ADD)

    def attach(self, stack: ExitStack) -> None:
        """Take part until the stack is closed."""
        stack.enter_context(self.slot.with_alpha(1.0))
        for number, layer in enumerate(self.zeros):
            note = partial(self._note_features, number)
            stack.enter_context(layer.register_forward_pre_hook(note))

    def _note_features(self, number: int, module: nn.Module, args: Any) -> None:
        # a norm makes its own features, of size 1
        if not isinstance(module, _BatchNorm | nn.LayerNorm | nn.GroupNorm):
            self.features[number] = float(args[0].detach().float().square().mean())

    def collect(self) -> None:
        """Add the gradients of the last step, if the seed was reached."""
        for number, layer in enumerate(self.zeros):
            gradients = [w.grad for w in _weights(layer) if w.grad is not None]
            layer.zero_grad()
            found = sum(float(gradient.double().square().sum()) for gradient in gradients)
            if gradients and math.isfinite(found):
                power, features = self.sums[number]
                self.sums[number] = (power + found, features + float(self.features[number]))

    @property
    def gain(self) -> float:
        return sum(
            math.sqrt(sum(w.numel() for w in _weights(layer)) * power / features)
            for layer, (power, features) in zip(self.zeros, self.sums, strict=True)
            if features
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = tensors((args, kwargs))
        x, count = given[0], len(given[0])
        rows = self.rows if self._are_rows(count, given) else count
        self.used = rows if rows == self.rows else self.examples or count

        def first(tensor: Tensor) -> Tensor:
            # detached: through a zero layer the model gets no gradient
            tensor = tensor.detach()
            return tensor[:rows] if tensor.dim() and len(tensor) == count else tensor

        args, kwargs = pytree.tree_map_only(Tensor, first, (args, kwargs))
        found = self.seed(*args, **kwargs)
        if self.is_block:  # it returns what it was given, or a tuple with it
            return with_first(found, lambda y: torch.cat((x[:rows] + (y - args[0]), x[rows:])))
        return torch.cat((found, found.new_zeros(count - len(found), *found.shape[1:])))

    def _are_rows(self, count: int, given: list[Tensor]) -> bool:
        """Whether the first axis of this size is that of examples, for a module of the user.

        Of a sequence or of windows it is another axis, also in masks and tables of positions.
        """
        if not self.is_of_module:
            return True
        return count == self.examples and not any(count in t.shape[1:] for t in given)

    def train(self, mode: bool = True) -> "_Probe":
        """No dropout in the seed: the model's randomness stays as it is."""
        super().train(mode)
        if self.is_of_module:
            self.seed.eval()
        elif isinstance(self.seed, Branch):  # dropout between its layers; norms are as the model's
            self.seed.body.training = False
        return self


def _note_examples(probes: list[_Probe], model: nn.Module, args: Any, kwargs: Any) -> None:
    count = next((len(t) for t in tensors((args, kwargs)) if t.dim()), 0)
    for probe in probes:
        probe.examples = count


def _weights(layer: nn.Module) -> list[nn.Parameter]:
    """A layer's own weights; biases are few, and the model has some."""
    return [p for name, p in layer.named_parameters(recurse=False) if name != "bias"]
