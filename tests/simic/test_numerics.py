"""One table of agents, and what must hold for each: acting, scoring and learning agree."""

import copy

import pytest
import torch

from esper.simic.agent.ppo import steps_of
from esper.tamiyo.policy.distributions import draw_noise
from esper.tamiyo.policy.network import RecurrentState, full_precision
from support.agents import (
    SmallEncoder,
    collect,
    episodes_of,
    make_agent,
    random_features,
    random_frames,
    random_masks,
    rollout_of,
)

FEW = (9, 4, 0, 12, 11)
MANY = (6, *[4] * 20, 7, 3, 5)  # from 20 envs on, torch multiplies in the compiled LSTM
PICTURE = (3, 7, 7)
TABLE = {  # the agent, and the lengths of its rollout's rows
    "plain": (dict(space="plain"), FEW),
    "plain, 2 layers, many envs": (dict(space="plain", layers=2), MANY),
    "plain, 128 units, floor": (dict(space="plain", hidden=128, floor=0.1), FEW),
    "plain, no memory": (dict(space="plain", memory=False), FEW),
    "dependent": (dict(space="dependent"), FEW),
    "dependent, 128 units, 2 layers, floor": (
        dict(space="dependent", hidden=128, layers=2, floor=0.05),
        FEW,
    ),
    "dependent, no memory": (dict(space="dependent", memory=False, floor=0.1), MANY),
    "continuous": (dict(space="continuous"), FEW),
    "continuous, no memory": (dict(space="continuous", memory=False), FEW),
    "mixed, many envs, floor": (dict(space="mixed", floor=0.1), MANY),
    "mixed, 2 layers": (dict(space="mixed", layers=2), FEW),
    "optional": (dict(space="optional"), FEW),
    "optional, floor": (dict(space="optional", hidden=20, floor=0.2), FEW),
    "pictures": (dict(space="plain", images=(PICTURE,)), FEW),
    "pictures, no memory": (dict(space="dependent", images=(PICTURE, PICTURE), memory=False), FEW),
    "custom encoder": (dict(space="mixed", encoder=SmallEncoder()), FEW),
    "Tamiyo": (dict(space="tamiyo", hidden=16), FEW),
    "Tamiyo, 2 layers, floor": (dict(space="tamiyo", hidden=16, layers=2, floor=0.02), MANY),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = [
    pytest.mark.parametrize("case", TABLE.values(), ids=TABLE),
    pytest.mark.parametrize("device", DEVICES),
]
CLOSE = dict(rtol=1e-5, atol=1e-5)


def new_agent(case, device, **settings):
    """The case's agent, and a rollout of it."""
    agent = make_agent(**case[0], device=device, **settings)
    return agent, collect(agent, case[1])


def weighted_sum(evaluation, valid):
    """A number that depends on all results for valid rows, each with another weight."""
    total = 0.0
    for result in (evaluation.log_probs, evaluation.normalized_entropies, evaluation.values):
        kept = result[valid]
        weights = torch.linspace(-1.0, 1.0, kept.numel(), device=kept.device)
        total = total + (weights.view(kept.shape) * kept).sum()
    return total


def assert_same_gradients(policy, expected, tolerance):
    for (name, parameter), wanted in zip(policy.named_parameters(), expected, strict=True):
        if wanted is None:  # the LSTM of a policy without memory
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        error = (parameter.grad - wanted).double().norm()
        assert error <= tolerance * (wanted.double().norm() + 1e-2), name


def test_evaluate_gives_what_act_gave_step_by_step(case, device):
    agent, buffer = new_agent(case, device)
    rollout = rollout_of(buffer)
    assert rollout.starts[rollout.valid].sum() > 3  # several episodes a row
    evaluation = agent.policy.evaluate(steps_of(rollout))
    valid = rollout.valid
    assert evaluation.is_scored[valid].all()
    torch.testing.assert_close(evaluation.log_probs[valid], rollout.log_probs[valid], **CLOSE)
    torch.testing.assert_close(evaluation.values[valid], rollout.values[valid], **CLOSE)
    assert (rollout.log_probs[valid] != 0).any(dim=0).all()  # every head chose something


def test_compiled_kernels_agree_with_plain_code_in_float64(case, device):
    agent, buffer = new_agent(case, device)
    fast = agent.policy
    plain = copy.deepcopy(fast).double()  # compiled kernels are for float32 only
    if plain.log_std is not None:
        plain.log_std.data = plain.log_std.data.float()  # distributions compute in float32
    rng = torch.Generator().manual_seed(1)
    num_envs = len(case[1])
    state = fast.initial_state(num_envs)
    states = [state, RecurrentState(state.h.double(), state.c.double())]
    for step in range(4):
        features = random_features(fast, num_envs, rng).to(device)
        frames = random_frames(fast, num_envs, rng).to(device)
        masks = random_masks(fast.action_space, num_envs, rng).to(device)
        noise = draw_noise(fast.action_space, (num_envs,), agent.device) if step else None
        settings = dict(frames=frames, noise=noise, deterministic=noise is None)
        mine = fast.act(features, masks, states[0], **settings)
        theirs = plain.act(features.double(), masks, states[1], **settings)
        assert torch.equal(mine.masks, theirs.masks)
        for got, expected in zip(mine[:2] + mine[3:4], theirs[:2] + theirs[3:4], strict=True):
            torch.testing.assert_close(got.double(), expected.double(), **CLOSE)
        states = [mine.state, theirs.state]
        torch.testing.assert_close(mine.state.h.double(), theirs.state.h, **CLOSE)

    rollout = rollout_of(buffer)
    steps = steps_of(rollout)
    doubles = steps._replace(
        features=steps.features.double(),
        initial=RecurrentState(*(part.double() for part in steps.initial)),
    )
    for policy, given in ((fast, steps), (plain, doubles)):
        with full_precision(agent.device):
            weighted_sum(policy.evaluate(given), rollout.valid).backward()
    assert_same_gradients(fast, [p.grad for p in plain.parameters()], 1e-4)


def test_a_rollout_scores_like_its_episodes_one_by_one(case, device):
    agent, buffer = new_agent(case, device)
    rollout = rollout_of(buffer)
    policy = agent.policy
    together = policy.evaluate(steps_of(rollout))
    alone = [torch.zeros_like(result) for result in together]
    for rows, env, episode in episodes_of(rollout):
        scored = policy.evaluate(steps_of(episode))
        for results, result in zip(alone, scored, strict=True):
            results[rows, env] = result[:, 0]
    alone = type(together)(*alone)
    for result, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(result[rollout.valid], expected[rollout.valid], **CLOSE)
    with full_precision(agent.device):
        weighted_sum(alone, rollout.valid).backward()
        expected = [parameter.grad for parameter in policy.parameters()]
        policy.zero_grad()
        weighted_sum(together, rollout.valid).backward()
    assert_same_gradients(policy, expected, 1e-4)


def test_all_ratios_are_one_before_the_first_optimizer_step(case, device):
    agent, buffer = new_agent(case, device, ppo_epochs=1, num_minibatches=1)
    for number in range(3):  # also once normalisers have changed
        assert agent.update(buffer)["first_ratio_error"] < 2e-5
        buffer = collect(agent, case[1], rng_seed=number + 1)
