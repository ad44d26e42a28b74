"""Encoder and heads for any factored action space and any flat features.

policy = flat_policy(action_space, num_features=17)
"""

import torch
from torch import Tensor, nn

from esper.leyline.factored_actions import FactoredActionSpace
from esper.tamiyo.policy.feature_scales import RunningNormalizer
from esper.tamiyo.policy.layers import POLICY_GAIN, embedding, linear, mlp
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic, PolicyConfig, Scene


def flat_policy(
    action_space: FactoredActionSpace, num_features: int, config: PolicyConfig | None = None
) -> FactoredRecurrentActorCritic:
    """A policy for any action space and `num_features` flat features."""
    config = config or PolicyConfig()
    heads = PlainHeads(action_space, num_features, config)
    return FactoredRecurrentActorCritic(action_space, heads, config)


class PlainHeads(nn.Module):
    """An MLP encoder, and heads that see the earlier choices they are given.

    Features are scaled with running statistics, which `update_scales` changes.
    """

    def __init__(self, action_space: FactoredActionSpace, feature_size: int, config: PolicyConfig):
        super().__init__()
        self.feature_size = feature_size
        self.scales = RunningNormalizer(feature_size)
        width = config.lstm_hidden_dim
        self.encoder = mlp(feature_size, width, config.encoder_layers)
        first, *later = action_space.group_spaces
        self._first_choices = first.num_choices
        self.groups = nn.ModuleList(
            _PlainGroup(action_space, action_space.given_indices[heads.start], space, width)
            for heads, space in zip(action_space.head_groups[1:], later, strict=True)
        )

    def initial_bias(self) -> Tensor:
        """No preference."""
        return torch.zeros(self._first_choices)

    def encode(self, features: Tensor) -> tuple[Tensor, Scene]:
        """The core's input `[B, width]`."""
        encoded: Tensor = self.encoder(self.scales.normalize(features))
        return encoded, ()

    def logits(self, group: int, core: Tensor, scene: Scene, actions: Tensor) -> Tensor:
        """Logits of a head group after the first, `[B, choices of the group]`."""
        logits: Tensor = self.groups[group - 1](core, actions)
        return logits

    @torch.no_grad()
    def update_scales(self, features: Tensor) -> None:
        """Update the running statistics with features `[R, F]`.

        When the mean moves, the shift is folded into the encoder's first bias: the policy's output
        on a given observation does not change. Otherwise a policy that leans to one side would
        move the mean, and lean further with every update. The first update is applied as is.
        """
        scales = self.scales
        old_mean, is_first = scales.mean.clone(), scales.count == 0
        scales.update(features)
        shift = ((scales.mean - old_mean) / scales.std).masked_fill(is_first, 0.0)
        weight, bias, *_ = self.encoder.parameters()
        bias.add_(weight.double() @ shift.double())


class _PlainGroup(nn.Module):
    """Heads given the same earlier choices: core and choices mixed, then one linear layer."""

    def __init__(
        self,
        action_space: FactoredActionSpace,
        given: tuple[int, ...],
        group_space: FactoredActionSpace,
        width: int,
    ):
        super().__init__()
        self.given = given
        self.mix = linear(width, width)
        self.chosen = nn.ModuleList(embedding(action_space.sizes[g], width) for g in given)
        self.readout = linear(width, group_space.num_choices, gain=POLICY_GAIN)

    def forward(self, core: Tensor, actions: Tensor) -> Tensor:
        mixed = self.mix(core)
        for index, chosen in zip(self.given, self.chosen, strict=True):
            mixed = mixed + chosen(actions[:, index])
        logits: Tensor = self.readout(mixed.tanh())
        return logits
