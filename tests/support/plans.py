"""Constant plans from a list of seeds."""

import torch

from esper.tamiyo.scripted import NEVER, ConstantPlan


def planned(*seeds: tuple[int, int, int], num_slots: int) -> ConstantPlan:
    """A plan from (step, slot, blueprint) of each seed."""
    step = torch.full((1, num_slots), NEVER)
    blueprint = torch.zeros_like(step)
    for when, slot, kind in seeds:
        step[0, slot], blueprint[0, slot] = when, kind
    return ConstantPlan(step, blueprint)
