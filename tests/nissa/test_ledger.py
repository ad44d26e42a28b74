"""The ledger: what goes in comes out, also through JSON; lives and verdicts follow from records."""

import math

import pytest

from esper.nissa.ledger import (
    FateRecord,
    Ledger,
    NetworkRecord,
    SeedState,
    StepRecord,
    Verdict,
)
from support.ledgers import full_ledger, new_ledger, seed, state, step


def test_json_gives_the_same_ledger_back(tmp_path):
    ledger = full_ledger()
    ledger.write(tmp_path / "run.json")
    back = Ledger.read(tmp_path / "run.json")
    assert back == ledger
    assert isinstance(back.before.blocks[0].shape, tuple)
    assert isinstance(back.decisions[0].legal["GERMINATE"], tuple)
    back.steps.append(step(10))  # a resumed run goes on with what was read
    assert len(back.steps) == len(ledger.steps) + 1


def test_an_unknown_schema_is_refused():
    text = full_ledger().to_json().replace('"schema": 1', '"schema": 7')
    with pytest.raises(ValueError, match="schema 7.*reads 1"):
        Ledger.from_json(text)


def test_a_life_is_the_stages_as_the_steps_show_them():
    ledger = full_ledger()
    assert ledger.life_of("a") == [("BLENDING", 0, 2), ("HOLDING", 2, 2)]
    assert ledger.life_of("b") == [
        ("BLENDING", 4, 7),
        ("HOLDING", 7, 7),  # committed at step 7, shown at step 8
        ("FOSSILIZED", 7, 9),
    ]


def test_a_seed_that_no_step_has_shown_yet_has_no_life():
    ledger = new_ledger()
    ledger.steps.append(step(0))
    ledger.seeds.append(seed("a", born=0))
    assert ledger.life_of("a") == []
    assert ledger.fate_of("a") is None


def test_a_prune_that_takes_its_time_ends_the_life_when_it_is_over():
    ledger = new_ledger()
    ledger.seeds.append(seed("a", born=0))
    ledger.steps.append(step(1, state("a", "HOLDING", 1.0)))
    ledger.steps.append(step(2, state("a", "BLENDING", 0.5)))
    ledger.steps.append(step(3))
    ledger.fates.append(FateRecord(seed="a", step=3, fate="pruned"))
    assert ledger.life_of("a")[-1] == ("BLENDING", 2, 3)


def test_the_last_fate_counts():
    ledger = full_ledger()
    ledger.fates.append(FateRecord(seed="b", step=9, fate="rolled_back"))
    assert ledger.fate_of("b").fate == "rolled_back"


def test_numbers_that_are_not_finite_become_none():
    record = StepRecord(step=0, metric=math.nan, params=1, macs=1, train_loss=math.inf)
    assert (record.metric, record.train_loss) == (None, None)
    contribution = SeedState(seed="a", stage="HOLDING", alpha=1.0, contribution=math.nan)
    assert contribution.contribution is None
    ledger = new_ledger(steps=[record])
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_a_verdict_needs_finite_metrics():
    with pytest.raises(ValueError, match="both must be finite"):
        Verdict(grown=math.nan, ungrown=0.5, returned="ungrown")


@pytest.mark.parametrize(
    ("verdict", "opening"),
    [
        (Verdict(grown=0.9, ungrown=0.8, returned="grown"), "Growing helped"),
        (Verdict(grown=0.9, ungrown=0.8, returned="grown", difference_error=0.2), "No clear"),
        (Verdict(grown=0.7, ungrown=0.8, returned="grown"), "No clear"),
        (
            Verdict(grown=0.9, ungrown=0.8, returned="grown", difference_error=0.03),
            "Growing helped",
        ),
        *(  # three standard errors: chance among three runs, hardly among twelve
            (Verdict(grown=0.9, ungrown=0.8, returned="grown", difference_error=0.03, repeats=n), o)
            for n, o in ((2, "No clear"), (3, "No clear"), (5, "Growing"), (12, "Growing helped"))
        ),
        (Verdict(grown=0.7, ungrown=0.8, returned="ungrown"), "Growing did not help"),
    ],
)
def test_the_summary_says_what_the_verdict_says(verdict, opening):
    ledger = new_ledger()
    ledger.after, ledger.verdict = NetworkRecord(params=1058, macs=8000), verdict
    assert ledger.summary().startswith(opening)
    assert f"{verdict.grown:.1%}" in ledger.summary()


def test_a_metric_that_is_no_share_is_told_as_it_is():
    ledger = new_ledger(metric="likelihood")
    verdict = Verdict(grown=0.145, ungrown=0.1225, returned="grown", difference_error=0.005)
    ledger.after, ledger.verdict = NetworkRecord(params=1058, macs=8000), verdict
    assert "likelihood 0.1225 to 0.145 (+0.0225 +- 0.005)" in ledger.summary()


def test_a_summary_without_a_verdict_claims_nothing():
    ledger = new_ledger()
    assert "not over" in ledger.summary()
    ledger.after = NetworkRecord(params=1058, macs=8000)
    assert "the gain is not known" in ledger.summary()
    assert "+200 parameters (+23%)" in ledger.summary()


def test_a_summary_of_nothing_kept_says_so():
    ledger = new_ledger()
    same = NetworkRecord(params=ledger.before.params, macs=ledger.before.macs)
    ledger.after = same
    assert ledger.summary() == "Nothing was kept: the network has its original size."
    ledger.after, ledger.verdict = same, Verdict(grown=0.8, ungrown=0.8, returned="grown")
    told = "Nothing was kept: accuracy 80.0% to 80.0% (+0.0 points), at the same size."
    assert ledger.summary() == told


def test_halves_are_rounded_away_from_zero():
    ledger = new_ledger()
    assert ledger.show(0.8125) == "81.3%"
    assert ledger.show_gain(-0.0025, 0.0025) == "-0.3 +- 0.3 points"
