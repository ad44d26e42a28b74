"""Action masks of all envs in a constant number of tensor operations.

Slot stages are looked up in the table of legal moves, and `OP_HEADS` lists the heads that each op
uses. Two masks depend on more than the slot: blueprints must fit the site, the budget and the seed
limit, and a new alpha target must differ from the current one.
"""

import torch

from esper.leyline.constants import ALPHA_TARGETS
from esper.leyline.factored_actions import (
    OP_HEADS,
    ActionMasks,
    FactoredActionSpace,
    tamiyo_action_space,
)
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleOp, slot_accepts
from esper.runtime.devices import DeviceConstant


def compute_batch_masks(reports: Reports, action_space: FactoredActionSpace) -> ActionMasks:
    """The legal choices of N envs. An op is legal if some slot accepts it; WAIT always is."""
    sizes = (reports.num_slots, reports.num_blueprints)
    if action_space.names != _HEAD_NAMES or action_space.sizes[1:3] != sizes:
        raise ValueError(
            f"the reports have {sizes[0]} slots and {sizes[1]} blueprints; use "
            f"tamiyo_action_space{sizes}, not {action_space.heads}"
        )
    # blueprints [N, S, B] that an empty slot could grow now
    affordable = (
        reports.fits
        & (reports.cost_params <= reports.params_left.view(-1, 1, 1))
        & (reports.cost_macs <= reports.macs_left.view(-1, 1, 1))
        & (reports.seeds_left > 0).view(-1, 1, 1)
    )
    # op-major and contiguous, so that looking up a row needs no copy
    legal = slot_accepts(reports.stage, reports.total_age).transpose(1, 2).contiguous()  # [N, O, S]
    legal[:, LifecycleOp.GERMINATE].logical_and_(affordable.any(dim=-1))
    op = legal.any(dim=-1)
    op[:, LifecycleOp.WAIT] = True
    choices = legal.unsqueeze(-1) & _used_choices(action_space).on(reports.device)

    masks = ActionMasks(action_space, (op, legal, choices))
    masks["blueprint"][:, LifecycleOp.GERMINATE].logical_and_(affordable)
    is_new = reports.alpha_target.unsqueeze(-1) != _ALPHA_TARGETS.on(reports.device)
    masks["alpha_target"][:, LifecycleOp.SET_ALPHA_TARGET].logical_and_(is_new)
    return masks


def compute_action_masks(
    reports: Reports, action_space: FactoredActionSpace, env_id: int = 0
) -> ActionMasks:
    """The legal choices of one env, as a batch of one."""
    if not 0 <= env_id < reports.num_envs:
        raise ValueError(f"env_id={env_id}; the reports have envs 0 to {reports.num_envs - 1}")
    env_ids = torch.tensor([env_id], device=reports.device)
    return compute_batch_masks(reports.at(env_ids), action_space)


def _used_choices(action_space: FactoredActionSpace) -> DeviceConstant:
    """`OP_HEADS` for every choice of the heads given op and slot, bool `[O, 1, choices]`."""
    if action_space.sizes not in _USED_CHOICES:
        later = action_space.heads[2:]
        used = [
            [head.name in heads for head in later for _ in range(head.size)]
            for heads in OP_HEADS.values()
        ]
        _USED_CHOICES[action_space.sizes] = DeviceConstant(torch.tensor(used).unsqueeze(1))
    return _USED_CHOICES[action_space.sizes]


_HEAD_NAMES = tamiyo_action_space(1, 1).names
_ALPHA_TARGETS = DeviceConstant(torch.tensor(ALPHA_TARGETS))
_USED_CHOICES: dict[tuple[int, ...], DeviceConstant] = {}
