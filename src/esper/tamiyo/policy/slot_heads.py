"""Tamiyo's encoder and heads: one network for every slot, one for every blueprint.

    policy = tamiyo_policy(FeatureLayout(num_slots=3, num_blueprints=8))

No weight has the number of slots or blueprints in its shape, so the same weights run on three
slots or twelve, and on another menu. All slots share one embedding network and are pooled. The
slot head is a pointer: it scores each slot from the core state, the op and the slot's embedding.
Blueprints are scored from their descriptors at the chosen slot. Permuting slots or blueprints
permutes their probabilities and changes nothing else.
"""

import math

import torch
from torch import Tensor, nn

from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.stages import LifecycleOp
from esper.tamiyo.policy.feature_scales import FeatureScales, SumOverRanks
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic, PolicyConfig, Scene
from esper.tamiyo.policy.policy_layers import POLICY_GAIN, embedding, linear, mlp

# Initial logits of the ops: grow seeds now and then, leave them alone, commit them. Uniform ops
# would prune or stop most seeds before their worth shows, and would fill every slot at once, so
# that no episode shows what growing nothing is worth.
OP_PRIOR = {
    LifecycleOp.WAIT: 0.0,
    LifecycleOp.GERMINATE: -2.5,
    LifecycleOp.SET_ALPHA_TARGET: -4.0,
    LifecycleOp.PRUNE: -4.0,
    LifecycleOp.FOSSILIZE: 1.5,
    LifecycleOp.ADVANCE: -4.0,
}

_RELU_GAIN = math.sqrt(2)
_SHARPNESS = 0.25  # of pointers: how far an optimiser step moves their logits
_OP, _SLOT = 0, 1  # columns of the actions
_SLOT_GROUP = 1  # Tamiyo's head groups: op; slot given op; the others given both


def tamiyo_policy(
    layout: FeatureLayout, config: PolicyConfig | None = None
) -> FactoredRecurrentActorCritic:
    """Tamiyo's policy; its weights fit any number of slots and any menu of blueprints."""
    config = config or PolicyConfig()
    space = tamiyo_action_space(layout.num_slots, layout.num_blueprints)
    policy = FactoredRecurrentActorCritic(space, SlotHeads(layout, config), config)
    policy.readout.bias.data[:-1] = torch.tensor([OP_PRIOR[op] for op in LifecycleOp])
    return policy


class SlotHeads(nn.Module):
    """An encoder that pools slots, and heads that point at slots and blueprints.

    Features are scaled by `FeatureScales`, fitted to the first rollout and then frozen.
    """

    frame_size = 0  # no pictures: `frames` holds nothing

    def __init__(self, layout: FeatureLayout, config: PolicyConfig):
        super().__init__()
        self.layout = layout
        self.feature_size = layout.width
        self.scales = FeatureScales(layout)
        space = tamiyo_action_space(layout.num_slots, layout.num_blueprints)
        width, num_ops = config.lstm_hidden_dim, space.sizes[_OP]
        slot_dim, blueprint_dim = config.slot_dim, config.blueprint_dim
        self.blueprint_encoder = linear(
            layout.blueprint_width, blueprint_dim, gain=_RELU_GAIN, bias=False
        )
        self.slot_encoder = linear(layout.slot_width + blueprint_dim, slot_dim, gain=_RELU_GAIN)
        self.encoder = mlp(layout.env_width + 2 * slot_dim, width, config.encoder_layers)
        self.slot_op = embedding(num_ops, width)
        self.slot_pointer = _Pointer(width, slot_dim)
        self.where_core = linear(width, width)
        self.where_op = embedding(num_ops, width)
        self.where_slot = linear(slot_dim, width, bias=False)
        self.blueprint_pointer = _Pointer(width, blueprint_dim)
        plain_choices = space.group_spaces[2].num_choices - layout.num_blueprints
        self.readout = linear(width, plain_choices, gain=POLICY_GAIN)

    def encode(self, features: Tensor, frames: Tensor | None = None) -> tuple[Tensor, Scene]:
        """The core's input `[B, width]`, and the embeddings of slots and blueprints."""
        env, slots, blueprints = self.scales(features)
        # no bias: a blueprint that does not fit has features 0, stays 0 and is never the maximum
        blueprints = self.blueprint_encoder(blueprints).relu()
        slots = self.slot_encoder(torch.cat((slots, _largest(blueprints)), dim=-1)).relu()
        pooled = (slots.mean(dim=-2), _largest(slots))
        encoded: Tensor = self.encoder(torch.cat((env, *pooled), dim=-1))
        return encoded, (slots, blueprints)

    def logits(self, group: int, core: Tensor, scene: Scene, actions: Tensor) -> Tensor:
        """Logits of a head group after the first, `[B, choices of the group]`."""
        slots, blueprints = scene  # [B, S, slot_dim], [B, S, blueprints, blueprint_dim]
        op = actions[:, _OP]
        if group == _SLOT_GROUP:
            logits: Tensor = self.slot_pointer(core + self.slot_op(op), slots)
            return logits
        num_rows, num_slots = slots.shape[:2]
        starts = torch.arange(0, num_rows * num_slots, num_slots, device=slots.device)
        chosen = starts + actions[:, _SLOT]
        slot = slots.flatten(0, 1).index_select(0, chosen)
        menu = blueprints.flatten(0, 1).index_select(0, chosen)
        where = (self.where_core(core) + self.where_op(op) + self.where_slot(slot)).tanh()
        return torch.cat((self.blueprint_pointer(where, menu), self.readout(where)), dim=-1)

    def update_scales(
        self,
        features: Tensor,
        frames: Tensor | None = None,
        sum_: SumOverRanks | None = None,
    ) -> None:
        """Fit the scales to features `[R, F]` the first time; later calls change nothing."""
        assert sum_ is None, "growth trains in one process"
        if not self.scales.is_fitted:
            self.scales.fit(features)


def _largest(candidates: Tensor) -> Tensor:
    """Elementwise maximum over candidates `[..., K, width]`."""
    if torch.is_grad_enabled():  # amax's gradient takes twice the time of max's
        return candidates.max(dim=-2).values
    return candidates.amax(dim=-2)  # without gradients, max takes 15 times as long


class _Pointer(nn.Module):
    """Scores candidates `[B, K, .]` by their product with a query made from a context `[B, .]`.

    With a product the ranking depends on the context from the first step on. In a sum under a
    tanh, nearly linear at first, the context adds the same to every candidate.
    """

    def __init__(self, context_dim: int, candidate_dim: int):
        super().__init__()
        self.query = linear(context_dim, candidate_dim, gain=POLICY_GAIN)

    def forward(self, context: Tensor, candidates: Tensor) -> Tensor:
        query = _SHARPNESS * self.query(context).unsqueeze(-1)
        return torch.bmm(candidates, query).squeeze(-1)
