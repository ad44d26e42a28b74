"""Stages of a seed, operations on it, and the one table of legal moves.

The action masks and the slots both read `slot_accepts`, so they cannot disagree.
"""

from enum import IntEnum

import torch
from torch import Tensor

from esper.leyline.constants import MIN_PRUNE_AGE
from esper.runtime.devices import DeviceConstant


class SeedStage(IntEnum):
    DORMANT = 0  # an empty slot
    TRAINING = 1  # shadow training: the host's output does not include the seed
    BLENDING = 2  # alpha moves to its target
    HOLDING = 3  # alpha is at its target; keep, retarget or prune
    FOSSILIZED = 4  # committed for good
    EMBARGOED = 5  # pruned; the slot is not usable yet


class LifecycleOp(IntEnum):
    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


class LifecycleError(RuntimeError):
    """A request that is not legal; the action mask should have ruled it out."""


# (stage, op) -> the next stage; a pair that is not listed is not legal.
# WAIT chooses no slot, so it has no row. With shadow training, GERMINATE leads to TRAINING. An op
# that moves alpha over several steps (also a ramped PRUNE) spends them in BLENDING.
LEGAL_MOVES: dict[tuple[SeedStage, LifecycleOp], SeedStage] = {
    (SeedStage.DORMANT, LifecycleOp.GERMINATE): SeedStage.BLENDING,
    (SeedStage.TRAINING, LifecycleOp.ADVANCE): SeedStage.BLENDING,
    (SeedStage.BLENDING, LifecycleOp.ADVANCE): SeedStage.HOLDING,
    (SeedStage.HOLDING, LifecycleOp.SET_ALPHA_TARGET): SeedStage.BLENDING,
    (SeedStage.HOLDING, LifecycleOp.FOSSILIZE): SeedStage.FOSSILIZED,
    (SeedStage.TRAINING, LifecycleOp.PRUNE): SeedStage.EMBARGOED,
    (SeedStage.BLENDING, LifecycleOp.PRUNE): SeedStage.EMBARGOED,
    (SeedStage.HOLDING, LifecycleOp.PRUNE): SeedStage.EMBARGOED,
}

# Stages in which a slot holds a seed that takes part in training and may still be pruned.
LIVE_STAGES = (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)

# `LEGAL_MOVES` as bool [old enough to prune, stages, ops]; WAIT's column is False
_accepts = torch.zeros(2, len(SeedStage), len(LifecycleOp), dtype=torch.bool)
for _stage, _op in LEGAL_MOVES:
    _accepts[:, _stage, _op] = True
_accepts[0, :, LifecycleOp.PRUNE] = False
_ACCEPTS = DeviceConstant(_accepts)


def slot_accepts(stage: Tensor, total_age: Tensor) -> Tensor:
    """Which ops each slot accepts, bool `[..., ops]`, from its stage and the age of its seed.

    The other conditions of GERMINATE (a blueprint that fits, the budget, the seed limit) do not
    depend on the slot alone; the masks add them.
    """
    old_enough = (total_age >= MIN_PRUNE_AGE).long()
    return _ACCEPTS.on(stage.device)[old_enough, stage.long()]
