"""Constants and enums that several packages share."""

from enum import IntEnum

DEFAULT_GAMMA = 0.995
DEFAULT_GAE_LAMBDA = 0.97
DEFAULT_LSTM_HIDDEN_DIM = 128
DEFAULT_EPISODE_LENGTH = 25

# The meaning of each choice of Tamiyo's heads, in the order of the choices.
TEMPO_STEPS = (2, 5, 8)  # length of the alpha ramp after germination
ALPHA_TARGETS = (0.5, 0.7, 1.0)
ALPHA_SPEED_STEPS = (0, 2, 5, 8)  # 0: at once

EMBARGO_STEPS = 2  # steps before a slot can be used again after a prune
MIN_PRUNE_AGE = 1  # steps that a seed must have trained before it may be pruned


class BlendStyle(IntEnum):
    """How a seed's output is added to its host's, with weight alpha."""

    ADD = 0  # x + alpha * seed(x)
    MULTIPLY = 1  # x * (1 + alpha * tanh(seed(x)))
    GATE = 2  # x + alpha * gate(x) * seed(x)


class AlphaCurve(IntEnum):
    """The shape of an alpha ramp."""

    LINEAR = 0
    COSINE = 1
    SIGMOID = 2


class SiteKind(IntEnum):
    """The kind of activations at a slot, which determines the blueprints that fit."""

    VECTOR = 0  # [batch, width]
    SERIES = 1  # [batch, width, length]
    IMAGE = 2  # [batch, width, height, width]
    TOKENS = 3  # [batch, length, width]
