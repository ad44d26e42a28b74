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
from torch.utils.hooks import RemovableHandle

from esper.growing.deepening import BlockCopy
from esper.growing.eval_mode import uncompiled
from esper.growing.heads import HeadsBranch
from esper.growing.inputs import tensors
from esper.growing.network import GrowingNetwork
from esper.growing.pairs import units_of
from esper.growing.sites import ModelSite
from esper.growing.slots import AnySeed, Seed, Slot, with_first
from esper.leyline.constants import BlendStyle, SiteKind

BATCHES = 8  # of each measurement
ROWS = 16  # of each batch, so that the seeds together cost little


class Evidence:
    """Measures the seeds that could grow in the empty slots of a network."""

    def __init__(self, network: GrowingNetwork, may_grow: Callable[[], Tensor]):
        """`may_grow` returns which seeds `[S, B]` fit into the network and the budget now."""
        self._network, self._may_grow = network, may_grow
        self._probes: list[_Probe] = []
        self._examples = _Examples()
        self._measuring = ExitStack()
        self.step = 0  # the decision after which it was measured
        self.batches = 0
        self.wait = 0  # optimiser steps until the probes are attached

    def start(self, step: int, wait: int = 0) -> None:
        """Make a probe for every seed that could grow in an empty slot, and attach it later."""
        self.clear()
        self.step, self.wait = step, wait
        if wait == 0:
            self._attach()

    def _attach(self) -> None:
        self._probes = self._make_probes()
        if not self._probes:
            return
        self._measuring.enter_context(uncompiled(self._network.model))
        self._examples.attach(self._network.model)
        for probe in self._probes:
            probe.attach()

    def _make_probes(self) -> "list[_Probe]":
        generator = torch.Generator().manual_seed(self.step)  # a resumed run makes the same probes
        # between two dense layers new units do more than a dense seed of the same cost
        inside = {
            n for slot in self._network.slots if slot.site.pair for n in slot.site.pair.inside
        }
        probes = []
        for index, (slot, fits) in enumerate(
            zip(self._network.slots, self._may_grow(), strict=True)
        ):
            is_dense = slot.site.kind in (SiteKind.VECTOR, SiteKind.TOKENS)
            if slot.seed is None and not (is_dense and slot.site.name in inside):
                probes += self._probes_of(index, slot.site, fits, generator)
        return probes

    def after_step(self) -> None:
        if self.wait > 0:
            self.wait -= 1
            if self.wait == 0:
                self._attach()
        elif self._probes and self.batches < BATCHES:
            for probe in self._probes:
                probe.collect()
            self.batches += 1
            if self.batches == BATCHES:
                self.stop()

    def clear(self) -> None:
        """Forget what was measured, and the copies of blocks."""
        self.stop()
        self.batches, self.wait, self._probes = 0, 0, []

    def stop(self) -> None:
        """Detach the probes; what they have measured stays."""
        self._measuring.close()
        self._examples.detach()
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
        """Multiply-adds so far; the gradients of last layers count as much as forward passes."""
        seeds = [self._network.menu[next(iter(probe.blueprints))] for probe in self._probes]
        pairs = zip(self._probes, seeds, strict=True)
        forward = sum(p.rows.used * p.slot.site.macs_of(seed) for p, seed in pairs)
        return 2 * self.batches * forward

    def to_dict(self) -> dict[str, Any]:
        probes = [(probe.sums, probe.copy_weights()) for probe in self._probes]
        return {
            "step": self.step, "wait": self.wait, "batches": self.batches, "probes": probes,
            "used": [probe.rows.used for probe in self._probes],
        }  # fmt: skip

    def load(self, saved: dict[str, Any]) -> None:
        self.step, self.wait, self.batches = saved["step"], saved["wait"], saved["batches"]
        if saved["probes"]:
            self._attach()
            for probe, (sums, weights) in zip(self._probes, saved["probes"], strict=True):
                probe.load(sums, weights)
            for probe, used in zip(self._probes, saved.get("used", ()), strict=False):
                probe.rows.used = used
        if self.batches == BATCHES:
            self.stop()

    def _probes_of(
        self, index: int, site: ModelSite, fits: Tensor, generator: torch.Generator
    ) -> "list[_Probe]":
        """A probe per blueprint; one for all sizes of a widening, whose units are all alike."""
        place = site.seed_site
        units = {
            b: units_of(place, entry)
            for b, entry in enumerate(self._network.menu)
            # a seed of one layer is linear: it adds little to the linear layer that follows
            if fits[b] and entry.program(place).depth > 1
        }
        probes = []
        for b in list(units)[:1] if site.pair else units:
            scales = {o: n / units[b] for o, n in units.items()} if site.pair else {b: 1.0}
            seed = self._network.new_seed(self._network.menu[b], site, generator)
            slot = Slot(site, self._network.model)
            probes.append(_Probe(index, scales, slot, seed, self._examples))
        return probes


class _Probe:
    """One seed that takes part in the forward pass without a change of the output."""

    def __init__(
        self,
        index: int,
        blueprints: dict[int, float],
        slot: Slot,
        seed: AnySeed,
        examples: "_Examples",
    ):
        self.index, self.blueprints, self.slot, self._seed = index, blueprints, slot, seed
        seed.requires_grad_(False)
        self._zeros = _zero_layers(seed)
        for layer in self._zeros:
            for weight in _weights(layer):
                weight.requires_grad_(True)
        self.rows = _FirstRows(seed, examples)
        slot.add_seed(self.rows, BlendStyle.ADD)
        self._hooks: list[RemovableHandle] = []
        # by layer: the mean square of its inputs in the last pass; 1 where torch does not call it
        self._features = [1.0] * len(self._zeros)
        # by layer: sums over batches of the squared gradient and of that mean square
        self.sums = [(0.0, 0.0) for _ in self._zeros]

    def attach(self) -> None:
        self.slot.alpha = 1.0
        self._hooks = [
            layer.register_forward_pre_hook(partial(self._note_features, number))
            for number, layer in enumerate(self._zeros)
        ]

    def detach(self) -> None:
        self.slot.alpha = 0.0
        for hook in self._hooks:
            hook.remove()

    def _note_features(self, number: int, module: nn.Module, args: Any) -> None:
        # a norm makes its own features, of size 1
        if not isinstance(module, _BatchNorm | nn.LayerNorm | nn.GroupNorm):
            self._features[number] = float(args[0].detach().float().square().mean())

    def collect(self) -> None:
        """Add the gradients of the last step, if the seed was reached."""
        for number, layer in enumerate(self._zeros):
            gradients = [w.grad for w in _weights(layer) if w.grad is not None]
            layer.zero_grad()
            found = sum(float(gradient.double().square().sum()) for gradient in gradients)
            if gradients and math.isfinite(found):
                power, features = self.sums[number]
                self.sums[number] = (power + found, features + self._features[number])

    @property
    def gain(self) -> float:
        return sum(
            math.sqrt(sum(w.numel() for w in _weights(layer)) * power / features)
            for layer, (power, features) in zip(self._zeros, self.sums, strict=True)
            if features
        )

    def copy_weights(self) -> dict[str, Tensor]:
        """The weights of a copied block, as they were when it was copied; other seeds are drawn."""
        return self._seed.state_dict() if isinstance(self._seed, BlockCopy) else {}

    def load(self, sums: list[tuple[float, float]], weights: dict[str, Tensor]) -> None:
        self.sums = sums
        if weights:
            self._seed.load_state_dict(weights)


def _zero_layers(seed: AnySeed) -> list[nn.Module]:
    """The layers that are zero in a new seed; only their gradients are not."""
    if isinstance(seed, BlockCopy):
        return seed.zero_layers
    return [seed.layers[-1] if isinstance(seed, Seed) else seed.last]


def _weights(layer: nn.Module) -> list[nn.Parameter]:
    """A layer's own weights; biases are few, and the model has some."""
    return [p for name, p in layer.named_parameters(recurse=False) if name != "bias"]


class _Examples:
    """Notes the number of examples in the model's last batch; 0 is not known."""

    def __init__(self) -> None:
        self.count = 0
        self._hook: RemovableHandle | None = None

    def attach(self, model: nn.Module) -> None:
        self.detach()
        self._hook = model.register_forward_pre_hook(self, with_kwargs=True)

    def detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.count = next((len(t) for t in tensors((args, kwargs)) if t.dim()), 0)


class _FirstRows(nn.Module):
    """A seed that is applied to some rows of a batch, or to all if it is not sure what they are."""

    def __init__(self, seed: nn.Module, examples: _Examples):
        super().__init__()
        self.seed, self._examples = seed, examples
        self.any_length = isinstance(seed, Seed) and seed.any_length
        self.used = ROWS  # examples of the last pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = tensors((args, kwargs))
        x, count = given[0], len(given[0])
        rows = ROWS if self._are_rows(count, given) else count
        self.used = rows if rows == ROWS else self._examples.count or count

        def first(tensor: Tensor) -> Tensor:
            # detached: through a zero layer the model gets no gradient
            tensor = tensor.detach()
            return tensor[:rows] if tensor.dim() and len(tensor) == count else tensor

        args, kwargs = pytree.tree_map_only(Tensor, first, (args, kwargs))
        found = self.seed(*args, **kwargs)
        if isinstance(self.seed, BlockCopy):  # it returns what it was given, or a tuple with it
            return with_first(found, lambda y: torch.cat((x[:rows] + (y - args[0]), x[rows:])))
        return torch.cat((found, found.new_zeros(count - len(found), *found.shape[1:])))

    def _are_rows(self, count: int, given: list[Tensor]) -> bool:
        """Whether the first axis of this size is that of examples, for a module of the user.

        Of a sequence or of windows it is another axis, also in masks and tables of positions.
        """
        if not isinstance(self.seed, BlockCopy | HeadsBranch):
            return True
        return count == self._examples.count and not any(count in t.shape[1:] for t in given)

    def train(self, mode: bool = True) -> "_FirstRows":
        """No dropout in the seed: the model's randomness stays as it is."""
        super().train(mode)
        if isinstance(self.seed, BlockCopy | HeadsBranch):
            self.seed.eval()
        self.seed.training = False
        return self
