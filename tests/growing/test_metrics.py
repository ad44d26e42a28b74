"""The metric that is used where none is given."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import esper
from esper.growing.validation import accuracy, closeness, default_metric
from esper.tamiyo.scripted import FixedSchedule
from support.grow_calls import refused


def metric_of(*targets):
    return default_metric(targets[0], targets)


def test_accuracy_by_hand():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
    assert accuracy(logits, torch.tensor([0, 0, 0])).tolist() == [1.0, 0.0, 1.0]
    logits[1:] = torch.tensor([[math.nan, 1.0], [5.0, -math.inf]])  # -inf: a class ruled out
    assert accuracy(logits, torch.tensor([0, 0, 0])).tolist() == [1.0, 0.0, 1.0]
    per_token = torch.zeros(1, 4, 3)
    per_token[0, :, 1] = 1.0
    target = torch.tensor([[1, 0, -100, 1]])
    assert accuracy(per_token, target).tolist() == pytest.approx([2 / 3])
    assert accuracy(per_token.movedim(-1, 1), target).tolist() == pytest.approx([2 / 3])


def test_closeness_by_hand():
    error = closeness(4.0)(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]))
    assert error.tolist() == pytest.approx([1 / (1 + 2 / 4)])


def test_the_variance_is_that_of_all_batches_around_each_positions_mean():
    """Far from 0, in batches of different sizes; an output that is off by the spread scores 0.5."""
    torch.manual_seed(0)
    targets = torch.randn(50, 2) * torch.tensor([3.0, 1.0]) + torch.tensor([1e4, -5.0])
    name, metric = metric_of(*targets.split(20))
    assert name == "1 / (1 + squared error / variance)"
    variance = float(targets.double().numpy().var(axis=0).mean())
    off = metric(targets[:3] + variance**0.5, targets[:3])
    assert off.tolist() == pytest.approx([0.5] * 3, rel=1e-3)


def test_which_metric_it_is_and_where_there_is_none():
    def unread():
        raise AssertionError("only numbers need all targets")
        yield

    assert default_metric(torch.tensor([0, 2]), unread()) == ("accuracy", accuracy)
    for targets, message in (
        (
            [torch.zeros(4), torch.ones(4)],
            "targets of 0.0 and 1.0 are probably classes.*For one logit",
        ),
        ([torch.ones(4, 3) / 3], "class probabilities.*For the most probable class"),
        ([torch.eye(3)], "class probabilities"),
        ([torch.full((4,), 2.5)], "a variance of 0.0; pass metric="),
        ([torch.tensor([0.5, math.nan])], "a variance of nan"),
        ([torch.randn(4, 2), torch.randn(4, 3)], "differ in shape; pass metric="),
    ):
        with pytest.raises(ValueError, match=message):
            metric_of(*targets)
    assert metric_of(torch.zeros(4), torch.tensor([0.0, 3.0]))


def test_numbers_of_another_shape_are_told_as_such():
    score = closeness(1.0)
    with pytest.raises(
        ValueError, match=r"output \(4, 1\) .* \(4,\) of numbers; give them the same"
    ):
        score(torch.zeros(4, 1), torch.randn(4))
    with pytest.raises(ValueError, match="pass metric="):
        score(torch.zeros(4, 3), torch.randn(4))
    with pytest.raises(ValueError, match="an output tuple and a target"):
        score((torch.zeros(4),), torch.zeros(4))


def test_the_metrics_that_are_advised_work():
    target = torch.tensor([0, 1, 1, 0])
    with pytest.raises(ValueError, match="For one logit") as told:
        accuracy(torch.zeros(4, 1), target)
    advised = eval(str(told.value).partition("For one logit: ")[2])
    logits = torch.tensor([-1.0, -2.0, 3.0, 4.0])
    for shown in (logits, logits[:, None]):
        assert advised(shown, target).tolist() == [1.0, 0.0, 1.0, 0.0]
        assert advised(shown, target[:, None].float()).tolist() == [1.0, 0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="For the most probable class") as told:
        metric_of(torch.eye(3))
    advised = eval(str(told.value).partition("For the most probable class: ")[2])
    logits = torch.tensor([[3.0, 0.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert advised(logits, torch.eye(3) * 0.7 + 0.1).tolist() == [1.0, 0.0, 1.0]


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
        self.scale = scale

    def forward(self, x):
        return self.body(x) * self.scale


def test_a_run_is_the_same_in_every_unit():
    """Metres or thousands of kilometres: the same metrics, the same decisions, no rollback."""
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    y = x[:, :1].sin() + x[:, 1:2]
    told = []
    for scale in (1.0, 2.0**20):
        model = Scaled(scale)
        result = esper.grow(
            model,
            [(x, y * scale)],
            [(x, y * scale)],
            loss=lambda output, target, scale=scale: F.mse_loss(output / scale, target / scale),
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            controller=FixedSchedule(every=1),
            steps=24,
            decisions=6,
            progress=False,
        )
        assert not result.ledger.rollbacks
        told.append(([step.metric for step in result.ledger.steps], result.ledger.summary()))
    assert told[0] == told[1]
    assert told[0][0][-1] > told[0][0][0]


def test_targets_without_a_metric_are_told_before_any_training():
    rows = torch.randn(4, 5)
    refused(
        "targets of 0.0 and 1.0", val_loader=[(rows, torch.tensor([[0.0], [1.0], [1.0], [0.0]]))]
    )
    refused("class probabilities", val_loader=[(rows, torch.ones(4, 3) / 3)])
