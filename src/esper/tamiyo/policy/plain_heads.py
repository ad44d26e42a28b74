"""Encoder and heads for any factored action space and any flat features."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from esper.leyline.factored_actions import FactoredActionSpace

_TANH_GAIN = math.sqrt(2)
POLICY_GAIN = 0.01  # near-uniform choices at first, so that early data does not depend on luck

Scene = tuple[Tensor, ...]  # what heads look up besides the core state; empty for plain heads


class PlainHeads(nn.Module):
    """An MLP in front of the core; behind it, heads that see the earlier choices they are given."""

    def __init__(
        self, action_space: FactoredActionSpace, feature_size: int, *, width: int, layers: int
    ):
        super().__init__()
        self.encoder = mlp(feature_size, width, layers)
        self.groups = nn.ModuleList(
            _PlainRun(
                [action_space.sizes[g] for g in action_space.given_indices[run.start]],
                list(action_space.given_indices[run.start]),
                space.num_choices,
                width,
            )
            for run, space in zip(
                action_space.head_groups[1:], action_space.group_spaces[1:], strict=True
            )
        )

    def encode(self, features: Tensor) -> tuple[Tensor, Scene]:
        """The core's input `[B, width]`."""
        encoded: Tensor = self.encoder(features)
        return encoded, ()

    @torch.no_grad()
    def shift_features(self, shift: Tensor) -> None:
        """Let features be read as `features + shift` from now on."""
        weight, bias, *_ = self.encoder.parameters()
        bias.add_(weight.double() @ shift.double())

    def logits(self, run: int, core: Tensor, scene: Scene, actions: Tensor) -> Tensor:
        """The logits of a run of heads after the first, `[B, choices of the run]`."""
        logits: Tensor = self.groups[run - 1](core, actions)
        return logits


class _PlainRun(nn.Module):
    """Heads given the same earlier choices: core and choices mixed, then one linear layer."""

    def __init__(self, given_sizes: list[int], given: list[int], num_choices: int, width: int):
        super().__init__()
        self.given = given
        self.mix = linear(width, width)
        self.chosen = nn.ModuleList(embedding(size, width) for size in given_sizes)
        self.readout = linear(width, num_choices, gain=POLICY_GAIN)

    def forward(self, core: Tensor, actions: Tensor) -> Tensor:
        mixed = self.mix(core)
        for index, chosen in zip(self.given, self.chosen, strict=True):
            mixed = mixed + chosen(actions[:, index])
        logits: Tensor = self.readout(mixed.tanh())
        return logits


def mlp(inputs: int, width: int, layers: int) -> nn.Sequential:
    """Layers of one width, each followed by tanh: in the range of an LSTM's output."""
    modules: list[nn.Module] = []
    for size in [inputs] + [width] * (layers - 1):
        modules += [linear(size, width, gain=_TANH_GAIN), nn.Tanh()]
    return nn.Sequential(*modules)


def linear(inputs: int, outputs: int, *, gain: float = 1.0, bias: bool = True) -> nn.Linear:
    """A linear layer with orthogonal weights and a bias, if any, of 0."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.orthogonal_(layer.weight, gain)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def embedding(size: int, width: int) -> nn.Embedding:
    """Rows of norm about 1, like one more input of an orthogonal layer."""
    layer = nn.Embedding(size, width)
    nn.init.normal_(layer.weight, std=width**-0.5)
    return layer


def init_lstm(lstm: nn.LSTM) -> None:
    """Orthogonal weights gate by gate; a forget bias of 1, so that memory lasts from the start."""
    for name, parameter in lstm.named_parameters():
        if name.startswith("weight"):
            _orthogonal_each(parameter.data.chunk(4))
        else:
            nn.init.zeros_(parameter)
            if name.startswith("bias_ih"):
                parameter.data.chunk(4)[1].fill_(
                    1.0
                )  # gates lie in the order input, forget, cell, output


def _orthogonal_each(blocks: Iterable[Tensor]) -> None:
    for block in blocks:
        nn.init.orthogonal_(block)
