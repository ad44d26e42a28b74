"""Masked factored categoricals against torch.distributions in float64, and at the edges."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical

from esper.leyline.factored_actions import (
    ActionMasks,
    FactoredActionSpace,
    Head,
    audit_action_space,
    tamiyo_action_space,
)
from esper.tamiyo.policy.distributions import MaskedFactoredCategorical, choose_actions

SPACES = {
    "one head": FactoredActionSpace((Head("move", 4),)),
    "equal sizes": FactoredActionSpace((Head("x", 3), Head("y", 3, given=("x",)))),
    "audit": audit_action_space(),
    "tamiyo": tamiyo_action_space(3, 5),
    "mixed runs": FactoredActionSpace(
        (
            Head("a", 2),
            Head("b", 4, given=("a",)),
            Head("c", 1, given=("b",)),
            Head("d", 3, given=("a", "b")),
            Head("e", 5),
        )
    ),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_rows(space, num_rows, generator, *, empty=0.3):
    """Mask rows `[num_rows, C]`; conditional heads sometimes have nothing to choose."""
    parts = {}
    for head in space:
        part = torch.rand(num_rows, head.size, generator=generator) < 0.6
        sure = torch.randint(head.size, (num_rows, 1), generator=generator)
        part.scatter_(1, sure, True)
        if head.given:
            part &= torch.rand(num_rows, 1, generator=generator) >= empty
        parts[head.name] = part
    return torch.cat([parts[name] for name in space.names], dim=-1)


def random_masks(space, num_envs, generator):
    parts = {}
    for head in space:
        shape = (num_envs, *space.mask_shape(head.name))
        part = torch.rand(shape, generator=generator) < 0.5
        if not head.given:
            part.scatter_(1, torch.randint(head.size, (num_envs, 1), generator=generator), True)
        parts[head.name] = part
    return ActionMasks(space, parts)


def legal_actions(space, rows, generator):
    """One legal action per head; 0 where nothing is legal."""
    weights = rows.double() * torch.rand(rows.shape, generator=generator, dtype=torch.float64)
    return torch.stack([part.argmax(-1) for part in space.split(weights).values()], dim=-1)


def oracle(logits, row, floor=0.0):
    """The distribution of one head and one row, over its legal choices only, in float64."""
    probs = logits.double()[row].softmax(-1)
    return Categorical(probs=(1 - floor) * probs + floor / row.sum())


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
@pytest.mark.parametrize("device", DEVICES)
def test_scores_equal_torch_distributions_in_float64(space, floor, device):
    generator = torch.Generator().manual_seed(1)
    rows = random_rows(space, 40, generator)
    logits = 3 * torch.randn(rows.shape, generator=generator)
    actions = legal_actions(space, rows, generator)
    on_device = [t.to(device) for t in (logits, rows, actions)]
    mine = MaskedFactoredCategorical(space, on_device[0], on_device[1], floor=floor)
    expected = torch.zeros(3, 40, space.num_heads, dtype=torch.float64)
    for r in range(40):
        for h, part in enumerate(space.slices):
            row = rows[r, part]
            if not row.any():
                continue
            p = oracle(logits[r, part], row, floor)
            position = row[: actions[r, h]].sum()  # among the legal choices
            count = int(row.sum())
            expected[0, r, h] = p.log_prob(position)
            expected[1, r, h] = p.entropy()
            expected[2, r, h] = p.entropy() / math.log(count) if count > 1 else 0.0
    got = (
        mine.log_prob(on_device[2]),
        mine.entropy(),
        mine.normalize(mine.entropy()),
    )
    for want, have in zip(expected, got, strict=True):
        assert have.dtype == torch.float32
        torch.testing.assert_close(have.cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_masked_choices_have_no_probability_and_no_gradient(dtype, floor):
    space = SPACES["tamiyo"]
    generator = torch.Generator().manual_seed(2)
    rows = random_rows(space, 200, generator)
    logits = (10 * torch.randn(rows.shape, generator=generator)).to(dtype).requires_grad_()
    actions = legal_actions(space, rows, generator)
    distribution = MaskedFactoredCategorical(space, logits, rows, floor=floor)
    for h, (head, row) in enumerate(space.split(rows).items()):
        probs = distribution.probs[:, h, : space.heads[h].size]
        assert (probs[~row & row.any(-1, keepdim=True)] == 0).all(), head
        assert (distribution.probs[:, h, space.heads[h].size :] == 0).all(), head
    for score in (
        distribution.log_prob(actions),
        distribution.entropy(),
        distribution.normalize(distribution.entropy()),
    ):
        (gradient,) = torch.autograd.grad(score.sum(), logits, retain_graph=True)
        assert gradient.isfinite().all()
        assert (gradient[~rows] == 0).all()
        assert (gradient[rows] != 0).any()


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_a_head_with_nothing_to_choose_takes_action_0_and_adds_exactly_nothing(floor):
    space = SPACES["tamiyo"]
    generator = torch.Generator().manual_seed(3)
    rows = random_rows(space, 100, generator, empty=0.5)
    logits = (50 * torch.randn(rows.shape, generator=generator)).requires_grad_()
    distribution = MaskedFactoredCategorical(space, logits, rows, floor=floor)
    empty = torch.stack([~row.any(-1) for row in space.split(rows).values()], dim=-1)
    assert 100 < empty.sum() < 500
    for actions in (distribution.sample(generator), distribution.mode()):
        assert (actions[empty] == 0).all()
        for score in (
            distribution.log_prob(actions),
            distribution.entropy(),
            distribution.normalize(distribution.entropy()),
        ):
            assert (score[empty] == 0).all()
            (gradient,) = torch.autograd.grad(score[empty].sum(), logits, retain_graph=True)
            assert (gradient == 0).all()


@pytest.mark.parametrize("size", [1, 2, 7])
def test_entropy_of_k_even_choices_is_log_k(size):
    space = FactoredActionSpace((Head("a", 7), Head("b", 2)))
    rows = torch.ones(1, 9, dtype=torch.bool)
    rows[0, size:7] = False
    distribution = MaskedFactoredCategorical(space, torch.full((1, 9), 4.0), rows)
    assert distribution.entropy()[0, 0].item() == pytest.approx(math.log(size), abs=1e-6)
    share = 1.0 if size > 1 else 0.0
    assert distribution.normalize(distribution.entropy())[0, 0].item() == pytest.approx(
        share, abs=1e-6
    )


def test_leading_dimensions_do_not_matter():
    space = SPACES["audit"]
    generator = torch.Generator().manual_seed(4)
    rows = random_rows(space, 12, generator)
    logits = torch.randn(rows.shape, generator=generator)
    flat = MaskedFactoredCategorical(space, logits, rows)
    nested = MaskedFactoredCategorical(space, logits.view(3, 4, -1), rows.view(3, 4, -1))
    torch.testing.assert_close(nested.entropy(), flat.entropy().view(3, 4, -1), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_masked_choice_is_never_drawn_in_a_million(device):
    space = SPACES["audit"]
    generator = torch.Generator().manual_seed(5)
    rows = random_rows(space, 1000, generator).repeat(1000, 1).to(device)
    # a legal choice may be all but impossible, a masked one may have the largest logit
    logits = (40 * torch.randn(1000, space.num_choices, generator=generator)).to(device)
    distribution = MaskedFactoredCategorical(space, logits.repeat(1000, 1), rows)
    drawn = distribution.sample(torch.Generator(device).manual_seed(6))
    offsets = torch.tensor([part.start for part in space.slices], device=device)
    assert rows.gather(1, drawn + offsets).all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1.0, 1e38, math.inf])
def test_no_clock_however_extreme_draws_a_masked_choice(monkeypatch, value):
    space = SPACES["tamiyo"]
    rows = random_rows(space, 500, torch.Generator().manual_seed(7))
    logits = 40 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(8))
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda t, **_: t.fill_(value))
    drawn = MaskedFactoredCategorical(space, logits, rows).sample()
    offsets = torch.tensor([part.start for part in space.slices])
    has_choice = torch.stack([row.any(-1) for row in space.split(rows).values()], dim=-1)
    assert torch.equal(rows.gather(1, drawn + offsets), has_choice)
    assert (drawn[~has_choice] == 0).all()


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_draws_have_the_scored_frequencies(floor):
    space = FactoredActionSpace((Head("a", 5), Head("b", 3)))
    logits = torch.tensor([1.0, -0.5, 2.0, 0.0, 0.3, 0.2, 1.5, -1.0])
    row = torch.tensor([True, True, False, True, True, True, False, True])
    draws = 200_000
    distribution = MaskedFactoredCategorical(
        space, logits.repeat(draws, 1), row.repeat(draws, 1), floor=floor
    )
    drawn = distribution.sample(torch.Generator().manual_seed(9))
    for h, part in enumerate(space.slices):
        expected = torch.zeros(space.sizes[h], dtype=torch.float64)
        expected[row[part]] = oracle(logits[part], row[part], floor).probs
        observed = drawn[:, h].bincount(minlength=space.sizes[h]) / draws
        # five standard errors
        torch.testing.assert_close(observed.double(), expected, rtol=0, atol=5 * 0.5 / draws**0.5)


def test_a_generator_decides_the_draws():
    space = SPACES["audit"]
    rows = random_rows(space, 64, torch.Generator().manual_seed(10))
    distribution = MaskedFactoredCategorical(space, torch.zeros(rows.shape), rows)
    draws = [distribution.sample(torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@given(st.integers(0, 10_000), st.sampled_from(list(SPACES)), st.booleans())
def test_decided_actions_are_legal_given_each_other_and_rescore_alike(seed, name, deterministic):
    space, generator = SPACES[name], torch.Generator().manual_seed(seed)
    masks = random_masks(space, 9, generator)
    tables = torch.randn(9, space.num_choices, generator=generator)
    # the logits of a later head depend on every earlier choice
    coupling = torch.randn(space.num_heads, space.num_choices, generator=generator)

    def packed_logits(actions, known):
        return tables + actions[:, :known].float() @ coupling[:known]

    def logits_of(run, actions):
        heads = space.head_groups[run]
        packed = packed_logits(actions, heads.start)
        return packed[:, space.slices[heads.start].start : space.slices[heads.stop - 1].stop]

    actions, log_probs, rows = choose_actions(
        space, masks, logits_of, generator=generator, deterministic=deterministic, floor=0.05
    )
    for env in range(9):
        for h, head in enumerate(space):
            earlier = tuple(int(actions[env, g]) for g in space.given_indices[h])
            row = masks[head.name][(env, *earlier)]
            assert torch.equal(rows[env, space.slices[h]], row)
            if row.any():
                assert row[actions[env, h]]
            else:
                assert actions[env, h] == 0
                assert log_probs[env, h] == 0
    logits = torch.cat(
        [
            packed_logits(actions, run.start)[:, space.slices[i]]
            for run in space.head_groups
            for i in run
        ],
        dim=-1,
    )
    rescored = MaskedFactoredCategorical(space, logits, rows, floor=0.05).log_prob(actions)
    torch.testing.assert_close(rescored, log_probs, rtol=0, atol=1e-5)


def test_a_row_does_not_depend_on_the_others():
    space = SPACES["tamiyo"]
    generator = torch.Generator().manual_seed(11)
    rows = random_rows(space, 50, generator)
    logits = torch.randn(rows.shape, generator=generator)
    actions = legal_actions(space, rows, generator)
    whole = MaskedFactoredCategorical(space, logits, rows, floor=0.1)
    logits[1:] = math.nan
    alone = MaskedFactoredCategorical(space, logits, rows, floor=0.1)
    for score in ("entropy", "mode"):
        assert torch.equal(getattr(whole, score)()[0], getattr(alone, score)()[0])
    assert torch.equal(whole.log_prob(actions)[0], alone.log_prob(actions)[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_distribution_compiles_as_one_graph(backend, floor):
    space = tamiyo_action_space(3, 5)
    generator = torch.Generator().manual_seed(12)
    rows = random_rows(space, 16, generator)
    logits = torch.randn(rows.shape, generator=generator)
    actions = legal_actions(space, rows, generator)

    def scores(logits, rows, actions):
        distribution = MaskedFactoredCategorical(space, logits, rows, floor=floor)
        return (
            distribution.log_prob(actions),
            distribution.normalize(distribution.entropy()),
            distribution.mode(),
            distribution.log_prob(distribution.sample()).isfinite(),
        )

    compiled = torch.compile(scores, fullgraph=True, backend=backend)
    for got, expected in zip(
        compiled(logits, rows, actions), scores(logits, rows, actions), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("logits", "rows", "floor", "message"),
    [
        ((2, 14), (2, 15), 0.0, r"shape \(2, 14\).*15\].*'blueprint': 5"),
        ((2, 15), (3, 15), 0.0, r"masks are .*\(3, 15\)"),
        ((2, 15), (2, 15), 1.0, "floor=1.0"),
        ((2, 15), (2, 15), -0.1, "floor=-0.1"),
    ],
)
def test_wrong_shapes_and_floors_are_refused(logits, rows, floor, message):
    with pytest.raises(ValueError, match=message):
        MaskedFactoredCategorical(
            audit_action_space(),
            torch.zeros(logits),
            torch.ones(rows, dtype=torch.bool),
            floor=floor,
        )


def test_masks_must_be_bool():
    with pytest.raises(ValueError, match="float32"):
        MaskedFactoredCategorical(audit_action_space(), torch.zeros(2, 15), torch.ones(2, 15))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_arithmetic_is_float32_whatever_the_logits_are(dtype):
    space = SPACES["audit"]
    generator = torch.Generator().manual_seed(13)
    rows = random_rows(space, 20, generator)
    logits = torch.randn(rows.shape, generator=generator).to(dtype)
    mine = MaskedFactoredCategorical(space, logits, rows).entropy()
    exact = MaskedFactoredCategorical(space, logits.float(), rows).entropy()
    torch.testing.assert_close(mine, exact, rtol=0, atol=0)


@pytest.mark.parametrize("logit", [-3e38, -1e31, 3e38, -math.inf, math.inf])
def test_extreme_logits_never_favour_a_masked_choice(logit):
    space = FactoredActionSpace((Head("a", 3), Head("b", 3, given=("a",))))
    logits = torch.full((1, 6), logit, requires_grad=True)
    masks = torch.tensor([[False, True, True, False, True, False]])
    chances = MaskedFactoredCategorical(space, logits, masks)
    torch.testing.assert_close(chances.probs[0, 0], torch.tensor([0.0, 0.5, 0.5]))
    assert chances.mode().tolist() == [[1, 1]]
    chances.entropy().sum().backward()
    assert logits.grad.isfinite().all()


def test_nan_logits_stay_nan_under_a_floor():
    space = FactoredActionSpace((Head("a", 2),))
    masks = torch.ones(1, 2, dtype=torch.bool)
    chances = MaskedFactoredCategorical(space, torch.full((1, 2), torch.nan), masks, floor=0.1)
    assert chances.log_prob(torch.tensor([[0]])).isnan().all()


def test_a_call_in_inference_mode_leaves_gradients_to_others():
    space = FactoredActionSpace((Head("first", 2), Head("second", 7)))  # met here first
    masks = torch.ones(1, 9, dtype=torch.bool)
    with torch.inference_mode():
        MaskedFactoredCategorical(space, torch.zeros(1, 9), masks)
    logits = torch.zeros(1, 9, requires_grad=True)
    chances = MaskedFactoredCategorical(space, logits, masks)
    log_probs = chances.log_prob(torch.zeros(1, 2, dtype=torch.int64))
    (chances.normalize(chances.entropy()) + log_probs).sum().backward()
    assert logits.grad is not None
