"""leyline: contracts -- the words every other package shares; it imports none of them."""

from esper.leyline.constants import (
    DEFAULT_EPISODE_LENGTH,
    DEFAULT_GAE_LAMBDA,
    DEFAULT_GAMMA,
    DEFAULT_LSTM_HIDDEN_DIM,
)
from esper.leyline.factored_actions import (
    ActionMasks,
    FactoredActionSpace,
    Head,
    audit_action_space,
    tamiyo_action_space,
)
from esper.leyline.stages import LEGAL_MOVES, LifecycleError, LifecycleOp, SeedStage

__all__ = [
    "DEFAULT_EPISODE_LENGTH",
    "DEFAULT_GAE_LAMBDA",
    "DEFAULT_GAMMA",
    "DEFAULT_LSTM_HIDDEN_DIM",
    "LEGAL_MOVES",
    "ActionMasks",
    "FactoredActionSpace",
    "Head",
    "LifecycleError",
    "LifecycleOp",
    "SeedStage",
    "audit_action_space",
    "tamiyo_action_space",
]
