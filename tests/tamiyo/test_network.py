"""The actor-critic: initial weights, permutations, other sizes, and refusals.

That acting and scoring agree is in tests/simic/test_numerics.py.
"""

import pytest
import torch

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head
from esper.leyline.stages import LifecycleOp
from esper.simic.agent.ppo import steps_of
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.distributions import Choices
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import (
    PolicyConfig,
    RecurrentState,
    Steps,
    full_precision,
)
from esper.tamiyo.policy.plain_heads import flat_policy
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from support.agents import (
    NUMBERS,
    SPACES,
    TAMIYO,
    collect,
    make_agent,
    random_features,
    random_masks,
    rollout_of,
    stir,
)
from support.random_reports import random_reports

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POLICIES = ["plain", "dependent", "mixed", "tamiyo"]
COUNTS = (17, 5, 0, 12)


def new_policy(name, **config):
    """With its initial weights."""
    torch.manual_seed(0)
    if name == "tamiyo":
        return tamiyo_policy(TAMIYO, PolicyConfig(**config))
    return flat_policy(SPACES[name], NUMBERS, PolicyConfig(**config))


def scored_rollout(agent):
    rollout = rollout_of(collect(agent, COUNTS))
    return rollout, agent.policy.evaluate(steps_of(rollout))


def act_and_check(policy, features, masks):
    """On a CPU `act` checks; on a GPU, whoever reads the decision."""
    policy.check(policy.act(features, masks, policy.initial_state(len(features))))


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_a_new_policy_is_near_uniform_and_remembers(name):
    agent = make_agent(name)
    agent.policy = policy = new_policy(name, lstm_hidden_dim=8)
    rollout, evaluation = scored_rollout(agent)
    chooses = (evaluation.num_choices > 1) & rollout.valid.unsqueeze(-1)
    if name == "tamiyo":
        chooses[..., 0] = False  # the ops have a prior: see below
    for head in policy.action_space.continuous:
        chooses[..., head] = False
    assert chooses.any()
    assert evaluation.normalized_entropies[chooses].min() > 0.99
    forget = policy.core.bias_ih_l0.chunk(4)[1] + policy.core.bias_hh_l0.chunk(4)[1]
    torch.testing.assert_close(forget, torch.ones(8))
    for block in policy.core.weight_hh_l0.chunk(4):
        torch.testing.assert_close(block @ block.T, torch.eye(8), rtol=0, atol=1e-5)
    assert ("log_std" in policy.state_dict()) == bool(policy.action_space.continuous)


def test_a_new_tamiyo_lets_seeds_live():
    policy = new_policy("tamiyo")
    reports = random_reports(50, TAMIYO.num_slots, TAMIYO.num_blueprints)
    masks = compute_batch_masks(reports, policy.action_space)
    features = TAMIYO.features(reports)
    state = policy.initial_state(50)
    likely_ops = policy.act(features, masks, state, deterministic=True).actions[:, 0]
    assert set(likely_ops.tolist()) == {LifecycleOp.WAIT, LifecycleOp.FOSSILIZE}
    probs, _ = probabilities(policy, features, slot=torch.zeros(50, dtype=torch.int64))
    assert probs["op"].min() > 1e-3  # and yet every op is tried


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_finite_and_reach_every_weight(name):
    agent = make_agent(name)
    rollout, evaluation = scored_rollout(agent)
    valid = rollout.valid
    (evaluation.log_probs[valid].sum() + evaluation.values[valid].sum()).backward()
    for parameter_name, parameter in agent.policy.named_parameters():
        assert parameter.grad.isfinite().all(), parameter_name
        assert (parameter.grad != 0).any(), parameter_name


def test_a_head_depends_on_the_choices_it_is_given_and_on_no_others():
    agent = make_agent("dependent")
    rollout = rollout_of(collect(agent, (1, 1)))
    rollout.masks.fill_(True)
    space = agent.policy.action_space
    for changed, head in enumerate(space):
        log_probs = []
        for choice in (0, 1):
            rollout.actions[..., changed] = choice
            log_probs.append(agent.policy.evaluate(steps_of(rollout)).log_probs)
        moved = (log_probs[0] != log_probs[1])[0].all(dim=0)
        expected = [other is head or head.name in other.given for other in space]
        assert moved.tolist() == expected


# -- acting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [True, False])
def test_value_is_that_of_act_and_no_argument_is_changed(memory):
    policy = make_agent("plain", memory=memory).policy
    rng = torch.Generator().manual_seed(3)
    features = random_features(policy, 4, rng)
    state = RecurrentState(*torch.randn(2, 4, 1, 8, generator=rng))
    before = [part.clone() for part in state]
    decision = policy.act(features, random_masks(policy.action_space, 4, rng), state)
    assert torch.equal(policy.value(features, state), decision.values)
    assert all(torch.equal(part, b) for part, b in zip(state, before, strict=True))
    assert torch.equal(decision.state.h, state.h) == (not memory)
    other = RecurrentState(*torch.randn(2, 4, 1, 8, generator=rng))
    assert torch.equal(policy.value(features, other), decision.values) == (not memory)


@pytest.mark.parametrize("name", POLICIES)
def test_act_writes_into_the_row_it_is_given(name):
    policy = make_agent(name).policy
    rng = torch.Generator().manual_seed(4)
    masks = random_masks(policy.action_space, 6, rng)
    given = random_features(policy, 6, rng), masks, policy.initial_state(6)
    row = Choices.empty(policy.action_space, 6, policy.device)
    written = policy.act(*given, generator=torch.Generator().manual_seed(1), out=row)
    fresh = policy.act(*given, generator=torch.Generator().manual_seed(1))
    for stored, mine, expected in zip(row, written, fresh, strict=False):
        assert mine.data_ptr() == stored.data_ptr()
        assert torch.equal(stored, expected)


@pytest.mark.parametrize("name", POLICIES)
def test_an_env_does_not_depend_on_the_others(name):
    policy = make_agent(name).policy
    rng = torch.Generator().manual_seed(4)
    features = random_features(policy, 30, rng)
    masks = random_masks(policy.action_space, 30, rng)
    state = RecurrentState(*torch.randn(2, 30, 1, 8, generator=rng))
    whole = policy.act(features, masks, state, deterministic=True)
    few = ActionMasks(policy.action_space, [part[2:5] for part in masks.groups])
    part = policy.act(
        features[2:5], few, RecurrentState(*(s[2:5] for s in state)), deterministic=True
    )
    torch.testing.assert_close(whole.actions[2:5], part.actions, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.log_probs[2:5], part.log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.values[2:5], part.values, rtol=1e-5, atol=1e-5)


# -- Tamiyo ---------------------------------------------------------------------------------------


def tamiyo(num_slots, num_blueprints):
    layout = FeatureLayout(num_slots, num_blueprints)
    torch.manual_seed(0)
    policy = tamiyo_policy(layout)
    stir(policy)
    return policy, layout


def probabilities(policy, features, slot, op=1):
    """Of each head's choices `[N, size]`, given an op and a slot; and V(s) `[N]`."""
    space = policy.action_space
    num_envs = len(features)
    actions = torch.zeros(num_envs, space.num_choices, space.num_heads, dtype=torch.int64)
    actions[..., 0] = op
    actions[..., 1] = slot.unsqueeze(1)
    for head, columns in enumerate(space.slices):
        actions[:, columns, head] = torch.arange(space.sizes[head])
    num_rows = num_envs * space.num_choices
    evaluation = policy.evaluate(
        Steps(
            features.repeat_interleave(space.num_choices, dim=0).unsqueeze(0),
            actions.view(1, num_rows, -1),
            torch.ones(1, num_rows, space.num_choices, dtype=torch.bool),
            torch.zeros(1, num_rows, dtype=torch.bool),
            policy.initial_state(num_rows),
        )
    )
    log_probs = evaluation.log_probs.detach().view(num_envs, space.num_choices, -1)
    probs = {
        head.name: log_probs[:, columns, index].exp()
        for index, (head, columns) in enumerate(zip(space, space.slices, strict=True))
    }
    return probs, evaluation.values.detach().view(num_envs, -1)[:, 0]


@pytest.mark.parametrize("permuted", ["slot", "blueprint"])
def test_permuting_slots_or_blueprints_permutes_their_probabilities_and_nothing_else(permuted):
    policy, layout = tamiyo(5, 4)
    features = random_features(policy, 6, torch.Generator().manual_seed(5))
    slot = torch.tensor([0, 1, 2, 3, 4, 0])
    env, slots, menu = layout.split(features)
    if permuted == "slot":
        order = torch.tensor([3, 0, 4, 1, 2])
        slots = slots[:, order]
        menu = menu[:, order]
        slot_after = order.argsort()[slot]
    else:
        order = torch.tensor([3, 0, 2, 1])
        menu = menu[:, :, order]
        slot_after = slot
    reordered = torch.cat((env, slots.flatten(1), menu.flatten(1)), dim=1)
    before, value_before = probabilities(policy, features, slot)
    after, value_after = probabilities(policy, reordered, slot_after)
    assert before[permuted].std(dim=1).min() > 1e-3
    for name, probs in before.items():
        torch.testing.assert_close(probs.sum(dim=1), torch.ones(6))
        expected = probs[:, order] if name == permuted else probs
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(value_after, value_before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [(12, 5), (3, 9), (1, 1)])
def test_the_same_weights_run_on_other_numbers_of_slots_and_blueprints(sizes):
    small, _ = tamiyo(3, 5)
    policy, layout = tamiyo(*sizes)
    policy.load_state_dict(small.state_dict())
    features = random_features(policy, 4, torch.Generator().manual_seed(1))
    assert features.shape[1] == layout.width
    masks = ActionMasks.all_legal(policy.action_space, 4)
    decision = policy.act(features, masks, policy.initial_state(4))
    assert decision.log_probs.isfinite().all()


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_envs_without_a_legal_choice_and_logits_that_are_nan_are_named(device):
    policy = make_agent("dependent", device=device).policy
    features = torch.zeros(3, NUMBERS, device=device)
    masks = ActionMasks.all_legal(policy.action_space, 3, device=device)
    masks["when"][1] = False
    with pytest.raises(ValueError, match="env 1, head 'when': no legal choice"):
        act_and_check(policy, features, masks)
    masks["when"][1] = True
    features[2, 1] = torch.nan
    with pytest.raises(ValueError, match="env 2, head 'op': logits are not finite, log-prob nan"):
        act_and_check(policy, features, masks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("field", "entry", "value", "message"),
    [
        *[
            ("actions", (3, 2, 1), action, rf"action {action} is not legal; legal here: \[0\]")
            for action in (-1, 1, 2, 99)
        ],
        ("actions", (3, 2, 2), 1, "head 'kind': action 1 is not legal; legal here: only 0"),
        ("states", (3, 2, 0), torch.nan, "head 'op': logits are not finite, log-prob nan"),
    ],
)
def test_stored_steps_that_cannot_be_scored_are_named(device, field, entry, value, message):
    agent = make_agent("dependent", device=device)
    rollout = rollout_of(collect(agent, (6, 6, 6, 6)))
    masks = agent.policy.action_space.split(rollout.masks)
    masks["slot"][3, 2] = torch.tensor([True, False])
    masks["kind"][3, 2] = False
    rollout.actions[3, 2, 1:3] = 0
    getattr(rollout, field)[entry] = value
    with pytest.raises(ValueError, match=f"env 2, step 3, .*{message}"):
        agent.policy.check_stored(steps_of(rollout), rollout.valid)
    rollout.valid[3, 2] = False
    agent.policy.check_stored(steps_of(rollout), rollout.valid)


@pytest.mark.parametrize("number", [1e30, torch.inf, torch.nan])
def test_a_stored_number_that_cannot_be_scored_is_named(number):
    agent = make_agent("mixed")
    rollout = rollout_of(collect(agent, (6, 6)))
    rollout.actions[3, 1, 1] = number
    with pytest.raises(ValueError, match="env 1, step 3, head 'speed': the number .* cannot be"):
        agent.policy.check_stored(steps_of(rollout), rollout.valid)


def test_wrong_shapes_and_configurations_are_refused():
    policy = make_agent("plain").policy
    space = policy.action_space
    masks, state = ActionMasks.all_legal(space, 3), policy.initial_state(3)
    with pytest.raises(ValueError, match=r"features: got \(3, 4\), expected \(3, 5\)"):
        policy.act(torch.zeros(3, 4), masks, state)
    with pytest.raises(ValueError, match=r"state h: got \(2, 1, 8\), expected \(3, 1, 8\)"):
        policy.act(torch.zeros(3, 5), masks, policy.initial_state(2))
    with pytest.raises(ValueError, match="masks are for 3 envs, features for 2"):
        policy.act(torch.zeros(2, 5), masks, policy.initial_state(2))
    other = ActionMasks.all_legal(FactoredActionSpace((Head("a", 3), Head("move", 4))), 3)
    with pytest.raises(ValueError, match=r"these differ: \['b', 'c', 'move'\]"):
        policy.act(torch.zeros(3, 5), other, state)
    with pytest.raises(ValueError, match="lstm_layers=0"):
        PolicyConfig(lstm_layers=0)
    with pytest.raises(ValueError, match=r"floor=1\.5"):
        PolicyConfig(floor=1.5)


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_tf32_is_off_inside_and_as_before_outside():
    rnn, matmul = torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    before = rnn.fp32_precision, matmul.fp32_precision
    with full_precision(torch.device("cuda")):
        assert (rnn.fp32_precision, matmul.fp32_precision) == ("ieee", "ieee")
    assert (rnn.fp32_precision, matmul.fp32_precision) == before


@pytest.mark.gpu
@pytest.mark.parametrize("name", POLICIES)
def test_nothing_waits_for_the_device(name):
    agent = make_agent(name, device="cuda")
    policy = agent.policy
    rollout = rollout_of(collect(agent, COUNTS))
    masks = random_masks(policy.action_space, 4, torch.Generator().manual_seed(1)).to("cuda")
    policy.evaluate(steps_of(rollout))  # the first use copies constants to the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        policy.act(rollout.states[0], masks, policy.initial_state(4))
        evaluation = policy.evaluate(steps_of(rollout))
        (evaluation.log_probs.sum() + evaluation.values.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
