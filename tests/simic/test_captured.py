"""Updates with CUDA graphs: equal to those without, and only where layouts come up often."""

import copy

import pytest
import torch

from esper.leyline.sequences import SequenceLayout
from esper.simic.agent import captured
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, TamiyoRolloutStep
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.feature_scales import RunningNormalizer
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.policy.plain_heads import flat_policy
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from support.random_reports import random_reports

NUM_ENVS, NUM_STEPS = 8, 5
LAYOUT = FeatureLayout(3, 8)


def tamiyo(config):
    return tamiyo_policy(LAYOUT, config)


def plain(config):
    return flat_policy(tamiyo(config).action_space, LAYOUT.width, config)


def make_agent(new_policy, **settings):
    torch.manual_seed(0)
    policy = new_policy(PolicyConfig(lstm_hidden_dim=16))
    settings = {"num_minibatches": 2, "ppo_epochs": 3, "target_kl": None} | settings
    return PPOAgent(policy.to("cuda"), PPOConfig(**settings))


def full_rows(agent, rng_seed):
    """A rollout of one unfinished episode for each env, as in growth training."""
    space = agent.policy.action_space
    generator = torch.Generator("cuda").manual_seed(rng_seed)
    buffer = TamiyoRolloutBuffer(NUM_ENVS, NUM_STEPS, LAYOUT.width, space, 16, 1, "cuda")
    state = agent.policy.initial_state(NUM_ENVS)
    no = torch.zeros(NUM_ENVS, dtype=torch.bool)
    for step in range(NUM_STEPS):
        reports = random_reports(NUM_ENVS, rng_seed=100 * rng_seed + step)
        features = LAYOUT.features(reports).cuda()
        masks = compute_batch_masks(reports, space).to("cuda")
        decision = agent.act(features, masks, state, generator=generator)
        rewards = torch.rand(NUM_ENVS, generator=generator, device="cuda") * (1 + rng_seed)
        buffer.add_batch(
            TamiyoRolloutStep(features, decision.actions, decision.log_probs, decision.masks,
                              decision.values, rewards, no, no, None, state.h, state.c)
        )  # fmt: skip
        state = decision.state
    return buffer, agent.value(features, state)


@pytest.mark.gpu
@pytest.mark.parametrize("new_policy", [tamiyo, plain])
def test_updates_with_graphs_equal_updates_without(monkeypatch, new_policy):
    """Also after the weights, the scales of features and values, and the schedules changed."""
    monkeypatch.setattr(captured, "OFTEN", 3)
    settings = {"entropy_coefficient": 0.05, "entropy_schedule": "linear"}
    with_graphs, without = make_agent(new_policy, **settings), make_agent(new_policy, **settings)
    without.captured = None
    for number in range(4):
        buffer, last_values = full_rows(without, number)
        found, expected = (
            agent.update(
                buffer,
                last_values,
                progress=number / 4,
                generator=torch.Generator().manual_seed(number),
            )
            for agent in (with_graphs, without)
        )
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)
        weights = zip(with_graphs.policy.parameters(), without.policy.parameters(), strict=True)
        for mine, theirs in weights:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        if number == 2:  # loaded weights are in the same place
            for agent in (with_graphs, without):
                agent.load_state_dict(copy.deepcopy(without.state_dict()))
    assert len(with_graphs.captured.graphs) == 1


@pytest.mark.gpu
def test_bad_rollouts_are_found_where_graphs_are_replayed(monkeypatch):
    monkeypatch.setattr(captured, "OFTEN", 1)
    agent = make_agent(tamiyo)
    agent.update(*full_rows(agent, 0))
    assert agent.captured.graphs
    before = copy.deepcopy(agent.policy.state_dict())
    buffer, last_values = full_rows(agent, 1)
    buffer.fields["log_probs"][0, 0] = -3e38  # its ratio is not finite
    assert agent.update(buffer, last_values)["update_undone"] == 1.0
    buffer, last_values = full_rows(agent, 2)
    buffer.fields["masks"][3, 2, :] = False
    buffer.fields["masks"][3, 2, 1] = True
    buffer.fields["actions"][3, 2, 0] = 0
    with pytest.raises(ValueError, match="env 3, step 2.*'op': action 0 is not legal"):
        agent.update(buffer, last_values)
    for name, tensor in before.items():
        assert torch.equal(agent.policy.state_dict()[name], tensor), name


@pytest.mark.gpu
def test_the_oldest_of_many_graphs_is_dropped(monkeypatch):
    monkeypatch.setattr(captured, "OFTEN", 1)
    monkeypatch.setattr(captured, "MOST_GRAPHS", 1)
    agent = make_agent(plain, num_minibatches=3)  # minibatches of 3, 3 and 2 envs
    for number in range(2):
        assert agent.update(*full_rows(agent, number))["first_ratio_error"] < 1e-4
    assert len(agent.captured.graphs) == 1


@pytest.mark.gpu
def test_a_graph_that_is_garbage_does_not_end_the_next_capture(monkeypatch):
    monkeypatch.setattr(captured, "OFTEN", 1)
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    layout = SequenceLayout.from_flags(torch.zeros(2, 1, dtype=torch.bool), torch.ones(2).long())
    old: list[object] = []

    def compute(inputs, layout):
        if old:
            cycle: list[object] = [old.pop()]
            cycle.append(cycle)
            del cycle
            garbage = [[] for _ in range(20_000)]  # enough for Python to collect
            del garbage
        (weight * inputs[0]).sum().backward()
        return [weight.detach() * 2]

    one, other = (captured.Captured(compute, [weight]) for _ in range(2))
    rows = torch.full((3,), 4.0, device="cuda")
    for gradients in (one, other, one):
        weight.grad = None
        gradients((rows,), layout)
    old.append(one.graphs.popitem()[1])
    weight.grad = None
    other((rows,), layout)
    assert not old
    assert weight.grad.tolist() == [4.0] * 3


def test_statistics_of_features_change_in_place():
    """A graph reads them where they were when it was captured."""
    scales, other = RunningNormalizer(3), RunningNormalizer(3)
    read = scales.center, scales.scale, scales.bound
    scales.update(torch.randn(9, 3) * 3 + 2)
    other.load_state_dict(scales.state_dict())
    rows = torch.randn(4, 3)
    assert torch.equal(scales.normalize(rows), other.normalize(rows))
    scales.load_state_dict(RunningNormalizer(3).state_dict())
    assert torch.equal(scales.normalize(rows), rows)
    for tensor, now in zip(read, (scales.center, scales.scale, scales.bound), strict=True):
        assert tensor is now
