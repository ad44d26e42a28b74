"""A user's model with its slots and its optimiser.

`adopt` carries out a transition of the lifecycle. `capture` and `restore` copy the whole state of
network and optimiser, for a rollback or a checkpoint.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypedDict

import torch
from torch import Tensor, nn, optim

from esper.growing.ddp import Ranks, SeedAverage
from esper.growing.preparation import PreparedModel
from esper.growing.seed_groups import AnyScheduler, SeedGroups
from esper.kasmina.blueprints import Blueprint
from esper.kasmina.lifecycle import SlotStates, Transition
from esper.leyline.constants import BlendStyle
from esper.leyline.stages import SeedStage
from esper.surgery.branches import Branch, new_branch
from esper.surgery.eval_mode import uncompiled, untouched_randomness, watch_hooks
from esper.surgery.sites import ModelSite
from esper.surgery.slots import Seed, Slot, new_seed

# dtypes of running statistics
_STATISTICS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class NetworkState(TypedDict):
    """A copy of weights, seeds and optimiser state, as plain containers for a file."""

    weights: dict[str, Tensor]  # by name, of the model and others that the optimiser trains
    buffers: dict[str, Tensor]
    extras: dict[str, Any]  # the extra states of its modules
    seeds: dict[int, dict[str, Tensor]]  # by slot
    moments: dict[str, dict[str, Any]]  # the optimiser's state by parameter name
    slots: dict[str, Tensor]  # the fields of `SlotStates`


class GrowingNetwork:
    """The model, its slots as one host of the lifecycle, and the optimiser that trains them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        prepared: PreparedModel,
        generator: torch.Generator,
        scheduler: AnyScheduler | None,
        ranks: Ranks,
    ):
        self.model, self.optimizer = model, optimizer
        self.ranks = ranks
        self._average = SeedAverage(ranks, self._seed_weights)
        self._average.follow(model)
        self.menu = prepared.menu
        self.slots = tuple(Slot(site, model) for site in prepared.sites)
        self.states = SlotStates.dormant(1, len(self.slots))
        # between two decisions alphas move from these values to those of the states
        self.ramp_start = [0.0] * len(self.slots)
        self.ramp_steps, self.ramp_done = 1, 0  # optimiser steps
        self.in_shadow: list[int] = []  # slots whose seeds are in shadow training
        self.generator = generator  # of the seeds' initial weights
        self._sound = finite_buffers(model)
        self._groups = SeedGroups(optimizer, scheduler)
        of_sites = (model.get_submodule(site.weights).parameters() for site in prepared.sites)
        self._owners = [self._groups.owner(weights) for weights in of_sites]
        own = {id(parameter) for parameter in model.parameters()}
        self._others = {  # such as a loss with weights
            f"other.{number}.{index}": parameter
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) not in own
        }
        self.made = {
            "weights per group": [len(g["params"]) for g in optimizer.param_groups],
            "weights": {n: tuple(p.shape) for n, p in model.named_parameters()},
            "weights outside the model": {n: tuple(p.shape) for n, p in self._others.items()},
        }

    def adopt(self, transition: Transition, steps: int = 1) -> None:
        """Carry out a transition from `self.states`: add and remove seeds, set alphas.

        Alphas move in equal parts over this many optimiser steps.
        """
        self.states = states = transition.states
        self.in_shadow = (states.stage[0] == SeedStage.TRAINING).nonzero().flatten().tolist()
        for index, slot in enumerate(self.slots):
            if transition.removed[0, index]:
                assert slot.seed is not None
                self._groups.leave(slot.seed.parameters())
                slot.clear()
            if transition.germinated[0, index]:
                self._add_seed(index)
            slot.is_committed = bool(states.stage[0, index] == SeedStage.FOSSILIZED)
        self.ramp_start = [slot.alpha for slot in self.slots]
        self.ramp_steps, self.ramp_done = steps, 0
        self.move_alphas()

    def move_alphas(self) -> None:
        """Set the alphas of the next optimiser step."""
        self.ramp_done = min(self.ramp_done + 1, self.ramp_steps)
        self.set_alphas()

    def set_alphas(self, *, is_over: bool = False) -> None:
        """The alphas of the ramp as far as it is, or of its end."""
        done, steps, goals = self.ramp_done, self.ramp_steps, self.states.alpha[0].tolist()
        for index, (slot, a) in enumerate(zip(self.slots, self.ramp_start, strict=True)):
            # a seed in shadow training is active in the shadow pass only
            b = 0.0 if slot.seed is None or index in self.in_shadow else goals[index]
            alpha = b if is_over or done == steps else a + (b - a) * done / steps
            if slot.alpha != alpha:
                slot.alpha = alpha

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The weights of the model and of every seed in it."""
        modules = {"model": self.model, **{f"seed.{name}": s for name, s in self._seeds.items()}}
        return {
            f"{at}.{n}": p for at, module in modules.items() for n, p in module.named_parameters()
        }

    @property
    def _seeds(self) -> dict[str, nn.Module]:
        """The seeds by site."""
        return {slot.site.name: slot.seed for slot in self.slots if slot.seed is not None}

    def _seed_weights(self) -> list[Tensor]:
        return [weight for seed in self._seeds.values() for weight in seed.parameters()]

    def statistics(self) -> list[Tensor]:
        """Buffers that training changes, such as the statistics of norms; ranks differ in them."""
        modules = (self.model, *self._seeds.values())
        return [b for m in modules for b in m.buffers() if b.dtype in _STATISTICS]

    def seed(self, index: int) -> nn.Module:
        """The seed in a slot that has one."""
        seed = self.slots[index].seed
        assert seed is not None, f"slot {index} is empty"
        return seed

    @contextmanager
    def without(self, slots: Collection[int]) -> Iterator[None]:
        """Switch some slots off inside the block."""
        with ExitStack() as stack:
            for index in slots:
                stack.enter_context(self.slots[index].with_alpha(0.0))
            yield

    @property
    def active(self) -> list[int]:
        """Slots whose seeds change the output."""
        return [index for index, slot in enumerate(self.slots) if slot.alpha != 0.0]

    @property
    def uncommitted(self) -> list[int]:
        """Slots whose seeds change the output and are not committed."""
        return [index for index in self.active if not self.slots[index].is_committed]

    def is_finite(self) -> bool:
        return are_finite(self.model, self._trained().values(), self._sound)

    def shadow_loss(self, compute_loss: Callable[[], Tensor]) -> None:
        """Compute gradients of the seeds in shadow training, by a pass without other effects."""
        if not self.in_shadow:
            return
        weights = [p for index in self.in_shadow for p in self.seed(index).parameters()]
        with ExitStack() as stack:
            stack.enter_context(_restored_after(self.model))
            for index in self.in_shadow:
                target = float(self.states.alpha_target[0, index])
                stack.enter_context(self.slots[index].with_alpha(target))
            gradients = torch.autograd.grad(compute_loss(), weights, allow_unused=True)
        means = self.ranks.mean_gradients(weights, gradients)
        for weight, gradient in zip(weights, means, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def capture(self, *, committed_only: bool = False) -> NetworkState:
        """A copy of the state; with `committed_only`, without the uncommitted seeds."""
        state, trained = self.optimizer.state, self._trained()
        own = {name: p for name, p in trained.items() if not name.startswith("seed.")}
        return NetworkState(
            weights={name: p.detach().clone() for name, p in own.items()},
            buffers={name: b.detach().clone() for name, b in self.model.named_buffers()},
            extras={
                name: copy.deepcopy(module.get_extra_state())
                for name, module in self.model.named_modules()
                if type(module).get_extra_state is not nn.Module.get_extra_state
            },
            seeds={
                index: copy.deepcopy(slot.seed.state_dict())
                for index, slot in enumerate(self.slots)
                if slot.seed is not None and (slot.is_committed or not committed_only)
            },
            moments={n: copy.deepcopy(state[p]) for n, p in trained.items() if p in state},
            slots=self.states.tensors(),
        )

    def merge_branches(self) -> None:
        """Make committed branches part of the model's layers, with their optimiser state."""
        for slot in self.slots:
            if slot.is_committed and isinstance(slot.seed, Branch):
                seed, alpha = slot.seed, slot.alpha
                slot.clear()
                self._groups.replace(seed.merge_into(self.model.get_submodule, alpha))

    def restore(self, state: NetworkState) -> None:
        """Restore a captured state, optimiser included; its settings (rates) stay as they are."""
        states, seeds = SlotStates(**state["slots"]), state["seeds"]
        present = torch.tensor([[slot.seed is not None for slot in self.slots]])
        self.adopt(Transition(states, states.has_seed & ~present, present & ~states.has_seed))
        if any(slot.is_committed and index not in seeds for index, slot in enumerate(self.slots)):
            self.merge_branches()  # the weights of these seeds are among those of the model
        trained = self._trained()
        with torch.no_grad():
            for name, value in state["weights"].items():
                trained[name].copy_(value)
            for name, value in state["buffers"].items():
                _set_buffer(self.model, name, value)
        for name, extra in state["extras"].items():
            self.model.get_submodule(name).set_extra_state(copy.deepcopy(extra))
        for index, weights in seeds.items():
            self.seed(index).load_state_dict(weights)
        for name, parameter in trained.items():
            self.optimizer.state.pop(parameter, None)
            if name in state["moments"]:
                self.optimizer.state[parameter] = moments = copy.deepcopy(state["moments"][name])
                for key, value in moments.items():
                    if isinstance(value, Tensor) and (value.dim() > 0 or value.is_cuda):
                        moments[key] = value.to(parameter.device)  # a step count may be on the CPU

    def _trained(self) -> dict[str, nn.Parameter]:
        """All weights that the optimiser may hold."""
        return self.named_parameters() | self._others

    def new_seed(
        self, blueprint: Blueprint, site: ModelSite, generator: torch.Generator
    ) -> Seed | Branch:
        if site.pair is None:
            return new_seed(blueprint.program(site.seed_site), site, generator)
        units = site.units_of(blueprint)
        return new_branch(site.pair, units, self.model.get_submodule, generator)

    def _add_seed(self, index: int) -> None:
        watch_hooks(self.model)
        slot = self.slots[index]
        blueprint = self.menu[int(self.states.blueprint[0, index])]
        seed = self.new_seed(blueprint, slot.site, self.generator)
        slot.add_seed(seed, BlendStyle(int(self.states.style[0, index])))
        self._average.follow(seed)
        named = [(f"seed.{slot.site.name}.{name}", p) for name, p in seed.named_parameters()]
        self._groups.join(self._owners[index], named)


def finite_buffers(model: nn.Module) -> dict[str, torch.Size]:
    """Names and sizes of the buffers that are finite now, such as the statistics of a norm.

    Other buffers, such as a mask of -inf or an unset value, are not checked later.
    """
    return {
        name: buffer.shape
        for name, buffer in model.named_buffers()
        if buffer.dtype in _STATISTICS and buffer.layout == torch.strided
        if bool(buffer.isfinite().all())
    }


def are_finite(model: nn.Module, weights: Iterable[Tensor], sound: dict[str, torch.Size]) -> bool:
    """Whether weights are finite, and `sound` buffers whose size has not changed."""
    buffers = [b for name, b in model.named_buffers() if b.shape == sound.get(name)]
    flags = [tensor.detach().isfinite().all() for tensor in (*weights, *buffers)]
    return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())


@torch.no_grad()
def _set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    """Set a buffer in place; replace it if its size has changed (a cache) or it is expanded.

    torch does not write to expanded tensors.
    """
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    present: Any = dict(owner.named_buffers(recurse=False)).get(leaf)
    has_size = present is not None and present.shape == value.shape
    if has_size and not (present.layout == torch.strided and 0 in present.stride()):
        present.copy_(value)
    else:
        is_saved = leaf not in owner._non_persistent_buffers_set
        owner.register_buffer(leaf, value.clone(), persistent=is_saved)


@contextmanager
def _restored_after(model: nn.Module) -> Iterator[None]:
    """Restore running statistics and random state after the block; compiled code is not used."""
    with ExitStack() as undo, untouched_randomness(model), uncompiled(model):
        for name, buffer in model.named_buffers():
            undo.callback(_set_buffer, model, name, buffer.clone())
        yield
