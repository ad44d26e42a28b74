"""Verdicts follow from the interval, and their sentences report it."""

from dataclasses import replace
from itertools import product

import pytest

from esper.simic.evaluation import arms
from esper.simic.evaluation.claims import CLAIMS, RANDOM_SEARCH, correct_for_number, decide, judge
from esper.simic.evaluation.statistics import Estimate, RunsToMatch


def lead(low, high):
    """With 1e4 degrees of freedom half an interval is 1.96 standard errors."""
    return Estimate((low + high) / 2, low, high, (high - low) / 3.92, 1e4)


def claim_about(rival):
    return next(claim for claim in CLAIMS if claim.rival == rival)


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


def test_the_sentence_reports_that_growing_did_not_help():
    claim = claim_about(arms.HOST_ALONE)
    failed = judge(claim, 0.2, lead(-0.03, -0.01))
    assert failed.decision == "fails"
    assert failed.sentence == (
        "At rent 0.2, growing did not help: -2.0 points of score [-3.0, -1.0]."
    )
    assert judge(claim, 0.2, lead(0.01, 0.03)).sentence.startswith("At rent 0.2, growing helped:")
    assert "it is undecided whether growing helped" in judge(claim, 0.2, lead(-1, 1)).sentence


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.margin == 0.0])
def test_a_tie_is_not_called_a_defeat(claim):
    verdict = judge(claim, 0.2, lead(0.0, 0.0))
    assert verdict.decision == "fails"
    assert " not " in verdict.sentence


def test_claims_are_those_that_were_asked_for():
    beaten = {arms.RANDOM, arms.SCHEDULE, arms.CONSTANT, arms.HEURISTIC}
    assert {c.rival for c in CLAIMS if c.letter == "a"} == beaten
    assert all(c.margin == 0 for c in CLAIMS if c.letter == "a")
    assert claim_about(arms.CONSTANT_PER_TYPE).margin == -0.005
    frontiers = {c.frontier: c.margin for c in CLAIMS if c.frontier}
    assert frontiers == {
        (kind, norm, size): 0.03 if size == "params" else 0.0
        for kind, norm, size in product(("uniform", "own"), (False, True), ("params", "macs"))
    }


def frontier_claim(*name):
    return next(claim for claim in CLAIMS if claim.frontier == name)


def test_a_frontier_sentence_reports_the_margin_and_the_coverage():
    verdict = judge(frontier_claim("own", True, "params"), 0.1, lead(0.04, 0.06), covered=0.75)
    assert verdict.decision == "holds"
    assert verdict.sentence == (
        "At rent 0.1, grown networks are 3 points more accurate than their own hosts widened, with "
        "norm, at equal parameters: +5.0 points of accuracy [+4.0, +6.0]. 25% of the networks are "
        "outside the frontier's size range."
    )
    assert judge(frontier_claim("uniform", False, "macs"), 0.1, lead(-0.02, -0.01)).sentence == (
        "At rent 0.1, grown networks are not more accurate than static hosts of one width, without "
        "norm, at equal multiply-adds: -1.5 points of accuracy [-2.0, -1.0]."
    )


@pytest.mark.parametrize(
    ("runs", "low", "high", "decision", "words"),
    [
        (RunsToMatch(4, 2, 9, 64), 0.01, 0.03, "holds", "Runs needed: 4 [2 to 9]."),
        (RunsToMatch(None, 60, None, 64), 0.1, 0.3, "holds", "more than 64 [60 to more than 64]"),
        (RunsToMatch(1, 1, 1, 64), -0.02, -0.01, "fails", "Runs needed: 1 [1 to 1]."),
        (RunsToMatch(2, 1, 3, 64), -0.01, 0.02, "undecided", "[1 to 3]"),
    ],
)
def test_a_random_search_is_judged_by_its_first_run(runs, low, high, decision, words):
    """It needs more than one run if the learned controller's lead over one run is positive."""
    verdict = judge(claim_about(RANDOM_SEARCH), 0.1, lead(low, high), runs=runs)
    assert verdict.decision == decision
    assert words in verdict.sentence
    assert verdict.runs == runs
    assert verdict.p_value == lead(low, high).p_value(0.0)


def test_holms_correction_decides_what_is_significant():
    """Leads of 5, 2.2 and 0.5 standard errors: p = 5.8e-7, 0.028 and 0.62; Holm makes the second
    0.056, twice what it was."""
    claim = claim_about(arms.HOST_ALONE)
    leads = [lead(z - 1.96, z + 1.96) for z in (2.2, 5.0, 0.5)]
    found = correct_for_number([judge(claim, 0.2, each) for each in leads])
    assert [v.decision for v in found] == ["holds", "holds", "undecided"]
    assert [v.corrected_p for v in found] == pytest.approx([0.0556, 1.75e-6, 0.617], rel=0.01)
    assert [v.is_significant for v in found] == [False, True, False]
    assert found[0].sentence.endswith(" Not significant after Holm correction over 3 verdicts.")
    assert found[1].sentence.endswith(" Significant after Holm correction over 3 verdicts.")
    assert "Holm" not in found[2].sentence


def test_the_margin_is_what_a_lead_is_tested_against():
    claim = claim_about(arms.CONSTANT_PER_TYPE)
    verdict = judge(claim, 0.2, lead(-0.004, 0.008))  # 7 points of 1000 above it, 2.29 errors
    assert verdict.p_value == pytest.approx(0.0222, rel=0.02)


def test_the_sentence_reports_each_controller():
    crossed = replace(
        lead(0.01, 0.03), per_controller=(0.018, 0.022), same_controllers=(0.015, 0.025)
    )
    assert judge(claim_about(arms.HOST_ALONE), 0.2, crossed).sentence == (
        "At rent 0.2, growing helped: +2.0 points of score [+1.0, +3.0]; over hosts only "
        "[+1.5, +2.5], per controller +1.8, +2.2."
    )
