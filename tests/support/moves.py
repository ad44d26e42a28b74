"""Moves of seeds by name: `moves.prune(states, hosts, slots)`."""

from functools import partial

from esper.kasmina.lifecycle import request
from esper.leyline.stages import LifecycleOp


def _move(op, states, host_ids, slot_ids, **details):
    return request(states, op, host_ids, slot_ids, **details)


germinate = partial(_move, LifecycleOp.GERMINATE)
advance = partial(_move, LifecycleOp.ADVANCE)
set_alpha_target = partial(_move, LifecycleOp.SET_ALPHA_TARGET)
prune = partial(_move, LifecycleOp.PRUNE)
fossilize = partial(_move, LifecycleOp.FOSSILIZE)
