"""A whole evaluation in the smallest size: every arm is there, paired, judged and written down."""

import json
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.cli import main
from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.plain_config import to_plain
from esper.simic.evaluation import arms, claims
from esper.simic.evaluation.evaluate import (
    evaluate_controllers,
    evaluate_run,
    host_training_cost,
    on_task,
)
from esper.simic.evaluation.experiment import PairedExperiment
from esper.simic.evaluation.searches import (
    StaticHost,
    candidate_widths,
    frontier_lines,
    train_static,
    widen,
    width_search,
)
from esper.simic.evaluation.settings import PRESETS, EvaluationConfig
from esper.simic.evaluation.statistics import Estimate
from esper.simic.training.config import PRESETS as TRAINING
from esper.simic.training.config import TrainConfig
from esper.simic.training.distribution import load_hosts, load_menu, load_task
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic, PolicyConfig
from esper.tamiyo.policy.slot_heads import SlotHeads
from esper.tolaria.environment import GrowthConfig
from esper.tolaria.host_batch import HostBatchConfig

STEPS = 6
MENU = ("conv", "conv_conv", "separable")
TRAINED = TrainConfig(
    variants=("plain",),
    held_out_variants=("permuted:3", "rows:500"),
    widths=(4, 8),
    held_out_widths=("4-8-8", "8-4-4"),
    menu=MENU,
    growth=GrowthConfig(num_steps=STEPS),
    host_batch=HostBatchConfig(num_types=2, envs_per_type=4, episode_steps=STEPS),
    policy=PolicyConfig(lstm_hidden_dim=8),
    device="cpu",
)
SMALL = EvaluationConfig(
    rents=(0.05, 0.2),
    num_widths=2,
    repeats=2,
    training_widths=2,
    training_repeats=1,
    learning_rates=(1e-5, 2e-2),
    heuristic_scales=(1.0, 4.0),
    num_plans=4,
    finalists=2,
    frontier_widths=(4, 8),
    widening_factors=(1.0, 1.5),
    width_search_share=0.03,
    host_batch=HostBatchConfig(minibatches=4, validation_rows=100),
)


class RestlessPolicy(FactoredRecurrentActorCritic):
    """An untrained policy that always draws: its likeliest choice would be to wait for ever."""

    rng = torch.Generator().manual_seed(0)

    def act(self, *inputs, generator=None, deterministic=False):
        return super().act(*inputs, generator=self.rng)


def make_controller(rng_seed, kind=FactoredRecurrentActorCritic):
    with torch.random.fork_rng():
        torch.manual_seed(rng_seed)
        config = PolicyConfig(lstm_hidden_dim=8)
        return LearnedController(
            kind(tamiyo_action_space(3, 3), SlotHeads(FeatureLayout(3, 3), config), config)
        )


@pytest.fixture(scope="module")
def report():
    controllers = [make_controller(0, RestlessPolicy), make_controller(1, RestlessPolicy)]
    return evaluate_controllers(controllers, TRAINED, SMALL)


def test_every_arm_has_figures_of_every_host(report):
    assert set(report.arms) == {
        arms.HOST_ALONE, arms.ALL_SEEDS, arms.FROM_SCRATCH, arms.RANDOM, arms.SCHEDULE,
        arms.HEURISTIC, arms.CONSTANT, arms.CONSTANT_PER_TYPE, arms.WIDTH_SEARCH, arms.LEARNED,
        arms.SAMPLED,
    }  # fmt: skip
    for name, arm in report.arms.items():
        controllers = 2 if name in (arms.LEARNED, arms.SAMPLED, arms.FROM_SCRATCH) else 1
        assert arm.scores.shape == (controllers, 2, 8), name
        for field in ("validation", "test", "params", "macs", "training_flops"):
            assert np.isfinite(arm.array(field)).all(), (name, field)
        assert (arm.array("params") == arm.array("host_params") + arm.array("added_params")).all()


def test_an_arm_that_grows_nothing_is_the_host_alone(report):
    alone = report.arms[arms.HOST_ALONE]
    assert (alone.scores[:, 0] == alone.scores[:, 1]).all()  # no rent on nothing
    for name in (arms.LEARNED, arms.SAMPLED, arms.RANDOM, arms.CONSTANT_PER_TYPE):
        arm = report.arms[name]
        bare = (arm.array("added_params") == 0) & (
            arm.array("training_flops") <= alone.array("training_flops")
        )
        same = np.broadcast_to(alone.array("test"), bare.shape)
        assert (arm.array("test")[bare] == same[bare]).all(), name


def test_scratch_networks_are_those_that_were_grown(report):
    grown, scratch = report.arms[arms.LEARNED], report.arms[arms.FROM_SCRATCH]
    assert (grown.array("params") == scratch.array("params")).all()
    assert grown.array("added_params").max() > 0
    assert (grown.array("test") != scratch.array("test")).any()


def test_all_seeds_from_the_start_are_all_there(report):
    born = report.arms[arms.ALL_SEEDS].outcome
    assert (born.seeds.blueprint == MENU.index("conv_conv")).all()


def test_the_learning_rate_is_the_one_that_hosts_learn_best_with(report):
    slow, fast = report.learning_rates.results
    assert fast > slow
    assert report.learning_rates.best == {"learning_rate": 2e-2}
    assert report.learning_rates.cost.networks == 2 * 2
    assert len(report.heuristic.tried) == 4
    assert report.arms[arms.HEURISTIC].search.networks == 4 * 2 * 2  # settings, rents, hosts


def test_what_a_search_cost_is_kept_beside_the_arm(report):
    assert report.arms[arms.CONSTANT].search.networks == (4 + 2 * 2) * 2  # plans, finals x rents
    assert report.arms[arms.CONSTANT_PER_TYPE].search.networks == (4 + 2 * 2) * 8
    assert report.arms[arms.LEARNED].search.networks == TRAINED.rounds * 8
    assert (
        report.arms[arms.WIDTH_SEARCH].search.networks == len(report.results.statics.hosts) * 2 * 2
    )


def test_a_controllers_cost_counts_seeds_and_looks_as_its_sampled_networks_have_them(report):
    """Per network, over training its host alone: the mean over the sampled arm's."""
    alone, sampled = report.arms[arms.HOST_ALONE], report.arms[arms.SAMPLED]
    rows = STEPS * SMALL.host_batch.minibatches * SMALL.host_batch.batch_size
    factor = (sampled.array("training_flops") / (6 * rows * alone.array("macs"))).mean()
    assert factor > 1.1
    expected = factor * host_training_cost(TRAINED).flops
    for name in (arms.LEARNED, arms.SAMPLED):
        assert report.arms[name].search.flops == pytest.approx(expected)


def test_the_width_search_spends_the_share_of_a_controllers_training_that_it_may(report):
    may = SMALL.width_search_share * report.arms[arms.LEARNED].search.flops
    spent = report.arms[arms.WIDTH_SEARCH].search.flops
    assert 12 < len(report.results.statics.hosts) < 20  # more than the frontiers, not all
    assert may - 3 * spent / len(report.results.statics.hosts) < spent <= may


def by_widths(host):
    return float(sum(host.widths)) + host.norm


def candidates(budget, rng_seed=0):
    rng = torch.Generator().manual_seed(rng_seed)
    lines = {"uniform": (((1, 1), (2, 2)),), "own": (((1, 2), (2, 4)), ((1, 1), (2, 2)))}
    return candidate_widths(lines, by_widths, budget, rng)


def test_a_budget_buys_distinct_hosts_beside_the_frontiers():
    """By hand: 1-1, 2-2, 1-2 and 2-4 cost 2, 4, 3 and 6, with norm one more: 34. That leaves 2-1,
    which costs 3 and 4."""
    first = set(product([(1, 1), (2, 2), (1, 2), (2, 4)], [False, True]))
    assert {(h.widths, h.norm) for h in candidates(0.0)} == first
    assert len(candidates(34 + 2.9)) == 8
    assert len(candidates(34 + 7)) == len(candidates(1e9)) == 10
    for rng_seed in range(5):
        *others, last = candidates(34 + 4.5, rng_seed)
        assert len(others) == 8
        assert last.widths == (2, 1)
    assert len({candidates(34 + 4.5, rng_seed) for rng_seed in range(9)}) == 2


def test_widths_are_widened_alike_to_the_nearest_integer():
    assert widen((4, 8, 16), (1.0, 1.25, 2.5)) == ((4, 8, 16), (5, 10, 20), (10, 20, 40))
    assert widen((6, 2, 10), (1.0, 1.25)) == ((6, 2, 10), (8, 3, 13))  # halves count as one
    with pytest.raises(ValueError, match="the same widths twice"):
        widen((1, 1, 1), (1.0, 1.25, 1.5))


@pytest.mark.parametrize(("preset", "count"), [("quick", 3), ("full", 5), ("transfer", 5)])
def test_presets_widen_every_host_that_they_judge_to_so_many_sizes(preset, count):
    config = TRAINING["quick" if preset == "quick" else "full"]
    for name in config.held_out_widths:
        wider = widen(tuple(map(int, name.split("-"))), PRESETS[preset].widening_factors)
        assert len(set(wider)) == count


def test_hosts_are_compared_with_their_own_widened_on_their_own_data(report):
    """Group by group from the pool: host 5 is the second of 8-4-4 on the first variant."""
    pool = report.results.statics
    own, uniform = (
        report.results.frontier((kind, False, "params"))[1] for kind in ("own", "uniform")
    )
    assert own.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert uniform.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    for norm, by in product((False, True), ("params", "macs")):
        frontier = pool.frontier("own", norm, by)
        lines = [[(4, 8, 8), (6, 12, 12)], [(8, 4, 4), (12, 6, 6)]]
        for group, (line, view) in enumerate(product(lines, range(2))):
            places = [pool.hosts.index(StaticHost(widths, norm)) for widths in line]
            assert frontier.sizes[:, group].tolist() == pool.sizes(by)[places].tolist()
            assert (frontier.accuracies[:, group] == pool.networks.test[places, view].numpy()).all()
        shared = pool.frontier("uniform", norm, by)
        places = [pool.hosts.index(StaticHost((width,) * 3, norm)) for width in (4, 8)]
        assert (shared.sizes == pool.sizes(by)[places].numpy()[:, None]).all()
        assert (shared.accuracies == pool.networks.test[places].numpy()).all()
    bare = pool.frontier("own", False, "params").sizes[0, own]
    assert (bare == report.arms[arms.HOST_ALONE].array("params")[0, 0]).all()


def test_growing_is_judged_against_the_host_made_wider(report):
    """Two lines of two sizes each: the share of the way from one to the other in log size."""
    pool, learned = report.results.statics, report.arms[arms.LEARNED]
    excess = np.empty((2, 8))
    for controller, host in np.ndindex(2, 8):
        ends = [(4, 8, 8), (6, 12, 12)] if host < 4 else [(8, 4, 4), (12, 6, 6)]
        low, high = (pool.hosts.index(StaticHost(widths, norm=True)) for widths in ends)
        size = learned.array("macs")[controller, 1, host]
        macs = pool.sizes("macs").numpy()
        way = np.log(size / macs[low]) / np.log(macs[high] / macs[low])
        first, second = (float(pool.networks.test[i, host // 2 % 2].mean()) for i in (low, high))
        static = first + np.clip(way, 0, 1) * (second - first)
        excess[controller, host] = learned.array("test")[controller, 1, host] - static
    (verdict,) = (
        v
        for v in report.verdicts
        if v.rival == "their own hosts widened, with norm, at equal multiply-adds" and v.rent == 0.2
    )
    assert verdict.lead.mean == pytest.approx(excess.mean())
    assert verdict.lead.per_controller == pytest.approx(excess.mean(1))


def test_static_hosts_cost_what_was_reckoned_one_by_one_or_side_by_side():
    task = load_task(TRAINED, ("plain", "rows:500"))
    hosts = [StaticHost(widths, norm=False) for widths in ((4, 4, 4), (8, 4, 4), (4, 8, 8))]
    built = load_hosts(TRAINED, task, tuple(host.widths for host in hosts))
    experiment = PairedExperiment(
        hosts=built[:1], view_ids=(1, 0), repeats=2, task=task, menu=load_menu(TRAINED, task),
        host_batch=replace(SMALL.host_batch, episode_steps=STEPS), growth=GrowthConfig(num_steps=STEPS),
    )  # fmt: skip
    lines = frontier_lines((4,), built[:1], (1.0,))
    together, apart = (
        train_static(replace(experiment, max_macs=macs), hosts, built, lines) for macs in (1e9, 1.0)
    )
    assert together.networks.validation.shape == (3, 2, 2)
    # hosts are numbered by their place: the first of each part is number 0;
    # bit-exact because the compiled CPU kernels train host by host
    assert torch.equal(together.networks.validation[0], apart.networks.validation[0])
    assert torch.equal(together.networks.training_flops, apart.networks.training_flops)
    expected = torch.tensor([experiment.host_flops(host) for host in built], dtype=torch.float64)
    torch.testing.assert_close(together.networks.training_flops.sum((1, 2)), expected)


def test_leads_are_reported_for_each_variant(report):
    assert [(v.variant, v.rent) for v in report.variants] == [
        ("mnist1d, permuted 3", 0.05), ("mnist1d, permuted 3", 0.2), ("mnist1d, 500 rows", 0.05),
        ("mnist1d, 500 rows", 0.2),
    ]  # fmt: skip
    learned, alone = report.arms[arms.LEARNED], report.arms[arms.HOST_ALONE]
    few_rows = [2, 3, 6, 7]  # of the hosts: two of each variant, then the next widths
    lead = (learned.scores[:, 1] - alone.scores[:, 1])[:, few_rows]
    assert report.variants[3].leads[arms.HOST_ALONE].mean == pytest.approx(lead.mean())
    for claim in (c for c in claims.CLAIMS if c.frontier):
        (overall,) = (v for v in report.verdicts if (v.rival, v.rent) == (claim.rival, 0.2))
        parts = [v.leads[claim.rival].mean for v in report.variants if v.rent == 0.2]
        assert np.mean(parts) == pytest.approx(overall.lead.mean)  # as many hosts on each
    text = report.markdown()
    assert "| mnist1d, 500 rows | 0.2 | " in text
    for hosts in ("static hosts of one width", "their own hosts widened"):
        assert f"accuracy over {hosts}, without norm, at equal parameters" in text
        assert f"accuracy over {hosts}, with norm" not in text  # the run's hosts have none
    with_norm = replace(report, config=replace(report.config, norm=True)).markdown()
    assert "accuracy over their own hosts widened, with norm, at equal parameters" in with_norm
    assert "accuracy over their own hosts widened, without norm" not in with_norm


def test_sizes_have_intervals_and_the_time_is_reported(report):
    from scipy import stats

    text = report.markdown()
    macs = report.arms[arms.HOST_ALONE].array("macs")[0, 0]
    low, high = stats.ttest_1samp(macs, 0).confidence_interval(0.95)
    assert f" {macs.mean():,.0f} ± {(high - low) / 2:,.0f} " in text
    assert "and other controllers trained in the same way" in text
    assert f"{report.seconds:.0f} s on cpu" in text
    learned = report.arms[arms.LEARNED]
    networks = learned.search.flops / learned.array("training_flops").mean()
    assert f"as much as growing {networks:,.0f} networks with it" in text


def test_the_width_search_takes_the_best_network_that_is_no_smaller(report):
    found, pool = report.arms[arms.WIDTH_SEARCH], report.results.statics
    params = pool.sizes("params").numpy()
    for rent_index, rent in enumerate(SMALL.rents):
        for host in range(8):
            view, own = host // 2 % 2, found.array("host_params")[0, 0, host]
            worth = [
                pool.networks.validation[i, view].mean().item() - rent * np.log(params[i] / own)
                if params[i] >= own
                else -np.inf
                for i in range(len(params))
            ]
            best = int(np.argmax(worth))
            assert found.array("params")[0, rent_index, host] == params[best]
            assert (
                found.array("test")[0, rent_index, host] == pool.networks.test[best, view, host % 2]
            )


def test_every_claim_gets_a_verdict_at_every_rent(report):
    assert len(report.verdicts) == len(claims.CLAIMS) * 2
    letters = [v.letter for v in report.verdicts]
    assert letters == sorted(letters)
    assert {v.letter for v in report.verdicts} == set("abcde")
    table = report.claim_table()
    assert len(table) == 1 + len(claims.CLAIMS)
    assert table[1] == ["(a) beats the random controller", *map(str, report.verdicts[:2])]
    alone = next(v for v in report.verdicts if v.rival == arms.HOST_ALONE)
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
    assert [line["label"] for line in plain["plot"]["lines"]] == [
        "one width, without norm", "one width, with norm", "own host widened, without norm",
        "own host widened, with norm",
    ]  # fmt: skip
    assert plain["statics"]["lines"]["own"][1] == [[8, 4, 4], [12, 6, 6]]
    assert len(plain["plot"]["points"]) == 11 * 2
    assert plain["learning_rates"]["cost"]["networks"] == 4
    text = as_markdown.read_text()
    assert all(f"| {name} |" in text for name in report.arms)
    assert "This is a small evaluation" in text
    spent = report.arms[arms.WIDTH_SEARCH].search.flops / report.arms[arms.LEARNED].search.flops
    assert f"width search {spent:.1%}" in text
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "evaluation.json", "evaluation.md",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.01, 0.03, "At rent 0.2 growing helped: +2.0 [+1.0, +3.0] points of score."),
        (-0.03, -0.01, "At rent 0.2 growing did not help: -2.0 [-3.0, -1.0] points of score."),
        (-0.01, 0.01, "At rent 0.2 it is undecided whether growing helped: +0.0 [-1.0, +1.0]"),
    ],
)
def test_the_headline_reports_whether_growing_helped(report, low, high, words):
    (claim,) = (c for c in claims.CLAIMS if c.rival == arms.HOST_ALONE)
    lead = Estimate((low + high) / 2, low, high, 0.01, 7.0)
    changed = replace(report, verdicts=[claims.judge(claim, 0.2, lead)])
    assert changed.headline().startswith(words)


def test_the_terminal_shows_every_arm_and_whole_verdicts(report, tmp_path):
    from rich.console import Console

    from esper.cli.evaluate import show

    shown = StringIO()
    show(report, tmp_path, Console(width=220, file=shown))
    assert all(name in shown.getvalue() for name in report.arms)
    assert all(str(verdict) in shown.getvalue() for verdict in report.verdicts)
    assert report.headline() in shown.getvalue().replace("\n", " ")


def test_a_line_of_the_picture_is_the_mean_over_hosts_and_data(report):
    pool = report.results.statics
    for line, norm in zip(report.plot()["lines"][2:], (False, True), strict=True):
        wider = [StaticHost(widths, norm) for widths in ((6, 12, 12), (12, 6, 6))]
        places = [pool.hosts.index(host) for host in wider]
        assert line["accuracy"][1] == pytest.approx(float(pool.networks.test[places].mean()))
        for size in ("params", "macs"):
            sizes = pool.sizes(size)[places].numpy()
            assert line[size][1] == pytest.approx(np.sqrt(sizes.prod()))
        assert line["low"][1] < line["accuracy"][1] < line["high"][1]


def test_the_picture_is_drawn(report, tmp_path):
    from esper.nissa.frontier_plot import draw_frontier

    path = draw_frontier(report.plot(), tmp_path / "frontier.png")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_the_command_shows_and_writes_it(report, tmp_path, monkeypatch, capsys):
    asked = []

    def evaluated(runs, preset, *, task, data, say):
        asked.append((runs, preset, task, data))
        say("growing")
        return report

    monkeypatch.setattr("esper.cli.evaluate.evaluate_run", evaluated)
    runs = str(tmp_path / "a"), str(tmp_path / "b")
    flags = ["--preset", "full", "--task", "fashion_mnist", "--data", "folder"]
    main(["evaluate", *runs, *flags, "--out", str(tmp_path)])
    assert asked == [(tuple(map(Path, runs)), "full", "fashion_mnist", "folder")]
    shown = " ".join(capsys.readouterr().out.split())
    assert "- growing" in shown
    assert "This is a small evaluation" in shown
    assert report.headline() in shown
    assert {p.name for p in tmp_path.iterdir()} == {
        "evaluation.json", "evaluation.md", "evaluation.png",
    }  # fmt: skip
    with pytest.raises(SystemExit, match="no run given; name its folder"):
        main(["evaluate"])


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


def test_a_controller_cost_what_its_own_training_took():
    """By hand: six architectures of MNIST-1D, every host of every round, without seeds."""

    def macs(a, b, c):  # outputs x weights of each: 19, 10 and 5 positions, then ten classes
        return 19 * a * 5 + 10 * b * a * 3 + 5 * c * b * 3 + 10 * 5 * c

    trained = [w for w in product((4, 8), repeat=3) if w not in ((4, 8, 8), (8, 4, 4))]
    mean = sum(macs(*widths) for widths in trained) / 6
    rows = STEPS * TRAINED.host_batch.minibatches * TRAINED.host_batch.batch_size
    cost = host_training_cost(TRAINED)
    assert cost.networks == TRAINED.rounds * 8
    assert cost.flops == pytest.approx(6 * mean * rows * cost.networks)


def test_a_run_that_held_nothing_out_is_refused():
    config = replace(TRAINED, held_out_widths=(), held_out_variants=())
    with pytest.raises(ValueError, match="nothing was held out"):
        evaluate_controllers([make_controller(0)], config, SMALL)


def test_the_width_search_is_charged_for_compute_like_grown_networks(report):
    pool, alone = report.results.statics, report.arms[arms.HOST_ALONE].outcome
    experiment = PairedExperiment(
        hosts=(None,) * 2, view_ids=(1, 2), repeats=2, task=None, menu=(),
        growth=GrowthConfig(compute_price=0.1),
    )  # fmt: skip
    params, macs, rent = pool.sizes("params").numpy(), pool.sizes("macs").numpy(), 0.05
    found = width_search(pool, alone, (rent,), experiment)
    for host in range(8):
        view, own = host // 2 % 2, float(alone.host_params[0, 0, host])
        added = macs / float(alone.macs[0, 0, host]) - 1
        worth = pool.networks.validation[:, view].mean(1).numpy() - 0.1 * added
        worth = np.where(params >= own, worth - rent * np.log(params / own), -np.inf)
        best = int(np.argmax(worth))
        assert found.macs[0, host] == macs[best]
        assert found.compute_charge[0, host].item() == pytest.approx(0.1 * added[best])


def test_a_run_without_networks_is_refused():
    config = replace(TRAINED, task="known_gains", variants=("plain",))
    with pytest.raises(ValueError, match="no networks to evaluate"):
        evaluate_controllers([make_controller(0)], config, SMALL)


def test_presets_can_be_told_apart():
    held_out = TRAINING["full"].held_out_variants
    assert PRESETS["full"].repeats * PRESETS["full"].num_widths * len(held_out) >= 256
    assert PRESETS["quick"].num_plans < PRESETS["full"].num_plans
    with pytest.raises(ValueError, match="repeats=1; use 2 or more"):
        replace(SMALL, repeats=1)
    with pytest.raises(ValueError, match="use one or more numbers of 0 or above"):
        replace(SMALL, rents=())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widening_factors": (1.0,)}, "widening_factors=.* two sizes or more, rising"),
        ({"widening_factors": (1.0, 2.0, 1.5)}, "widening_factors=.* two sizes or more, rising"),
        ({"widening_factors": (1.0, 2.0, 2.0)}, "widening_factors=.* two sizes or more, rising"),
        ({"widening_factors": (1.5, 2.0)}, "start with 1, the unchanged host"),
        ({"frontier_widths": (8, 4)}, "frontier_widths=.* two sizes or more, rising"),
        ({"frontier_widths": (0, 4)}, "use widths of 1 or more"),
    ],
)
def test_sizes_that_are_no_frontier_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_factors_too_close_for_a_host_are_refused_before_anything_trains():
    said = []
    close = replace(SMALL, widening_factors=(1.0, 1.05))
    with pytest.raises(ValueError, match="the same widths twice"):
        evaluate_controllers([make_controller(0)], TRAINED, close, say=said.append)
    assert said == []


def test_a_menu_without_the_usual_seeds_is_judged_by_its_largest():
    tiny = replace(
        SMALL, rents=(0.1,), learning_rates=(1e-2,), heuristic_scales=(1.0,), finalists=1
    )
    menu = ("depthwise7", "conv_bottleneck", "separable")
    report = evaluate_controllers([make_controller(0)], replace(TRAINED, menu=menu), tiny)
    seeds = report.arms[arms.ALL_SEEDS].outcome.seeds.blueprint
    assert (seeds == menu.index("conv_bottleneck")).all()
