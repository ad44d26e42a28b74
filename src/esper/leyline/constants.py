"""Values that two packages must agree on. Every other default names one of these."""

from enum import IntEnum

DEFAULT_GAMMA = 0.995
DEFAULT_GAE_LAMBDA = 0.97
DEFAULT_LSTM_HIDDEN_DIM = 128
DEFAULT_EPISODE_LENGTH = 25

# What the choices of Tamiyo's heads mean, in the order of the choices.
TEMPO_STEPS = (2, 5, 8)  # length of the alpha ramp after germination
ALPHA_TARGETS = (0.5, 0.7, 1.0)
ALPHA_SPEED_STEPS = (0, 2, 5, 8)  # 0: at once

EMBARGO_STEPS = 2  # a slot rests this long after a prune
MIN_PRUNE_AGE = 1  # a seed has trained for at least one step before it may be pruned


class BlendStyle(IntEnum):
    """How a seed's output joins its host's, with alpha the seed's weight."""

    ADD = 0  # x + alpha * seed(x)
    MULTIPLY = 1  # x * (1 + alpha * tanh(seed(x)))
    GATE = 2  # x + alpha * gate(x) * seed(x)


class AlphaCurve(IntEnum):
    """The shape of an alpha ramp."""

    LINEAR = 0
    COSINE = 1
    SIGMOID = 2


class SiteKind(IntEnum):
    """What flows through a slot: decides which blueprints fit."""

    VECTOR = 0  # [batch, width]
    SERIES = 1  # [batch, width, length]
    IMAGE = 2  # [batch, width, height, width]
    TOKENS = 3  # [batch, length, width]
