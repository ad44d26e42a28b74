"""Networks whose seeds are committed before training starts."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.stages import SeedStage
from esper.tamiyo.scripted import ConstantPlan
from growth_evaluation.paired_experiment import Arm, ArmOutcome, PairedExperiment, SideBySide
from growth_evaluation.settings import SearchConfig


def train_with_seeds(
    experiment: PairedExperiment,
    blueprint: Tensor,
    style: Tensor,
    alpha: Tensor,
    rents: Sequence[float] = (0.1,),
) -> ArmOutcome:
    """Networks that have these seeds from the start, each `[lanes, H, S]`; -1 is an empty slot."""
    arms = [Arm("preset", ConstantPlan(), tuple(rents))]
    environment = experiment.hosts.untrained(rents)
    (envs,) = SideBySide(arms, experiment.num_hosts).envs
    host_batch = environment.host_batch
    states = committed(host_batch.states, envs.flatten(), blueprint, style, alpha)
    host_batch.preset_seeds(states)
    (outcome,) = experiment.play(arms, environment)
    return outcome


def committed(
    states: SlotStates, ids: Tensor, blueprint: Tensor, style: Tensor, alpha: Tensor
) -> SlotStates:
    """Dormant `states` with seeds committed in envs `ids` at their blend weights."""
    blueprint = blueprint.flatten(0, 1)
    is_there = blueprint >= 0
    weight = (alpha.flatten(0, 1) * is_there).to(states.alpha.dtype)
    seeds = replace(
        states.at(ids),
        blueprint=blueprint,
        style=style.flatten(0, 1),
        stage=torch.where(is_there, int(SeedStage.FOSSILIZED), int(SeedStage.DORMANT)),
        alpha=weight,
        alpha_target=weight,
    )
    return states.put(seeds, ids)


def all_seeds(experiment: PairedExperiment, blueprint: Blueprint) -> ArmOutcome:
    """Hosts with one blueprint in every slot from the start, `[1, H]`."""
    shape = (1, experiment.num_hosts, experiment.architectures[0].num_slots)
    seeds = torch.full(shape, experiment.menu.index(blueprint))
    return train_with_seeds(experiment, seeds, torch.zeros_like(seeds), torch.ones(shape))


def reference_seed(settings: SearchConfig, experiment: PairedExperiment) -> Blueprint:
    by_name = {blueprint.name: blueprint for blueprint in experiment.menu}
    known = [by_name[name] for name in settings.reference_seeds if name in by_name]
    site = experiment.architectures[0].sites[0]
    return known[0] if known else max(experiment.menu, key=lambda b: b.program(site).num_params)
