"""The host_batch: populations of several architectures behave as one set of envs."""

import math
from dataclasses import replace

import pytest
import torch

from esper.kasmina.blueprints import menu_for
from esper.kasmina.hosts import build_host
from esper.kasmina.lifecycle import Transition
from esper.leyline.constants import SiteKind
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.scripted import ConstantPlan, RandomController
from esper.tolaria.environment import GrowthConfig, GrowthEnvironment
from esper.tolaria.host_batch import HostBatchConfig, PopulationBatch
from esper.tolaria.tasks import few_rows, stack
from support.feature_positions import positions
from support.plans import planned
from support.populations import random_task

STEPS, EACH = 6, 3
WIDTHS = ((4, 4), (8, 4), (4, 8))


def make_environment(widths=WIDTHS, *, num_types=2, rng_seed=0, siblings=1, task=None):
    hosts = [build_host("conv1d", input_shape=(1, 20), num_classes=5, widths=w) for w in widths]
    host_batch = PopulationBatch(
        hosts,
        menu_for(SiteKind.SERIES)[:4],
        task or random_task(num_views=2, num_rows=120, dtype=torch.float32),
        HostBatchConfig(num_types=num_types, envs_per_type=EACH, siblings=siblings, minibatches=3, batch_size=20,
                     validation_rows=40, episode_steps=STEPS),
    )  # fmt: skip
    assert (
        host_batch.find_kernels() == "compiled"
    )  # host by host: equal to the bit whatever is beside it
    return GrowthEnvironment(host_batch, GrowthConfig(num_steps=STEPS), rng_seed=rng_seed)


def run(environment, controller):
    """An episode; the outcome of every step, and the last reports before the end."""
    environment.reset()
    outcomes = []
    for _ in range(STEPS):
        reports = environment.observe()
        masks = compute_batch_masks(reports, environment.action_space)
        outcomes.append(environment.step(controller.decide(reports, masks)))
    return outcomes, reports


def test_costs_in_the_reports_are_those_of_the_networks():
    environment = make_environment()
    _, reports = run(environment, planned((0, 0, 1), (0, 1, 2), num_slots=2))
    host_batch = environment.host_batch
    for number, host in enumerate(host_batch.types):
        envs = slice(number * EACH, (number + 1) * EACH)
        params = [host_batch.menu[b].program(host.sites[s]).num_params for s, b in ((0, 1), (1, 2))]
        assert (reports.host_params[envs] == host.num_params).all()
        assert (reports.params[envs] == host.num_params + sum(params)).all()
        assert (reports.cost_params[envs, 0, 1] == params[0]).all()
    assert (reports.contribution_known == (reports.blueprint >= 0)).all()


def test_the_policy_is_shown_the_data_that_each_env_learns_from():
    base = random_task(num_rows=120, dtype=torch.float32)
    smooth = few_rows(base.map(lambda x: x.cumsum(-1)), 50)
    environment = make_environment(task=stack([base, smooth]))
    environment.reset()
    host_batch = environment.host_batch
    host_batch.new_hosts(host_batch.hosts[:2], torch.tensor([0, 1, 1, 0, 0, 1]), rng_seed=3)
    environment.begin(host_batch.facts(), torch.full((2 * EACH,), 0.1))
    rough_locality, smooth_locality = base.locality.item(), smooth.locality.item()
    assert smooth_locality - rough_locality > 0.7
    reports = environment.observe()
    assert reports.train_rows.tolist() == [120, 50, 50, 120, 120, 50]
    layout = FeatureLayout(reports.num_slots, reports.num_blueprints)
    features, places = layout.features(reports), positions("env")
    rows, found = (features[:, places[name][0]].tolist() for name in ("train_rows", "locality"))
    few, many = math.log(1.5) / 4, math.log(2.2) / 4
    assert rows == pytest.approx([many, few, few, many, many, few])
    expected = [
        smooth_locality if view else rough_locality for view in host_batch.view_ids.tolist()
    ]
    assert found == pytest.approx(expected)


def test_the_last_score_is_that_of_committed_seeds_only():
    environment = make_environment()
    late = planned(
        (0, 0, 1), (STEPS - 2, 1, 2), num_slots=2
    )  # the second has no time to be committed
    outcomes, reports = run(environment, late)
    assert (environment.host_batch.states.stage[:, 0] == SeedStage.FOSSILIZED).all()
    assert not environment.host_batch.states.has_seed[:, 1].any()  # removed before it is validated
    assert (outcomes[-2].added_params > outcomes[-1].added_params).all()
    assert (outcomes[-1].added_params == reports.seed_params[:, 0]).all()
    assert outcomes[-1].terminated.all()
    assert not any(outcome.terminated.any() for outcome in outcomes[:-1])


def test_an_episode_repeats_from_its_seed_and_the_next_one_differs():
    runs = []
    for _ in range(2):
        environment = make_environment(rng_seed=3)
        controller = RandomController(torch.Generator().manual_seed(0))
        runs.append([run(environment, controller) for _ in range(2)])
    (first, _), (second, _) = runs[0]
    for again, before in zip(runs[1][0][0], first, strict=True):
        assert torch.equal(again.accuracy, before.accuracy)
    assert not torch.equal(first[-1].accuracy, second[-1].accuracy)
    assert not torch.equal(runs[0][0][1].rent, runs[0][1][1].rent)


def test_a_host_does_not_depend_on_the_types_beside_it():
    accuracies = []
    for widths in (((4, 4), (8, 4)), ((4, 4), (4, 8))):
        environment = make_environment(widths)
        host_batch = environment.host_batch
        environment.reset()
        host_batch.new_hosts(host_batch.hosts, torch.arange(2 * EACH) % 2, rng_seed=7)
        environment._facts = host_batch.facts()
        environment.step(torch.zeros(2 * EACH, environment.action_space.num_heads).long())
        accuracies.append(environment.observe().validation_loss[:EACH])
    assert torch.equal(*accuracies)


def test_hosts_of_one_name_and_view_live_alike_and_names_change_them():
    hosts = [build_host("conv1d", input_shape=(1, 20), num_classes=5, widths=(4, 8))]
    task = random_task(num_views=2, num_rows=120, dtype=torch.float32)
    host_batch = PopulationBatch(
        hosts,
        menu_for(SiteKind.SERIES)[:4],
        task,
        HostBatchConfig(num_types=1, envs_per_type=4, minibatches=3, batch_size=20,
                     validation_rows=40, episode_steps=STEPS),
        host_ids=torch.tensor([5, 6, 5, 5]),
    )  # fmt: skip
    assert host_batch.find_kernels() == "compiled"
    environment = GrowthEnvironment(host_batch, GrowthConfig(num_steps=STEPS))
    host_batch.new_hosts(hosts, torch.tensor([0, 0, 0, 1]), rng_seed=1)
    environment.begin(host_batch.facts(), torch.tensor([0.1, 0.1, 0.2, 0.1]))
    assert environment.observe().rent.tolist() == pytest.approx([0.1, 0.1, 0.2, 0.1])
    losses = environment.host_batch.train_step(Transition.of(host_batch.states)).loss
    assert losses[0] == losses[2]
    assert len(set(losses.tolist())) == 3


def test_seeds_that_are_sown_are_there_from_birth():
    environment = make_environment()
    environment.reset()
    host_batch = environment.host_batch
    born = torch.full((2 * EACH, 2), 1)
    states = replace(
        host_batch.states,
        blueprint=born,
        stage=torch.full_like(born, SeedStage.FOSSILIZED),
        alpha=torch.ones(born.shape, dtype=torch.float64),
    )
    host_batch.preset_seeds(states)
    for _ in range(STEPS):
        outcome = environment.step(torch.zeros(2 * EACH, environment.action_space.num_heads).long())
    reports = environment.observe()
    assert (outcome.added_params == reports.cost_params[..., 1].sum(dim=1)).all()
    assert (reports.contribution != 0).any()
    rows = host_batch.task.validation_x[:, :40], host_batch.task.validation_y[:, :40]
    assert torch.equal(host_batch.accuracy_on(*rows), outcome.accuracy)


def test_the_learning_rate_is_full_at_first_and_a_fiftieth_in_the_last_step():
    host_batch = make_environment().host_batch
    shares = []
    for host_batch._step in range(STEPS):
        shares.append(host_batch._learning_share())
    assert shares[0] == 1.0
    assert shares[-1] == pytest.approx(0.02)
    assert shares == sorted(shares, reverse=True)


def test_siblings_differ_in_nothing_but_what_is_done_to_them():
    environment = make_environment(siblings=EACH)
    outcomes, reports = run(environment, ConstantPlan())
    families = torch.stack([outcomes[-1].accuracy, reports.rent, reports.validation_loss]).view(
        3, 2, EACH
    )
    assert torch.equal(families, families[..., :1].expand_as(families))
    assert len(families[1, :, 0].unique()) == len(families[2, :, 0].unique()) == 2
    environment.reset()
    actions = torch.zeros(2 * EACH, environment.action_space.num_heads).long()
    actions[0, 0] = LifecycleOp.GERMINATE
    for _ in range(3):
        environment.step(actions)
        actions[:] = 0
    losses = environment.observe().validation_loss
    assert losses[0] != losses[1]
    assert losses[1] == losses[2]
