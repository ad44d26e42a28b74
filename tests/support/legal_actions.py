"""Random actions that the slots accept."""

import torch
from torch import Tensor

from esper.kasmina.lifecycle import SlotStates
from esper.leyline.constants import ALPHA_TARGETS
from esper.leyline.factored_actions import FactoredActionSpace
from esper.leyline.stages import LifecycleOp, slot_accepts


def legal_actions(states: SlotStates, space: FactoredActionSpace, rng: torch.Generator) -> Tensor:
    """A random legal action for each host, [P, H]; heads that an op ignores are random too."""
    sizes = torch.tensor(space.sizes)
    draws = torch.rand(states.num_hosts, space.num_heads, generator=rng)
    actions = (draws * sizes).long()
    accepts = slot_accepts(states.stage, states.total_age)
    for host in range(states.num_hosts):
        pairs = accepts[host].nonzero().tolist()
        pick = int(torch.randint(len(pairs) + 1, (), generator=rng))
        if pick == len(pairs):
            actions[host, space.index("op")] = LifecycleOp.WAIT
            continue
        slot, op = pairs[pick]
        actions[host, space.index("slot")] = slot
        actions[host, space.index("op")] = op
        present = states.alpha_target[host, slot].item()
        if present in ALPHA_TARGETS and op == LifecycleOp.SET_ALPHA_TARGET:
            other = (ALPHA_TARGETS.index(present) + 1) % len(ALPHA_TARGETS)
            actions[host, space.index("alpha_target")] = other
    return actions
