"""What seeds are worth, measured by switching them off."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from esper import Growth
from esper.growing.validation import measure, paired_difference
from esper.leyline.stages import LifecycleOp
from support.growth_loops import new_growth
from support.models import WAIT, Script, act, blobs, build, germinate

X, Y = blobs(60)


def grown(val_loader, score=None):
    """A growth with a committed seed in slot 0 and a live one in slot 1, both awake."""
    model, _ = build("mlp")
    script = Script(
        germinate(0, blueprint=3, tempo=0),
        germinate(1, blueprint=3, tempo=0),
        WAIT,
        act(LifecycleOp.FOSSILIZE, 0),
    )
    growth = Growth(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        example=X,
        controller=script,
        sites=["1", "5"],
        decisions=25,
        val_loader=val_loader,
        score=score or (lambda batch: is_correct(model, batch).float()),
    )
    for _ in range(4):
        growth.decide()
    torch.manual_seed(5)
    for slot in growth._network.slots:
        torch.nn.init.normal_(slot.seed.layers[-1].weight, std=2.0)
    return growth, script


def is_correct(model: nn.Module, batch) -> torch.Tensor:
    return model(batch[0]).argmax(1) == batch[1]


def correct(growth: Growth) -> torch.Tensor:
    growth.model.eval()
    with torch.no_grad():
        return is_correct(growth.model, (X, Y)).double()


def test_contributions_are_differences_on_the_same_examples():
    """The loader shuffles: pairing by batch, not by position, is what makes the error small."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True)
    growth, _ = grown(loader)
    measured = measure(growth._network, loader, lambda batch: is_correct(growth.model, batch))
    whole = correct(growth)
    slots = growth._network.slots
    for index, slot in enumerate(slots):
        with slot.with_alpha(0.0):
            difference = whole - correct(growth)
        mean, error = measured.contributions[index]
        assert mean == pytest.approx(float(difference.mean()))
        assert error == pytest.approx(float(difference.std()) / 60**0.5)
    assert measured.metric == pytest.approx(float(whole.mean()))
    with slots[1].with_alpha(0.0):
        assert measured.committed_metric == pytest.approx(float(correct(growth).mean()))


def test_controllers_see_contributions_and_their_age():
    growth, script = grown([(X, Y)])
    growth.decide()
    report = script.reports[-1]
    assert report.contribution_known[0].tolist() == [True, True]
    assert report.contribution_age[0].tolist() == [0, 0]
    assert (report.contribution_error[0] >= 0).all()
    assert growth.ledger.steps[-1].seeds[0].contribution is not None


def test_the_loss_comes_with_the_scores_where_it_is_known():
    growth, _ = grown([(X, Y)])
    half = X[:20], Y[:20]

    def score(batch):
        rows = len(batch[0])
        return torch.full((rows,), 0.5), torch.tensor(float(rows))

    measured = measure(growth._network, [(X, Y), half], score)
    assert measured.loss == pytest.approx((60 * 60 + 20 * 20) / 80)
    assert measured.metric == 0.5


@pytest.mark.parametrize(
    "value", [np.float64(0.5), torch.tensor(0.5), nn.Parameter(torch.tensor(0.5)) * 1]
)
def test_metric_and_loss_may_be_numbers_of_any_kind(value, tmp_path):
    """Those of a loop without no_grad come with their graph."""
    growth = new_growth()
    growth.decide(value, value)
    step = growth.ledger.steps[0]
    assert (type(step.metric), type(step.validation_loss)) == (float, float)
    growth.save(tmp_path / "growth.pt")


def test_modes_and_gradients_are_as_before():
    growth, _ = grown([(X, Y)])
    growth.model.train()
    growth.model[2].eval()
    growth.decide()
    assert growth.model.training
    assert not growth.model[2].training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("loader", "value", "message"),
    [
        ([], 0.5, "validation loader yields nothing"),
        ([(X[:0], Y[:0])], 0.5, "validation loader yields nothing"),
        ([(X, Y)], math.nan, "scores of nan to nan; each must be 0 to 1"),
        ([(X, Y)], 50.0, "scores of 50 to 50; .* Use a share instead of per cent"),
        ([(X, Y)], -math.inf, "scores of -inf to -inf"),
    ],
)
def test_data_and_scores_that_cannot_judge_are_told_before_anything_is_touched(
    loader, value, message
):
    model, example = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=message):
        Growth(
            model,
            optimizer,
            example=example,
            decisions=25,
            val_loader=loader,
            score=lambda batch: torch.full((len(batch[0]),), value),
        )
    assert len(optimizer.param_groups) == 1


def test_the_measurement_before_the_run_leaves_no_trace():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model, _ = build("mlp")
    model.train()
    torch.set_rng_state(before)
    loader = DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True)
    Growth(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        example=X,
        decisions=25,
        val_loader=loader,
        score=lambda batch: (model(batch[0]).argmax(1) == batch[1]).float(),
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_every_score_is_0_to_1():
    """The mean is: it does not show an error where a score belongs."""
    errors = torch.linspace(0.0, 1.4, len(X))
    assert errors.mean() < 1
    with pytest.raises(ValueError, match=r"scores of 0 to 1.4; each must be 0 to 1, higher is"):
        grown([(X, Y)], score=lambda batch: errors)
    with pytest.raises(ValueError, match=r"scores of -0.7 to 0.7"):
        grown([(X, Y)], score=lambda batch: errors - 0.7)
    growth, _ = grown([(X, Y)], score=lambda batch: torch.full((len(X),), 1 + 1e-6))
    assert growth.best_metric == 1.0


def growth_scored(*scores):
    """A run after as many decisions as there are scores, after those of the look before it."""
    given = iter([torch.tensor([0.5, 0.5]), *(torch.tensor(pair) for pair in scores)])
    growth = new_growth(decisions=12, val_loader=[0], score=lambda batch: next(given))
    for _ in scores:
        growth.decide()
    return growth


def test_later_a_score_below_0_is_as_bad_as_can_be():
    """One example beyond what a score was made for is no reason to take the training back."""
    growth = growth_scored((0.5, 0.5), (-math.inf, 0.75), (-3.0, 0.75))
    assert [step.metric for step in growth.ledger.steps] == [0.5, 0.375, 0.375]
    assert growth.ledger.rollbacks == []


def test_later_a_score_above_1_is_no_number_and_a_rollback():
    growth = growth_scored((0.5, 0.5), (1.2, 0.9), (0.6, 0.6), (math.inf, 0.9))
    assert [step.metric for step in growth.ledger.steps] == [0.5, None, pytest.approx(0.6), None]
    assert [(r.step, r.to_step) for r in growth.ledger.rollbacks] == [(1, 0), (3, 2)]
    assert growth.best_metric == pytest.approx(0.6)


def test_later_a_metric_outside_0_to_1_is_a_rollback():
    growth = new_growth(decisions=12)
    for metric in (0.5, 1.2, 0.6, -math.inf, 0.7, -0.1):
        growth.decide(metric)
    assert [step.metric for step in growth.ledger.steps] == [0.5, None, 0.6, None, 0.7, None]
    assert [r.step for r in growth.ledger.rollbacks] == [1, 3, 5]
    assert "not a number from 0 to 1" in growth.ledger.rollbacks[0].reason
    with pytest.raises(ValueError, match=r"the validation metric is 1.2; it must be 0 to 1"):
        new_growth().decide(1.2)


def test_what_cannot_be_scored_without_a_seed_says_nothing_of_it():
    growth, _ = grown([(X, Y)])
    network = growth._network

    def score(batch):
        return torch.full((len(X),), 0.5 if network.slots[0].alpha else 1.5)

    measured = measure(network, [(X, Y)], score)
    assert measured.metric == 0.5
    assert list(measured.contributions) == [1]


def test_scores_are_one_per_example():
    with pytest.raises(ValueError, match=r"a score \(\); give one number per example"):
        grown([(X, Y)], score=lambda batch: torch.tensor(0.5))


def test_a_metric_beside_a_score_is_refused():
    growth, _ = grown([(X, Y)])
    with pytest.raises(ValueError, match="leave it out"):
        growth.decide(0.5)


def test_paired_differences_by_hand():
    a, b = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    mean, error = paired_difference(a.double(), b.double())
    assert mean == 0.5
    assert error == pytest.approx((4 * 0.25 / 3) ** 0.5 / 2)


@pytest.mark.parametrize(
    ("metrics", "losses", "is_told"),
    [
        ([0.64, 0.5, 0.45, 0.42, 0.4, 0.4], [1.1, 0.9, 0.8, 0.7, 0.7, 0.6], True),  # an error
        ([0.64, 0.5, 0.45, 0.42], [1.1, 0.9, 0.8, 0.7], True),  # told as early as that
        ([0.64, 0.5, 0.45, 0.5, 0.4], [1.1, 0.9, 1.2, 1.0, 0.9], True),  # of one that overfits
        ([0.64, 0.5, 0.45, 0.42], [1.1, 0.9, 0.8, 1.7], False),  # a network that gets worse
        ([0.64, 0.7, 0.45, 0.42, 0.4], [1.1, 0.9, 0.8, 0.7, 0.6], False),  # it has been better
        ([0.64, 0.5, 0.53, 0.42, 0.5], [1.1, 0.9, 0.8, 0.7, 0.6], False),  # noise, perhaps
        ([0.64, 0.3, 0.3], [1.1, 0.9, 0.8], False),  # a dip, perhaps
        ([0.64, 0.5, 0.45, 0.42], [None] * 4, False),  # nobody knows
    ],
)
def test_a_metric_that_falls_with_the_loss_is_told_once(metrics, losses, is_told):
    growth = new_growth(Script())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for pair in zip(metrics, losses, strict=True):
            growth.decide(*pair)
    assert [(w.filename, "lower is better" in str(w.message)) for w in told] == (
        [(__file__, True)] if is_told else []
    )
