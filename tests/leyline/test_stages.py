"""The table of legal moves, row by row, and what a slot accepts because of it."""

import pytest
import torch

from esper.leyline.constants import MIN_PRUNE_AGE
from esper.leyline.stages import LEGAL_MOVES, LifecycleOp, SeedStage, slot_accepts

# written out a second time on purpose: a change of the rules is a change in two places
ACCEPTED = {
    SeedStage.DORMANT: {LifecycleOp.GERMINATE},
    SeedStage.TRAINING: {LifecycleOp.ADVANCE, LifecycleOp.PRUNE},
    SeedStage.BLENDING: {LifecycleOp.ADVANCE, LifecycleOp.PRUNE},
    SeedStage.HOLDING: {
        LifecycleOp.SET_ALPHA_TARGET,
        LifecycleOp.FOSSILIZE,
        LifecycleOp.PRUNE,
    },
    SeedStage.FOSSILIZED: set(),
    SeedStage.EMBARGOED: set(),
}


@pytest.mark.parametrize("stage", SeedStage)
def test_a_slot_accepts_exactly_the_moves_of_its_stage(stage: SeedStage) -> None:
    accepts = slot_accepts(torch.tensor([[int(stage)]]), torch.tensor([[MIN_PRUNE_AGE]]))
    assert accepts.shape == (1, 1, len(LifecycleOp))
    assert {op for op in LifecycleOp if accepts[0, 0, op]} == ACCEPTED[stage]


@pytest.mark.parametrize("stage", SeedStage)
def test_a_seed_too_young_to_be_pruned_accepts_everything_else(stage: SeedStage) -> None:
    accepts = slot_accepts(torch.tensor([int(stage)]), torch.tensor([MIN_PRUNE_AGE - 1]))
    expected = ACCEPTED[stage] - {LifecycleOp.PRUNE}
    assert {op for op in LifecycleOp if accepts[0, op]} == expected


def test_every_stage_but_the_last_can_be_left_and_reached() -> None:
    left = {stage for stage, _ in LEGAL_MOVES}
    reached = set(LEGAL_MOVES.values())
    timed = {SeedStage.DORMANT}  # an embargo ends by itself
    shadow_training = {SeedStage.TRAINING}  # where the host must not be disturbed
    assert reached | timed | shadow_training == set(SeedStage)
    assert left == set(SeedStage) - {SeedStage.FOSSILIZED, SeedStage.EMBARGOED}


def test_what_slots_accept_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(slot_accepts, fullgraph=True, backend="aot_eager")
    stage, age = torch.arange(6).repeat(2, 1), torch.tensor([[0], [1]]).expand(2, 6)
    assert torch.equal(compiled(stage, age), slot_accepts(stage, age))
