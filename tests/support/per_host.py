"""The oracle: one host at a time, stock torch modules and optimisers, plain Python for the rest.

It shares no code with `kasmina.lifecycle`, `kasmina.blending` or `tolaria.population`: what they do
for a whole population with arrays is written here once more, from the rules, for a single slot
and a single host.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.hosts import Host
from esper.leyline.constants import (
    ALPHA_SPEED_STEPS,
    ALPHA_TARGETS,
    EMBARGO_STEPS,
    TEMPO_STEPS,
    AlphaCurve,
    BlendStyle,
)
from esper.leyline.stages import LifecycleError, LifecycleOp, SeedStage

LIVE = (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def along(kind: AlphaCurve, fraction: float) -> float:
    """How far along a ramp alpha is."""
    if fraction >= 1.0:
        return 1.0
    if kind == AlphaCurve.LINEAR:
        return fraction
    if kind == AlphaCurve.COSINE:
        return (1.0 - math.cos(math.pi * fraction)) / 2.0
    low, here = 1.0 / (1.0 + math.exp(5.0)), 1.0 / (1.0 + math.exp(5.0 - 10.0 * fraction))
    return (here - low) / (1.0 - 2.0 * low)


@dataclass
class SlotLife:
    """One slot's life, a field at a time."""

    stage: SeedStage = SeedStage.DORMANT
    stage_age: int = 0
    total_age: int = 0
    alpha: float = 0.0
    alpha_start: float = 0.0
    alpha_target: float = 0.0
    ramp_steps: int = 0
    ramp_elapsed: int = 0
    curve: int = 0
    style: int = 0
    blueprint: int = -1

    def act(self, choice: dict[str, int], shadow_training: bool = False) -> None:
        """One factored action on this slot, its choices by the names of Tamiyo's heads."""
        target = ALPHA_TARGETS[choice["alpha_target"]]
        speed = ALPHA_SPEED_STEPS[choice["alpha_speed"]]
        match LifecycleOp(choice["op"]):
            case LifecycleOp.GERMINATE:
                tempo, curve = TEMPO_STEPS[choice["tempo"]], choice["alpha_curve"]
                kind = choice["blueprint"], choice["style"]
                self.germinate(*kind, tempo, target, curve, shadow_training)
            case LifecycleOp.SET_ALPHA_TARGET:
                self.set_alpha_target(target, speed, choice["alpha_curve"])
            case LifecycleOp.PRUNE:
                self.prune(speed)
            case LifecycleOp.FOSSILIZE:
                self.fossilize()
            case LifecycleOp.ADVANCE:
                self.advance()

    def germinate(self, blueprint, style, ramp_steps, alpha_target, curve, shadow_training=False):
        self._require(self.stage == SeedStage.DORMANT)
        self.blueprint, self.style, self.curve = blueprint, style, curve
        self.alpha_target = alpha_target
        self.ramp_steps = ramp_steps
        self._enter(SeedStage.TRAINING if shadow_training else SeedStage.BLENDING)

    def advance(self):
        if self.stage == SeedStage.TRAINING:
            self._enter(SeedStage.BLENDING)
        else:
            self._require(self.stage == SeedStage.BLENDING)
            self._arrive()

    def set_alpha_target(self, alpha_target, ramp_steps, curve):
        self._require(self.stage == SeedStage.HOLDING and alpha_target != self.alpha_target)
        self.curve = curve
        self._ramp(alpha_target, ramp_steps)

    def prune(self, ramp_steps):
        self._require(self.stage in LIVE and self.total_age >= 1)
        if self.stage == SeedStage.TRAINING:
            self.remove_live_seeds()
        else:
            self._ramp(0.0, ramp_steps)

    def fossilize(self):
        self._require(self.stage == SeedStage.HOLDING)
        self._enter(SeedStage.FOSSILIZED)

    def remove_live_seeds(self):
        """The seed is gone; the slot rests."""
        self.__init__(stage=SeedStage.EMBARGOED)

    def begin_step(self):
        if self.stage == SeedStage.BLENDING:
            self.ramp_elapsed += 1
            part = along(self.curve, self.ramp_elapsed / self.ramp_steps)
            self.alpha = self.alpha_start + (self.alpha_target - self.alpha_start) * part
            if self.ramp_elapsed == self.ramp_steps:
                self.alpha = self.alpha_target

    def end_step(self):
        self.stage_age += 1
        if self.blueprint >= 0:
            self.total_age += 1
        if self.stage == SeedStage.BLENDING and self.ramp_elapsed == self.ramp_steps:
            self._arrive()
        elif self.stage == SeedStage.EMBARGOED and self.stage_age == EMBARGO_STEPS:
            self.__init__()

    def _ramp(self, alpha_target, ramp_steps):
        self.alpha_start, self.alpha_target = self.alpha, alpha_target
        self.ramp_steps, self.ramp_elapsed = ramp_steps, 0
        self._enter(SeedStage.BLENDING)
        if ramp_steps == 0:
            self._arrive()

    def _arrive(self):
        if self.alpha_target == 0.0:
            self.remove_live_seeds()
        else:
            self.alpha = self.alpha_target
            self._enter(SeedStage.HOLDING)

    def _enter(self, stage):
        if stage != self.stage:
            self.stage, self.stage_age = stage, 0

    def _require(self, legal):
        if not legal:
            raise LifecycleError(f"not legal in {self.stage.name} at age {self.total_age}")


def blended(x: Tensor, seed: Tensor, alpha: float, style: int) -> Tensor:
    """A seed's output joined to its host's."""
    match BlendStyle(style):
        case BlendStyle.ADD:
            return x + alpha * seed
        case BlendStyle.MULTIPLY:
            return x * (1 + alpha * torch.tanh(seed))
        case BlendStyle.GATE:
            return x + alpha * torch.sigmoid(x) * seed


class HostModule(nn.Module):
    """A host as a plain module; `seeds` act on the activations after each segment.

    `widenings` read the input of a segment; what they give is added to the next layer's output.
    """

    def __init__(self, host: Host):
        super().__init__()
        self.segments = nn.ModuleList(segment.module() for segment in host.segments)
        self.head = host.head.module()

    def forward(
        self,
        x: Tensor,
        seeds: Mapping[int, Callable[[Tensor], Tensor]] = {},
        widenings: Mapping[int, Callable[[Tensor], Tensor]] = {},
    ) -> Tensor:
        added = None
        for slot, segment in enumerate((*self.segments, self.head)):
            next_added = widenings[slot](x) if slot in widenings else None
            for layer in segment:
                x = layer(x)
                if added is not None and isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
                    x, added = x + added, None
            x, added = seeds[slot](x) if slot in seeds else x, next_added
        return x


class PerHost:
    """One growing host: a module, a module per seed, and an optimiser for each of them."""

    def __init__(
        self,
        host: Host,
        menu: Sequence[Blueprint],
        make_optimizer: MakeOptimizer,
        weights: Tensor,
    ):
        self.sites, self.menu, self.make_optimizer = host.sites, menu, make_optimizer
        self.module = HostModule(host).to(weights.dtype)
        vector_to_parameters(weights, self.module.parameters())
        self.optimizer = make_optimizer(self.module.parameters())
        self.slots = [SlotLife() for _ in host.sites]
        self.seeds: list[nn.Module | None] = [None for _ in host.sites]
        self.seed_optimizers: list[torch.optim.Optimizer | None] = [None for _ in host.sites]

    def act(self, choice: dict[str, int], shadow_training: bool = False) -> None:
        """One factored action."""
        self.slots[choice["slot"]].act(choice, shadow_training)
        if choice["op"] == LifecycleOp.GERMINATE:
            self.add_seed(choice["slot"])
        self._drop_removed_seeds()

    def add_seed(self, slot: int) -> None:
        """A module, its last layer zero, and an optimiser for the seed that germinated in a slot."""
        program = self.menu[self.slots[slot].blueprint].program(self.sites[slot])
        seed = program.module().to(next(self.module.parameters()).dtype)
        last = [module for module in seed.modules() if list(module.parameters(recurse=False))][-1]
        for param in last.parameters():
            nn.init.zeros_(param)
        self.seeds[slot] = seed
        self.seed_optimizers[slot] = self.make_optimizer(seed.parameters())

    def begin_step(self) -> None:
        for life in self.slots:
            life.begin_step()

    def end_step(self) -> None:
        for life in self.slots:
            life.end_step()
        self._drop_removed_seeds()

    def train(self, x: Tensor, labels: Tensor) -> float:
        """One minibatch `[batch, *shape]`; the loss that it had before its step."""
        seeds = [seed for seed in self.seeds if seed is not None]
        for module in (self.module, *seeds):
            module.zero_grad()
        loss = F.cross_entropy(self.logits(x), labels)
        loss.backward()
        self._train_in_shadow(x, labels)
        self.optimizer.step()
        for optimizer in self.seed_optimizers:
            if optimizer is not None:
                optimizer.step()
        return loss.item()

    def logits(self, x: Tensor, without: int | None = None) -> Tensor:
        """Of the host as it is, or `without` the seed of one slot; TRAINING seeds are not felt."""
        felt = [
            None if life.stage == SeedStage.TRAINING or slot == without else life.alpha
            for slot, life in enumerate(self.slots)
        ]
        return self._forward(x, felt)

    def weights(self) -> Tensor:
        return parameters_to_vector(self.module.parameters()).detach()

    def seed_weights(self, slot: int) -> Tensor:
        return parameters_to_vector(self.seeds[slot].parameters()).detach()

    def load_seed(self, slot: int, weights: Tensor) -> None:
        vector_to_parameters(weights, self.seeds[slot].parameters())

    def save(self) -> dict:
        return copy.deepcopy(self.__dict__)

    def roll_back(self, saved: dict) -> None:
        """As it was when saved, and without the seeds that were live then."""
        self.__dict__.update(copy.deepcopy(saved))
        for life in self.slots:
            if life.stage in LIVE:
                life.remove_live_seeds()
        self._drop_removed_seeds()

    def _forward(self, x: Tensor, alphas: Sequence[float | None]) -> Tensor:
        """With the seeds at these alphas; None leaves a seed out."""

        seeds, widenings = {}, {}
        for slot, life in enumerate(self.slots):
            seed, alpha = self.seeds[slot], alphas[slot]
            if seed is None or alpha is None:
                continue
            if self.menu[life.blueprint].name.startswith("widen"):
                widenings[slot] = partial(lambda seed, alpha, x: alpha * seed(x), seed, alpha)
            else:
                seeds[slot] = partial(
                    lambda seed, alpha, style, x: blended(x, seed(x), alpha, style),
                    *(seed, alpha, life.style),
                )
        return self.module(x, seeds, widenings)

    def _train_in_shadow(self, x: Tensor, labels: Tensor) -> None:
        """The shadow pass: TRAINING seeds at their targets, and a gradient for them alone."""
        behind = [i for i, life in enumerate(self.slots) if life.stage == SeedStage.TRAINING]
        if not behind:
            return
        alphas = [
            life.alpha_target if slot in behind else life.alpha
            for slot, life in enumerate(self.slots)
        ]
        loss = F.cross_entropy(self._forward(x, alphas), labels)
        params = [param for slot in behind for param in self.seeds[slot].parameters()]
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad

    def _drop_removed_seeds(self) -> None:
        for slot, life in enumerate(self.slots):
            if life.blueprint < 0:
                self.seeds[slot] = self.seed_optimizers[slot] = None
