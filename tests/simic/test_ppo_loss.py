"""The compiled loss and its gradients are those of its plain twin, for every kind of head."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.simic.agent.ppo import steps_of
from esper.simic.agent.ppo_loss import plain_loss, ppo_loss
from support.agents import SPACES, collect, make_agent, rollout_of

SETTINGS = dict(entropy_coefficient=0.3, value_coefficient=0.7, clip=0.3)


def both_losses(agent, rollout, outputs, entropy_weights, counts=None):
    """The loss by the kernel and by its twin, with gradients for outputs and log_std."""
    policy = agent.policy
    outputs = type(outputs)(*(part.detach().requires_grad_() for part in outputs))
    inputs = [*outputs] + ([] if policy.log_std is None else [policy.log_std])
    steps = steps_of(rollout)
    settings = (rollout, entropy_weights, agent.config, counts)
    compiled = ppo_loss(policy, outputs, steps, *settings)
    plain = plain_loss(policy.score(outputs, steps), *settings)
    return [
        (part, torch.autograd.grad(part.roots, inputs, part.gradients, materialize_grads=True))
        for part in (compiled, plain)
    ]


def assert_same(compiled, plain):
    torch.testing.assert_close(compiled[0].loss, plain[0].loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled[0].measured, plain[0].measured, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(compiled[0].ratio_error, plain[0].ratio_error, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(compiled[1], plain[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(SPACES)),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 1000),
    st.floats(0, 3),
)
def test_the_kernel_gives_the_loss_and_the_gradients_of_its_plain_twin(name, floor, seed, spread):
    agent = make_agent(name, floor=floor, **SETTINGS)
    torch.manual_seed(seed)
    rollout = rollout_of(collect(agent, (9, 4, 0, 12), forced_env=3))
    moved = torch.where(rollout.log_probs < 0, 0.3 * torch.randn(rollout.log_probs.shape), 0.0)
    rollout = replace(rollout, log_probs=rollout.log_probs + moved)
    if agent.policy.log_std is not None:  # one outside of the bounds, where the gradient is 0
        agent.policy.log_std.data.copy_(torch.linspace(-1.0, 2.5, len(agent.policy.log_std)))
    with torch.no_grad():
        outputs = agent.policy.outputs(steps_of(rollout))
    outputs = outputs._replace(logits=outputs.logits + spread * torch.randn(outputs.logits.shape))
    weights = torch.linspace(0.2, 1.0, agent.policy.action_space.num_heads)
    assert_same(*both_losses(agent, rollout, outputs, weights))


@pytest.mark.parametrize("name", list(SPACES))
def test_losses_gradients_and_metrics_of_parts_add_up_to_those_of_the_whole(name):
    agent = make_agent(name, **SETTINGS)
    rollout = rollout_of(collect(agent, (9, 4, 0, 12), forced_env=3))
    weights = torch.linspace(0.2, 1.0, agent.policy.action_space.num_heads)

    def measured(part, counts=None):
        with torch.no_grad():
            outputs = agent.policy.outputs(steps_of(part))
        losses = both_losses(agent, part, outputs, weights, counts)
        assert_same(*losses)
        compiled, (to_logits, to_values, *to_log_std) = losses[0]
        return [compiled.loss, compiled.measured, *to_log_std], [to_logits, to_values]

    sums, gradients = measured(rollout)
    counts = (int(sums[1][1, 0]), int(sums[1][1, 1]))
    assert counts[0] >= counts[1] > 0
    # the second has no step, the third no choice, except of numbers
    parts = [rollout.of_envs(torch.tensor(envs)) for envs in ([0, 1], [2], [3])]
    of_parts = [measured(part, counts) for part in parts]
    for whole, *some in zip(sums, *(found[0] for found in of_parts), strict=True):
        torch.testing.assert_close(sum(some), whole, rtol=1e-5, atol=1e-5)
    for whole, *some in zip(gradients, *(found[1] for found in of_parts), strict=True):
        torch.testing.assert_close(torch.cat(some, dim=1), whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 2e29, -3e38, math.nan])
@pytest.mark.parametrize("name", ["optional", "mixed"])
def test_logits_without_bounds_are_treated_as_by_the_plain_twin(name, value):
    agent = make_agent(name, **SETTINGS)
    rollout = rollout_of(collect(agent, (9, 4)))
    with torch.no_grad():
        outputs = agent.policy.outputs(steps_of(rollout))
    number = agent.policy.action_space.continuous
    column = agent.policy.action_space.slices[number[0]].start if number else 0
    outputs.logits[3, 0, column] = value
    weights = torch.ones(agent.policy.action_space.num_heads)
    (compiled, _), (plain, _) = both_losses(agent, rollout, outputs, weights)
    torch.testing.assert_close(compiled.loss, plain.loss, rtol=1e-4, atol=1e-4, equal_nan=True)
    # an update whose loss is not finite is undone
    assert compiled.measured[0, 0].isfinite() == plain.measured[0, 0].isfinite()


def test_a_row_that_decides_nothing_trains_the_critic_only():
    agent = make_agent("plain", **SETTINGS)
    rollout = rollout_of(collect(agent, (5,), forced_env=0))
    with torch.no_grad():
        outputs = agent.policy.outputs(steps_of(rollout))
    ((_, (to_logits, to_values)), _) = both_losses(agent, rollout, outputs, torch.ones(3))
    assert (to_logits == 0).all()
    errors = outputs.values - rollout.targets
    torch.testing.assert_close(to_values, 0.7 * errors / 5)


@pytest.mark.parametrize("frozen", ["log_std", "all but log_std"])
def test_frozen_weights_stay_and_the_others_learn(frozen):
    agent = make_agent("mixed", num_minibatches=1)
    for name, parameter in agent.policy.named_parameters():
        parameter.requires_grad_((name == "log_std") == (frozen == "all but log_std"))
    before = {name: value.clone() for name, value in agent.policy.named_parameters()}
    assert agent.update(collect(agent, (9, 4)))["update_undone"] == 0.0
    for name, parameter in agent.policy.named_parameters():
        assert torch.equal(parameter, before[name]) or parameter.requires_grad, name


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("action", [10**11, 77, -3])
def test_a_stored_action_that_is_no_index_is_refused(action, floor):
    agent = make_agent("plain", floor=floor)
    buffer = collect(agent, (5, 5))
    buffer.actions[0, 2, 0] = action
    with pytest.raises(ValueError, match=f"env 0, step 2, head '.*': action {action} is not legal"):
        agent.update(buffer)
