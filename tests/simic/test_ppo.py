"""PPO: its loss by the formulas, rows that must not count, and updates that go wrong.

That ratios are 1 before the first optimiser step is in test_numerics.py.
"""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch

from esper.leyline.factored_actions import ActionMasks
from esper.simic.agent.ppo import (
    FIRST_RATIO_TOLERANCE,
    PPOAgent,
    PPOConfig,
    TrainingFailed,
    steps_of,
)
from esper.simic.agent.ppo_loss import loss_names, plain_loss, ppo_loss
from esper.simic.agent.rollout import LEARNED_FROM
from esper.tamiyo.policy.feature_scales import RunningNormalizer
from esper.tamiyo.policy.network import Evaluation, PolicyConfig, RecurrentState
from esper.tamiyo.policy.plain_heads import flat_policy
from support.agents import (
    NUMBERS,
    SPACES,
    collect,
    episodes_of,
    make_agent,
    random_features,
    rollout_of,
)
from support.rollouts import stored_fields

NUM_ENVS = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class KeepGradients:
    """Stands in for the optimiser: keeps the gradients of each step, and changes nothing."""

    def __init__(self, agent):
        self.optimizer = agent.optimizer
        self.steps = []
        agent.optimizer = self

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self):
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.steps.append([grad.clone() for grad in grads])


def loss_of(agent, rollout, entropy_weights):
    steps = steps_of(rollout)
    outputs = agent.policy.outputs(steps)
    return ppo_loss(agent.policy, outputs, steps, rollout, entropy_weights, agent.config)


def gradients_of(loss, policy):
    """The gradient of every weight; zeros where the loss does not depend on it."""
    policy.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.parameters()]


def fill_empty_rows(buffer):
    """Put what cannot be right into every field of every row that holds no step."""
    is_empty = ~buffer.valid_mask
    assert is_empty.sum() > 4
    for field in stored_fields(buffer).values():
        if field.dtype == torch.bool:
            field[is_empty] = True
        else:
            bad = {torch.uint8: 255, torch.int64: -7}
            field[is_empty] = bad.get(field.dtype, torch.nan)


def append_empty_rows(buffer, num_steps):
    """Let PPO learn from the buffer's rollout with rows at its end that hold no step."""
    whole = buffer.rollout

    def longer(device):
        rollout = whole(device)
        fields = {}
        for name in LEARNED_FROM:
            field = getattr(rollout, name)
            fields[name] = torch.cat([field, torch.zeros_like(field[:num_steps])])
        return replace(rollout, **fields, is_full=False)

    buffer.rollout = longer


# -- the loss by its formulas, in float64, row by row ---------------------------------------------


def loss_by_hand(evaluation, rollout, entropy_weights, config):
    """The loss (Schulman et al. 2017, equations 7 and 9) and metrics, from loops over steps."""
    surrogates, bonuses, squares, kls, clips = [], [], [], [], []
    num_heads = evaluation.log_probs.shape[-1]
    entropies = [[] for _ in range(num_heads)]
    shares = [[] for _ in range(num_heads)]
    steps = rollout.valid.nonzero().tolist()
    for t, env in steps:
        squares.append((evaluation.values[t, env] - rollout.targets[t, env].double()) ** 2)
        log_ratio = 0.0  # of all heads together; a head without a choice has probability 1
        bonus = 0.0
        for h in range(num_heads):
            log_ratio += evaluation.log_probs[t, env, h] - rollout.log_probs[t, env, h].double()
            bonus += entropy_weights[h] * evaluation.normalized_entropies[t, env, h]
        choosing = [h for h in range(num_heads) if evaluation.num_choices[t, env, h] > 1]
        for h in choosing:
            entropies[h].append(evaluation.entropies[t, env, h])
            shares[h].append(evaluation.normalized_entropies[t, env, h])
        if not choosing:
            continue
        ratio = torch.exp(log_ratio)
        gain = rollout.advantages[t, env].double()
        low, high = 1 - config.clip, 1 + config.clip
        bounded = low if ratio < low else high if ratio > high else ratio
        surrogates.append(torch.min(ratio * gain, bounded * gain))
        bonuses.append(bonus)
        kls.append(ratio - 1 - log_ratio)
        clips.append(float(not low <= ratio <= high))

    def mean(numbers):
        return sum(numbers) / len(numbers)

    policy_loss = -mean(surrogates)
    value_loss = 0.5 * mean(squares)
    loss = policy_loss + config.value_coefficient * value_loss
    loss = loss - config.entropy_coefficient * mean(bonuses)
    metrics = [loss, policy_loss, mean(kls), mean(clips), value_loss, len(clips) / len(steps)]
    metrics += [mean(of_head) for of_head in entropies] + [mean(of_head) for of_head in shares]
    metrics += [len(of_head) / len(steps) for of_head in entropies]
    return loss, torch.stack([torch.as_tensor(metric).detach().double() for metric in metrics])


SETTINGS = dict(entropy_coefficient=0.3, value_coefficient=0.7, clip=0.3)


@pytest.mark.parametrize("name", ["plain", "optional", "mixed"])
def test_loss_gradients_and_metrics_are_those_of_the_formulas(name):
    agent = make_agent(name, **SETTINGS)
    rollout = rollout_of(collect(agent, forced_env=2))
    scored = agent.policy.evaluate(steps_of(rollout))
    torch.manual_seed(0)
    has_choice = scored.num_choices > 1
    moved = scored.log_probs + torch.where(has_choice, torch.randn(has_choice.shape), 0.0)
    leaves = (moved, scored.entropies, scored.normalized_entropies, scored.values)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    weights = torch.linspace(0.2, 1.0, has_choice.shape[-1])

    found = plain_loss(Evaluation(*leaves, *scored[4:]), rollout, weights, agent.config)
    sums, counts = found.measured
    expected, metrics = loss_by_hand(
        Evaluation(*exact, *scored[4:]), rollout, weights, agent.config
    )
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close((sums / counts).double(), metrics, rtol=1e-5, atol=1e-6)
    assert 0.2 < metrics[3] < 0.9  # of the ratios are clipped, on both sides, for good and bad
    if name != "mixed":  # where a number is always free to choose
        assert metrics[5] < 1.0  # the forced env decides nothing
    differentiable = (0, 2, 3)  # not the entropies in nats
    got = torch.autograd.grad(found.roots, [leaves[i] for i in differentiable])
    wanted = torch.autograd.grad(expected, [exact[i] for i in differentiable])
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),  # by hand, with clip 0.2; slope: d loss / d log ratio
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),  # good, and far enough already
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),  # bad, and far enough already
    ],
)
def test_a_ratio_is_clipped_only_where_the_step_is_far_enough_already(
    ratio, advantage, loss, slope
):
    agent = make_agent("plain", value_coefficient=0.0)
    rollout = rollout_of(collect(agent, (1,)))
    rollout = replace(rollout, advantages=torch.full_like(rollout.advantages, advantage))
    evaluation = agent.policy.evaluate(steps_of(rollout))
    log_probs = rollout.log_probs.clone()
    log_probs[..., 0] += math.log(ratio)
    evaluation = evaluation._replace(
        log_probs=log_probs.requires_grad_(), num_choices=torch.full((1, 1, 3), 2.0)
    )
    got = plain_loss(evaluation, rollout, torch.ones(3), agent.config)
    got.backward()
    assert got.loss.item() == pytest.approx(loss, rel=1e-5)
    assert log_probs.grad[0, 0].tolist() == pytest.approx([slope] * 3, rel=1e-5)


def test_an_update_learns_from_the_gradient_of_the_formulas():
    agent = make_agent("dependent", num_minibatches=1, ppo_epochs=1, max_grad_norm=1e9,
                       head_entropy_weights={"slot": 0.5}, **SETTINGS)  # fmt: skip
    buffer = collect(agent, forced_env=2)
    chosen = buffer.log_probs < 0  # as from an older policy: some ratios are clipped
    buffer.log_probs[chosen] += 0.4 * torch.randn(int(chosen.sum()))
    before = copy.deepcopy(agent.policy)
    kept = KeepGradients(agent)
    with pytest.warns(UserWarning, match="first_ratio_error"):
        metrics = agent.update(buffer)

    rollout = rollout_of(buffer)
    returns = rollout.returns[rollout.valid].double()
    scaled = (rollout.returns.double() - returns.mean()) / returns.std(correction=0)
    rollout = replace(rollout, targets=scaled)
    loss, expected = loss_by_hand(
        before.evaluate(steps_of(rollout)), rollout, [1.0, 0.5, 1.0, 1.0], agent.config
    )
    measured = [metrics[name] for name in loss_names(before.action_space)]
    assert measured == pytest.approx(expected.tolist(), abs=1e-5)
    torch.testing.assert_close(kept.steps[0], gradients_of(loss, before), rtol=1e-4, atol=1e-6)


# -- rows that must not count ---------------------------------------------------------------------

CASES = [
    dict(space="dependent"),
    dict(space="mixed", layers=2, floor=0.1),
    dict(space="plain", images=((3, 7, 7),)),
    dict(space="tamiyo", memory=False),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_minibatches", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_what_rows_without_a_step_hold_changes_no_gradient(case, num_minibatches, device):
    first, second = (
        make_agent(**case, device=device, num_minibatches=num_minibatches, ppo_epochs=2)
        for _ in range(2)
    )
    kept, expected = KeepGradients(first), KeepGradients(second)
    clean, spoilt = collect(second, (9, 0, 12, 4)), collect(second, (9, 0, 12, 4))
    fill_empty_rows(spoilt)
    metrics = [
        agent.update(buffer, generator=torch.Generator().manual_seed(0))
        for agent, buffer in ((first, spoilt), (second, clean))
    ]
    close = 0.0 if device == "cpu" else 1e-5  # a GPU may sum in another order
    assert metrics[0] == pytest.approx(metrics[1], rel=close, abs=close)
    assert metrics[0]["update_undone"] == 0.0
    assert len(kept.steps) == len(expected.steps) >= 2
    torch.testing.assert_close(kept.steps, expected.steps, rtol=close, atol=close)
    states = [agent.state_dict()["policy"] for agent in (first, second)]
    torch.testing.assert_close(*map(dict, states), rtol=close, atol=close)  # with the scales


@pytest.mark.parametrize("case", CASES)
def test_a_tail_of_as_many_empty_rows_changes_no_metric_and_is_reported_once(case, capsys):
    agents = [make_agent(**case, ppo_epochs=3) for _ in range(2)]
    for rng_seed in range(2):
        buffers = [collect(agents[0], (9, 9, 9, 9), rng_seed=rng_seed) for _ in agents]
        append_empty_rows(buffers[1], 9)
        metrics, printed = [], []
        for agent, buffer in zip(agents, buffers, strict=True):
            generator = torch.Generator().manual_seed(0)
            metrics.append(agent.update(buffer, generator=generator))
            printed.append(capsys.readouterr().out)
        for found in metrics:  # itself a rounding error, which depends on the number of rows
            assert found.pop("first_ratio_error") < 1e-4
        assert metrics[1] == pytest.approx(metrics[0], abs=2e-6, rel=1e-5, nan_ok=True)
        assert printed[0] == ""
        assert ("50% of the rollout's rows hold no step" in printed[1]) == (rng_seed == 0)


@pytest.mark.parametrize("case", CASES)
def test_an_episode_gives_the_same_loss_and_gradients_alone_as_inside_a_rollout(case):
    agent = make_agent(**case, **SETTINGS)
    policy = agent.policy
    rollout = rollout_of(collect(agent, (9, 4, 12)))
    weights = torch.ones(policy.action_space.num_heads)
    with torch.no_grad():
        rollout.log_probs.sub_(0.3 * torch.rand_like(rollout.log_probs))
    episodes = [e for e in episodes_of(rollout) if len(e[2].valid) > 1]
    assert len(episodes) > 3
    for rows, env, alone in episodes:
        counted = torch.zeros_like(rollout.valid)
        counted[rows, env] = True
        inside = replace(rollout, valid=counted, is_full=False)
        found, expected = (loss_of(agent, part, weights) for part in (inside, alone))
        torch.testing.assert_close(found.measured, expected.measured, rtol=1e-5, atol=1e-5)
        gradients = [gradients_of(part, policy) for part in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_metrics_of_uneven_minibatches_are_weighted_by_their_rows():
    def metrics_with(num_minibatches, **settings):
        agent = make_agent("optional", num_minibatches=num_minibatches, ppo_epochs=1, **settings)
        buffer = collect(agent, (9, 2, 0, 12, 5), forced_env=4)
        kept = KeepGradients(agent)
        metrics = agent.update(buffer, generator=torch.Generator().manual_seed(0))
        for name in ("loss", "gradient_norm", "first_ratio_error"):  # not means over steps
            del metrics[name]
        return metrics, len(kept.steps)

    expected, num_steps = metrics_with(1)
    assert num_steps == 1
    for num_minibatches, expected_steps in ((2, 2), (5, 4), (99, 4)):
        metrics, num_steps = metrics_with(num_minibatches)
        assert num_steps == expected_steps  # one for each env with steps at most
        assert metrics == pytest.approx(expected, abs=1e-5)


# -- scales of features and values ----------------------------------------------------------------


def test_normalizers_use_stored_rows_only():
    agent = make_agent("plain")
    buffer = collect(agent)
    fill_empty_rows(buffer)
    agent.update(buffer)
    rows = buffer.states[buffer.valid_mask].double()
    scales = agent.policy.heads.scales
    torch.testing.assert_close(scales.mean, rows.mean(dim=0))
    torch.testing.assert_close(scales.variance, rows.var(dim=0, correction=0))
    returns = buffer.returns[buffer.valid_mask].double()
    torch.testing.assert_close(agent.value_normalizer.mean[0], returns.mean())
    assert agent.value_normalizer.count == len(buffer)


def observation(agent, dtype=torch.float32):
    """Features, masks and a recurrent state of four envs."""
    rng = torch.Generator().manual_seed(7)
    features = random_features(agent.policy, NUM_ENVS, rng).to(dtype)
    state = RecurrentState(*torch.randn(2, NUM_ENVS, 1, 8, generator=rng).to(dtype))
    return features, ActionMasks.all_legal(agent.policy.action_space, NUM_ENVS), state


def test_values_are_returned_in_units_of_the_reward_and_kept_when_their_scale_changes():
    agent = make_agent("plain", ppo_epochs=1, normalize_features=False)
    KeepGradients(agent)  # nothing changes but what scaling changes
    features, masks, state = observation(agent)
    values = agent.value(features, state)
    for number, scale in enumerate((1.0, 100.0, 1e-3)):
        buffer = collect(agent, rng_seed=number)
        buffer.rewards.mul_(scale)
        agent.update(buffer)
        if number == 0:
            # the first statistics are applied as they are: a new critic predicts the mean return
            returns = buffer.returns[buffer.valid_mask]
            values = values * returns.std(correction=0) + returns.mean()
        torch.testing.assert_close(agent.value(features, state), values, rtol=1e-4, atol=1e-3)
        decision = agent.act(features, masks, state)
        torch.testing.assert_close(decision.values, values, rtol=1e-4, atol=1e-3)
        assert agent.value_normalizer.std > (10 if number else 0)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**10])
def test_what_is_learned_does_not_depend_on_the_scale_of_rewards(scale):
    def learned(scale):
        torch.manual_seed(0)
        policy = flat_policy(SPACES["plain"], NUMBERS, PolicyConfig(lstm_hidden_dim=8))
        agent = PPOAgent(policy, PPOConfig(num_minibatches=2))
        for rng_seed in range(4):
            buffer = collect(agent, rng_seed=rng_seed)
            buffer.rewards.mul_(scale)
            buffer.bootstrap_values.mul_(scale)
            agent.update(buffer, generator=torch.Generator().manual_seed(rng_seed))
        return agent.policy.state_dict()

    plain = learned(1.0)
    for name, weight in learned(scale).items():
        torch.testing.assert_close(weight, plain[name], rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("name", ["plain", "dependent"])
def test_a_new_mean_of_features_does_not_change_what_the_policy_makes_of_an_observation(name):
    agent = make_agent(name)
    agent.policy.double()
    features, masks, state = observation(agent, torch.float64)
    spread = torch.randn(50, NUMBERS, dtype=torch.float64)
    spread = (spread - spread.mean(dim=0)) / spread.std(dim=0, correction=0)
    agent.policy.heads.update_scales(spread * 3 + 1)

    def made():
        decision = agent.act(features, masks, state, deterministic=True)
        return decision.log_probs, decision.values, agent.value(features, state), *decision.state

    before = made()
    # as many rows again, their mean elsewhere, their spread such that the scale of all stays at 3
    distance = torch.tensor([3.0, -3.0, 1.0, 0.0, 4.0], dtype=torch.float64)
    agent.policy.heads.update_scales(spread * (9 - distance.square() / 2).sqrt() + 1 + distance)
    scales = agent.policy.heads.scales
    torch.testing.assert_close(scales.mean, 1 + distance / 2)
    torch.testing.assert_close(scales.std, torch.full_like(distance, 3))
    for old, new in zip(before, made(), strict=True):
        torch.testing.assert_close(new, old, check_dtype=False, rtol=1e-6, atol=1e-6)


def test_the_first_statistics_move_what_the_encoder_reads_and_later_ones_only_scale_it():
    agent = make_agent("plain", ppo_epochs=1)
    KeepGradients(agent)  # nothing changes but what scaling changes
    scales, encoder = agent.policy.heads.scales, agent.policy.heads.encoder
    features, _, _ = observation(agent)
    for number in range(3):
        weight, bias = (p.detach().clone().double() for p in encoder.parameters())
        old_mean = scales.mean.clone()
        agent.update(collect(agent, rng_seed=number))
        assert (scales.mean - old_mean).abs().min() > 1e-3
        middle = scales.mean if number == 0 else old_mean
        expected = torch.tanh((features - middle) / scales.std @ weight.T + bias)
        encoded = agent.policy.heads.encode(features)[0].detach()
        torch.testing.assert_close(encoded.double(), expected, rtol=1e-5, atol=1e-5)


def test_running_statistics_do_not_depend_on_how_rows_arrive_and_survive_a_file():
    rows = torch.randn(100, 3, dtype=torch.float64) * 5 + 7
    normalizer, loaded = RunningNormalizer(3), RunningNormalizer(3)
    tensors = normalizer.center, normalizer.scale, normalizer.bound
    assert torch.equal(normalizer.normalize(rows), rows)  # no statistics yet, no limit
    for piece in rows.split([1, 9, 50, 0, 40]):
        normalizer.update(piece)
    torch.testing.assert_close(normalizer.mean, rows.mean(dim=0))
    torch.testing.assert_close(normalizer.variance, rows.var(dim=0, correction=0))
    loaded.load_state_dict(normalizer.state_dict())
    expected = (rows - rows.mean(dim=0)) / rows.std(dim=0, correction=0)
    for scaled in (normalizer.normalize(rows), loaded.normalize(rows)):
        torch.testing.assert_close(scaled, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loaded.denormalize(expected), rows, rtol=1e-5, atol=1e-5)
    assert (loaded.normalize(rows + 1e6) == 10.0).all()  # far outliers are clipped
    now = normalizer.center, normalizer.scale, normalizer.bound
    assert all(a is b for a, b in zip(now, tensors, strict=True))  # they change in place


# -- when it goes wrong ---------------------------------------------------------------------------


def assert_same_state(agent, before):
    after = agent.state_dict()
    for key in ("policy", "value_normalizer"):
        for name, tensor in before[key].items():
            assert torch.equal(after[key][name], tensor), name
    for index, moments in before["optimizer"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(after["optimizer"]["state"][index][name], tensor), name


@pytest.mark.parametrize("rng_seed", range(6))  # the bad env is in the first minibatch or the last
def test_an_update_that_is_not_finite_is_undone_and_the_run_stops_after_several(rng_seed):
    agent = make_agent("plain", max_failed_updates=2, rng_seed=rng_seed)
    agent.update(collect(agent))
    before = copy.deepcopy(agent.state_dict())
    buffer = collect(agent, rng_seed=1)
    buffer.log_probs[0, 0] = -3e38  # its ratio is not finite
    settings = dict(generator=torch.Generator().manual_seed(rng_seed))
    assert agent.update(buffer, **settings)["update_undone"] == 1.0
    assert agent.failed_updates == 1
    assert_same_state(agent, before)
    with pytest.raises(TrainingFailed, match="2 updates in a row"):
        agent.update(buffer, **settings)
    assert_same_state(agent, before)
    agent.failed_updates = 0
    assert agent.update(collect(agent, rng_seed=2))["update_undone"] == 0.0


@pytest.mark.parametrize("device", DEVICES)
def test_an_illegal_stored_action_is_named_and_leaves_the_agent_as_it_was(device):
    agent = make_agent("plain", device=device, num_minibatches=3)
    agent.update(collect(agent))
    before = copy.deepcopy(agent.state_dict())
    buffer = collect(agent, rng_seed=1)
    buffer.actions[3, 5, 1] = 77
    with pytest.raises(ValueError, match="env 3, step 5, head 'b': action 77 is not legal"):
        agent.update(buffer)
    assert_same_state(agent, before)


def test_ratios_that_are_not_one_before_the_first_step_warn_once():
    agent = make_agent("plain", ppo_epochs=1)
    buffer = collect(agent)
    assert bool((buffer.terminated | buffer.truncated).any())
    for field in (buffer.terminated, buffer.truncated, buffer.bootstrap_values):
        field.zero_()  # as if no episode had ended
    with pytest.warns(UserWarning, match="first_ratio_error.*not reset.*masks.*features") as caught:
        errors = [agent.update(buffer)["first_ratio_error"] for _ in range(2)]
    assert min(errors) > FIRST_RATIO_TOLERANCE
    assert len(caught) == 1


def test_an_empty_rollout_is_an_error():
    agent = make_agent("plain")
    buffer = collect(agent)
    buffer.reset()
    with pytest.raises(ValueError, match="no steps"):
        agent.update(buffer)


# -- settings -------------------------------------------------------------------------------------


def test_gradients_are_clipped_to_their_norm():
    agent = make_agent("plain", num_minibatches=1, ppo_epochs=1, max_grad_norm=1e-3)
    kept = KeepGradients(agent)
    metrics = agent.update(collect(agent))
    norm = torch.stack([gradient.norm() for gradient in kept.steps[0]]).norm()
    assert metrics["gradient_norm"] > 1e-2
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("target_kl", "is_stopped"), [(0.01, True), (None, False)])
def test_the_passes_stop_when_the_policy_has_moved_far_enough(target_kl, is_stopped):
    agent = make_agent("plain", ppo_epochs=10, learning_rate=0.05, target_kl=target_kl)
    kept = agent.update(collect(agent))
    assert (kept["ppo_epochs_run"] < 10) == is_stopped
    assert kept["kl"] > 0.0


def test_schedules_scale_the_learning_rate_and_the_entropy_bonus():
    def weights_after(progress, **settings):
        agent = make_agent("dependent", **settings)
        rate = agent.update(
            collect(agent), progress=progress, generator=torch.Generator().manual_seed(0)
        )["learning_rate"]
        return rate, torch.cat([weight.detach().flatten() for weight in agent.policy.parameters()])

    constant = dict(learning_rate=0.002, learning_rate_schedule="constant")
    linear = dict(learning_rate=0.008, learning_rate_schedule="linear")
    entropy = dict(entropy_coefficient=0.1)
    falling_entropy = dict(entropy_coefficient=0.4, entropy_schedule="linear")
    rate, expected = weights_after(0.0, **constant, **entropy)
    assert rate == pytest.approx(0.002)
    for settings in (dict(**constant, **falling_entropy), dict(**linear, **falling_entropy)):
        rate, weights = weights_after(0.75, **settings)
        assert rate == pytest.approx(0.002)
        torch.testing.assert_close(weights, expected)
    _, weights = weights_after(0.0, **constant, **falling_entropy)
    assert not torch.allclose(weights, expected)
    with pytest.raises(ValueError, match=r"progress=1\.5"):
        weights_after(1.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(clip=0.0), "clip=0.0"),
        (dict(learning_rate=lambda _: 1e-3), "learning_rate=<function.*; use a finite number"),
        (dict(gamma=1.5), "gamma=1.5"),
        (dict(ppo_epochs=0), "ppo_epochs=0"),
        (dict(head_entropy_weights={"mvoe": 1.0}), "no head 'mvoe'"),
        (dict(target_kl=-1.0), "target_kl=-1.0"),
        (dict(entropy_coefficient=math.nan), "entropy_coefficient=nan"),
        (dict(learning_rate_schedule="cosine"), "learning_rate_schedule='cosine'"),
        (dict(entropy_schedule="cosine"), "entropy_schedule='cosine'"),
    ],
)
def test_mistakes_in_the_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        make_agent("plain", **settings)


@pytest.mark.gpu
def test_a_pass_waits_once_for_the_device_and_a_minibatch_never():
    def waits(**settings):
        agent = make_agent(
            "dependent", device="cuda", target_kl=None, learning_rate=1e-5, **settings
        )
        for _ in range(2):  # the first compiles and allocates
            buffer = collect(agent)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                agent.update(buffer)
                torch.cuda.set_sync_debug_mode("default")
        return len([w for w in caught if "synchronizing" in str(w.message)])

    once = waits(ppo_epochs=2, num_minibatches=1)
    assert waits(ppo_epochs=2, num_minibatches=4) == once
    assert waits(ppo_epochs=5, num_minibatches=4) == once + 3


# -- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_captured_agent_learns_what_an_eager_one_learns_also_from_other_weights(case):
    captured, eager = (make_agent(**case, device="cuda", num_minibatches=3) for _ in range(2))
    eager.graphs = None
    other = make_agent(**case, device="cuda")
    with torch.no_grad():
        for parameter in other.policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for weights in (None, other.state_dict(), None):
        for agent in (captured, eager):
            if weights is not None:
                agent.load_state_dict(copy.deepcopy(weights))
        buffer = collect(eager, (9, 0, 12, 4, 7, 12))
        metrics = [
            agent.update(buffer, generator=torch.Generator().manual_seed(0))
            for agent in (captured, eager)
        ]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-6, nan_ok=True)
        states = [dict(agent.state_dict()["policy"]) for agent in (captured, eager)]
        torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)
    assert captured.graphs is not None  # nothing fell back to single operations


@pytest.mark.gpu
def test_an_encoder_that_waits_for_the_gpu_runs_without_graphs_and_says_so(capsys):
    class Waits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(NUMBERS, 8)

        def forward(self, numbers):
            return self.linear(numbers) * float(numbers.sum() * 0 + 1)

    config = PolicyConfig(lstm_hidden_dim=8)
    policy = flat_policy(SPACES["plain"], NUMBERS, config, encoder=Waits())
    agent = PPOAgent(policy.to("cuda"), PPOConfig(ppo_epochs=1))
    metrics = agent.update(collect(agent, (9, 4)))
    assert metrics["update_undone"] == 0.0
    assert "learning cannot be captured as a CUDA graph, so it is slower" in capsys.readouterr().out
