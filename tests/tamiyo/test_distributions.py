"""Masked factored categoricals against torch.distributions in float64, and at the edges."""

import math

import pytest
import torch
from torch.distributions import Categorical

from esper.leyline.factored_actions import (
    FactoredActionSpace,
    Head,
    audit_action_space,
    tamiyo_action_space,
)
from esper.tamiyo.policy.distributions import LegalChoices, MaskedFactoredCategorical

SPACES = {
    "one head": FactoredActionSpace((Head("move", 4),)),
    "equal sizes": FactoredActionSpace((Head("x", 3), Head("y", 3, given=("x",)))),
    "tamiyo": tamiyo_action_space(3, 5),
    "with a size of 1": FactoredActionSpace(
        (Head("a", 2), Head("b", 4, given=("a",)), Head("c", 1, given=("b",)), Head("d", 5))
    ),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_rows(space, num_rows, rng):
    """Mask rows `[num_rows, C]`; conditional heads sometimes have nothing to choose."""
    parts = []
    for head in space:
        part = torch.rand(num_rows, head.size, generator=rng) < 0.6
        part.scatter_(1, torch.randint(head.size, (num_rows, 1), generator=rng), True)
        if head.given:
            part &= torch.rand(num_rows, 1, generator=rng) >= 0.3
        parts.append(part)
    return torch.cat(parts, dim=-1)


def legal_actions(space, rows, rng):
    """One legal action per head; 0 where nothing is legal."""
    weights = rows.double() * torch.rand(rows.shape, generator=rng, dtype=torch.float64)
    return torch.stack([part.argmax(-1) for part in space.split(weights).values()], dim=-1)


def scores_of(distribution, actions):
    entropy = distribution.entropy()
    return distribution.log_prob(actions), entropy, distribution.normalize(entropy)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("device", DEVICES)
def test_scores_equal_torch_distributions_in_float64(space, floor, device):
    rng = torch.Generator().manual_seed(1)
    rows = random_rows(space, 40, rng)
    logits = 3 * torch.randn(rows.shape, generator=rng)
    actions = legal_actions(space, rows, rng)
    expected = torch.zeros(3, 40, space.num_heads, dtype=torch.float64)
    for r in range(40):
        for h, part in enumerate(space.slices):
            legal = rows[r, part]
            count = int(legal.sum())
            if count == 0:
                continue
            probs = (1 - floor) * logits[r, part].double()[legal].softmax(-1) + floor / count
            oracle = Categorical(probs=probs)
            expected[0, r, h] = oracle.log_prob(legal[: actions[r, h]].sum())
            expected[1, r, h] = oracle.entropy()
            expected[2, r, h] = oracle.entropy() / math.log(count) if count > 1 else 0.0
    distribution = MaskedFactoredCategorical(space, logits.to(device), rows.to(device), floor=floor)
    found = torch.stack(scores_of(distribution, actions.to(device)))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_masked_choices_have_no_probability_and_no_gradient(dtype, floor):
    space = SPACES["tamiyo"]
    rng = torch.Generator().manual_seed(2)
    rows = random_rows(space, 200, rng)
    logits = (10 * torch.randn(rows.shape, generator=rng)).to(dtype).requires_grad_()
    distribution = MaskedFactoredCategorical(space, logits, rows, floor=floor)
    for h, (head, row) in enumerate(space.split(rows).items()):
        probs = distribution.probs[:, h]
        size = row.shape[1]
        assert (probs[:, :size][~row & row.any(-1, keepdim=True)] == 0).all(), head
        assert (probs[:, size:] == 0).all(), head
    for score in scores_of(distribution, legal_actions(space, rows, rng)):
        assert score.dtype == torch.float32
        (gradient,) = torch.autograd.grad(score.sum(), logits, retain_graph=True)
        assert gradient.isfinite().all()
        assert (gradient[~rows] == 0).all()
        assert (gradient[rows] != 0).any()


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_a_head_with_nothing_to_choose_takes_action_0_and_adds_exactly_nothing(floor):
    space = SPACES["tamiyo"]
    rng = torch.Generator().manual_seed(3)
    rows = random_rows(space, 100, rng)
    logits = (50 * torch.randn(rows.shape, generator=rng)).requires_grad_()
    distribution = MaskedFactoredCategorical(space, logits, rows, floor=floor)
    is_empty = torch.stack([~row.any(-1) for row in space.split(rows).values()], dim=-1)
    assert 100 < is_empty.sum() < 400
    actions = distribution.mode()
    assert (actions[is_empty] == 0).all()
    for score in scores_of(distribution, actions):
        assert (score[is_empty] == 0).all()
        (gradient,) = torch.autograd.grad(score[is_empty].sum(), logits, retain_graph=True)
        assert (gradient == 0).all()


@pytest.mark.parametrize("logit", [-8.0, -20.0])
def test_a_choice_at_its_floor_keeps_a_gradient(logit):
    floor, num_choices = 0.1, 4
    logits = torch.tensor([[logit, 0.0, 1.0, 0.5]], requires_grad=True)
    space = SPACES["one head"]
    legal = torch.ones(1, num_choices, dtype=torch.bool)
    distribution = MaskedFactoredCategorical(space, logits, legal, floor=floor)
    log_prob = distribution.log_prob(torch.tensor([[0]]))
    assert log_prob.exp().item() == pytest.approx(floor / num_choices, rel=0.02)
    log_prob.sum().backward()
    exact = logits.detach().double().requires_grad_()
    probs = (1 - floor) * exact.softmax(-1) + floor / num_choices
    probs[0, 0].log().backward()
    assert (exact.grad != 0).all()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_entropy_of_k_even_choices_is_log_k(size):
    space = FactoredActionSpace((Head("a", 7), Head("b", 2)))
    rows = torch.ones(1, 9, dtype=torch.bool)
    rows[0, size:7] = False
    distribution = MaskedFactoredCategorical(space, torch.full((1, 9), 4.0), rows)
    entropy = distribution.entropy()
    share = 1.0 if size > 1 else 0.0
    assert entropy[0, 0].item() == pytest.approx(math.log(size), abs=1e-6)
    assert distribution.normalize(entropy)[0, 0].item() == pytest.approx(share, abs=1e-6)


def test_a_row_depends_on_no_other_and_leading_dimensions_do_not_matter():
    space = audit_action_space()
    rng = torch.Generator().manual_seed(4)
    rows = random_rows(space, 12, rng)
    logits = torch.randn(rows.shape, generator=rng)
    actions = legal_actions(space, rows, rng)
    whole = scores_of(MaskedFactoredCategorical(space, logits, rows, floor=0.1), actions)
    nested = MaskedFactoredCategorical(space, logits.view(3, 4, -1), rows.view(3, 4, -1), floor=0.1)
    for score, expected in zip(scores_of(nested, actions.view(3, 4, -1)), whole, strict=True):
        assert torch.equal(score.flatten(0, 1), expected)
    logits[1:] = math.nan
    alone = scores_of(MaskedFactoredCategorical(space, logits, rows, floor=0.1), actions)
    for score, expected in zip(alone, whole, strict=True):
        assert torch.equal(score[0], expected[0])


@pytest.mark.parametrize("logit", [-3e38, -1e31, 3e38, -math.inf, math.inf])
def test_extreme_logits_never_favour_a_masked_choice(logit):
    space = SPACES["equal sizes"]
    logits = torch.full((1, 6), logit, requires_grad=True)
    masks = torch.tensor([[False, True, True, False, True, False]])
    distribution = MaskedFactoredCategorical(space, logits, masks)
    torch.testing.assert_close(distribution.probs[0, 0], torch.tensor([0.0, 0.5, 0.5]))
    assert distribution.mode().tolist() == [[1, 1]]
    distribution.entropy().sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_distribution_compiles_as_one_graph(backend, floor):
    space = SPACES["tamiyo"]
    rng = torch.Generator().manual_seed(12)
    rows = random_rows(space, 16, rng)
    logits = torch.randn(rows.shape, generator=rng)
    noise = torch.rand(rows.shape, generator=rng)
    actions = legal_actions(space, rows, rng)

    def scores(logits, rows, actions, noise):
        distribution = MaskedFactoredCategorical(space, logits, rows, floor=floor)
        return *scores_of(distribution, actions), distribution.sample(noise), distribution.mode()

    compiled = torch.compile(scores, fullgraph=True, backend=backend)
    given = logits, rows, actions, noise
    torch.testing.assert_close(compiled(*given), scores(*given))


@pytest.mark.parametrize(
    ("logits", "rows", "floor", "message"),
    [
        ((2, 14), torch.ones(2, 15).bool(), 0.0, r"shape \(2, 14\).*15\].*'blueprint': 5"),
        ((2, 15), torch.ones(3, 15).bool(), 0.0, r"masks are .*\(3, 15\)"),
        ((2, 15), torch.ones(2, 15), 0.0, "masks are torch.float32"),
        ((2, 15), torch.ones(2, 15).bool(), 1.0, "floor=1.0"),
        ((2, 15), torch.ones(2, 15).bool(), -0.1, "floor=-0.1"),
    ],
)
def test_wrong_shapes_dtypes_and_floors_are_refused(logits, rows, floor, message):
    with pytest.raises(ValueError, match=message):
        MaskedFactoredCategorical(audit_action_space(), torch.zeros(logits), rows, floor=floor)


def test_a_call_in_inference_mode_leaves_gradients_to_others():
    space = FactoredActionSpace((Head("first", 2), Head("second", 7)))  # used here first
    masks = torch.ones(1, 9, dtype=torch.bool)
    with torch.inference_mode():
        MaskedFactoredCategorical(space, torch.zeros(1, 9), masks)
    logits = torch.zeros(1, 9, requires_grad=True)
    distribution = MaskedFactoredCategorical(space, logits, masks)
    sum(s.sum() for s in scores_of(distribution, torch.zeros(1, 2).long())).backward()
    assert logits.grad is not None


def test_a_number_counts_as_two_choices_and_an_unused_one_as_none():
    space = FactoredActionSpace(
        (Head("kind", 3), Head("speed", continuous=True), Head("aim", continuous=True))
    )
    masks = torch.tensor([[1, 0, 0, 1, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
    legal = LegalChoices.from_masks(masks, space)
    assert legal.counts.tolist() == [[1, 2, 0], [2, 0, 0], [1, 0, 0]]
    assert legal.has_choice.tolist() == [1.0, 1.0, 0.0]
