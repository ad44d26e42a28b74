"""Arms on the same hosts: pairing, costs, plans with known scores."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from esper.kasmina.blueprints import menu_for
from esper.leyline.constants import SiteKind
from esper.simic.growth.comparison import PairedHosts
from esper.simic.growth.train_config import TrainConfig
from esper.tamiyo.scripted import NEVER, ConstantPlan, RandomController
from esper.tolaria.environment import GrowthConfig, GrowthEnvironment
from esper.tolaria.host_batch import HostBatchConfig, PopulationBatch
from growth_evaluation.paired_experiment import Arm, PairedExperiment, play_arms
from growth_evaluation.plan_search import candidate_plans, run_plans, search_plans
from growth_evaluation.tuning import with_learning_rate
from support.plans import planned
from support.populations import random_task
from support.synthetic_hosts import SyntheticHosts

STEPS, MINIBATCHES, BATCH = 6, 3, 20
MENU = menu_for(SiteKind.SERIES)[:4]
WAIT = ConstantPlan()
TEST_ROWS = torch.zeros(1), torch.zeros(1)


def make_experiment(**options):
    config = TrainConfig(
        num_layers=2,
        held_out_widths=(),
        menu=tuple(blueprint.name for blueprint in MENU),
        host_batch=HostBatchConfig(
            minibatches=MINIBATCHES, batch_size=BATCH, validation_rows=40, episode_steps=STEPS
        ),
        growth=GrowthConfig(num_steps=STEPS),
        device="cpu",
    )
    task = random_task(num_views=2, num_rows=120, dtype=torch.float32)
    hosts = PairedHosts(config, task, widths=[(4, 4), (8, 4)], view_ids=[1, 0], repeats=2)
    return PairedExperiment(hosts=hosts, **options)


@pytest.fixture
def examined(monkeypatch):
    """How many networks were measured on test rows; each has its view as its accuracy."""
    asked = []

    def accuracy_on(host_batch, x, labels):
        asked.append(host_batch.num_envs)
        return host_batch.view_ids.float()

    monkeypatch.setattr(PopulationBatch, "accuracy_on", accuracy_on)
    return asked


def random_arm(rng_seed=0):
    return Arm("random", RandomController(torch.Generator().manual_seed(rng_seed)), (0.1, 0.2))


def test_a_host_is_the_same_in_every_arm_whatever_grows_beside_it():
    experiment = make_experiment()
    first, _, third = experiment.run(
        [Arm("alone", WAIT, (0.1, 0.2)), random_arm(), Arm("again", WAIT)]
    )
    (alone,) = experiment.run([Arm("alone", WAIT)])
    for other in (first.validation[0], first.validation[1], third.validation[0]):
        assert torch.equal(other, alone.validation[0])
    assert len(set(alone.validation[0].tolist())) > 3  # hosts differ from one another


def test_waves_change_nothing():
    arms = [random_arm(), Arm("alone", WAIT), Arm("plan", planned((0, 0, 1), num_slots=2))]
    together = make_experiment().run(arms)
    apart = make_experiment(max_macs=1).run([random_arm(), *arms[1:]])
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one.validation, other.validation)
        assert torch.equal(one.params, other.params)


def test_hosts_of_another_seed_are_others():
    experiment = make_experiment()
    (first,), (second,) = (experiment.run([Arm("alone", WAIT)], rng_seed=s) for s in (0, 1))
    assert not torch.equal(first.validation, second.validation)


def test_hosts_lie_by_architecture_view_and_repeat():
    experiment = make_experiment()
    assert experiment.num_hosts == 8
    assert experiment.type_names == (
        "4-4 on view 1", "4-4 on view 0", "8-4 on view 1", "8-4 on view 0",
    )  # fmt: skip
    (alone,) = experiment.run([Arm("alone", WAIT)])
    first, second = experiment.architectures
    assert alone.params[0].tolist() == [first.num_params] * 4 + [second.num_params] * 4
    assert experiment.type_of_host.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert experiment.view_of_host.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_every_finished_network_is_examined_once_on_its_own_view(examined):
    experiment = make_experiment(test_rows=TEST_ROWS)
    alone, grown = experiment.run([Arm("alone", WAIT), random_arm()])
    assert examined == [3 * experiment.num_hosts]
    for lane in (*alone.test, *grown.test):
        assert lane.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    (unread,) = make_experiment().run([Arm("alone", WAIT)])
    assert unread.test.isnan().all()


def test_training_flops_count_a_seed_while_it_lives_and_every_look():
    experiment = make_experiment()
    late = planned((2, 0, 1), num_slots=2)
    alone, grown = experiment.run([Arm("alone", WAIT), Arm("late", late)])
    rows = STEPS * MINIBATCHES * BATCH
    for number, host in enumerate(experiment.architectures):
        seed = MENU[1].program(host.sites[0])
        hosts = slice(4 * number, 4 * number + 4)
        looks = (STEPS + 1) * 40 * 2 * host.macs  # after every step, and at the end
        assert (alone.training_flops[0, hosts] == 6 * rows * host.macs + looks).all()
        lived, both = (STEPS - 2) / STEPS, host.macs + seed.macs
        # two steps without the seed, then with it and once more without; at the end only with it
        looks = (2 * host.macs + (STEPS - 2) * 2 * both + both) * 40 * 2
        expected = 6 * rows * (host.macs + lived * seed.macs) + looks
        torch.testing.assert_close(
            grown.training_flops[0, hosts], torch.full((4,), expected, dtype=torch.float64),
            rtol=1e-6, atol=0.0,
        )  # fmt: skip
        assert (grown.macs[0, hosts] == host.macs + seed.macs).all()
        assert (grown.added_params[0, hosts] == seed.num_params).all()


def test_scores_charge_the_rent_and_choosing_uses_validation(examined):
    experiment = make_experiment(test_rows=TEST_ROWS)
    (grown,) = experiment.run([Arm("plan", planned((0, 0, 1), num_slots=2))])
    size = torch.log1p(grown.added_params / grown.host_params)
    views = torch.tensor([[1.0, 1, 0, 0, 1, 1, 0, 0]]).double()
    torch.testing.assert_close(
        grown.scores([0.1, 0.2]), torch.cat((views - 0.1 * size, views - 0.2 * size))
    )
    torch.testing.assert_close(grown.scores([0.1], "validation"), grown.validation - 0.1 * size)


def test_larger_hosts_train_in_smaller_companies():
    experiment = make_experiment()
    few = sum(host.macs for host in experiment.architectures) * 4  # hosts of each
    assert [replace(experiment, max_macs=few * x).max_lanes for x in (0.5, 1.0, 2.9, 3.0)] == [
        1,
        1,
        2,
        3,
    ]


# Plans


def every_plan():
    rows = torch.tensor(list(product(range(-1, SyntheticHosts.num_blueprints), repeat=3)))
    return ConstantPlan(torch.where(rows < 0, NEVER, 0), rows.clamp(min=0))


def grow_known(arms, num_hosts):
    rents = torch.tensor([rent for arm in arms for rent in arm.rents]).repeat(num_hosts)
    host_batch = SyntheticHosts(len(rents))
    environment = GrowthEnvironment(host_batch)
    environment.begin(host_batch.reset(torch.Generator()), rents)
    found = play_arms(arms, environment, num_hosts, training_rows=1, validation_rows=1)
    return host_batch, found


class KnownExperiment:
    """Networks with known gains; another rng seed changes nothing."""

    max_lanes = 400

    def __init__(self, num_hosts):
        self.num_hosts, self.seeds = num_hosts, []

    def run(self, arms, *, rng_seed):
        self.seeds.append(rng_seed)
        return grow_known(arms, self.num_hosts)[1]


@pytest.mark.parametrize("finalists", [1, 3])
@pytest.mark.parametrize("num_types", [1, 2])
def test_the_best_constant_plan_is_the_optimum_where_gains_are_known(num_types, finalists):
    plans, rents, experiment = every_plan(), (0.02, 0.06, 0.12, 0.3), KnownExperiment(2)
    found = search_plans(experiment, plans, rents, num_types=num_types, finalists=finalists)
    assert found.best.shape == (4, num_types)
    host_batch = SyntheticHosts(1)
    for kind in range(num_types):
        scores = [
            found.trained[0].scores([rent], "validation")[best, 0]
            for rent, best in zip(rents, found.best[:, kind], strict=True)
        ]
        torch.testing.assert_close(
            torch.stack(scores).float(), host_batch.best_scores(torch.tensor(rents))
        )
    assert len(set(found.best[:, 0].tolist())) > 2  # rents want different plans
    assert len(set(experiment.seeds)) == (1 if finalists == 1 else 2)
    assert found.num_networks == 2 * len(plans.step) + (8 * finalists if finalists > 1 else 0)


def test_each_env_follows_the_plan_of_its_number():
    plans = every_plan()
    numbers = [17, 200, 342]
    _, grown = grow_known(
        [Arm("all", ConstantPlan(plans.step[numbers], plans.blueprint[numbers]), (0.1,))], 3
    )
    for host, number in enumerate(numbers):
        one = [
            (0, slot, int(plans.blueprint[number, slot]))
            for slot in range(3)
            if plans.step[number, slot] == 0
        ]
        _, (alone,) = grow_known([Arm("one", planned(*one, num_slots=3))], 1)
        assert grown[0].validation[0, host] == alone.validation[0, 0]


@pytest.mark.parametrize("finalists", [1, 2])
def test_each_type_gets_the_plan_that_is_best_for_it(finalists):
    experiment, rent = make_experiment(), 0.05
    plans = candidate_plans(5, 2, len(MENU), STEPS, torch.Generator().manual_seed(0))
    found = search_plans(experiment, plans, (rent, 0.1), num_types=4, finalists=finalists)
    first = run_plans(experiment, plans, rng_seed=1).scores([rent], "validation")
    second = run_plans(experiment, plans, rng_seed=4).scores([rent], "validation")
    for number in range(4):
        hosts = slice(2 * number, 2 * number + 2)
        worth = first[:, hosts].mean(dim=1)
        finals = worth.argsort(descending=True)[:finalists].tolist()
        if finalists > 1:
            worth = worth + second[:, hosts].mean(dim=1)
        assert int(found.best[0, number]) == max(finals, key=lambda plan: worth[plan])


def test_a_pool_of_plans_is_the_same_in_one_wave_or_many():
    plans = candidate_plans(5, 2, len(MENU), STEPS, torch.Generator().manual_seed(0))
    one = run_plans(make_experiment(), plans, rng_seed=1)
    experiment = make_experiment()
    hosts = sum(host.macs for host in experiment.architectures) * 4
    assert replace(experiment, max_macs=2.5 * hosts).max_lanes == 2
    many = run_plans(replace(experiment, max_macs=2.5 * hosts), plans, rng_seed=1)
    assert torch.equal(one.validation, many.validation)
    assert one.validation.shape == (5, 8)


def test_candidates_begin_with_no_seeds_and_differ():
    plans = candidate_plans(60, 3, 9, 25, torch.Generator().manual_seed(0))
    assert (plans.step[0] == NEVER).all()
    grown = (plans.step != NEVER).sum(dim=1)
    assert grown[1:].min() == 1
    assert grown.max() == 3
    assert plans.blueprint.max() == 8
    seeds = torch.where(plans.step == NEVER, -1, plans.blueprint)
    assert len(torch.cat((plans.step, seeds), dim=1).unique(dim=0)) > 50
    assert (plans.step[1:10] == 0).all()  # one blueprint in every slot
    assert torch.equal(plans.blueprint[1:10], torch.arange(9).unsqueeze(1).expand(9, 3))
    few = candidate_plans(5, 3, 9, 25, torch.Generator().manual_seed(0))
    is_uniform = (few.step == 0).all(dim=1) & (few.blueprint == few.blueprint[:, :1]).all(dim=1)
    assert is_uniform.tolist() == [False, True, False, False, False]


def test_rents_reach_the_controllers_lane_by_lane():
    seen = []

    class Listens(ConstantPlan):
        def decide(self, reports, masks):
            seen.append(reports.rent.tolist())
            return super().decide(reports, masks)

    experiment = make_experiment()
    experiment.run([Arm("other", WAIT), Arm("listens", Listens(), (0.25, 0.5))])
    assert seen[0] == [0.25] * 8 + [0.5] * 8
    assert len(seen) == STEPS


def test_hosts_can_learn_at_another_rate():
    experiment = make_experiment()
    (first,) = experiment.run([Arm("alone", WAIT)])
    (second,) = with_learning_rate(experiment, 1e-5).run([Arm("alone", WAIT)])
    assert not torch.equal(first.validation, second.validation)
