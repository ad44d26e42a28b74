"""Continuous heads against torch.distributions and integrals in float64."""

import math

import pytest
import torch
from torch.distributions import Categorical, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.nn.functional import softplus

from esper.leyline.factored_actions import FactoredActionSpace, Head
from esper.tamiyo.policy.distributions import (
    LOG_STD_BOUNDS,
    MaskedFactoredCategorical,
    SquashedGaussians,
    draw_noise,
)
from support.agents import SPACES

SPACE = SPACES["mixed"]
USED = torch.tensor([True])


def squashed(mean, log_std):
    """The oracle: tanh of a Gaussian, in float64."""
    return TransformedDistribution(Normal(mean.double(), log_std.double().exp()), [TanhTransform()])


def test_log_probs_and_gradients_equal_a_transformed_distribution():
    rng = torch.Generator().manual_seed(0)
    mean = (1.5 * torch.randn(200, 2, generator=rng)).requires_grad_()
    log_std = torch.tensor([-1.0, 0.3], requires_grad=True)
    samples = (mean + log_std.exp() * torch.randn(200, 2, generator=rng)).detach()
    mine = SquashedGaussians(mean, log_std, torch.ones(200, 2, dtype=torch.bool)).log_prob(samples)
    expected = squashed(mean, log_std).log_prob(samples.double().tanh())
    torch.testing.assert_close(mine.double(), expected, rtol=1e-4, atol=1e-4)
    gradients = torch.autograd.grad(mine.sum(), (mean, log_std))
    wanted = torch.autograd.grad(expected.sum(), (mean, log_std))
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-3)


def test_log_probs_are_finite_where_tanh_is_1_in_float32():
    gaussian = SquashedGaussians(torch.tensor([20.0]), torch.zeros(1), USED)
    # log p = log N(0; 0, 1) - log(1 - tanh(20)^2), and 1 - tanh(u)^2 is 4 exp(-2u) up to rounding
    expected = -0.5 * math.log(2 * math.pi) - math.log(4) + 40
    assert gaussian.log_prob(torch.tensor([20.0])).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("log_std", torch.linspace(*LOG_STD_BOUNDS, 15).tolist())
def test_the_entropy_is_that_of_an_integral_for_all_means_and_spreads(log_std):
    means = torch.linspace(-3.0, 3.0, 13, dtype=torch.float64).unsqueeze(-1)
    std = math.exp(log_std)
    z = torch.linspace(-10.0, 10.0, 100_001, dtype=torch.float64)
    samples = means + std * z  # [means, points], before tanh
    normal_log_density = -0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)
    # log(1 - tanh(u)^2), written out: 1 - tanh(u)^2 loses all digits for large u
    log_slope = 2 * (math.log(2) - samples - softplus(-2 * samples))
    minus_log_density = log_slope - normal_log_density
    expected = torch.trapezoid(normal_log_density.exp() * minus_log_density, samples)
    gaussians = SquashedGaussians(means.float(), torch.tensor([log_std]), USED.expand(13, 1))
    entropy = gaussians.entropy().squeeze(-1).double()
    assert (entropy - expected).abs().max() < 1e-3
    assert entropy.max() < math.log(2) + 1e-3  # the uniform distribution has the most


def test_mixed_heads_add_up_to_the_joint_density():
    rng = torch.Generator().manual_seed(1)
    num_rows = 60
    logits = 2 * torch.randn(num_rows, SPACE.num_choices, generator=rng)
    log_std = torch.tensor([-0.5, 0.2])
    masks = torch.rand(num_rows, SPACE.num_choices, generator=rng) < 0.7
    masks[:, 0] = masks[:, 3] = True  # a legal kind, and speed is always used
    distribution = MaskedFactoredCategorical(SPACE, logits, masks, log_std=log_std)
    noise = draw_noise(SPACE, (num_rows,), logits.device, rng)
    actions = distribution.sample(noise)
    log_probs = distribution.log_prob(actions)
    entropies = distribution.entropy()
    expected = torch.zeros(num_rows, dtype=torch.float64)
    for row in range(num_rows):
        for head in (0, 2):
            part = SPACE.slices[head]
            legal = masks[row, part]
            if legal.any():
                choice = int(actions[row, head])
                assert legal[choice]
                oracle = Categorical(logits=logits[row, part].double()[legal])
                expected[row] += oracle.log_prob(legal[:choice].sum())
        for index, head in enumerate((1, 3)):
            column = SPACE.slices[head].start
            if masks[row, column]:
                oracle = squashed(logits[row, column], log_std[index])
                expected[row] += oracle.log_prob(actions[row, head].double().tanh())
    torch.testing.assert_close(log_probs.sum(-1).double(), expected, rtol=1e-4, atol=1e-4)

    is_unused = ~masks[:, SPACE.slices[3].start]
    assert 5 < is_unused.sum() < num_rows - 5
    for values in (actions, log_probs, entropies, distribution.normalize(entropies)):
        assert (values[is_unused, 3] == 0).all()
    # as a share of the uniform distribution on (-1, 1), whose width is 2
    widths = distribution.normalize(entropies)[:, 1]
    torch.testing.assert_close(widths, entropies[:, 1].exp() / 2)
    assert ((widths > 0) & (widths < 1)).all()


def test_a_number_that_is_not_used_has_no_gradient():
    logits = torch.randn(50, SPACE.num_choices, requires_grad=True)
    log_std = torch.zeros(2, requires_grad=True)
    masks = torch.ones(50, SPACE.num_choices, dtype=torch.bool)
    masks[:, -1] = False
    distribution = MaskedFactoredCategorical(SPACE, logits, masks, log_std=log_std)
    log_probs = distribution.log_prob(distribution.mode())
    score = log_probs.sum() + distribution.normalize(distribution.entropy()).sum()
    of_logits, of_std = torch.autograd.grad(score, (logits, log_std))
    assert (of_logits[:, -1] == 0).all()
    assert (of_logits[:, 3] != 0).all()
    assert of_std[1] == 0
    assert of_std[0] != 0


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
