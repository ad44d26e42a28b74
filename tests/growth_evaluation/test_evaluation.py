"""The evaluation behind the published claims, in its smallest size."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from esper.kasmina.lifecycle import SlotStates
from esper.leyline.stages import SeedStage
from esper.runtime.plain_config import to_plain
from growth_evaluation import arms, claims
from growth_evaluation.__main__ import shared_config
from growth_evaluation.estimates import Estimate
from growth_evaluation.evaluation import evaluate_fully, prepare
from growth_evaluation.preset_seeds import committed
from growth_evaluation.settings import SIZES, SearchConfig
from growth_evaluation.static_hosts import StaticHost, candidate_widths, widen
from support.evaluations import MENU, SMALL, TRAINED, RestlessPolicy, make_controller

SEARCH = SearchConfig(
    learning_rates=(1e-5, 2e-2),
    heuristic_scales=(1.0, 4.0),
    frontier_widths=(4, 8),
    widening_factors=(1.0, 1.5),
    width_search_share=0.13,
)


@pytest.fixture(scope="module")
def report():
    controllers = [make_controller(rng_seed, RestlessPolicy) for rng_seed in (0, 1)]
    return evaluate_fully(controllers, TRAINED, SMALL, SEARCH)


def test_every_claim_has_an_arm_and_a_verdict_at_every_rent(report):
    letters = [v.claim.letter for v in report.verdicts]
    assert letters == sorted(letters)
    assert set(letters) == set("abcde")
    assert len(report.verdicts) == 2 * len(claims.PUBLISHED)
    rivals = {claim.rival for claim in claims.PUBLISHED}
    assert rivals - set(report.arms) == {claims.RANDOM_SEARCH, *claims.FRONTIERS}
    for name, arm in report.arms.items():
        is_learned = name in (arms.LEARNED, claims.SAMPLED, claims.FROM_SCRATCH)
        assert arm.scores.shape == (2 if is_learned else 1, 2, 8), name
        assert np.isfinite(arm.array("test")).all(), name


def test_preset_networks_have_their_seeds_from_the_start(report):
    grown, scratch = report.arms[arms.LEARNED], report.arms[claims.FROM_SCRATCH]
    assert (grown.array("params") == scratch.array("params")).all()
    assert grown.array("added_params").max() > 0
    assert (grown.array("test") != scratch.array("test")).any()
    everywhere = report.arms[claims.ALL_SEEDS].outcome.blueprint
    assert (everywhere == MENU.index("conv_conv")).all()


def test_preset_seeds_keep_the_weight_they_were_committed_with():
    blueprint = torch.tensor([[[1, -1], [-1, 2]]])
    alpha = torch.tensor([[[0.5, 0.7], [0.3, 1.0]]])
    states = committed(
        SlotStates.dormant(3, 2),
        torch.tensor([2, 0]),
        blueprint,
        torch.zeros_like(blueprint),
        alpha,
    )
    assert states.alpha.tolist() == [[0.0, 1.0], [0.0, 0.0], [0.5, 0.0]]
    is_committed = states.stage == int(SeedStage.FOSSILIZED)
    assert is_committed.tolist() == [[False, True], [False, False], [True, False]]


def test_settings_are_tuned_and_searches_are_counted(report):
    slow, fast = report.learning_rates.results
    assert fast > slow
    assert report.learning_rates.best == {"learning_rate": 2e-2}
    assert report.arms[arms.HEURISTIC].search_networks == 4 * 2 * 2  # settings, rents, hosts
    statics = report.results.statics.hosts
    assert 12 < len(statics) < 20  # more than the frontiers, not all
    budget = SEARCH.width_search_share * report.search_flops[arms.LEARNED]
    spent = report.search_flops[claims.WIDTH_SEARCH]
    assert budget - 3 * spent / len(statics) < spent <= budget


def test_hosts_are_compared_with_their_own_widened_on_their_own_data(report):
    pool = report.results.statics
    frontier, groups = report.results.frontier(("own", False, "params"))
    assert groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    lines = [[(4, 8, 8), (6, 12, 12)], [(8, 4, 4), (12, 6, 6)]]
    for group, (line, view) in enumerate(product(lines, range(2))):
        places = [pool.hosts.index(StaticHost(widths, False)) for widths in line]
        assert frontier.sizes[:, group].tolist() == pool.sizes("params")[places].tolist()
        assert (frontier.accuracies[:, group] == pool.networks.test[places, view].numpy()).all()
    alone = report.arms[arms.HOST_ALONE].array("params")[0, 0]
    assert (frontier.sizes[0, groups] == alone).all()


def test_the_width_search_takes_the_best_network_that_is_not_smaller(report):
    found, pool = report.arms[claims.WIDTH_SEARCH], report.results.statics
    params = pool.sizes("params").numpy()
    for (index, rent), host in product(enumerate(SMALL.rents), range(8)):
        view, own = host // 2 % 2, found.array("host_params")[0, 0, host]
        accuracy = pool.networks.validation[:, view].mean(dim=1).numpy()
        worth = np.where(params >= own, accuracy - rent * np.log(params / own), -np.inf)
        assert found.array("params")[0, index, host] == params[int(np.argmax(worth))]


def test_the_report_has_all_tables_and_lines(report, tmp_path):
    as_json, as_markdown = report.save(tmp_path)
    plain, text = json.loads(as_json.read_text()), as_markdown.read_text()
    assert len(plain["plot"]["lines"]) == 4
    assert len(plain["plot"]["points"]) == 11 * 2
    assert plain["statics"]["lines"]["own"][1] == [[8, 4, 4], [12, 6, 6]]
    assert "; k = " in text
    assert "| mnist1d, 500 rows | 0.2 | " in text
    assert "accuracy over their own hosts widened, without norm, at equal parameters" in text
    assert "accuracy over their own hosts widened, with norm" not in text  # the run has none


def test_an_arm_that_grows_nothing_is_the_host_alone(report):
    alone = report.arms[arms.HOST_ALONE]
    assert (alone.scores[:, 0] == alone.scores[:, 1]).all()  # no rent on nothing
    for name in (arms.LEARNED, arms.RANDOM, arms.CONSTANT, claims.SAMPLED):
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


def test_verdicts_are_corrected_for_their_number(report):
    assert len(report.verdicts) == len(claims.PUBLISHED) * 2
    table = report.claim_table()
    assert len(table) == 1 + len(claims.PUBLISHED)
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


def test_a_budget_buys_distinct_hosts_in_addition_to_the_frontiers():
    """By hand: 1-1, 2-2, 1-2 and 2-4 cost 2, 4, 3 and 6, with norm one more: 34. That leaves 2-1,
    which costs 3 and 4."""
    lines = {"uniform": (((1, 1), (2, 2)),), "own": (((1, 2), (2, 4)), ((1, 1), (2, 2)))}

    def candidates(budget, rng_seed=0):
        rng = torch.Generator().manual_seed(rng_seed)
        return candidate_widths(lines, lambda h: float(sum(h.widths)) + h.norm, budget, rng)

    first = set(product([(1, 1), (2, 2), (1, 2), (2, 4)], [False, True]))
    assert {(h.widths, h.norm) for h in candidates(0.0)} == first
    assert len(candidates(34 + 2.9)) == 8
    assert len(candidates(34 + 7)) == len(candidates(1e9)) == 10
    assert len({candidates(34 + 4.5, rng_seed) for rng_seed in range(9)}) == 2


def test_widths_are_widened_to_the_nearest_integer():
    assert widen((4, 8, 16), (1.0, 1.25, 2.5)) == ((4, 8, 16), (5, 10, 20), (10, 20, 40))
    assert widen((6, 2, 10), (1.0, 1.25)) == ((6, 2, 10), (8, 3, 13))  # halves are rounded up
    close = replace(SEARCH, widening_factors=(1.0, 1.05))
    with pytest.raises(ValueError, match="the same widths twice"):
        evaluate_fully([], TRAINED, SMALL, close)


def test_hosts_of_training_types_choose_and_held_out_ones_are_compared():
    training, held_out = prepare(TRAINED, SMALL)
    assert training.test_rows is None
    assert (training.num_hosts, held_out.num_hosts) == (2, 8)
    assert not set(training.hosts.widths) & set(held_out.hosts.widths)
    few = prepare(
        replace(TRAINED, task="digits", menu=(), widths=(2, 4), held_out_widths=()), SMALL
    )
    rows = few[0].hosts.config.host_batch.validation_rows
    assert rows == min(100, few[0].hosts.task.validation_y.shape[1])


def test_runs_of_different_kinds_are_not_one_arm(tmp_path):
    for name, changes in (("a", {}), ("b", {"rng_seed": 3}), ("c", {"rounds": 3})):
        (tmp_path / name).mkdir()
        config = to_plain(replace(TRAINED, **changes))
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert shared_config([tmp_path / "a", tmp_path / "b"]) == TRAINED
    with pytest.raises(ValueError, match="differ in more than their rng_seed"):
        shared_config([tmp_path / "a", tmp_path / "c"])


def test_sizes_that_cannot_be_used_are_refused():
    settings, _ = SIZES["quick"]
    with pytest.raises(ValueError, match="repeats=1; use 2 or more"):
        replace(settings, repeats=1)
    with pytest.raises(ValueError, match="use one or more numbers of 0 or above"):
        replace(settings, rents=())
    with pytest.raises(ValueError, match="finalists=9; use 1 to num_plans=5"):
        replace(settings, finalists=9)
