"""Rows of a rollout: to read all of them, and to step environments without a buffer."""

import torch
from torch import Tensor

from esper.simic.agent.rollout import RolloutRow
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer

ROW_FIELDS = RolloutRow._fields


def stored_fields(buffer: TamiyoRolloutBuffer) -> dict[str, Tensor]:
    """Every field that a step writes, `[N, T, ...]`."""
    return {name: getattr(buffer, name) for name in ROW_FIELDS}


def row_for(envs) -> RolloutRow:
    """A row that is not part of a rollout."""
    spec = envs.spec
    buffer = TamiyoRolloutBuffer(
        spec.num_envs, 1, spec.num_features, spec.action_space, frame_size=spec.frame_size
    )
    return buffer.spare_row()


def act_and_step(envs, actions, row: RolloutRow | None = None):
    """Take these actions; returns what `step` returns, and the row with rewards and flags."""
    row = row_for(envs) if row is None else row
    row.actions.copy_(torch.as_tensor(actions))
    return envs.step(row), row
