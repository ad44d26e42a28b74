"""Tamiyo's encoder and heads: one network for every slot, one for every blueprint.

No weight has the number of slots or blueprints in its shape, so the same weights run on three
slots or twelve, and on another menu. Slots are embedded alike and pooled; the slot head points at
them, scoring each from the core state, the op and the slot's embedding. Blueprints are scored
from their descriptors at the chosen slot. Permuting slots or blueprints permutes their
probabilities and changes nothing else.
"""

import math

import torch
from torch import Tensor, nn

from esper.leyline.devices import device_table
from esper.leyline.factored_actions import FactoredActionSpace, tamiyo_action_space
from esper.leyline.stages import LifecycleOp
from esper.tamiyo.policy.feature_scales import FeatureScales
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.plain_heads import POLICY_GAIN, Scene, embedding, linear, mlp

# Logits of the ops before anything is learned: seeds are grown now and then, left to live and
# committed. Even chances would prune or stop most seeds before they can show what they are worth,
# and where every slot is filled at once, nothing shows what growing nothing is worth.
OP_PRIOR = {
    LifecycleOp.WAIT: 0.0,
    LifecycleOp.GERMINATE: -2.5,
    LifecycleOp.SET_ALPHA_TARGET: -4.0,
    LifecycleOp.PRUNE: -4.0,
    LifecycleOp.FOSSILIZE: 1.5,
    LifecycleOp.ADVANCE: -4.0,
}

_RELU_GAIN = math.sqrt(2)
_SHARPNESS = 0.25  # of pointers: how far a step of the optimiser moves their logits
_OP, _SLOT = 0, 1  # columns of the actions
_SLOT_RUN = 1  # runs of Tamiyo's heads: op; slot given op; the others given both


class SlotHeads(nn.Module):
    """Pooled slots in front of the core; behind it, heads that point."""

    def __init__(
        self,
        action_space: FactoredActionSpace,
        layout: FeatureLayout,
        *,
        width: int,
        layers: int,
        slot_dim: int,
        blueprint_dim: int,
    ):
        super().__init__()
        expected = tamiyo_action_space(layout.num_slots, layout.num_blueprints)
        if action_space != expected:
            raise ValueError(
                f"a layout with {layout.num_slots} slots and {layout.num_blueprints} blueprints "
                f"needs heads {expected.heads}, got {action_space.heads}"
            )
        self.layout = layout
        self.scales = FeatureScales(layout)
        self.blueprint_encoder = linear(
            layout.blueprint_width, blueprint_dim, gain=_RELU_GAIN, bias=False
        )
        self.slot_encoder = linear(layout.slot_width + blueprint_dim, slot_dim, gain=_RELU_GAIN)
        self.encoder = mlp(layout.env_width + 2 * slot_dim, width, layers)
        num_ops = action_space.sizes[_OP]
        self.slot_op = embedding(num_ops, width)
        self.slot_pointer = _Pointer(width, slot_dim)
        self.where_core = linear(width, width)
        self.where_op = embedding(num_ops, width)
        self.where_slot = linear(slot_dim, width, bias=False)
        self.blueprint_pointer = _Pointer(width, blueprint_dim)
        plain_choices = action_space.group_spaces[2].num_choices - layout.num_blueprints
        self.readout = linear(width, plain_choices, gain=POLICY_GAIN)

    def encode(self, features: Tensor) -> tuple[Tensor, Scene]:
        """The core's input `[B, width]`; slot `[B, S, .]` and blueprint `[B, S, B', .]` embeddings."""
        env, slots, blueprints = self.scales(features)
        exists = self.layout.slot_exists(slots).unsqueeze(-1)
        # no bias: what does not fit is all 0 in the features, stays 0, and is never the largest
        blueprints = self.blueprint_encoder(blueprints).relu()
        slots = self.slot_encoder(torch.cat((slots, _largest(blueprints)), dim=-1)).relu() * exists
        mean = slots.sum(dim=-2) / exists.sum(dim=-2).clamp(min=1)
        encoded: Tensor = self.encoder(torch.cat((env, mean, _largest(slots)), dim=-1))
        return encoded, (slots, blueprints)

    def logits(self, run: int, core: Tensor, scene: Scene, actions: Tensor) -> Tensor:
        """The logits of a run of heads after the first, `[B, choices of the run]`."""
        slots, blueprints = scene
        op = actions[:, _OP]
        if run == _SLOT_RUN:
            logits: Tensor = self.slot_pointer(core + self.slot_op(op), slots)
            return logits
        num_rows, num_slots = slots.shape[:2]
        chosen = (
            device_table(range(0, num_rows * num_slots, num_slots), slots.device)
            + actions[:, _SLOT]
        )
        slot = slots.flatten(0, 1).index_select(0, chosen)
        menu = blueprints.flatten(0, 1).index_select(0, chosen)
        where = (self.where_core(core) + self.where_op(op) + self.where_slot(slot)).tanh()
        return torch.cat((self.blueprint_pointer(where, menu), self.readout(where)), dim=-1)


def _largest(candidates: Tensor) -> Tensor:
    """The largest among candidates `[..., K, width]`, unit by unit."""
    if torch.is_grad_enabled():  # the gradient of amax takes twice the time
        return candidates.max(dim=-2).values
    return candidates.amax(dim=-2)  # and max takes fifteen times that of amax


class _Pointer(nn.Module):
    """Scores candidates `[B, K, .]` by what a context `[B, .]` asks for.

    A product, so that what is asked for depends on the context from the first step on: in a sum
    under a tanh, near linear at first, the context adds the same to every candidate.
    """

    def __init__(self, context_dim: int, candidate_dim: int):
        super().__init__()
        self.question = linear(context_dim, candidate_dim, gain=POLICY_GAIN)

    def forward(self, context: Tensor, candidates: Tensor) -> Tensor:
        question = _SHARPNESS * self.question(context).unsqueeze(-1)
        return torch.bmm(candidates, question).squeeze(-1)
