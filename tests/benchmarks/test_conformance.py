"""The conformance checks accept a plain implementation, and each finds the mistake it is for."""

import re

import pytest
import torch
from conformance_kit import conformance
from torch import nn


def gae(rewards, values, terminated, truncated, nexts, gamma, lam, step_counts=None, mistake=""):
    """A loop, written from the definition."""
    if mistake == "swapped":
        gamma, lam = lam, gamma
    advantages = torch.zeros_like(rewards)
    for env in range(len(rewards)):
        count = rewards.shape[1] if step_counts is None else int(step_counts[env])
        if mistake == "padding":
            count = rewards.shape[1]
        later = 0.0
        for t in reversed(range(count)):
            end = bool(terminated[env, t]), bool(truncated[env, t])
            next_value = 0.0 if end[0] else nexts[env, t]
            if mistake == "bootstraps an end" or (mistake == "limit before end" and end[1]):
                next_value = nexts[env, t]
            if mistake == "cut is an end" and end[1]:
                next_value = 0.0
            if mistake == "next episode" and end[1] and t + 1 < count:
                next_value = values[env, t + 1]
            keeps = 0.0 if any(end) and mistake != "runs over ends" else 1.0
            delta = rewards[env, t] + gamma * next_value - values[env, t]
            decay = {"gamma twice": gamma * gamma, "lambda twice": lam * lam}.get(mistake)
            later = delta + (decay or gamma * lam) * keeps * later
            advantages[env, t] = later
    if mistake == "mixes envs":
        advantages = advantages - advantages.mean()
    return advantages


@pytest.mark.parametrize(
    ("mistake", "failing"),
    [
        ("", set()),
        ("cut is an end", {"six rows", "splits"}),
        ("next episode", {"six rows", "splits"}),
        ("runs over ends", {"six rows", "splits"}),
        ("mixes envs", {"six rows", "splits"}),
        ("padding", {"ragged rows"}),
        ("bootstraps an end", {"six rows", "splits"}),
        ("limit before end", {"six rows", "splits"}),
        ("swapped", {"six rows", "splits"}),
        ("gamma twice", {"six rows", "splits"}),
        ("lambda twice", {"six rows", "splits"}),
    ],
)
def test_advantages(mistake, failing):
    found = conformance(gae=lambda *args, **kwargs: gae(*args, **kwargs, mistake=mistake))
    assert set(found) == {"six rows", "splits", "ragged rows"}
    assert {name for name, result in found.items() if result != "pass"} >= failing
    assert bool(failing) or set(found.values()) == {"pass"}


def test_what_is_not_supported_is_no_failure():
    def whole_rows(*args, step_counts=None):
        if step_counts is not None:
            raise NotImplementedError("rows have one length")
        return gae(*args)

    assert conformance(gae=whole_rows)["ragged rows"] == "none: rows have one length"


def test_masks():
    def fill(value):
        return lambda logits, masks: torch.where(masks, logits, value).softmax(-1)

    assert conformance(masked_probs=fill(-1e9)) == {"masks": "pass"}
    assert "FAIL" in conformance(masked_probs=fill(-3.0))["masks"]

    def leaks(logits, masks):
        nothing = 1e-3 * (logits.sum(-1, keepdim=True) - logits.sum(-1, keepdim=True).detach())
        return fill(-1e9)(logits, masks) + nothing * masks

    assert "gradient of an illegal choice" in conformance(masked_probs=leaks)["masks"]


class Recurrent(nn.Module):
    def __init__(self, mistake=""):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.mistake = nn.GRUCell(4, 3), mistake

    def step(self, observation, state, starts):
        state = torch.zeros(len(observation), 3) if state is None else state
        if self.mistake == "resets all":
            starts = starts.any().expand(len(starts))
        if self.mistake != "never reset":
            state = torch.where(starts[:, None], 0.0, state)
        state = self.cell(observation, state)
        if self.mistake == "mixes envs":
            state = state + 0.1 * state.mean(0)
        return state, state

    def unroll(self, observations, starts):
        starts = starts & (self.mistake != "learning never resets")
        outputs, state = [], None
        for observation, start in zip(observations, starts, strict=True):
            output, state = self.step(observation, state, start)
            outputs.append(output.detach())
        return torch.stack(outputs)


@pytest.mark.parametrize(
    ("mistake", "failing"),
    [
        ("", None),
        ("never reset", "state reset"),
        ("mixes envs", "state reset"),
        ("resets all", "state reset"),
        ("learning never resets", "unrolled"),
    ],
)
def test_recurrent_policies(mistake, failing):
    policy = Recurrent(mistake)
    found = conformance(step=policy.step, unroll=policy.unroll)
    assert [name for name, result in found.items() if result != "pass"] == (
        [failing] if failing else []
    )


def test_a_policy_without_memory_is_named():
    layer = nn.Linear(4, 3)
    found = conformance(step=lambda observation, state, starts: (layer(observation), None))
    assert found == {
        "state reset": "none: no memory: outputs do not depend on earlier observations"
    }


def test_ratios():
    assert conformance(ratios=lambda: torch.ones(9)) == {"ratio 1": "pass"}
    found = conformance(ratios=lambda: torch.tensor([1.0, 1.01]))
    assert found == {"ratio 1": "FAIL: ratio [1] is 1.01, expected 1"}


@pytest.mark.parametrize(
    ("wrong", "name", "text"),
    [
        (lambda *rows: gae(*rows), "ragged rows", "TypeError: .*'step_counts'"),
        (lambda *rows, **counts: gae(*rows, **counts).numpy(), "six rows", "got ndarray, expected"),
        (
            lambda *rows, **counts: gae(*rows, **counts)[0],
            "six rows",
            r"got shape \(6,\), expected",
        ),
        (lambda *rows, **counts: [][1], "splits", "IndexError: list index"),
    ],
)
def test_an_error_in_the_function_under_test_is_a_failure_with_its_text(wrong, name, text):
    assert re.search(f"^FAIL: {text}", conformance(gae=wrong)[name])


def test_other_results_are_failures():
    assert "FAIL: AttributeError" in conformance(masked_probs=lambda *_: [0.5])["masks"]
    assert "FAIL: TypeError" in conformance(step=lambda *_: None)["state reset"]
    policy = Recurrent()
    found = conformance(step=policy.step, unroll=lambda *rows: policy.unroll(*rows)[..., :1])
    assert found == {"state reset": "pass", "unrolled": found["unrolled"]}
    assert "FAIL: got shape (9, 3, 1), expected (9, 3, 3)" in found["unrolled"]
    assert conformance(ratios=lambda: torch.ones(0)) == {"ratio 1": "FAIL: got an empty tensor"}
    with pytest.raises(ValueError, match="pass step= too"):
        conformance(unroll=policy.unroll)
