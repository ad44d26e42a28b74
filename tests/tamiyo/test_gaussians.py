"""Continuous heads against torch.distributions in float64: scores, gradients, samples, masks."""

import math

import pytest
import torch
from torch.distributions import Categorical, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head
from esper.tamiyo.policy.distributions import (
    LegalChoices,
    MaskedFactoredCategorical,
    SquashedGaussians,
    choose_actions,
)
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.policy.plain_heads import flat_policy

SPACE = FactoredActionSpace(
    (
        Head("kind", 3),
        Head("speed", continuous=True),
        Head("target", 4, given=("kind",)),
        Head("aim", given=("kind",), continuous=True),
    )
)


def squashed(mean, log_std):
    """The oracle: tanh of a Gaussian, in float64."""
    return TransformedDistribution(Normal(mean.double(), log_std.double().exp()), [TanhTransform()])


def test_log_probs_and_gradients_equal_a_transformed_distribution():
    generator = torch.Generator().manual_seed(0)
    mean = (1.5 * torch.randn(200, 2, generator=generator)).requires_grad_()
    log_std = torch.tensor([-1.0, 0.3], requires_grad=True)
    samples = (mean + log_std.exp() * torch.randn(200, 2, generator=generator)).detach()
    mine = SquashedGaussians(mean, log_std, torch.ones(200, 2, dtype=torch.bool)).log_prob(samples)
    expected = squashed(mean, log_std).log_prob(samples.double().tanh())
    torch.testing.assert_close(mine.double(), expected, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(mine.sum(), (mean, log_std), retain_graph=True)
    wanted = torch.autograd.grad(expected.sum(), (mean, log_std))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_log_probs_are_finite_where_tanh_is_1_in_float32():
    gaussian = SquashedGaussians(torch.tensor([20.0]), torch.zeros(1), torch.tensor([True]))
    # log p = log N(0; 0, 1) - log(1 - tanh(20)^2), and 1 - tanh(u)^2 is 4 exp(-2u) up to rounding
    expected = -0.5 * math.log(2 * math.pi) - math.log(4) + 40
    assert gaussian.log_prob(torch.tensor([20.0])).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0])
@pytest.mark.parametrize("std", [0.01, 0.3, 1.0, 1.5])
def test_the_entropy_is_that_of_an_integral(mean, std):
    oracle = squashed(torch.tensor(mean), torch.tensor(std).log())
    points = torch.linspace(-8, 8, 40_001, dtype=torch.float64) * std + mean
    density = oracle.base_dist.log_prob(points).exp()
    # log p(a) is written out: the oracle inverts tanh, which loses all digits near 1
    slope = 2 * (math.log(2) - points - torch.nn.functional.softplus(-2 * points))
    expected = torch.trapezoid(-density * (oracle.base_dist.log_prob(points) - slope), points)
    inside = points.abs() < 4
    torch.testing.assert_close(
        oracle.log_prob(points.tanh())[inside],
        (oracle.base_dist.log_prob(points) - slope)[inside],
        rtol=1e-6,
        atol=1e-6,
    )
    gaussian = SquashedGaussians(
        torch.tensor([mean]), torch.tensor([std]).log(), torch.tensor([True])
    )
    assert gaussian.entropy().item() == pytest.approx(expected.item(), abs=1e-3)


def test_mixed_heads_add_up_to_the_joint_density():
    generator = torch.Generator().manual_seed(1)
    num_rows = 60
    logits = 2 * torch.randn(num_rows, SPACE.num_choices, generator=generator)
    log_std = torch.tensor([-0.5, 0.2])
    masks = torch.rand(num_rows, SPACE.num_choices, generator=generator) < 0.7
    masks[:, 0] = masks[:, 3] = True  # a legal kind, and speed is always used
    distribution = MaskedFactoredCategorical(SPACE, logits, masks, log_std=log_std)
    actions = distribution.sample(generator)
    log_probs, entropies = distribution.log_prob(actions), distribution.entropy()
    expected = torch.zeros(num_rows, dtype=torch.float64)
    for row in range(num_rows):
        for head in (0, 2):
            part, legal = SPACE.slices[head], masks[row, SPACE.slices[head]]
            if legal.any():
                choice = legal[: int(actions[row, head])].sum()
                assert legal[int(actions[row, head])]
                expected[row] += Categorical(logits=logits[row, part].double()[legal]).log_prob(
                    choice
                )
        for index, head in enumerate((1, 3)):
            column = SPACE.slices[head].start
            if masks[row, column]:
                oracle = squashed(logits[row, column], log_std[index])
                expected[row] += oracle.log_prob(actions[row, head].double().tanh())
    torch.testing.assert_close(log_probs.sum(-1).double(), expected, rtol=1e-4, atol=1e-4)
    unused = ~masks[:, SPACE.slices[3].start]
    assert 5 < unused.sum() < num_rows - 5
    for values in (actions, log_probs, entropies, distribution.normalize(entropies)):
        assert (values[unused, 3] == 0).all()
    widths = distribution.normalize(entropies)[:, 1]
    torch.testing.assert_close(widths, entropies[:, 1].exp() / 2)
    assert (widths > 0).all()
    assert (widths < 1).all()


def test_a_number_that_is_not_used_has_no_gradient():
    logits = torch.randn(50, SPACE.num_choices, requires_grad=True)
    log_std = torch.zeros(2, requires_grad=True)
    masks = torch.ones(50, SPACE.num_choices, dtype=torch.bool)
    masks[:, -1] = False
    distribution = MaskedFactoredCategorical(SPACE, logits, masks, log_std=log_std)
    actions = distribution.sample()
    score = (
        distribution.log_prob(actions).sum() + distribution.normalize(distribution.entropy()).sum()
    )
    of_logits, of_std = torch.autograd.grad(score, (logits, log_std))
    assert (of_logits[:, -1] == 0).all()
    assert (of_logits[:, 3] != 0).all()
    assert of_std[1] == 0
    assert of_std[0] != 0


def test_an_unused_number_leaves_nothing_to_decide():
    masks = torch.tensor([[1, 0, 0, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 1, 0, 0, 0, 0]]).bool()
    legal = LegalChoices.from_masks(masks, SPACE)
    assert legal.counts.tolist() == [[1, 2, 1, 0], [1, 0, 1, 0]]
    assert legal.has_choice.tolist() == [1.0, 0.0]


def test_samples_have_the_right_mean_and_spread_and_later_heads_their_mask_rows():
    masks = ActionMasks(
        SPACE,
        {
            "kind": torch.ones(20_000, 3, dtype=torch.bool),
            "speed": torch.ones(20_000, 1, dtype=torch.bool),
            "target": torch.ones(20_000, 3, 4, dtype=torch.bool),
            "aim": torch.tensor([[True], [False], [True]]).expand(20_000, 3, 1),
        },
    )
    columns = [0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0, -1.0]
    actions, log_probs, rows = choose_actions(
        SPACE,
        masks,
        lambda group, _: torch.tensor(columns[group]).expand(20_000, -1),
        generator=torch.Generator().manual_seed(2),
        log_std=torch.tensor([-1.0, 0.0]),
    )
    assert actions.dtype == torch.float32
    speed, aim = actions[:, 1], actions[actions[:, 0] != 1, 3]
    for numbers, mean, std in ((speed, 0.5, math.exp(-1)), (aim, -1.0, 1.0)):
        assert numbers.mean().item() == pytest.approx(mean, abs=0.03)
        assert numbers.std().item() == pytest.approx(std, abs=0.03)
    is_one = actions[:, 0] == 1
    assert (actions[is_one, 3] == 0).all()
    assert (log_probs[is_one, 3] == 0).all()
    assert torch.equal(rows[:, -1], ~is_one)


def test_acting_and_scoring_agree_and_a_policy_without_numbers_has_no_spread():
    policy = flat_policy(SPACE, 5, PolicyConfig(lstm_hidden_dim=8))
    masks = ActionMasks.all_legal(SPACE, 6)
    decision = policy.act(torch.randn(6, 5), masks, policy.initial_state(6))
    assert decision.actions.dtype == torch.float32
    assert "log_std" in policy.state_dict()
    plain = flat_policy(FactoredActionSpace((Head("move", 2),)), 5)
    assert "log_std" not in plain.state_dict()


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((Head("x", 2, continuous=True),), "'x' is continuous; leave out size=2"),
        (
            (Head("x", continuous=True), Head("y", 2, given=("x",))),
            r"'y' is given \['x'\]; the choices before it are \[\]",
        ),
    ],
)
def test_mistakes_in_continuous_heads_are_named(heads, message):
    with pytest.raises(ValueError, match=message):
        FactoredActionSpace(heads)
