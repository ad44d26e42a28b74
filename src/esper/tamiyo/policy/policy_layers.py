"""Layers with the initial weights that PPO learns well from: orthogonal, biases 0."""

import math

import torch
from torch import Tensor, nn

POLICY_GAIN = 0.01  # of layers that output logits: choices start near uniform
_TANH_GAIN = math.sqrt(2)


class TanhLayers(nn.Sequential):
    """Linear layers, each followed by tanh: the range of an LSTM's output."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        for place, layer in enumerate(layers):
            self.add_module(str(2 * place), layer)  # as in a sequence with a module for each tanh

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            assert isinstance(layer, nn.Linear)
            # without the calls of modules, which take longer than the arithmetic of one step
            x = torch.nn.functional.linear(x, layer.weight, layer.bias).tanh()
        return x


def mlp(inputs: int, width: int, layers: int) -> TanhLayers:
    """Layers of one width, with tanh."""
    sizes = [inputs] + [width] * (layers - 1)
    return TanhLayers(*(linear(size, width, gain=_TANH_GAIN) for size in sizes))


def linear(inputs: int, outputs: int, *, gain: float = 1.0, bias: bool = True) -> nn.Linear:
    """A linear layer with orthogonal weights; its bias, if any, is 0."""
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
    """Orthogonal weights per gate; forget bias 1, so that the cell keeps its memory at first."""
    for name, parameter in lstm.named_parameters():
        gates = parameter.data.chunk(4)  # input, forget, cell, output
        if name.startswith("weight"):
            for gate in gates:
                nn.init.orthogonal_(gate)
        else:
            nn.init.zeros_(parameter)
            if name.startswith("bias_ih"):
                gates[1].fill_(1.0)


def spread_time_constants(lstm: nn.LSTM, longest: int) -> None:
    """Chrono initialisation: cells keep what they saw for 1 to `longest` - 1 steps.

    A cell with forget bias log(T) and input bias -log(T) has a time constant of about T steps, and
    takes in as much as it forgets (Tallec & Ollivier 2018).
    """
    biases = torch.linspace(1.0, max(longest - 1.0, 1.0), lstm.hidden_size).log()
    for _, _, bias, _ in lstm.all_weights:
        gates = bias.data.chunk(4)  # input, forget, cell, output
        gates[0].copy_(-biases)
        gates[1].copy_(biases)
