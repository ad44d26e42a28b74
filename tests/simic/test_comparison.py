"""`esper evaluate`: every arm grows the same hosts, test rows are read once, the table is right."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from scipy import stats

from esper.cli import main
from esper.runtime.plain_config import to_plain
from esper.simic.growth import comparison as module
from esper.simic.growth.comparison import (
    HOST_ALONE,
    LEARNED,
    PRESETS,
    Comparison,
    ComparisonConfig,
    Estimate,
    GrownHosts,
    PairedHosts,
    best_constant,
    evaluate_run,
    on_task,
    play,
    prepare,
)
from esper.simic.growth.hosts_and_data import load_hosts, load_menu, load_task
from esper.simic.growth.train_config import PRESETS as TRAINING
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.scripted import ConstantPlan, FixedSchedule, RandomController
from esper.tolaria.tasks import HeldOut
from support.evaluations import MENU, STEPS, TRAINED, make_controller
from support.populations import random_task

RENTS = (0.05, 0.2)
SMALL = ComparisonConfig(rents=RENTS, num_widths=2, repeats=2)
RIVALS = ["random controller", "fixed schedule", "best constant", "heuristic"]


def save_run(folder, config=TRAINED, controller=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_plain(config)))
    if controller is not None:
        controller.save(folder / "controller.pt")
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison, and what was reported and opened on the way."""
    run, events = tmp_path_factory.mktemp("run"), []
    save_run(run, controller=make_controller(0))
    acts = RandomController(torch.Generator().manual_seed(7))  # an untrained policy only waits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LearnedController, "load", lambda path, device: acts)
        opened = HeldOut.open
        patch.setattr(HeldOut, "open", lambda rows: events.append("opened") or opened(rows))
        found = evaluate_run(run, SMALL, on_phase=lambda *phase: events.append(phase))
    return found, events


def paired_hosts():
    config = replace(TRAINED, num_layers=2, held_out_widths=(), menu=("conv", "conv_conv"))
    task = random_task(num_views=2, num_rows=120, dtype=torch.float32)
    return PairedHosts(config, task, widths=[(4, 4), (8, 4)], view_ids=[1, 0], repeats=2)


# -- the hosts --------------------------------------------------------------------------------


def test_hosts_lie_by_architecture_view_and_repeat():
    hosts = paired_hosts()
    environment = hosts.untrained([0.1, 0.3])
    batch = environment.host_batch
    assert hosts.num_hosts == 8
    assert batch.find_kernels() == "compiled"  # host by host: the tests below ask for equal bits
    assert batch.host_names == ("4-4",) * 8 + ("8-4",) * 8
    assert batch.view_ids.tolist() == ([1] * 4 + [0] * 4) * 2
    torch.testing.assert_close(environment.observe().rent, torch.tensor([0.1, 0.3] * 8))
    grown = hosts.grow(ConstantPlan(), [0.1])
    first, second = load_hosts(hosts.config, hosts.task, ((4, 4), (8, 4)))
    assert grown.host_params.tolist() == [[first.num_params] * 4 + [second.num_params] * 4]


def test_a_host_is_the_same_in_every_arm_whatever_grows_beside_it():
    hosts = paired_hosts()
    alone = hosts.grow(ConstantPlan(), [0.1])
    both = hosts.grow(ConstantPlan(), [0.1, 0.3])
    assert torch.equal(both.accuracy, alone.accuracy.expand(2, -1))
    assert len(set(alone.accuracy[0].tolist())) > 3  # hosts differ from one another
    step = torch.tensor([0, 1 << 30]).repeat(hosts.num_hosts).unsqueeze(1)  # at the first rent
    beside = hosts.grow(ConstantPlan(step, torch.tensor(0)), [0.1, 0.3])
    assert (beside.added_params[0] > 0).all()
    assert torch.equal(beside.accuracy[1], alone.accuracy[0])


def test_hosts_of_another_seed_are_others():
    first, second = (paired_hosts().untrained([0.1], rng_seed=seed) for seed in (0, 1))
    one, other = ([*play(each, ConstantPlan())][-1].accuracy for each in (first, second))
    assert not torch.equal(one, other)


def test_each_rent_has_its_networks_and_its_reports():
    seen = []

    class Listens(ConstantPlan):
        def decide(self, reports, masks):
            seen.append(reports.rent)
            return super().decide(reports, masks)

    paired_hosts().grow(Listens(), [0.25, 0.5])
    assert len(seen) == STEPS
    assert seen[0].tolist() == [0.25, 0.5] * 8


def test_test_rows_are_those_of_each_hosts_view():
    hosts = paired_hosts()
    x, labels = hosts.task.held_out.sealed()
    scored = hosts.grow(ConstantPlan(), [0.1], (x, labels))
    wrong = torch.stack((labels[0], (labels[1] + 1) % 5))  # of view 1
    other = hosts.grow(ConstantPlan(), [0.1], (x, wrong))
    is_second = torch.tensor([True, True, False, False] * 2)
    assert torch.equal((scored.accuracy != other.accuracy)[0], is_second)


def test_scores_charge_the_rent():
    grown = paired_hosts().grow(ConstantPlan(0, 0), [0.1])
    size = torch.log1p(grown.added_params / grown.host_params)
    expected = torch.cat([grown.accuracy - rent * size for rent in RENTS])
    torch.testing.assert_close(grown.scores(RENTS), expected)
    charged = grown._replace(compute_charge=torch.tensor(0.25))
    torch.testing.assert_close(charged.scores(RENTS), expected - 0.25)


def test_the_best_constant_is_the_best_of_all_plans_at_each_rent():
    hosts, rents = paired_hosts(), (0.0, 10.0)
    scores = [
        hosts.grow(plan, [0.1]).scores(rents).mean(dim=1)
        for plan in (ConstantPlan(), ConstantPlan(0, 0), ConstantPlan(0, 1))
    ]
    best = torch.stack(scores).argmax(dim=0).tolist()
    assert best[0] != best[1] == 0  # nothing pays such a rent
    plan = best_constant(hosts, rents, num_hosts=3)
    assert (plan.step == 0).flatten().tolist() == [True, False] * 3
    assert plan.blueprint.flatten().tolist() == [best[0] - 1, 0] * 3


# -- the whole --------------------------------------------------------------------------------


def test_every_arm_has_figures_of_every_host_at_every_rent(compared):
    found, _ = compared
    assert list(found.arms) == [HOST_ALONE, *RIVALS, LEARNED]
    for name, arm in found.arms.items():
        assert all(field.isfinite().all() and field.shape == (2, 8) for field in arm), name
    alone, learned = found.arms[HOST_ALONE], found.arms[LEARNED]
    assert torch.equal(alone.accuracy[0], alone.accuracy[1])
    assert (alone.added_params == 0).all()
    assert (learned.added_params > 0).any()


def test_test_rows_are_opened_once_after_the_plan_was_chosen(compared):
    _, events = compared
    phases = [event for event in events if event != "opened"]
    assert [done for done, _ in phases] == list(range(7))
    assert events.index("opened") == 1
    assert events.count("opened") == 1
    assert phases[0][1] == "trying constant plans on 4 training hosts"
    assert phases[-1][1] == "growing 8 held-out hosts: learned"


def test_leads_are_the_paired_t_intervals(compared):
    found, _ = compared
    learned, rival = (found.scores(name)[1].numpy() for name in (LEARNED, "fixed schedule"))
    lead = found.leads(LEARNED, "fixed schedule")[1]
    low, high = stats.ttest_rel(learned, rival).confidence_interval(0.95)
    assert lead.mean == pytest.approx((learned - rival).mean())
    assert lead.mean + lead.half_width == pytest.approx(high)
    assert lead.mean - lead.half_width == pytest.approx(low)


def test_the_table_has_every_arm_at_every_rent_the_best_first(compared):
    found, _ = compared
    header, dashes, *lines = found.table().splitlines()
    assert len({len(line) for line in (header, dashes, *lines)}) == 1
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows] == ["rent 0.05"] * 6 + ["rent 0.2"] * 6
    for of_rent in (rows[:6], rows[6:]):
        assert {row[1] for row in of_rent} == set(found.arms)
        assert all(float(one[2]) >= float(other[2]) for one, other in pairwise(of_rent))
    row = next(row for row in rows[6:] if row[1] == "heuristic")
    assert row[4] == str(found.leads("heuristic", HOST_ALONE)[1])
    assert row[5] == str(found.leads(LEARNED, "heuristic")[1])
    arm = found.arms["heuristic"]
    assert row[3] == f"{(arm.host_params + arm.added_params)[1].mean():,.0f}"
    figures = list(found.figures()["rent 0.2"])
    assert figures == [row[1] for row in reversed(rows[6:])]


def with_leads(**leads):
    """A comparison of two hosts in which the learned controller leads by these pairs of points."""
    arms = {LEARNED: torch.full((2,), 50.0)} | {
        name: 50.0 - torch.tensor(pair) for name, pair in leads.items()
    }
    grown = {
        name: GrownHosts(
            points.double().expand(2, -1) / 100,
            torch.full((2, 2), 100.0),
            torch.full((2, 2), 20.0 if name == LEARNED else 0.0),
            torch.full((2, 2), 0.0),
        )
        for name, points in arms.items()
    }
    return Comparison("mnist1d", (0.0, 0.0), grown)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((2.0, 2.1), "Growing helped: +2.0 [+1.4, +2.7] points over the same networks ungrown"),
        ((-2.0, -2.1), "Growing did not help: -2.0 [-2.7, -1.4] points"),
        ((-2.0, 2.1), "It is undecided whether growing helped: +0.0 [-26.0, +26.1] points"),
        ((0.0, 0.0), "Growing did not help: +0.0 [+0.0, +0.0] points"),
    ],
)
def test_two_lines_report_whether_growing_helped_and_every_rival(pair, words):
    lines = with_leads(**{HOST_ALONE: pair, "rival": (1.0, 1.01), "other": (-9.0, 8.0)}).brief()
    first, second = lines.splitlines()
    assert first.startswith(words)
    assert "with 20% more parameters (rent 0); at rent 0: " in first
    assert second == (
        "Lead over other ways to grow: rival +1.0, other -0.5 (undecided). 2 networks per way, of "
        "widths and data that it never saw."
    )


def test_an_interval_that_leaves_out_zero_decides():
    assert Estimate(0.02, 0.01).is_decided
    assert Estimate(-0.02, 0.01).is_decided
    assert not Estimate(0.02, 0.02).is_decided
    assert Estimate(0.0, 0.0).is_decided
    assert str(Estimate(0.02, 0.01)) == "+2.0 [+1.0, +3.0]"


def test_the_report_begins_with_the_two_lines_and_names_other_tasks(compared, tmp_path):
    found, _ = compared
    path = found.save(tmp_path)
    assert path.name == "evaluation.md"
    lines = path.read_text().splitlines()
    assert [line for line in lines[1:6] if line] == found.brief().splitlines()
    assert found.table() in path.read_text()
    assert replace(found, task="digits").save(tmp_path).name == "evaluation_digits.md"


def test_the_command_shows_and_writes_it(compared, tmp_path, monkeypatch, capsys):
    found, asked = compared[0], []

    def evaluated(run, settings, task, data, on_phase):
        asked.append((run, settings, task, data))
        on_phase(3, "growing")
        return found

    monkeypatch.setattr("esper.cli.evaluate.evaluate_run", evaluated)
    flags = ["--preset", "full", "--task", "fashion_mnist", "--data", "folder"]
    main(["evaluate", str(tmp_path / "a"), *flags, "--out", str(tmp_path)])
    assert asked == [(Path(tmp_path / "a"), PRESETS["full"], "fashion_mnist", "folder")]
    shown = capsys.readouterr().out
    assert "3 / 7 phases" in shown
    assert found.markdown() in shown
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.md"]


# -- what is refused, and other data ----------------------------------------------------------


def test_a_folder_without_a_controller_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not the folder of a run"):
        evaluate_run(tmp_path, SMALL)
    with pytest.raises(ValueError, match="has no controller yet"):
        evaluate_run(save_run(tmp_path), SMALL)


def test_a_run_that_held_nothing_out_is_refused():
    with pytest.raises(ValueError, match="nothing was held out"):
        prepare(replace(TRAINED, held_out_widths=(), held_out_variants=()), SMALL)


def test_plans_are_chosen_on_training_types_and_arms_compared_on_others():
    training, held_out = prepare(TRAINED, SMALL)
    assert training.task is held_out.task
    assert [training.task.names[view] for view in training.view_ids] == ["mnist1d"]
    assert len(held_out.view_ids) == 2
    assert set(held_out.widths) == {(4, 8, 8), (8, 4, 4)}
    assert not set(held_out.widths) & set(training.widths)
    only_data = prepare(replace(TRAINED, held_out_widths=()), SMALL)[1]
    assert set(only_data.widths) <= set(only_data.config.training_widths)
    assert [only_data.task.names[view] for view in only_data.view_ids] != ["mnist1d"]


def test_other_data_are_another_task(tmp_path, monkeypatch):
    asked = []
    run = save_run(tmp_path, controller=make_controller(0))
    monkeypatch.setattr(module, "prepare", lambda config, settings: asked.append(config) or 1 / 0)
    for other in ({"task": "digits"}, {}):
        with pytest.raises(ZeroDivisionError):
            evaluate_run(run, SMALL, **other)
    assert [config.task for config in asked] == ["digits", "mnist1d"]


@pytest.mark.parametrize(("trained", "task"), [("mnist1d", "digits"), ("digits", "mnist1d")])
def test_other_data_get_hosts_that_fit_them(trained, task):
    there = on_task(replace(TRAINED, task=trained), task)
    data = load_task(there, ("plain",))
    assert load_hosts(there, data, ((4, 8, 8),))[0].num_slots == 3
    assert len(load_menu(there, data)) > len(MENU)
    assert on_task(TRAINED, "mnist1d") is TRAINED


def test_the_presets_compare_as_many_hosts_as_they_say():
    for name, hosts in (("quick", 36), ("full", 256)):
        config, settings = TRAINING[name], PRESETS[name]
        widths = config.held_out_widths[: settings.num_widths]
        assert len(widths) * len(config.held_out_variants) * settings.repeats == hosts


def test_controllers_of_any_kind_can_be_arms():
    hosts = paired_hosts()
    for controller in (FixedSchedule(), RandomController(torch.Generator().manual_seed(0))):
        assert (hosts.grow(controller, [0.1]).added_params > 0).any(), controller
