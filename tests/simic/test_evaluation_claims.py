"""Verdicts follow the interval, and say in words what it shows."""

from dataclasses import replace
from itertools import product

import pytest

from esper.simic.evaluation import arms, claims
from esper.simic.evaluation.claims import (
    CLAIMS,
    FrontierClaim,
    SearchClaim,
    correct_for_number,
    decide,
    judge,
    judge_frontier,
    judge_search,
)
from esper.simic.evaluation.statistics import Estimate, RunsToMatch


def lead(low, high):
    """With 1e4 degrees of freedom half an interval is 1.96 standard errors."""
    return Estimate((low + high) / 2, low, high, low, high, (high - low) / 3.92, 1e4)


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


def test_growing_that_did_not_help_is_said_so():
    claim = claim_about(arms.HOST_ALONE)
    failed = judge(claim, 0.2, lead(-0.03, -0.01))
    assert failed.decision == "fails"
    assert failed.sentence == (
        "At rent 0.2 growing did not help here: -2.0 points of score [-3.0, -1.0]."
    )
    assert judge(claim, 0.2, lead(0.01, 0.03)).sentence.startswith("At rent 0.2 growing helped:")
    assert "it is undecided whether growing helped" in judge(claim, 0.2, lead(-1, 1)).sentence


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.margin == 0.0])
def test_a_tie_is_not_called_a_defeat(claim):
    verdict = judge(claim, 0.2, lead(0.0, 0.0))
    assert verdict.decision == "fails"
    assert " not " in verdict.sentence or " no better " in verdict.sentence


def test_claims_are_those_that_were_asked_for():
    beaten = {arms.RANDOM, arms.SCHEDULE, arms.CONSTANT, arms.HEURISTIC}
    assert {c.rival for c in CLAIMS if c.letter == "a"} == beaten
    assert all(c.margin == 0 for c in CLAIMS if c.letter == "a")
    assert claim_about(arms.CONSTANT_PER_TYPE).margin == -0.005
    frontiers = {(c.kind, c.norm, c.size): c.margin for c in claims.FRONTIER_CLAIMS}
    assert frontiers == {
        (kind, norm, size): 0.03 if size == "params" else 0.0
        for kind, norm, size in product(("uniform", "own"), (False, True), ("params", "macs"))
    }


def test_the_frontier_speaks_of_its_margin_and_its_ends():
    claim = FrontierClaim("d", "own", norm=True, size="params", margin=0.03)
    verdict = judge_frontier(claim, 0.1, lead(0.04, 0.06), covered=0.75)
    assert verdict.decision == "holds"
    assert verdict.sentence == (
        "At rent 0.1 grown networks lie 3 points above their own hosts widened, with norm, at equal "
        "parameters: +5.0 points of accuracy [+4.0, +6.0]. 25% of the networks lie beyond the "
        "frontier's ends."
    )
    claim = FrontierClaim("d", "uniform", norm=False, size="macs", margin=0.0)
    assert judge_frontier(claim, 0.1, lead(-0.02, -0.01), covered=1.0).sentence == (
        "At rent 0.1 grown networks do not lie above static hosts of one width, without norm, at "
        "equal multiply-adds: -1.5 points of accuracy [-2.0, -1.0]."
    )


@pytest.mark.parametrize(
    ("needed", "decision", "words"),
    [
        (RunsToMatch(4, 2, 9, 64), "holds", "needs 4 full runs"),
        (RunsToMatch(None, 60, None, 64), "holds", "needs more than 64 full runs"),
        (RunsToMatch(1, 1, 1, 64), "fails", "needs 1 full runs"),
        (RunsToMatch(2, 1, 3, 64), "undecided", "[1 to 3]"),
    ],
)
def test_a_search_is_judged_by_the_runs_it_needs(needed, decision, words):
    verdict = judge_search(SearchClaim("c", runs=1), 0.1, needed, lead(0.01, 0.03))
    assert verdict.decision == decision
    assert words in verdict.sentence
    assert verdict.p_value == lead(0.01, 0.03).p_value(0.0)


def test_a_verdict_stands_if_it_would_with_all_of_them_counted():
    """Leads of 5, 2.2 and 0.5 standard errors: p = 5.8e-7, 0.028 and 0.62; Holm makes the second
    0.056, twice what it was."""
    claim = claim_about(arms.HOST_ALONE)
    leads = [lead(z - 1.96, z + 1.96) for z in (2.2, 5.0, 0.5)]
    found = correct_for_number([judge(claim, 0.2, each) for each in leads])
    assert [v.decision for v in found] == ["holds", "holds", "undecided"]
    assert [v.corrected_p for v in found] == pytest.approx([0.0556, 1.75e-6, 0.617], rel=0.01)
    assert [v.stands for v in found] == [False, True, False]
    assert found[0].sentence.endswith(" With all 3 verdicts counted it is undecided.")
    assert found[1].sentence.endswith(" It stands with all 3 verdicts counted.")
    assert "counted" not in found[2].sentence


def test_the_margin_is_what_a_lead_is_tested_against():
    claim = claim_about(arms.CONSTANT_PER_TYPE)
    verdict = judge(claim, 0.2, lead(-0.004, 0.008))  # 7 points of 1000 above it, 2.29 errors
    assert verdict.p_value == pytest.approx(0.0222, rel=0.02)


def test_several_controllers_are_named_one_by_one():
    crossed = replace(
        lead(0.01, 0.03), per_controller=(0.018, 0.022), same_controllers=(0.015, 0.025)
    )
    assert judge(claim_about(arms.HOST_ALONE), 0.2, crossed).sentence == (
        "At rent 0.2 growing helped: +2.0 points of score [+1.0, +3.0]; of these controllers "
        "[+1.5, +2.5], each +1.8, +2.2."
    )
