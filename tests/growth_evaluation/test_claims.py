"""Verdicts follow from the interval; Holm's correction counts all of them."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from growth_evaluation import arms
from growth_evaluation.claims import (
    CONSTANT_PER_TYPE,
    FRONTIERS,
    HELPS,
    PUBLISHED,
    Claim,
    correct_for_number,
    decide,
    judge,
)
from growth_evaluation.estimates import Estimate


def lead(low, high):
    """With 1e4 degrees of freedom half an interval is 1.96 standard errors."""
    return Estimate((low + high) / 2, low, high, (high - low) / 3.92, 1e4)


@pytest.mark.parametrize(
    ("low", "high", "margin", "decision"),
    [
        (0.01, 0.02, 0.0, "holds"),
        (-0.02, -0.01, 0.0, "fails"),
        (-0.01, 0.01, 0.0, "undecided"),
        (-0.004, 0.01, -0.005, "holds"),
        (-0.02, -0.006, -0.005, "fails"),
        (-0.006, 0.0, -0.005, "undecided"),
        (0.01, 0.04, 0.03, "undecided"),
        (0.0, 0.0, 0.0, "fails"),  # the same network every time: nothing was gained
        (0.0, 0.0, -0.005, "holds"),
        (0.0, 0.01, 0.0, "undecided"),  # an interval that touches the margin decides nothing
    ],
)
def test_the_whole_interval_decides(low, high, margin, decision):
    assert decide(lead(low, high), margin) == decision


def test_published_claims_are_those_that_were_asked_for():
    beaten = {arms.RANDOM, arms.SCHEDULE, arms.CONSTANT, arms.HEURISTIC}
    assert {c.rival for c in PUBLISHED if c.letter == "a"} == beaten
    assert HELPS.rival == arms.HOST_ALONE
    margins = {c.rival: c.margin for c in PUBLISHED}
    assert margins[CONSTANT_PER_TYPE] == -0.005
    assert {name: margins[rival] for rival, name in FRONTIERS.items()} == {
        (kind, norm, size): 0.03 if size == "params" else 0.0
        for kind, norm, size in product(("uniform", "own"), (False, True), ("params", "macs"))
    }


def test_a_verdict_reports_its_interval_and_its_note():
    (verdict,) = correct_for_number([judge(HELPS, 0.1, lead(0.01, 0.03), "; 25% outside")])
    assert str(verdict) == "holds +2.0 [+1.0, +3.0]; 25% outside"
    assert str(judge(HELPS, 0.1, lead(-0.01, 0.02))) == "undecided +0.5 [-1.0, +2.0]"


def test_holms_correction_decides_what_is_significant():
    """Leads of 5, 2.2 and 0.5 standard errors: p = 5.8e-7, 0.028 and 0.62; Holm makes the second
    0.056, twice what it was."""
    claim = HELPS
    leads = [lead(z - 1.96, z + 1.96) for z in (2.2, 5.0, 0.5)]
    found = correct_for_number([judge(claim, 0.2, each) for each in leads])
    assert [v.decision for v in found] == ["holds", "holds", "undecided"]
    assert [v.corrected_p for v in found] == pytest.approx([0.0556, 1.75e-6, 0.617], rel=0.01)
    assert [str(v).endswith(" *") for v in found] == [True, False, False]


def test_the_margin_is_what_a_lead_is_tested_against():
    claim = Claim("b", arms.CONSTANT, "is at most half a point below", margin=-0.005)
    verdict = judge(claim, 0.2, lead(-0.004, 0.008))  # 7 points of 1000 above it, 2.29 errors
    assert verdict.p_value == pytest.approx(0.0222, rel=0.02)


def test_a_claim_of_accuracy_compares_accuracies():
    def arm(score, test):
        outcome = SimpleNamespace(test=np.full((1, 1, 4), test))
        return SimpleNamespace(
            scores=np.full((1, 1, 4), score), array=lambda name: getattr(outcome, name)
        )

    results = {arms.LEARNED: arm(0.5, 0.9), "rival": arm(0.4, 0.6)}
    for measure, lead_of in (("score", 0.1), ("accuracy", 0.3)):
        claim = Claim("x", "rival", "leads", measure=measure)
        assert claim.lead(results, 0).mean == pytest.approx(lead_of)
