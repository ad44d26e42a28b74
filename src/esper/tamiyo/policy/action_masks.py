"""What each env may do, for all envs at once: a constant number of tensor operations.

A slot's stage is looked up in the one table of legal moves; which op uses which head is data too
(`OP_HEADS`). Only what depends on more than the slot is computed: the blueprints that fit the
site, the budget and the seed limit, and the alpha target that a seed already has.
"""

import torch
from torch import Tensor

from esper.leyline.constants import ALPHA_TARGETS
from esper.leyline.devices import DeviceConstant
from esper.leyline.factored_actions import (
    OP_HEADS,
    ActionMasks,
    FactoredActionSpace,
    tamiyo_action_space,
)
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleOp, slot_accepts


def compute_batch_masks(reports: Reports, action_space: FactoredActionSpace) -> ActionMasks:
    """The legal choices of N envs: an op is legal where some slot accepts it, WAIT always."""
    _check_action_space(reports, action_space)
    affordable = affordable_blueprints(reports)
    # op-major and contiguous, so that a row can be found without another copy
    legal = slot_accepts(reports.stage, reports.total_age).transpose(1, 2).contiguous()
    legal &= reports.slot_exists.unsqueeze(1)  # [N, O, S]
    legal[:, LifecycleOp.GERMINATE].logical_and_(affordable.any(dim=-1))
    op = legal.any(dim=-1)
    op[:, LifecycleOp.WAIT] = True
    choices = legal.unsqueeze(-1) & _used_choices(action_space).on(reports.device)

    masks = ActionMasks.from_groups(action_space, (op, legal, choices))
    masks["blueprint"][:, LifecycleOp.GERMINATE].logical_and_(affordable)
    is_new = reports.alpha_target.unsqueeze(-1) != _ALPHA_TARGETS.on(reports.device)
    masks["alpha_target"][:, LifecycleOp.SET_ALPHA_TARGET].logical_and_(is_new)
    return masks


def compute_action_masks(
    reports: Reports, action_space: FactoredActionSpace, env_id: int = 0
) -> ActionMasks:
    """The legal choices of one env, as a batch of one."""
    env_ids = torch.tensor([env_id], device=reports.device)
    return compute_batch_masks(reports.select(env_ids), action_space)


def affordable_blueprints(reports: Reports) -> Tensor:
    """Blueprints that a slot could grow now if it is empty, bool `[N, S, B]`."""
    within_params = reports.cost_params <= reports.params_left.view(-1, 1, 1)
    within_macs = reports.cost_macs <= reports.macs_left.view(-1, 1, 1)
    within_seed_limit = (reports.seeds_left > 0).view(-1, 1, 1)
    return reports.fits & within_params & within_macs & within_seed_limit


def _check_action_space(reports: Reports, action_space: FactoredActionSpace) -> None:
    sizes = (reports.num_slots, reports.num_blueprints)
    if action_space.names != _HEAD_NAMES or action_space.sizes[1:3] != sizes:
        raise ValueError(
            f"these reports have {sizes[0]} slots and {sizes[1]} blueprints: use "
            f"tamiyo_action_space{sizes}, not {action_space.heads}"
        )


def _used_choices(action_space: FactoredActionSpace) -> DeviceConstant:
    """`OP_HEADS` spread over the choices of the heads given op and slot: bool `[O, 1, C']`."""
    if action_space.sizes not in _USED_CHOICES:
        later = action_space.heads[2:]
        used = [
            [head.name in OP_HEADS[op] for head in later for _ in range(head.size)]
            for op in LifecycleOp
        ]
        _USED_CHOICES[action_space.sizes] = DeviceConstant(torch.tensor(used).unsqueeze(1))
    return _USED_CHOICES[action_space.sizes]


_HEAD_NAMES = tamiyo_action_space(1, 1).names
_ALPHA_TARGETS = DeviceConstant(torch.tensor(ALPHA_TARGETS))
_USED_CHOICES: dict[tuple[int, ...], DeviceConstant] = {}
