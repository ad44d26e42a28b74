"""A growth run: exact resumption, rounds that are all or nothing, and what is kept of them."""

from dataclasses import replace

import pytest
import torch

from esper.leyline.stages import LifecycleOp
from esper.runtime.files import UnreadableFile, write_file
from esper.simic.agent.ppo import TrainingFailed
from esper.simic.growth.growth_envs import GrowthEnvs
from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.rewards import growth_score
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.scripted import RandomController
from esper.tolaria.environment import GrowthConfig, GrowthEnvironment
from esper.tolaria.governor import Breakage, Rollback
from support.rollouts import act_and_step, row_for
from support.synthetic_hosts import (
    BLUEPRINT_PARAMS,
    HOST_ACCURACY,
    HOST_PARAMS,
    SyntheticHosts,
)
from support.training_configs import NETWORKS, ORACLE

PHASES = {"observe", "features", "masks", "act", "hosts", "buffer", "update", "telemetry"}


def run(training, until=None):
    """The records of a run to its end, or to the end of a round."""
    records = []
    training.run(records.append, should_stop=lambda: training.rounds_done == until)
    return records


def measured(record):
    """What does not depend on the clock."""
    kept = {name: v for name, v in record.metrics.items() if not name.startswith("time")}
    return {name: v for name, v in kept.items() if v == v}  # nothing is equal to NaN


def assert_same(records, others):
    assert [r.round for r in records] == [r.round for r in others]
    for record, other in zip(records, others, strict=True):
        assert measured(record) == measured(other)
        for name in ("actions", "legal", "rewards", "observations"):
            assert torch.equal(getattr(record, name), getattr(other, name)), name
        for name in ("scores", "rent", "accuracy"):
            one, two = (getattr(each.episodes, name) for each in (record, other))
            assert torch.equal(one, two), name
        assert record.hosts == other.hosts
        assert record.variants == other.variants


@pytest.fixture(scope="module", params=[ORACLE, NETWORKS], ids=["oracle", "networks"])
def whole_run(request):
    """A run that never stopped, and its records."""
    training = GrowthTraining(request.param)
    return training, run(training)


@pytest.mark.parametrize("rounds", [0, 1, 2])  # features are scaled after the first
def test_a_resumed_run_ends_with_the_numbers_of_one_that_never_stopped(whole_run, rounds, tmp_path):
    whole, expected = whole_run
    config = whole.config
    first = GrowthTraining(config)
    begun = run(first, until=rounds)
    first.save(tmp_path / "checkpoint.pt")
    second = GrowthTraining.resume(tmp_path / "checkpoint.pt")
    assert_same([*begun, *run(second)], expected)
    for name, weight in whole.agent.policy.state_dict().items():
        assert torch.equal(weight, second.agent.policy.state_dict()[name]), name
    assert whole.is_finished
    assert second.is_finished


def test_a_run_saved_in_the_middle_of_a_round_begins_that_round_again(tmp_path):
    expected = run(GrowthTraining(ORACLE))
    training, records, steps = GrowthTraining(ORACLE), [], iter(range(10_000))
    training.run(records.append, should_stop=lambda: next(steps) == 12 * 2 + 5)
    assert training.rounds_done == 2
    training.save(tmp_path / "checkpoint.pt")
    resumed = GrowthTraining.resume(tmp_path / "checkpoint.pt")
    assert_same([*records, *run(resumed)], expected)


def test_another_rng_seed_is_another_run():
    one, other = (run(GrowthTraining(replace(ORACLE, rng_seed=s, rounds=1)))[0] for s in (0, 1))
    assert not torch.equal(one.episodes.rent, other.episodes.rent)
    assert not torch.equal(one.actions, other.actions)


def test_features_are_not_scaled_by_an_update_that_is_undone():
    training = GrowthTraining(ORACLE)
    agent, trainer = training.agent, training.trainer
    scales = agent.policy.heads.scales
    before = {name: value.clone() for name, value in scales.state_dict().items()}
    trainer.collect()
    trainer.buffer.log_probs[0, 0] = -3e38  # the ratio is not finite
    assert trainer.learn()["ppo/update_undone"] == 1.0
    for name, value in scales.state_dict().items():
        assert torch.equal(value, before[name]), name
    trainer.collect()
    assert trainer.learn()["ppo/update_undone"] == 0.0
    assert scales.is_fitted


def test_a_checkpoint_of_another_policy_is_refused(tmp_path):
    training = GrowthTraining(ORACLE)
    other = {
        "task": "known_gains",
        "imports": ORACLE.imports,
        "host_batch": {"num_types": 2, "envs_per_type": 4},
    }
    contents = {"config": other, "trainer": training.trainer.state_dict()}
    write_file(tmp_path / "other.pt", "growth run", contents, version=4)
    with pytest.raises(UnreadableFile, match="policy.*expected float32"):
        GrowthTraining.resume(tmp_path / "other.pt")


def test_a_controller_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path):
    training, path = GrowthTraining(ORACLE), tmp_path / "checkpoint.pt"
    run(training, until=1)
    training.save(path)
    good = path.read_bytes()
    with torch.no_grad():
        training.agent.policy.readout.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="env 0"):
        training.run()
    with pytest.raises(TrainingFailed, match="readout.weight is not finite"):
        training.save(path)
    assert path.read_bytes() == good
    assert GrowthTraining.resume(path).rounds_done == 1


def test_time_has_names_and_shares_that_add_up():
    metrics = run(GrowthTraining(ORACLE))[-1].metrics
    assert {name for name in metrics if name.startswith("time_share/")} == {
        f"time_share/{phase}" for phase in PHASES
    }
    assert sum(metrics[f"time_share/{phase}"] for phase in PHASES) == pytest.approx(1)
    seconds = sum(metrics[f"time/{phase}"] for phase in PHASES)
    assert metrics["time/hosts_per_second"] == pytest.approx(8 / seconds)


def test_a_record_tells_what_was_decided_what_it_cost_and_what_came_of_it():
    record = run(GrowthTraining(ORACLE))[-1]
    space = GrowthTraining(ORACLE).environment.action_space
    assert record.episodes.lengths.tolist() == [12] * 8
    for env in range(8):
        for step in range(12):
            action, legal = record.actions[env, step], space.split(record.legal[env, step])
            for head, choice in zip(space.names, action.tolist(), strict=True):
                assert legal[head][choice] or not legal[head].any()
            is_birth = action[0] == LifecycleOp.GERMINATE
            cost = BLUEPRINT_PARAMS[action[2]] if is_birth else 0.0
            assert record.episodes.cost_params[env, step] == cost
            if is_birth and step < 11:  # nothing is committed in the last step
                assert record.episodes.added_params[env, step] >= cost
    last = growth_score(
        record.episodes.accuracy[:, -1],
        record.episodes.added_params[:, -1],
        torch.tensor(HOST_PARAMS),
        record.episodes.rent,
    )
    torch.testing.assert_close(record.episodes.scores, last)
    torch.testing.assert_close(record.rewards.sum(dim=1), last - HOST_ACCURACY)
    assert (record.actions[..., 0] == LifecycleOp.GERMINATE).any()


def test_records_are_of_their_round_and_observed_envs_take_turns():
    records = run(GrowthTraining(ORACLE))
    assert not torch.equal(records[0].actions, records[1].actions)  # no views of one buffer
    assert [record.observed_envs.tolist() for record in records] == [
        [3, 4, 5], [6, 7, 0], [1, 2, 3], [4, 5, 6],
    ]  # fmt: skip
    assert records[0].observations.shape[:2] == (3, 12)


def test_the_controller_of_a_run_decides_as_its_policy_does(tmp_path):
    training = GrowthTraining(ORACLE)
    run(training, until=2)
    training.controller().save(tmp_path / "controller.pt")
    loaded = LearnedController.load(tmp_path / "controller.pt")
    for name, weight in training.agent.policy.state_dict().items():
        assert torch.equal(weight, loaded.policy.state_dict()[name])


def test_a_record_has_the_reason_of_every_rollback():
    class Breaking(SyntheticHosts):
        """Env 5 breaks in step 2, and again in step 3, after its episode has ended."""

        events = ()
        steps = 0

        def train_step(self, transition):
            measured = super().train_step(transition)
            self.steps += 1
            self.events = ()
            if self.steps in (2, 3):
                breakage = list(Breakage)[self.steps - 2]
                self.events = (Rollback(5, breakage, "a test"),)
                measured.rolled_back[5] = True
            return measured

    training = GrowthTraining(replace(ORACLE, rounds=1))
    training.environment.host_batch = Breaking(8)
    (record,) = run(training)
    assert record.rollback_reasons == (None,) * 5 + ("loss not finite: a test",) + (None,) * 2
    assert record.episodes.scores.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_saved_and_resumed(tmp_path):
    training = GrowthTraining(replace(NETWORKS, device="cuda"))
    run(training, until=1)
    training.save(tmp_path / "checkpoint.pt")
    resumed = GrowthTraining.resume(tmp_path / "checkpoint.pt")
    assert resumed.agent.device.type == "cuda"
    records = run(resumed)
    assert [record.round for record in records] == [2, 3]
    assert all(record.episodes.scores.isfinite().all() for record in records)
    assert all(record.actions.device.type == "cpu" for record in records)


def test_controls_only_wait_and_the_others_lead_over_them_is_reported():
    hosts = SyntheticHosts(8, siblings=4)
    environment = GrowthEnvironment(hosts, GrowthConfig(num_steps=4))
    envs = GrowthEnvs(environment, "cpu", controls=1)
    envs.begin_round()
    generator = torch.Generator().manual_seed(0)
    row = row_for(envs)
    round_over = False
    while not round_over:
        masks = envs.observe(row).masks
        legal = masks["op"].sum(dim=1)
        assert (legal[3::4] == 1).all()
        assert (legal[[0, 1, 2, 4, 5, 6]] > 1).all()
        actions = RandomController(generator).decide(envs.reports, masks)
        assert (actions[3::4, 0] == LifecycleOp.WAIT).all()
        stepped, _ = act_and_step(envs, actions, row)
        round_over = stepped.round_over
    metrics = envs.end_round(buffer=None)  # it is written to after a rollback only
    episodes = envs.episodes
    scores = episodes.scores.view(2, 4)
    is_ungrown = (episodes.cost_params.sum(dim=1) == 0).view(2, 4)
    assert is_ungrown[:, 3].all()
    assert not is_ungrown.all()
    ungrown = torch.stack(
        [row[flags].mean() for row, flags in zip(scores, is_ungrown, strict=True)]
    )
    expected = (scores[:, :3].mean(dim=1) - ungrown).mean()
    assert metrics["episode/lead"] == pytest.approx(float(expected))
    with pytest.raises(ValueError, match="controls=4, but only 4 siblings"):
        GrowthEnvs(environment, "cpu", controls=4)


def test_the_probability_of_a_decision_is_that_of_all_its_choices():
    training = GrowthTraining(replace(ORACLE, rounds=1))
    (record,) = run(training)
    rollout = training.trainer.buffer.get_batched_sequences()
    expected = rollout["log_probs"].double().exp().prod(dim=-1).float()
    torch.testing.assert_close(record.probabilities, expected)
    assert ((record.probabilities > 0) & (record.probabilities <= 1)).all()
