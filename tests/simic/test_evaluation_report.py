"""A whole evaluation in the smallest size: every arm is there, paired, judged and written down."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.runtime.plain_config import to_plain
from esper.runtime.ranks import join_ranks
from esper.simic.evaluation import arms, claims
from esper.simic.evaluation.claims import Estimate
from esper.simic.evaluation.evaluate import evaluate_controllers, evaluate_run, on_task
from esper.simic.evaluation.experiment import PRESETS
from esper.simic.growth.hosts_and_data import load_hosts, load_menu, load_task
from esper.simic.growth.train_config import PRESETS as TRAINING
from support.evaluations import MENU, SMALL, TRAINED, RestlessPolicy, make_controller
from support.ranks import on_ranks


@pytest.fixture(scope="module")
def report():
    controllers = [make_controller(0, RestlessPolicy), make_controller(1, RestlessPolicy)]
    return evaluate_controllers(controllers, TRAINED, SMALL)


def test_every_arm_has_figures_of_every_host(report):
    assert set(report.arms) == {
        arms.HOST_ALONE, arms.RANDOM, arms.SCHEDULE, arms.HEURISTIC, arms.CONSTANT, arms.LEARNED,
    }  # fmt: skip
    for name, arm in report.arms.items():
        controllers = 2 if name == arms.LEARNED else 1
        assert arm.scores.shape == (controllers, 2, 8), name
        for field in ("validation", "test", "params", "macs", "training_flops"):
            assert np.isfinite(arm.array(field)).all(), (name, field)
        assert (arm.array("params") == arm.array("host_params") + arm.array("added_params")).all()


def test_an_arm_that_grows_nothing_is_the_host_alone(report):
    alone = report.arms[arms.HOST_ALONE]
    assert (alone.scores[:, 0] == alone.scores[:, 1]).all()  # no rent on nothing
    for name in (arms.LEARNED, arms.RANDOM, arms.CONSTANT):
        arm = report.arms[name]
        bare = (arm.array("added_params") == 0) & (
            arm.array("training_flops") <= alone.array("training_flops")
        )
        same = np.broadcast_to(alone.array("test"), bare.shape)
        assert (arm.array("test")[bare] == same[bare]).all(), name


def test_the_networks_of_a_search_are_counted(report):
    assert report.arms[arms.CONSTANT].search_networks == (4 + 2 * 2) * 2  # plans, finals x rents
    assert report.arms[arms.LEARNED].search_networks == TRAINED.rounds * 8


def test_sizes_have_intervals_and_the_time_is_reported(report):
    from scipy import stats

    text = report.markdown()
    macs = report.arms[arms.HOST_ALONE].array("macs")[0, 0]
    low, high = stats.ttest_1samp(macs, 0).confidence_interval(0.95)
    assert f" {macs.mean():,.0f} ± {(high - low) / 2:,.0f} " in text
    assert "and other controllers trained in the same way" in text
    assert f"{report.seconds:.0f} s on cpu" in text


def test_every_claim_gets_a_verdict_at_every_rent(report):
    assert len(report.verdicts) == len(claims.CLAIMS) * 2
    table = report.claim_table()
    assert len(table) == 1 + len(claims.CLAIMS)
    assert table[1] == ["(a) beats the random controller", *map(str, report.verdicts[:2])]
    alone = next(v for v in report.verdicts if v.claim == claims.HELPS)
    lead = report.arms[arms.LEARNED].scores[:, 0] - report.arms[arms.HOST_ALONE].scores[:, 0]
    assert alone.lead.mean == pytest.approx(lead.mean())
    assert all(v.corrected_p >= v.p_value for v in report.verdicts)
    assert min(v.corrected_p for v in report.verdicts) == pytest.approx(
        min(1.0, len(report.verdicts) * min(v.p_value for v in report.verdicts))
    )


def test_files_hold_all_of_it(report, tmp_path):
    as_json, as_markdown = report.save(tmp_path / "run")
    plain = json.loads(as_json.read_text())
    assert plain["arms"]["learned"]["axes"] == ["controller", "rent", "host"]
    assert np.shape(plain["arms"]["learned"]["test"]) == (2, 2, 8)
    assert plain["verdicts"][0]["claim"]["rival"] == arms.RANDOM
    text = as_markdown.read_text()
    assert all(f"| {name} |" in text for name in report.arms)
    assert "This is a small evaluation" in text
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "evaluation.json", "evaluation.md",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.01, 0.03, "At rent 0.2 growing helped: +2.0 [+1.0, +3.0] points."),
        (-0.03, -0.01, "At rent 0.2 growing did not help: -2.0 [-3.0, -1.0] points."),
        (-0.01, 0.01, "At rent 0.2 it is undecided whether growing helped: +0.0 [-1.0, +1.0]"),
    ],
)
def test_the_headline_reports_whether_growing_helped(report, low, high, words):
    lead = Estimate((low + high) / 2, low, high, 0.01, 7.0)
    changed = replace(report, verdicts=[claims.judge(claims.HELPS, 0.2, lead)])
    assert changed.headline().startswith(words)


def test_two_lines_report_the_lead_its_price_and_every_rival(report):
    first, second = report.brief().splitlines()
    assert re.match(r"(Growing|It is undecided whether growing) (helped|did not help): ", first)
    assert re.search(r"over the same networks ungrown, with \d+% more parameters \(rent ", first)
    rivals = {claim.rival for claim in claims.CLAIMS} - {arms.HOST_ALONE}
    assert all(re.search(rf"{rival} [+-]\d", second) for rival in rivals)
    assert arms.HOST_ALONE not in second


def test_figures_have_every_arm_at_every_rent(report):
    figures = report.figures()
    assert list(figures) == [f"rent {rent:g}" for rent in report.settings.rents]
    for index, bars in enumerate(figures.values()):
        assert set(bars) == set(report.arms)
        for name, (mean, _) in bars.items():
            assert mean == pytest.approx(100 * report.arms[name].scores[:, index].mean())


def test_evaluation_on_two_ranks_is_that_of_one_process():
    """Hosts are trained by the same compiled kernels, one by one: equal bit for bit."""

    def work():
        ranks = join_ranks()
        return evaluate_controllers([make_controller(0)], TRAINED, SMALL, ranks=ranks).arms

    one, (two, other) = work(), on_ranks(2, work)
    for name, arm in one.items():
        for found in (two, other):
            torch.testing.assert_close(
                arm.outcome.tensors(), found[name].outcome.tensors(), rtol=0, atol=0, equal_nan=True
            )


def test_runs_of_different_kinds_are_not_one_arm(tmp_path):
    for name, config in (("a", TRAINED), ("b", replace(TRAINED, rounds=3))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(to_plain(config)))
        make_controller(0).save(tmp_path / name / "controller.pt")
    with pytest.raises(ValueError, match="differ in more than their rng_seed"):
        evaluate_run([tmp_path / "a", tmp_path / "b"], settings=SMALL)
    with pytest.raises(ValueError, match="not the folder of a run"):
        evaluate_run(tmp_path)
    with pytest.raises(ValueError, match="no preset 'huge'"):
        evaluate_run(tmp_path / "a", "huge")


def test_a_run_that_has_no_controller_yet_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_plain(TRAINED)))
    with pytest.raises(ValueError, match="has no controller yet"):
        evaluate_run(tmp_path, settings=SMALL)


@pytest.mark.parametrize(("trained", "task"), [("mnist1d", "digits"), ("digits", "mnist1d")])
def test_other_data_gets_hosts_that_fit_it(trained, task):
    there = on_task(replace(TRAINED, task=trained), task)
    data = load_task(there, ("plain",))
    assert load_hosts(there, data, ((4, 8, 8),))[0].num_slots == 3
    assert len(load_menu(there, data)) > len(MENU)
    assert on_task(TRAINED, "mnist1d") is TRAINED


def test_a_run_that_held_nothing_out_is_refused():
    config = replace(TRAINED, held_out_widths=(), held_out_variants=())
    with pytest.raises(ValueError, match="nothing was held out"):
        evaluate_controllers([make_controller(0)], config, SMALL)


def test_presets_can_be_told_apart():
    held_out = TRAINING["full"].held_out_variants
    assert PRESETS["full"].repeats * PRESETS["full"].num_widths * len(held_out) >= 256
    assert PRESETS["quick"].num_plans < PRESETS["full"].num_plans
    with pytest.raises(ValueError, match="repeats=1; use 2 or more"):
        replace(SMALL, repeats=1)
    with pytest.raises(ValueError, match="use one or more numbers of 0 or above"):
        replace(SMALL, rents=())
