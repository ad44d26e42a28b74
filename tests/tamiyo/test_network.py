"""The actor-critic: act() against evaluate(), permutations, other sizes, and refusals."""

import pytest
import torch

from esper.leyline.factored_actions import (
    ActionMasks,
    FactoredActionSpace,
    Head,
    audit_action_space,
    tamiyo_action_space,
)
from esper.leyline.sequences import SequenceLayout, SequenceParts
from esper.leyline.stages import LifecycleOp
from esper.tamiyo.policy import prepared_act as module_of_prepared_act
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import (
    PolicyConfig,
    RecurrentState,
    full_precision,
)
from esper.tamiyo.policy.plain_heads import flat_policy
from esper.tamiyo.policy.prepared_act import prepared_act
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from support.random_reports import random_reports

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CHAIN = FactoredActionSpace(
    (Head("a", 3), Head("b", 4, given=("a",)), Head("c", 2, given=("a", "b")), Head("d", 5))
)
POLICIES = {
    "one head": (FactoredActionSpace((Head("move", 4),)), 6),
    "audit": (audit_action_space(), 6),
    "chain": (CHAIN, 6),
    "tamiyo": (tamiyo_action_space(3, 5), FeatureLayout(3, 5)),
}


def new_policy(name, **config):
    space, features = POLICIES[name]
    torch.manual_seed(0)
    if isinstance(features, FeatureLayout):
        return tamiyo_policy(features, PolicyConfig(**config))
    return flat_policy(space, features, PolicyConfig(**config))


def make_policy(name, *, device="cpu", **config):
    """A policy whose choices are far from uniform."""
    policy = new_policy(name, **config)
    stir(policy)
    return policy.to(device)


def evaluate(policy, features, actions, masks, layout, initial):
    (steps,) = policy.gather(features, actions, masks, SequenceParts((layout,)), initial)
    return policy.evaluate(steps, layout)


def stir(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape))


def random_features(policy, shape, generator):
    return torch.randn(*shape, policy.feature_size, generator=generator)


def random_masks(space, num_envs, generator):
    parts = {}
    for head in space:
        shape = (num_envs, *space.mask_shape(head.name))
        part = torch.rand(shape, generator=generator) < 0.6
        if not head.given:
            part.scatter_(1, torch.randint(head.size, (num_envs, 1), generator=generator), True)
        parts[head.name] = part
    return ActionMasks(space, parts)


class Rollout:
    """Steps of `act`, stored `[N, T, ...]`, several episodes per row, rows of unequal length."""

    def __init__(self, policy, step_counts, *, device="cpu", seed=1):
        generator = torch.Generator().manual_seed(seed)
        num_envs, steps = len(step_counts), max(step_counts)
        layers, hidden = policy.config.lstm_layers, policy.config.lstm_hidden_dim
        self.initial = RecurrentState(
            *(torch.randn(num_envs, layers, hidden, generator=generator).to(device) for _ in "hc")
        )
        self.features = random_features(policy, (num_envs, steps), generator).to(device)
        ended = torch.rand(num_envs, steps, generator=generator) < 0.3
        counts = torch.tensor(step_counts)
        self.layout = SequenceLayout.from_flags(ended, counts)
        state, draws = self.initial, torch.Generator(device).manual_seed(seed)
        stored = []
        for t in range(steps):
            masks = random_masks(policy.action_space, num_envs, generator).to(device)
            decision = policy.act(self.features[:, t], masks, state, generator=draws)
            stored.append(decision)
            begins = ended[:, t].to(device).view(-1, 1, 1)
            state = RecurrentState(*(torch.where(begins, 0.0, s) for s in decision.state))
        self.actions, self.log_probs, self.masks, self.values = (
            torch.stack(field, dim=1) for field in list(zip(*stored, strict=True))[:4]
        )
        unused = torch.arange(steps) >= counts[:, None]
        self.features[unused.to(device)] = torch.nan
        self.actions[unused.to(device)] = -7

    def evaluate(self, policy):
        return evaluate(policy, self.features, self.actions, self.masks, self.layout, self.initial)

    def evaluate_and_look(self, policy):
        self.evaluate(policy)
        policy.raise_on_bad_values()


def act_and_look(policy, features, masks):
    policy.act(features, masks, policy.initial_state(len(features)))
    policy.raise_on_bad_values()


def test_a_new_policy_lets_seeds_live():
    space, features = POLICIES["tamiyo"]
    policy = new_policy("tamiyo")
    reports = random_reports(50, features.num_slots, features.num_blueprints)
    masks = compute_batch_masks(reports, space)
    state = policy.initial_state(50)
    log_probs = policy.act(features.features(reports), masks, state).log_probs
    actions = policy.act(features.features(reports), masks, state, deterministic=True).actions
    assert set(actions[:, 0].tolist()) == {LifecycleOp.WAIT, LifecycleOp.FOSSILIZE}
    assert log_probs[:, 0].exp().min() > 0.01  # and yet nothing is out of reach


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_evaluate_agrees_with_act_step_by_step(name, layers, device):
    policy = make_policy(name, device=device, lstm_layers=layers, floor=0.02)
    rollout = Rollout(policy, [17, 5, 1, 0, 12, 17], device=device)
    assert rollout.layout.num_episodes > 12
    evaluation = rollout.evaluate(policy)
    policy.raise_on_bad_values()
    for got, stored in (
        (evaluation.log_probs, rollout.log_probs),
        (evaluation.values, rollout.values),
    ):
        torch.testing.assert_close(got, rollout.layout.gather(stored), rtol=0, atol=1e-5)
    assert (evaluation.log_probs != 0).any(0).all()


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_finite_and_reach_every_weight(name):
    policy = make_policy(name)
    evaluation = Rollout(policy, [17, 5, 0, 17]).evaluate(policy)
    (evaluation.log_probs.sum() + evaluation.values.sum()).backward()
    for parameter_name, parameter in policy.named_parameters():
        assert parameter.grad.isfinite().all(), parameter_name
        assert (parameter.grad != 0).any(), parameter_name


def test_gradients_equal_those_of_a_loop_over_time_in_float64():
    policy = make_policy("chain", lstm_layers=2).double()
    rollout = Rollout(policy.float(), [9, 4, 9])
    policy = policy.double()
    fields = [rollout.features.double(), *(s.double() for s in rollout.initial)]
    features, h, c = fields
    evaluation = evaluate(
        policy, features, rollout.actions, rollout.masks, rollout.layout, RecurrentState(h, c)
    )
    weights = torch.linspace(-1, 1, evaluation.values.numel(), dtype=torch.float64)
    got = torch.autograd.grad((weights * evaluation.values).sum(), list(policy.core.parameters()))

    layout = rollout.layout
    values = torch.zeros(layout.num_envs, layout.max_steps, dtype=torch.float64)
    for env, start, length in zip(layout.env_ids, layout.starts, layout.lengths, strict=True):
        state = [s[env].unsqueeze(1) for s in (h, c)]
        if start > 0:
            state = [torch.zeros_like(s) for s in state]
        encoded, _ = policy.heads.encode(features[env, start : start + length])
        output, _ = policy.core(encoded.unsqueeze(1), tuple(state))
        values[env, start : start + length] = policy.readout(output[:, 0] + encoded)[:, -1]
    expected = torch.autograd.grad(
        (weights * layout.gather(values)).sum(), list(policy.core.parameters())
    )
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_value_reads_the_state_and_does_not_advance_it():
    policy = make_policy("audit")
    generator = torch.Generator().manual_seed(3)
    features = random_features(policy, (4,), generator)
    state = RecurrentState(*(torch.randn(4, 1, 128, generator=generator) for _ in "hc"))
    before = [s.clone() for s in state]
    decision = policy.act(features, random_masks(policy.action_space, 4, generator), state)
    torch.testing.assert_close(policy.value(features, state), decision.values, rtol=0, atol=0)
    assert all(torch.equal(s, b) for s, b in zip(state, before, strict=True))
    assert not decision.values.requires_grad


@pytest.mark.parametrize("name", POLICIES)
def test_an_env_does_not_depend_on_the_others(name):
    policy = make_policy(name).double()  # so that no choice is a tie within rounding
    generator = torch.Generator().manual_seed(4)
    features = random_features(policy, (8,), generator).double()
    masks = random_masks(policy.action_space, 8, generator)
    state = RecurrentState(*(s.double() for s in policy.initial_state(8)))
    whole = policy.act(features, masks, state, deterministic=True)
    few = ActionMasks(policy.action_space, {n: masks[n][2:5] for n in policy.action_space.names})
    rows = RecurrentState(*(s[2:5] for s in state))
    part = policy.act(features[2:5], few, rows, deterministic=True)
    assert torch.equal(whole.actions[2:5], part.actions)
    torch.testing.assert_close(whole.log_probs[2:5], part.log_probs, rtol=0, atol=1e-10)
    torch.testing.assert_close(whole.values[2:5], part.values, rtol=0, atol=1e-10)


def test_a_minibatch_of_rows_scores_like_the_whole():
    policy = make_policy("chain")
    rollout = Rollout(policy, [17, 5, 0, 12, 17])
    whole = rollout.evaluate(policy)
    layout = rollout.layout
    scattered = torch.zeros(layout.num_envs * layout.max_steps)
    scattered[layout.rows] = whole.values.detach()
    rollout.layout = layout.select(torch.tensor([1, 4]))
    part = rollout.evaluate(policy)
    assert len(part.values) == 22
    torch.testing.assert_close(part.values, scattered[rollout.layout.rows], rtol=0, atol=1e-5)


class Observed:
    """Tamiyo's probabilities and value for features `[N, F]`, given an op and a slot."""

    def __init__(self, policy, features, slot, op=1):
        space = policy.action_space
        actions = torch.zeros(len(features), 1, space.num_heads, dtype=torch.int64)
        actions[..., 0], actions[:, 0, 1] = op, slot
        evaluation = evaluate(
            policy,
            features.unsqueeze(1),
            actions,
            torch.ones(len(features), 1, space.num_choices, dtype=torch.bool),
            SequenceLayout.from_flags(actions[..., 0] > 0, torch.ones(len(features))),
            policy.initial_state(len(features)),
        )
        probs = evaluation.distribution.probs.detach()
        self.values = evaluation.values.detach()
        self.probs = {h.name: probs[:, i, : h.size] for i, h in enumerate(space)}


def permuted(layout, features, *, slots=None, blueprints=None):
    env, slot_features, menu = layout.split(features)
    if slots is not None:
        slot_features, menu = slot_features[:, slots], menu[:, slots]
    if blueprints is not None:
        menu = menu[:, :, blueprints]
    return torch.cat((env, slot_features.flatten(1), menu.flatten(1)), dim=1)


def tamiyo(num_slots, num_blueprints):
    layout = FeatureLayout(num_slots, num_blueprints)
    torch.manual_seed(0)
    policy = tamiyo_policy(layout)
    stir(policy)
    return policy, layout


def test_permuting_slots_permutes_their_probabilities_and_nothing_else():
    policy, layout = tamiyo(5, 4)
    features = random_features(policy, (6,), torch.Generator().manual_seed(5))
    order = torch.tensor([3, 0, 4, 1, 2])
    slot = torch.tensor([0, 1, 2, 3, 4, 0])
    before = Observed(policy, features, slot)
    after = Observed(policy, permuted(layout, features, slots=order), order.argsort()[slot])
    assert before.probs["slot"].std(dim=1).min() > 1e-3
    for name, probs in before.probs.items():
        expected = probs[:, order] if name == "slot" else probs
        torch.testing.assert_close(after.probs[name], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(after.values, before.values, rtol=0, atol=1e-5)


def test_permuting_blueprints_permutes_their_probabilities_and_nothing_else():
    policy, layout = tamiyo(3, 6)
    features = random_features(policy, (6,), torch.Generator().manual_seed(6))
    order, slot = torch.tensor([5, 2, 0, 1, 4, 3]), torch.tensor([0, 1, 2, 0, 1, 2])
    before = Observed(policy, features, slot)
    after = Observed(policy, permuted(layout, features, blueprints=order), slot)
    assert before.probs["blueprint"].std(dim=1).min() > 1e-3
    for name, probs in before.probs.items():
        expected = probs[:, order] if name == "blueprint" else probs
        torch.testing.assert_close(after.probs[name], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(after.values, before.values, rtol=0, atol=1e-5)


def test_the_same_weights_run_on_other_numbers_of_slots_and_blueprints():
    small, _ = tamiyo(3, 5)
    for num_slots, num_blueprints in ((12, 5), (3, 9), (1, 1)):
        policy, layout = tamiyo(num_slots, num_blueprints)
        policy.load_state_dict(small.state_dict())
        rollout = Rollout(policy, [6, 3])
        assert rollout.evaluate(policy).log_probs.isfinite().all()
        assert rollout.features.shape[-1] == layout.width


@pytest.mark.parametrize("name", POLICIES)
def test_a_new_policy_is_near_uniform_and_remembers(name):
    policy = new_policy(name)
    evaluation = Rollout(policy, [17, 17]).evaluate(policy)
    chooses = evaluation.entropies > 0
    if name == "tamiyo":
        chooses[:, 0] = False  # the ops have a prior: see below
    assert chooses.any()
    assert evaluation.normalized_entropies[chooses].min() > 0.99
    forget = policy.core.bias_ih_l0.chunk(4)[1] + policy.core.bias_hh_l0.chunk(4)[1]
    torch.testing.assert_close(forget, torch.ones(128))
    for block in policy.core.weight_hh_l0.chunk(4):
        torch.testing.assert_close(block @ block.T, torch.eye(128), rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_an_env_with_no_legal_choice_is_named(device):
    policy = make_policy("chain", device=device)
    masks = ActionMasks.all_legal(policy.action_space, 3, device=device)
    masks["d"][1] = False
    with pytest.raises(ValueError, match="env 1, head 'd': no legal choice"):
        act_and_look(policy, torch.zeros(3, 6, device=device), masks)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_logits_are_named_where_they_arise(device):
    policy = make_policy("audit", device=device)
    masks = ActionMasks.all_legal(policy.action_space, 3, device=device)
    features = torch.zeros(3, 6, device=device)
    features[2, 1] = torch.nan
    with pytest.raises(ValueError, match="env 2, head 'slot': logits are not finite, log-prob nan"):
        act_and_look(policy, features, masks)
    rollout = Rollout(policy, [4, 6, 5], device=device)
    rollout.features[1, 5, 0] = torch.nan
    with pytest.raises(ValueError, match=r"\(env 1, step 5\), head 'slot': logits are not finite"):
        rollout.evaluate_and_look(policy)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("action", [-1, 3, 4, 99])
def test_a_stored_action_outside_its_mask_or_range_is_named(action, device):
    policy = make_policy("chain", device=device)
    rollout = Rollout(policy, [4, 6, 5], device=device)
    rollout.masks[2, 3, 3:7] = torch.tensor([True, True, True, False])
    rollout.actions[2, 3, 1] = action
    message = rf"\(env 2, step 3\), head 'b': action {action} is not legal; legal here: \[0, 1, 2\]"
    with pytest.raises(ValueError, match=message):
        rollout.evaluate_and_look(policy)


def test_shapes_are_refused_at_once():
    policy = make_policy("chain")
    masks, state = ActionMasks.all_legal(CHAIN, 3), policy.initial_state(3)
    with pytest.raises(ValueError, match=r"features: got \(3, 5\), expected \(3, 6\)"):
        policy.act(torch.zeros(3, 5), masks, state)
    with pytest.raises(ValueError, match=r"state h: got \(2, 1, 128\), expected \(3, 1, 128\)"):
        policy.act(torch.zeros(3, 6), masks, policy.initial_state(2))
    with pytest.raises(ValueError, match="masks are for 3 envs, features for 2"):
        policy.act(torch.zeros(2, 6), masks, policy.initial_state(2))
    other = ActionMasks.all_legal(POLICIES["one head"][0], 3)
    with pytest.raises(ValueError, match=r"these differ: \['a', 'b', 'c', 'd', 'move'\]"):
        policy.act(torch.zeros(3, 6), other, state)


def test_wrong_configurations_are_refused():
    with pytest.raises(ValueError, match="lstm_layers=0"):
        PolicyConfig(lstm_layers=0)
    with pytest.raises(ValueError, match=r"floor=1\.5"):
        PolicyConfig(floor=1.5)


@pytest.mark.gpu
def test_tf32_is_off_inside_and_as_before_outside():
    rnn, matmul = torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    before = rnn.fp32_precision, matmul.fp32_precision
    with full_precision(torch.device("cuda")):
        assert (rnn.fp32_precision, matmul.fp32_precision) == ("ieee", "ieee")
    assert (rnn.fp32_precision, matmul.fp32_precision) == before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["chain", "tamiyo"])
def test_nothing_waits_for_the_device(name):
    policy = make_policy(name, device="cuda")
    rollout = Rollout(policy, [17, 5, 12], device="cuda")
    masks = random_masks(policy.action_space, 3, torch.Generator().manual_seed(1)).to("cuda")
    rollout.evaluate(policy)  # the first use copies constants to the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        policy.act(rollout.features[:, 0], masks, rollout.initial)
        evaluation = rollout.evaluate(policy)
        (evaluation.log_probs.sum() + evaluation.values.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    policy.raise_on_bad_values()


def test_without_memory_only_the_current_observation_counts():
    policy = make_policy("one head", memory=False)
    features, state = torch.randn(2, 6), policy.initial_state(2)
    masks = ActionMasks.all_legal(policy.action_space, 2)
    first = policy.act(features, masks, state, deterministic=True)
    other = RecurrentState(torch.randn_like(state.h), torch.randn_like(state.c))
    assert torch.equal(policy.value(features, other), first.values)
    layout = SequenceLayout.from_flags(torch.zeros(2, 2, dtype=torch.bool), torch.tensor([2, 2]))
    scored = evaluate(
        policy,
        features[:, None].expand(2, 2, -1),
        first.actions[:, None].expand(2, 2, -1),
        first.masks[:, None].expand(2, 2, -1),
        layout,
        other,
    )
    torch.testing.assert_close(scored.values.view(2, 2), first.values.expand(2, 2))


# -- prepared weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one head", "audit"])
@pytest.mark.parametrize("config", [{}, {"memory": False}, {"encoder_layers": 2}])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prepared_act_decides_as_act_does(name, config, deterministic):
    policy, rng = make_policy(name, **config), torch.Generator().manual_seed(1)
    policy.heads.update_scales(3 * random_features(policy, (50,), rng) + 1)
    mean, std = torch.tensor([5.0]), torch.tensor([2.0])
    act = prepared_act(policy, mean, std)
    assert act is not None
    ours = theirs = policy.initial_state(6)
    for step in range(4):
        features, masks = (
            random_features(policy, (6,), rng),
            random_masks(policy.action_space, 6, rng),
        )
        noise = [torch.Generator().manual_seed(step) for _ in range(2)]
        ours = act(features, masks, ours, generator=noise[0], deterministic=deterministic)
        theirs = policy.act(
            features, masks, theirs, generator=noise[1], deterministic=deterministic
        )
        same = ours.actions == theirs.actions  # rounding may decide between two that are equal
        assert same.float().mean() > 0.9
        assert torch.equal(ours.masks, theirs.masks)
        log_probs = ours.log_probs[same], theirs.log_probs[same]
        torch.testing.assert_close(*log_probs, rtol=0, atol=2e-6)
        torch.testing.assert_close(ours.values, 2 * theirs.values + 5, rtol=0, atol=1e-5)
        ours, theirs = ours.state, theirs.state
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_many_envs_act_without_the_compiled_step(monkeypatch):
    monkeypatch.setattr(module_of_prepared_act, "MOST_ENVS", 5)
    policy = make_policy("one head")
    act = prepared_act(policy, torch.tensor([5.0]), torch.tensor([2.0]))
    masks = ActionMasks.all_legal(policy.action_space, 6)
    inputs = torch.randn(6, policy.feature_size), masks, policy.initial_state(6)
    ours, theirs = act(*inputs, deterministic=True), policy.act(*inputs, deterministic=True)
    assert torch.equal(ours.state.h, theirs.state.h)
    assert torch.equal(ours.values, 2 * theirs.values + 5)


def test_a_prepared_act_reports_what_act_reports():
    policy = make_policy("one head")
    features, state = torch.zeros(2, policy.feature_size), policy.initial_state(2)
    masks = ActionMasks.all_legal(policy.action_space, 2)
    policy.readout.weight.data.fill_(torch.nan)
    act = prepared_act(policy, torch.zeros(1), torch.ones(1))
    with pytest.raises(ValueError, match="env 0, head 'move': logits are not finite"):
        act(features, masks, state)
    act = prepared_act(make_policy("one head"), torch.zeros(1), torch.ones(1))
    masks.groups[0][1] = False
    with pytest.raises(ValueError, match="env 1, head 'move': no legal choice"):
        act(features, masks, state)


@pytest.mark.parametrize("wrong", ["features", "rows", "state", "masks"])
def test_a_prepared_act_refuses_other_shapes(wrong):
    policy = make_policy("one head")
    features, state = torch.zeros(2, policy.feature_size), policy.initial_state(2)
    masks = ActionMasks.all_legal(policy.action_space, 3 if wrong == "masks" else 2)
    features = {"features": features[:, 1:], "rows": features[:1]}.get(wrong, features)
    state = policy.initial_state(1) if wrong == "state" else state
    act = prepared_act(policy, torch.zeros(1), torch.ones(1))
    with pytest.raises(ValueError, match="expected|masks are for 3 envs"):
        act(features, masks, state)


@pytest.mark.parametrize(
    ("name", "config"),
    [("chain", {}), ("tamiyo", {}), ("one head", {"floor": 0.1}), ("one head", {"lstm_layers": 2})],
)
def test_other_policies_have_no_prepared_act(name, config):
    assert prepared_act(make_policy(name, **config), torch.zeros(1), torch.ones(1)) is None
