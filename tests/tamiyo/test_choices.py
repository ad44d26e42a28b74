"""Choosing actions: the compiled kernel, its plain twin and the distributions that score agree."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.factored_actions import ActionMasks
from esper.tamiyo.policy.distributions import (
    Choices,
    MaskedFactoredCategorical,
    choose_actions,
    choose_group,
    draw_noise,
)
from support.agents import SPACES, random_masks

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_ENVS = 50


class Logits:
    """Logits of each group, which depend on all earlier choices."""

    def __init__(self, space, num_envs, rng, scale=1.0):
        self.space = space
        self.tables = scale * torch.randn(num_envs, space.num_choices, generator=rng)
        self.coupling = torch.randn(space.num_heads, space.num_choices, generator=rng)
        self.columns = [
            slice(space.slices[group[0]].start, space.slices[group[-1]].stop)
            for group in space.head_groups
        ]

    def __call__(self, group, actions):
        columns = self.columns[group]
        first = self.space.head_groups[group].start
        earlier = actions[:, :first].float() @ self.coupling[:first, columns].to(actions.device)
        return self.tables[:, columns].to(actions.device) + earlier

    def packed(self, actions):
        groups = range(len(self.columns))
        return torch.cat([self(group, actions) for group in groups], dim=-1)


def plain_choices(space, masks, logits_of, noise, floor, log_std):
    """As `choose_actions`, by the plain twin of the kernel."""
    out = Choices.empty(space, masks.num_envs, masks.device)
    for group in range(len(space.head_groups)):
        logits = logits_of(group, out.actions)
        choose_group(space, group, logits, masks, noise, floor, log_std, out)
    return out


def log_std_of(space):
    return torch.linspace(-6.0, 3.0, len(space.continuous)) if space.continuous else None


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("floor", [0.0, 0.2])
@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("scale", [3.0, 1e4])
def test_the_kernel_chooses_and_scores_as_its_plain_twin(name, floor, is_sampled, scale):
    space = SPACES[name]
    rng = torch.Generator().manual_seed(1)
    masks = random_masks(space, NUM_ENVS, rng)
    logits = Logits(space, NUM_ENVS, rng, scale)
    noise = draw_noise(space, (NUM_ENVS,), CPU, rng) if is_sampled else None
    settings = dict(noise=noise, floor=floor, log_std=log_std_of(space))
    compiled = choose_actions(space, masks, logits, **settings)
    plain = plain_choices(space, masks, logits, **settings)
    assert torch.equal(compiled.masks, plain.masks)
    torch.testing.assert_close(compiled.actions, plain.actions, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled.log_probs, plain.log_probs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("floor", [0.0, 0.2])
@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize(
    "values",
    [[-math.inf, 0.0, 1.0], [-math.inf] * 3, [math.inf, 0.0, 0.0], [3e38, -3e38, 1e30],
     [math.nan, 0.0, 0.0], [0.0, math.nan, 0.0], [0.0, 0.0, math.nan], [math.nan] * 3],
)  # fmt: skip
def test_the_kernel_treats_infinite_and_nan_logits_as_its_plain_twin(values, floor, is_sampled):
    space = SPACES["optional"]
    legal = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 1]]).bool()
    tools = torch.ones(len(legal), 3, 4, dtype=torch.bool)
    tools[:2] = False  # nothing to choose, whatever the logits are
    masks = ActionMasks(space, {"op": legal, "tool": tools})
    rows = [torch.tensor([values]), torch.tensor([[*values, values[0]]])]
    settings = dict(noise=None, floor=floor, log_std=None)
    if is_sampled:
        settings["noise"] = draw_noise(space, (len(legal),), CPU, torch.Generator().manual_seed(1))

    def logits_of(group, _):
        return rows[group].repeat(len(legal), 1)

    compiled = choose_actions(space, masks, logits_of, **settings)
    plain = plain_choices(space, masks, logits_of, **settings)
    torch.testing.assert_close(compiled.log_probs, plain.log_probs, equal_nan=True)
    is_number = plain.log_probs.isfinite()
    assert torch.equal(compiled.actions[is_number], plain.actions[is_number])
    assert (compiled.actions[:2, 1] == 0).all()
    assert (compiled.log_probs[:2, 1] == 0).all()
    # a legal logit that is NaN is reported, never replaced
    has_nan = (legal & torch.tensor(values).isnan()).any(dim=1)
    assert torch.equal(compiled.log_probs[:, 0].isnan(), has_nan)


@given(st.integers(0, 10_000), st.sampled_from(list(SPACES)), st.booleans())
def test_choices_are_legal_given_each_other_and_score_alike_again(rng_seed, name, is_sampled):
    space = SPACES[name]
    rng = torch.Generator().manual_seed(rng_seed)
    masks = random_masks(space, 9, rng)
    logits = Logits(space, 9, rng)
    noise = draw_noise(space, (9,), CPU, rng) if is_sampled else None
    log_std = log_std_of(space)
    actions, log_probs, rows = choose_actions(
        space, masks, logits, noise=noise, floor=0.05, log_std=log_std
    )
    for env in range(9):
        for index, head in enumerate(space):
            earlier = [int(actions[env, given]) for given in space.given_indices[index]]
            legal = masks[head.name][(env, *earlier)]
            assert torch.equal(rows[env, space.slices[index]], legal)
            if not legal.any():
                assert actions[env, index] == 0
                assert log_probs[env, index] == 0
            elif not head.continuous:
                assert legal[int(actions[env, index])]
    distribution = MaskedFactoredCategorical(
        space, logits.packed(actions), rows, floor=0.05, log_std=log_std
    )
    torch.testing.assert_close(distribution.log_prob(actions), log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_draws_have_the_frequencies_of_their_probabilities(floor, device):
    space = SPACES["dependent"]
    num_draws = 200_000
    rng = torch.Generator().manual_seed(3)
    one_env = random_masks(space, 1, rng)
    masks = ActionMasks(space, [part.expand(num_draws, *part.shape[1:]) for part in one_env.groups])
    logits = Logits(space, 1, rng)
    logits.tables = logits.tables.expand(num_draws, -1)
    noise = draw_noise(
        space, (num_draws,), torch.device(device), torch.Generator(device).manual_seed(4)
    )
    choices = choose_actions(space, masks.to(device), logits, noise=noise, floor=floor)
    actions = choices.actions.cpu()

    assert not set(one_env["op"][0].nonzero()[:, 0].tolist()) - set(actions[:, 0].tolist())
    for first in actions[:, 0].unique().tolist():  # the kinds that each op and slot lead to
        for second in (0, 1):
            chosen = (actions[:, 0] == first) & (actions[:, 1] == second)
            legal = one_env["kind"][0, first, second]
            if chosen.sum() < 1000 or not legal.any():
                continue
            actions_row = actions[chosen][:1]
            raw = logits.packed(actions_row)[0, space.slices[2]].double()
            expected = torch.zeros(4, dtype=torch.float64)
            expected[legal] = (1 - floor) * raw[legal].softmax(-1) + floor / legal.sum()
            observed = actions[chosen, 2].bincount(minlength=4) / chosen.sum()
            error = 5 * 0.5 / float(chosen.sum()) ** 0.5  # five standard errors
            torch.testing.assert_close(observed.double(), expected, rtol=0, atol=error)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_are_drawn_from_their_gaussians(device):
    space = SPACES["mixed"]
    num_draws = 40_000
    masks = ActionMasks.all_legal(space, num_draws, device)
    masks["aim"][:, 1] = False  # not used after kind 1
    columns = [0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0, -1.0]
    noise = draw_noise(
        space, (num_draws,), torch.device(device), torch.Generator(device).manual_seed(2)
    )
    log_std = torch.tensor([-1.0, 0.0], device=device)
    actions, log_probs, rows = choose_actions(
        space,
        masks,
        lambda group, _: torch.tensor(columns[group], device=device).repeat(num_draws, 1),
        noise=noise,
        log_std=log_std,
    )
    is_used = actions[:, 0] != 1
    for numbers, mean, std in (
        (actions[:, 1], 0.5, math.exp(-1)),
        (actions[is_used, 3], -1.0, 1.0),
    ):
        assert numbers.mean().item() == pytest.approx(mean, abs=0.03)
        assert numbers.std().item() == pytest.approx(std, abs=0.03)
        z = (numbers - mean) / std
        assert (z < -1).float().mean().item() == pytest.approx(0.1587, abs=0.01)
    assert torch.equal(rows[:, -1], is_used)
    assert (actions[~is_used, 3] == 0).all()
    assert (log_probs[~is_used, 3] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_masked_choice_is_never_drawn_in_a_million(device):
    space = SPACES["plain"]
    rng = torch.Generator().manual_seed(5)
    legal = random_masks(space, 1000, rng)
    masks = ActionMasks(space, [part.repeat(1000, 1) for part in legal.groups]).to(device)
    # a legal choice may be all but impossible, a masked one may have the largest logit
    logits = (40 * torch.randn(1000, space.num_choices, generator=rng)).repeat(1000, 1).to(device)
    noise = draw_noise(space, (len(logits),), logits.device, torch.Generator(device).manual_seed(6))
    choices = choose_actions(space, masks, lambda *_: logits, noise=noise)
    offsets = torch.tensor([part.start for part in space.slices], device=device)
    assert masks.groups[0].gather(1, choices.actions + offsets).all()


@pytest.mark.parametrize("clock", [0.0, 1e-45, 1.0, 1e38, math.inf])
@pytest.mark.parametrize("choose", [choose_actions, plain_choices])
def test_no_clock_however_extreme_draws_a_masked_choice(monkeypatch, choose, clock):
    space = SPACES["dependent"]
    rng = torch.Generator().manual_seed(7)
    masks = random_masks(space, 500, rng)
    logits = Logits(space, 500, rng, scale=40.0)
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda t, **_: t.fill_(clock))
    noise = draw_noise(space, (500,), CPU)
    actions, _, rows = choose(space, masks, logits, noise=noise, floor=0.0, log_std=None)
    offsets = torch.tensor([part.start for part in space.slices])
    has_choice = torch.stack([row.any(-1) for row in space.split(rows).values()], dim=-1)
    assert torch.equal(rows.gather(1, actions + offsets), has_choice)
    assert (actions[~has_choice] == 0).all()


def test_a_generator_decides_the_noise_and_a_round_of_it_is_drawn_at_once():
    space = SPACES["mixed"]
    draws = [draw_noise(space, (7, 4), CPU, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert draws[0].shape == (7, 4, space.num_choices)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
