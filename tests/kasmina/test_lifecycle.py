"""Lives of seeds: what slots accept, how alpha moves, and a whole population against one slot."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina import lifecycle
from esper.kasmina.lifecycle import SlotStates
from esper.leyline.constants import (
    ALPHA_TARGETS,
    EMBARGO_STEPS,
    TEMPO_STEPS,
    AlphaCurve,
    BlendStyle,
)
from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.stages import LifecycleError, LifecycleOp, SeedStage, slot_accepts
from support import moves
from support.legal_actions import legal_actions
from support.per_host import SlotLife

NUM_SLOTS, NUM_BLUEPRINTS = 3, 4
SPACE = tamiyo_action_space(NUM_SLOTS, NUM_BLUEPRINTS)
HOST, SLOT = torch.tensor([0]), torch.tensor([0])
TWICE = torch.tensor([1, 0, 1])
SEED = {
    "blueprint": 2,
    "style": BlendStyle.GATE,
    "ramp_steps": 2,
    "alpha_target": 0.7,
    "curve": AlphaCurve.LINEAR,
}
REQUESTS = {
    LifecycleOp.GERMINATE: lambda s: moves.germinate(s, HOST, SLOT, **SEED),
    LifecycleOp.SET_ALPHA_TARGET: lambda s: moves.set_alpha_target(
        s, HOST, SLOT, alpha_target=0.5, ramp_steps=2, curve=AlphaCurve.LINEAR
    ),
    LifecycleOp.PRUNE: lambda s: moves.prune(s, HOST, SLOT),
    LifecycleOp.FOSSILIZE: lambda s: moves.fossilize(s, HOST, SLOT),
    LifecycleOp.ADVANCE: lambda s: moves.advance(s, HOST, SLOT),
}


def one_slot(stage=SeedStage.DORMANT, **values) -> SlotStates:
    states = SlotStates.dormant(1, 1)
    values = {"stage": stage, "alpha_target": 1.0, **values}
    return replace(states, **{k: torch.full_like(getattr(states, k), v) for k, v in values.items()})


def step(states: SlotStates) -> SlotStates:
    return lifecycle.begin_step(states).then(lifecycle.end_step).states


def alphas_until(states: SlotStates, stage: SeedStage) -> list[float]:
    """The alphas that the steps of a ramp train at, until the slot reaches a stage."""
    alphas = []
    while states.stage.item() != stage:
        states = lifecycle.begin_step(states).states
        alphas.append(states.alpha.item())
        states = lifecycle.end_step(states).states
        assert len(alphas) < 20
    return alphas


def action(**choices) -> torch.Tensor:
    return torch.tensor([[choices.get(name, 0) for name in SPACE.names]])


def is_accepted(request, states) -> bool:
    try:
        request(states)
    except LifecycleError:
        return False
    return True


@pytest.mark.parametrize("stage", SeedStage)
@pytest.mark.parametrize("age", range(4))
@pytest.mark.parametrize("op", REQUESTS)
def test_a_slot_accepts_exactly_what_the_table_says(stage, age, op):
    states = one_slot(stage, total_age=age)
    legal = bool(slot_accepts(states.stage, states.total_age)[0, 0, op])
    assert is_accepted(REQUESTS[op], states) == legal
    assert is_accepted(lambda s: lifecycle.apply(s, action(op=op), SPACE), states) == legal


def test_waiting_is_always_legal_and_changes_nothing():
    for stage in SeedStage:
        states = one_slot(stage, total_age=3, stage_age=2)
        assert_same(lifecycle.apply(states, action(op=LifecycleOp.WAIT), SPACE).states, states)


@pytest.mark.parametrize("target", range(len(ALPHA_TARGETS)))
def test_a_retarget_to_the_present_target_is_not_legal(target):
    states = one_slot(SeedStage.HOLDING, total_age=3, alpha_target=ALPHA_TARGETS[target])
    for other in range(len(ALPHA_TARGETS)):
        retarget = action(op=LifecycleOp.SET_ALPHA_TARGET, alpha_target=other)
        accepted = is_accepted(lambda s, a=retarget: lifecycle.apply(s, a, SPACE), states)
        assert accepted == (other != target)


def test_the_error_names_host_slot_stage_age_and_op():
    states = SlotStates.dormant(4, 3)
    states = moves.germinate(states, torch.tensor([2]), torch.tensor([1]), **SEED).states
    for _ in range(2):
        states = step(states)
    message = "host 2, slot 1: GERMINATE is not legal in stage HOLDING at age 2"
    hosts, slots = torch.tensor([0, 2]), torch.tensor([0, 1])
    with pytest.raises(LifecycleError, match=message):
        moves.germinate(states, hosts, slots, **SEED)
    with pytest.raises(LifecycleError, match="to the present target 0.7 is not legal"):
        moves.set_alpha_target(
            states, hosts[1:], slots[1:], alpha_target=0.7, ramp_steps=0, curve=0
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"host_ids": torch.tensor([-1])}, r"host ids \[-1\]; there are 2: use 0 to 1"),
        ({"host_ids": torch.tensor([2])}, r"host ids \[2\]; there are 2: use 0 to 1"),
        ({"slot_ids": torch.tensor([3])}, r"slot ids \[3\]; there are 3: use 0 to 2"),
        ({"host_ids": TWICE, "slot_ids": TWICE}, "host 1, slot 1 is named more than once"),
        ({"alpha_target": 0.0}, "alpha_target=0.0"),
        ({"alpha_target": 1.5}, "alpha_target=1.5"),
        ({"ramp_steps": 0}, "ramp_steps=0"),
        ({"blueprint": -1}, "blueprint=-1"),
        ({"style": 7}, "style=7"),
        ({"curve": 9}, "curve=9"),
    ],
)
def test_requests_out_of_range_are_refused(wrong, message):
    request = {"host_ids": HOST, "slot_ids": SLOT, **SEED, **wrong}
    with pytest.raises(ValueError, match=message):
        moves.germinate(SlotStates.dormant(2, NUM_SLOTS), **request)


def test_a_ramp_of_two_trains_at_half_and_then_at_the_whole_target():
    states = moves.germinate(one_slot(), HOST, SLOT, **SEED).states
    assert states.alpha.item() == 0.0  # until the step begins the host does not feel the seed
    assert alphas_until(states, SeedStage.HOLDING) == [0.35, 0.7]


def test_a_ramp_of_one_step_is_the_whole_target_at_once():
    states = moves.germinate(one_slot(), HOST, SLOT, **{**SEED, "ramp_steps": 1}).states
    assert alphas_until(states, SeedStage.HOLDING) == [0.7]


@pytest.mark.parametrize("ramp_steps", [*TEMPO_STEPS, 3, 7])
@pytest.mark.parametrize("kind", AlphaCurve)
@pytest.mark.parametrize("target", ALPHA_TARGETS)
def test_alpha_arrives_exactly_and_on_time(ramp_steps, kind, target):
    seed = {**SEED, "ramp_steps": ramp_steps, "curve": kind, "alpha_target": target}
    states = moves.germinate(one_slot(), HOST, SLOT, **seed).states
    alphas = alphas_until(states, SeedStage.HOLDING)
    assert len(alphas) == ramp_steps
    assert alphas[0] > 0.0
    assert alphas == sorted(alphas)
    assert alphas[-1] == target


@pytest.mark.parametrize("start", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("target", [0.1, 0.3, 0.7, 1.0])
def test_a_retarget_arrives_exactly(start, target):
    if start == target:
        return
    states = one_slot(SeedStage.HOLDING, alpha=start, alpha_target=start)
    states = moves.set_alpha_target(
        states, HOST, SLOT, alpha_target=target, ramp_steps=3, curve=AlphaCurve.COSINE
    ).states
    assert alphas_until(states, SeedStage.HOLDING)[-1] == target  # start + way * 1 may be off


def test_a_ramped_prune_blends_down_to_zero_and_then_the_slot_rests():
    states = one_slot(SeedStage.HOLDING, alpha=0.7, alpha_target=0.7, total_age=4, blueprint=1)
    states = moves.prune(states, HOST, SLOT, ramp_steps=2).states
    assert (states.stage.item(), states.alpha.item()) == (SeedStage.BLENDING, 0.7)
    states = step(states)
    assert (states.stage.item(), states.alpha.item()) == (SeedStage.BLENDING, 0.35)
    states = lifecycle.begin_step(states).states
    assert (states.stage.item(), states.alpha.item()) == (SeedStage.BLENDING, 0.0)
    states = lifecycle.end_step(states).states
    for _ in range(EMBARGO_STEPS):
        assert states.stage.item() == SeedStage.EMBARGOED
        assert not states.has_seed.item()
        states = step(states)
    assert_same(states, SlotStates.dormant(1, 1))


def test_advance_ends_a_ramp_at_its_target_or_the_seed_when_it_was_going_down():
    up = one_slot(SeedStage.BLENDING, alpha=0.1, alpha_target=0.5, ramp_steps=8, ramp_elapsed=1)
    up = moves.advance(up, HOST, SLOT).states
    assert (up.stage.item(), up.alpha.item()) == (SeedStage.HOLDING, 0.5)
    down = one_slot(SeedStage.BLENDING, alpha=0.1, alpha_target=0.0, ramp_steps=8, total_age=4)
    down = moves.advance(down, HOST, SLOT).states
    assert (down.stage.item(), down.alpha.item()) == (SeedStage.EMBARGOED, 0.0)


def test_a_retarget_without_a_ramp_is_there_at_once():
    states = one_slot(SeedStage.HOLDING, alpha=1.0, stage_age=5)
    states = moves.set_alpha_target(
        states, HOST, SLOT, alpha_target=0.5, ramp_steps=0, curve=AlphaCurve.SIGMOID
    ).states
    assert (states.stage.item(), states.alpha.item()) == (SeedStage.HOLDING, 0.5)


def test_behind_the_host_alpha_is_zero_until_advanced_and_then_ramps_as_planned():
    states = moves.germinate(one_slot(), HOST, SLOT, **SEED, shadow_training=True).states
    for _ in range(3):
        states = step(states)
        assert (states.stage.item(), states.alpha.item()) == (SeedStage.TRAINING, 0.0)
    pruned = moves.prune(states, HOST, SLOT, ramp_steps=8).states
    assert pruned.stage.item() == SeedStage.EMBARGOED
    assert alphas_until(moves.advance(states, HOST, SLOT).states, SeedStage.HOLDING) == [
        0.35,
        0.7,
    ]


def test_uprooting_removes_the_live_seeds_of_those_hosts_alone():
    stages = torch.tensor([[stage.value for stage in SeedStage]] * 2)
    states = replace(SlotStates.dormant(*stages.shape), stage=stages)
    states = replace(states, blueprint=torch.where(states.is_live, 1, -1))
    uprooted = lifecycle.remove_live_seeds(states, torch.tensor([1])).states
    assert_same(uprooted.at(torch.tensor([0])), states.at(torch.tensor([0])))
    gone, rests = states.is_live[1], SeedStage.EMBARGOED
    assert uprooted.stage[1].tolist() == torch.where(gone, rests, stages[1]).tolist()
    assert not uprooted.has_seed[1].any()


def test_a_transition_names_the_slots_that_got_or_lost_a_seed():
    hosts, slots = torch.tensor([0, 1]), torch.tensor([2, 0])
    start = moves.germinate(SlotStates.dormant(2, 3), hosts, slots, **SEED)
    assert start.germinated.nonzero().tolist() == [[0, 2], [1, 0]]
    assert not start.removed.any()
    trained = start.then(lifecycle.begin_step).then(lifecycle.end_step)
    assert torch.equal(trained.germinated, start.germinated)  # survives the moves after it
    gone = moves.prune(trained.states, hosts[:1], slots[:1])
    assert gone.removed.nonzero().tolist() == [[0, 2]]
    assert not gone.germinated.any()
    both = trained.then(lambda s: moves.prune(s, hosts[:1], slots[:1]))
    assert both.germinated.nonzero().tolist() == [[1, 0]]
    for _ in range(EMBARGO_STEPS + 1):
        both = both.then(lifecycle.end_step)
    again = both.then(lambda s: moves.germinate(s, hosts[:1], slots[:1], **SEED))
    assert again.removed.nonzero().tolist() == [[0, 2]]  # the first seed made room for another
    assert again.germinated.nonzero().tolist() == [[0, 2], [1, 0]]
    assert again.at(hosts[1:]).germinated.tolist() == [[True, False, False]]


def test_the_number_of_tensor_operations_does_not_depend_on_the_population():
    def count(num_hosts):
        states = SlotStates.dormant(num_hosts, NUM_SLOTS)
        grow = action(op=LifecycleOp.GERMINATE).expand(num_hosts, -1)
        with torch.profiler.profile() as profile:
            step(lifecycle.apply(states, grow, SPACE).states)
        return sum(event.count for event in profile.key_averages())

    count(2)  # tables are made on first use
    assert count(500) == count(2)


@given(st.integers(0, 2**31), st.booleans())
def test_a_population_lives_as_each_slot_would_alone(rng_seed, shadow_training):
    rng = torch.Generator().manual_seed(rng_seed)
    num_hosts = 5
    states = SlotStates.dormant(num_hosts, NUM_SLOTS)
    lives = [[SlotLife() for _ in range(NUM_SLOTS)] for _ in range(num_hosts)]
    for _ in range(15):
        actions = legal_actions(states, SPACE, rng)
        states = lifecycle.apply(states, actions, SPACE, shadow_training=shadow_training).states
        for host, row in enumerate(actions.tolist()):
            choice = dict(zip(SPACE.names, row, strict=True))
            lives[host][choice["slot"]].act(choice, shadow_training)
        if torch.rand((), generator=rng) < 0.1:
            host = int(torch.randint(num_hosts, (), generator=rng))
            states = lifecycle.remove_live_seeds(states, torch.tensor([host])).states
            for life in lives[host]:
                if life.stage in (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING):
                    life.remove_live_seeds()
        states = lifecycle.begin_step(states).states
        call_all(lives, SlotLife.begin_step)
        assert_lives(states, lives)
        states = lifecycle.end_step(states).states
        call_all(lives, SlotLife.end_step)
        assert_lives(states, lives)


def call_all(lives, method) -> None:
    for slots in lives:
        for life in slots:
            method(life)


def assert_lives(states: SlotStates, lives: list[list[SlotLife]]) -> None:
    alone = {
        e.name: torch.tensor(
            [[getattr(life, e.name) for life in slots] for slots in lives],
            dtype=e.metadata["dtype"],
        )
        for e in fields(SlotStates)
    }
    assert_same(states, SlotStates(**alone))


def assert_same(actual: SlotStates, expected: SlotStates) -> None:
    for e in fields(SlotStates):
        torch.testing.assert_close(
            getattr(actual, e.name),
            getattr(expected, e.name),
            rtol=0,
            atol=1e-15,
            msg=lambda text, name=e.name: f"{name}: {text}",
        )
