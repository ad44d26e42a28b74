"""Lifecycle of every seed in a population, as arrays and pure functions.

A move takes the slots' states and returns a `Transition`: the new states, and which slots got
or lost a seed. One step (one policy decision) is

    transition = apply(states, actions, action_space)  # or request(states, op, ...)
    transition = transition.then(begin_step)           # alphas move; hosts train at these alphas
    transition = end_step(transition.states)           # ages grow; timed moves happen

A ramp of n steps trains its k-th step at `curve(k / n)` of the way: the first step already moves,
the last is exactly at the target, and the seed is HOLDING from the end of that step on. Between
steps `alpha` is the value that the host was last trained and validated with, so a germination or
the start of a ramp does not change the output.

`leyline.stages.slot_accepts` defines what is legal, for the slots and for the action masks; other
requests raise `LifecycleError`. States are on the CPU, so no function here synchronises a GPU.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.kasmina.blending import curve
from esper.leyline.arrays import TensorFields
from esper.leyline.constants import (
    ALPHA_SPEED_STEPS,
    ALPHA_TARGETS,
    EMBARGO_STEPS,
    TEMPO_STEPS,
    AlphaCurve,
    BlendStyle,
)
from esper.leyline.factored_actions import FactoredActionSpace
from esper.leyline.stages import (
    LEGAL_MOVES,
    LIVE_STAGES,
    LifecycleError,
    LifecycleOp,
    SeedStage,
    slot_accepts,
)

NO_BLUEPRINT = -1


def _array(dtype: torch.dtype, empty: int | float = 0) -> Any:
    """A tensor field, and its value in a slot without a seed."""
    return field(metadata={"dtype": dtype, "fill_value": empty})


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotStates(TensorFields):
    """Every slot of every host, each field `[P, S]`."""

    stage: Tensor = _array(torch.int64)  # SeedStage
    stage_age: Tensor = _array(torch.int64)  # steps in this stage
    total_age: Tensor = _array(torch.int64)  # steps since germination
    alpha: Tensor = _array(torch.float64)  # the seed's weight in the blend
    alpha_start: Tensor = _array(torch.float64)  # where the ramp began
    alpha_target: Tensor = _array(torch.float64)  # where it ends; 0 while a prune is under way
    ramp_steps: Tensor = _array(torch.int64)
    ramp_elapsed: Tensor = _array(torch.int64)
    curve: Tensor = _array(torch.int64)  # AlphaCurve
    style: Tensor = _array(torch.int64)  # BlendStyle
    blueprint: Tensor = _array(torch.int64, NO_BLUEPRINT)

    @classmethod
    def dormant(cls, num_hosts: int, num_slots: int) -> "SlotStates":
        """States of hosts without any seed."""
        shape = (num_hosts, num_slots)
        return cls(**{entry.name: torch.full(shape, **entry.metadata) for entry in fields(cls)})

    @property
    def num_hosts(self) -> int:
        return self.stage.shape[0]

    @property
    def num_slots(self) -> int:
        return self.stage.shape[1]

    @property
    def has_seed(self) -> Tensor:
        return self.blueprint != NO_BLUEPRINT

    @property
    def is_live(self) -> Tensor:
        """Where a seed takes part in training and may still be pruned."""
        return torch.isin(self.stage, _LIVE)

    @property
    def is_active(self) -> Tensor:
        """Where a seed is part of the host's output."""
        return self.has_seed & (self.stage != SeedStage.TRAINING)


class Transition(NamedTuple):
    """What a move did: the new states, and the slots `[P, S]` that got or lost a seed."""

    states: SlotStates
    germinated: Tensor  # bool: the seed in the slot is new
    removed: Tensor  # bool: the slot's earlier seed was removed

    @classmethod
    def of(cls, states: SlotStates, germinated: Tensor | None = None) -> "Transition":
        """A transition to `states` that removes no seed; without a mask, none is new."""
        none = torch.zeros_like(states.stage, dtype=torch.bool)
        return cls(states, none if germinated is None else germinated, none)

    def then(self, move: Callable[[SlotStates], "Transition"]) -> "Transition":
        """This transition followed by another one."""
        after = move(self.states)
        return Transition(
            after.states,
            germinated=after.germinated | (self.germinated & ~after.removed),
            removed=self.removed | after.removed,
        )

    def at(self, host_ids: Tensor) -> "Transition":
        """The transition of some hosts."""
        return Transition(
            self.states.at(host_ids), self.germinated[host_ids], self.removed[host_ids]
        )


def apply(
    states: SlotStates,
    actions: Tensor,
    action_space: FactoredActionSpace,
    *,
    shadow_training: bool = False,
) -> Transition:
    """One factored action `[P, H]` per host, in Tamiyo's eight heads."""
    is_choice = (actions >= 0) & (actions < torch.tensor(action_space.sizes))
    assert bool(is_choice.all())
    choice = dict(zip(action_space.names, actions.unbind(-1), strict=True))
    op = choice["op"]
    germinates = op == LifecycleOp.GERMINATE
    target = _ALPHA_TARGETS[choice["alpha_target"]]
    return _request(
        states,
        torch.arange(states.num_hosts),
        choice["slot"],
        op,
        _Details(
            blueprint=choice["blueprint"],
            style=choice["style"],
            alpha_target=torch.where(op == LifecycleOp.PRUNE, 0.0, target),
            ramp_steps=torch.where(
                germinates, _TEMPO_STEPS[choice["tempo"]], _SPEED_STEPS[choice["alpha_speed"]]
            ),
            curve=choice["alpha_curve"],
        ),
        shadow_training,
    )


def request(
    states: SlotStates,
    op: LifecycleOp,
    host_ids: Tensor,
    slot_ids: Tensor,
    *,
    blueprint: Tensor | int = NO_BLUEPRINT,
    style: Tensor | int = 0,
    ramp_steps: Tensor | int = 0,
    alpha_target: Tensor | float = 1.0,
    curve: Tensor | int = 0,
    shadow_training: bool = False,
) -> Transition:
    """One op on each of K slots; the details that it uses are one for all, or `[K]`.

    - GERMINATE puts a new seed at alpha 0; its ramp of 1 or more steps starts in the next step.
      With `shadow_training` it enters TRAINING; target, ramp and curve apply after its ADVANCE.
    - ADVANCE moves a seed from shadow training to its ramp, or to the end of its ramp.
    - SET_ALPHA_TARGET and PRUNE move alpha over `ramp_steps`, at once if 0. A seed in shadow
      training is pruned at once: its alpha is 0 already.
    - FOSSILIZE commits a held seed for good.
    """
    for name, ids, count in zip(
        ("host", "slot"), (host_ids, slot_ids), states.stage.shape, strict=True
    ):
        if bool(((ids < 0) | (ids >= count)).any()):
            raise ValueError(f"{name} ids {ids.tolist()}; there are {count}: use 0 to {count - 1}")
    places = Counter(zip(host_ids.tolist(), slot_ids.tolist(), strict=True))
    if twice := [place for place, times in places.items() if times > 1]:
        host, slot = twice[0]
        raise ValueError(f"host {host}, slot {slot} is named more than once in one call")
    asked = _Details(blueprint, style, alpha_target, ramp_steps, curve)
    _check_details(op, asked)
    if op == LifecycleOp.PRUNE:
        asked = asked._replace(alpha_target=0.0)
    ops = torch.full_like(slot_ids, op)
    return _request(states, host_ids, slot_ids, ops, asked, shadow_training)


def remove_live_seeds(states: SlotStates, host_ids: Tensor) -> Transition:
    """Remove every live seed of K hosts at once, at any age, as a rollback does."""
    rows = states.at(host_ids)
    return _transition(states, states.put(_remove(rows, rows.is_live), host_ids))


def begin_step(states: SlotStates) -> Transition:
    """Advance every ramp by one step: hosts train this step at the new alphas."""
    moves = states.stage == SeedStage.BLENDING
    elapsed = states.ramp_elapsed + moves
    fraction = elapsed.to(states.alpha.dtype) / states.ramp_steps.clamp(min=1)
    along = curve(states.curve, fraction)
    way = states.alpha_target - states.alpha_start
    arrived = elapsed >= states.ramp_steps  # exact: no rounding of start + way
    alpha = torch.where(arrived, states.alpha_target, states.alpha_start + way * along)
    alpha = torch.where(moves, alpha, states.alpha)
    return Transition.of(replace(states, alpha=alpha, ramp_elapsed=elapsed))


def end_step(states: SlotStates) -> Transition:
    """End a step: ages grow, finished ramps hold or remove their seed, embargoes run out."""
    older = replace(
        states, stage_age=states.stage_age + 1, total_age=states.total_age + states.has_seed
    )
    arrived = states.ramp_elapsed >= states.ramp_steps
    settled = _settle(older, (states.stage == SeedStage.BLENDING) & arrived)
    rested = (settled.stage == SeedStage.EMBARGOED) & (settled.stage_age >= EMBARGO_STEPS)
    freed = _enter(settled, torch.where(rested, SeedStage.DORMANT, settled.stage))
    return _transition(states, freed)


def _transition(before: SlotStates, after: SlotStates) -> Transition:
    """The transition of one move, which never replaces a seed by another."""
    return Transition(
        after,
        germinated=after.has_seed & ~before.has_seed,
        removed=before.has_seed & ~after.has_seed,
    )


class _Details(NamedTuple):
    """The values of an op apart from its slot: one for all K, or one each."""

    blueprint: Tensor | int
    style: Tensor | int
    alpha_target: Tensor | float
    ramp_steps: Tensor | int
    curve: Tensor | int


def _request(
    states: SlotStates,
    host_ids: Tensor,
    slot_ids: Tensor,
    op: Tensor,
    asked: _Details,
    shadow_training: bool,
) -> Transition:
    """K requests, each for a different slot; WAIT changes nothing."""
    old = states.at(host_ids, slot_ids)
    _check_legal(old, op, asked, host_ids, slot_ids)
    germinates = op == LifecycleOp.GERMINATE
    retargets = op == LifecycleOp.SET_ALPHA_TARGET
    prunes = op == LifecycleOp.PRUNE
    ramps = germinates | retargets | prunes
    bends = germinates | retargets
    new = replace(
        old,
        blueprint=torch.where(germinates, asked.blueprint, old.blueprint),
        style=torch.where(germinates, asked.style, old.style),
        curve=torch.where(bends, asked.curve, old.curve),
        alpha_target=torch.where(ramps, asked.alpha_target, old.alpha_target),
        alpha_start=torch.where(ramps, old.alpha, old.alpha_start),
        ramp_steps=torch.where(ramps, asked.ramp_steps, old.ramp_steps),
        ramp_elapsed=old.ramp_elapsed * ~ramps,
    )
    jumps = (op == LifecycleOp.ADVANCE) & (old.stage == SeedStage.BLENDING)
    jumps |= (retargets | prunes) & (new.ramp_steps == 0)
    jumps |= prunes & (old.stage == SeedStage.TRAINING)
    stage = _DESTINATIONS[old.stage, op]
    stage = torch.where(ramps & ~jumps, SeedStage.BLENDING, stage)
    if shadow_training:
        stage = torch.where(germinates, SeedStage.TRAINING, stage)
    after = _settle(_enter(new, stage), jumps)
    return _transition(states, states.put(after, host_ids, slot_ids))


def _settle(states: SlotStates, arrived: Tensor) -> SlotStates:
    """End the ramps in `arrived`: the seed holds, or is removed if its target was 0."""
    gone = arrived & (states.alpha_target == 0.0)
    held = replace(states, alpha=torch.where(arrived, states.alpha_target, states.alpha))
    held = _enter(held, torch.where(arrived & ~gone, SeedStage.HOLDING, held.stage))
    return _remove(held, gone)


def _remove(states: SlotStates, gone: Tensor) -> SlotStates:
    """Remove the seeds in `gone` and put their slots under embargo."""
    empty = {
        e.name: torch.where(gone, e.metadata["fill_value"], getattr(states, e.name))
        for e in fields(states)
    }
    return replace(SlotStates(**empty), stage=torch.where(gone, SeedStage.EMBARGOED, states.stage))


def _enter(states: SlotStates, stage: Tensor) -> SlotStates:
    """Change stages; the age of a new stage starts at 0."""
    return replace(states, stage=stage, stage_age=states.stage_age * (stage == states.stage))


def _check_legal(
    old: SlotStates, op: Tensor, asked: _Details, host_ids: Tensor, slot_ids: Tensor
) -> None:
    """Raise for the first of K requests that its slot does not accept."""
    accepts = slot_accepts(old.stage, old.total_age)
    accepted = accepts.gather(-1, op.unsqueeze(-1)).squeeze(-1) | (op == LifecycleOp.WAIT)
    stays = (op == LifecycleOp.SET_ALPHA_TARGET) & (old.alpha_target == asked.alpha_target)
    legal = accepted & ~stays
    if bool(legal.all()):
        return
    first = int((~legal).nonzero()[0])
    stage, age = SeedStage(int(old.stage[first])).name, int(old.total_age[first])
    name = LifecycleOp(int(op[first])).name
    if accepted[first]:
        name += f" to the present target {float(old.alpha_target[first])}"
    raise LifecycleError(
        f"host {int(host_ids[first])}, slot {int(slot_ids[first])}: "
        f"{name} is not legal in stage {stage} at age {age}"
    )


def _check_details(op: LifecycleOp, asked: _Details) -> None:
    target = torch.as_tensor(asked.alpha_target)
    if not bool(((target > 0.0) & (target <= 1.0)).all()):
        raise ValueError(f"alpha_target={asked.alpha_target}; use more than 0 and at most 1")
    germinates = op == LifecycleOp.GERMINATE
    for name, least, most in (
        ("ramp_steps", int(germinates), None),
        ("blueprint", 0 if germinates else NO_BLUEPRINT, None),
        ("style", 0, len(BlendStyle) - 1),
        ("curve", 0, len(AlphaCurve) - 1),
    ):
        given = torch.as_tensor(getattr(asked, name))
        if bool((given < least).any()) or (most is not None and bool((given > most).any())):
            expected = f"{least} or more" if most is None else f"{least} to {most}"
            raise ValueError(f"{name}={getattr(asked, name)}; use {expected}")


# `LEGAL_MOVES` as stages [stages, ops]; an illegal pair keeps its stage
_DESTINATIONS = torch.arange(len(SeedStage)).unsqueeze(1).repeat(1, len(LifecycleOp))
for (_stage, _op), _destination in LEGAL_MOVES.items():
    _DESTINATIONS[_stage, _op] = _destination
_LIVE = torch.tensor(LIVE_STAGES)
_TEMPO_STEPS, _SPEED_STEPS = torch.tensor(TEMPO_STEPS), torch.tensor(ALPHA_SPEED_STEPS)
_ALPHA_TARGETS = torch.tensor(ALPHA_TARGETS, dtype=torch.float64)
