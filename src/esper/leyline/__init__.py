"""leyline: contracts -- the types and tables that all other packages share.

It imports no other package of Esper. `stages.py` has the stages of a seed and the table of legal
moves, `factored_actions.py` the actions and their masks, `reports.py` what a controller sees,
`protocols.py` the interfaces between packages, and `sequences.py` the episodes of a rollout.
"""

from esper.leyline.constants import (
    DEFAULT_EPISODE_LENGTH,
    DEFAULT_GAE_LAMBDA,
    DEFAULT_GAMMA,
    DEFAULT_LSTM_HIDDEN_DIM,
)
from esper.leyline.factored_actions import (
    NUM_BLENDS,
    NUM_BLUEPRINTS,
    NUM_OPS,
    NUM_SLOTS,
    ActionMasks,
    FactoredActionSpace,
    Head,
    tamiyo_action_space,
)
from esper.leyline.stages import LEGAL_MOVES, LifecycleError, LifecycleOp, SeedStage

__all__ = [
    "DEFAULT_EPISODE_LENGTH",
    "DEFAULT_GAE_LAMBDA",
    "DEFAULT_GAMMA",
    "DEFAULT_LSTM_HIDDEN_DIM",
    "LEGAL_MOVES",
    "NUM_BLENDS",
    "NUM_BLUEPRINTS",
    "NUM_OPS",
    "NUM_SLOTS",
    "ActionMasks",
    "FactoredActionSpace",
    "Head",
    "LifecycleError",
    "LifecycleOp",
    "SeedStage",
    "tamiyo_action_space",
]
