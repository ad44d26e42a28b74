"""The same run whatever the number of ranks, up to the order of summation.

The tolerance: ranks add up gradients and statistics in another order, so weights differ by the
rounding of float32, which the update amplifies. After three rounds the policies below differ by
less than 1e-5; 1e-4 is allowed. Actions and scores are equal.
"""

import os
import re
import signal
import sqlite3
import time
from dataclasses import replace

import pytest
import torch

from esper.cli import main
from esper.cli.gym import gym
from esper.leyline.factored_actions import Head
from esper.runtime.ranks import ALONE, RankLost, Ranks, _backend, join_ranks
from esper.simic.agent.ppo import PPOConfig
from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.run_folder import RunFiles
from esper.simic.gym.ppo_model import PPO, GymConfig
from esper.tamiyo.learned import LearnedController
from esper.tolaria.host_batch import HostBatchConfig
from support.gym_environments import BestActions, CueMemory, vector
from support.ranks import on_ranks
from support.training_configs import NETWORKS, ORACLE, POLICY, flags

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
SHORT = PPOConfig(ppo_epochs=2)
CONFIGS = {"oracle": ORACLE, "networks": NETWORKS}


def trained(config, ranks: Ranks = ALONE, rounds: int = 3):
    """Records of all rounds (on rank 0) and the state of the run after them."""
    records = []
    training = GrowthTraining(replace(config, rounds=rounds), ranks)
    training.run(records.append)
    return records, training.trainer.state_dict()


def require_same_runs(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        for name in ("hosts", "variants", "rollback_reasons"):
            assert list(getattr(a, name)) == list(getattr(b, name))
        assert torch.equal(a.actions, b.actions)
        assert torch.equal(a.legal, b.legal)
        assert torch.equal(a.observed_envs, b.observed_envs)
        torch.testing.assert_close(a.observations, b.observations, **TOLERANCE)
        torch.testing.assert_close(a.episodes, b.episodes, equal_nan=True, **TOLERANCE)
        names = [name for name in a.metrics if not name.startswith("time")]
        torch.testing.assert_close(
            *({name: record.metrics[name] for name in names} for record in (a, b)),
            equal_nan=True,
            **TOLERANCE,
        )
    require_same_state(one[1], other[1])


def require_same_state(one, other):
    for name in ("progress", "action_rng", "shuffle_rng", "envs"):
        assert str(one[name]) == str(other[name])
    for name in ("policy", "value_normalizer"):
        torch.testing.assert_close(one["agent"][name], other["agent"][name], **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "size"),
    [("oracle", 2), ("networks", 2), pytest.param("oracle", 4, marks=pytest.mark.slow),
     pytest.param("networks", 3, marks=pytest.mark.slow)],
)  # fmt: skip
def test_ranks_run_as_one_process_does(name, size):
    config = CONFIGS[name]
    runs = on_ranks(size, lambda: trained(config, join_ranks()))
    require_same_runs(trained(config), runs[0])
    for records, state in runs[1:]:
        assert records == []  # rank 0 writes
        torch.testing.assert_close(state["agent"], runs[0][1]["agent"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), (1, 2), pytest.param(4, 1, marks=pytest.mark.slow),
     pytest.param(4, 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_checkpoint_resumes_on_another_number_of_ranks(before, after, tmp_path):
    path = tmp_path / "checkpoint.pt"

    def half() -> None:
        training = GrowthTraining(replace(ORACLE, rounds=2), join_ranks())
        training.run(lambda record: None, should_stop=lambda: training.rounds_done == 1)
        if training.ranks.is_first:
            training.save(path)

    def rest():
        training = GrowthTraining.resume(path, join_ranks())
        assert training.rounds_done == 1
        training.run(lambda record: None)
        return training.trainer.state_dict()

    assert on_ranks(before, half) == [None] * before
    _, whole = trained(ORACLE, rounds=2)
    require_same_state(whole, on_ranks(after, rest)[0])


def test_hosts_that_do_not_split_are_refused():
    (error, *_) = on_ranks(3, lambda: GrowthTraining(ORACLE, join_ranks()))
    assert isinstance(error, ValueError)
    assert "8 envs do not split over 3 ranks" in str(error)
    with pytest.raises(ValueError, match="use a number of ranks that divides 6"):
        NETWORKS.host_batch.split(Ranks(0, 5))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_every_host_is_on_one_rank_and_siblings_stay_together(size):
    config = HostBatchConfig(num_types=3, envs_per_type=8, siblings=2)
    parts = [config.split(Ranks(rank, size)) for rank in range(size)]
    ids = torch.cat([share.ids for _, share in parts])
    assert torch.equal(ids.sort().values, torch.arange(24))
    for own, share in parts:
        assert own.num_types * own.envs_per_type == len(share.ids) == 24 // size
        assert (share.ids.view(-1, 2) // 2).diff(dim=1).eq(0).all()


# -- commands -------------------------------------------------------------------------------------


def test_train_on_two_ranks_writes_the_folder_of_one(tmp_path):
    def run(name: str) -> None:
        main(["train", *flags(replace(ORACLE, rounds=2)), f"--out={tmp_path / name}"])

    assert on_ranks(2, lambda: run("two")) == [None, None]
    run("one")
    files = [RunFiles(tmp_path / name) for name in ("one", "two")]
    policies = [LearnedController.load(each.controller).policy.state_dict() for each in files]
    torch.testing.assert_close(*policies, **TOLERANCE)
    query = "SELECT env, host, steps, rolled_back FROM episodes ORDER BY round, env"
    rows = [sqlite3.connect(each.database).execute(query).fetchall() for each in files]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2 * ORACLE.num_envs


def gym_run(env):
    """A model after 4 rounds: its weights, steps and last metrics."""
    seen = []
    model = PPO(env, config=GymConfig(num_envs=4, horizon=16, policy=POLICY, ppo=SHORT))
    model.learn(256, lambda steps, metrics: seen.append(metrics))
    return model.agent.policy.state_dict(), model.num_steps, seen[-1]


def test_gym_on_two_ranks_is_the_run_of_one_process():
    one, (two, other) = gym_run("CartPole-v1"), on_ranks(2, lambda: gym_run("CartPole-v1"))
    torch.testing.assert_close(two[0], other[0], rtol=0, atol=0)
    torch.testing.assert_close(one[0], two[0], **TOLERANCE)
    assert one[1] == two[1] == other[1]
    for name in ("episode/return", "episode/length", "ppo/rows", "progress/episodes"):
        assert one[2][name] == pytest.approx(two[2][name])


def test_every_rank_has_its_own_environment_and_loads_what_was_just_saved(tmp_path):
    """`num_envs` is for ids: it need not split over ranks."""

    def work():
        config = GymConfig(num_envs=1, horizon=12, policy=POLICY, ppo=SHORT)
        model = PPO(vector(BestActions, 1), config=config).learn(24)
        model.save(tmp_path / "run.pt")
        return PPO.load(tmp_path / "run.pt").agent.policy.state_dict()

    one, other = on_ranks(2, work)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_gym_command_runs_on_two_ranks(tmp_path, capfd):
    command = (
        f"gym CartPole-v1 --num-envs 4 --horizon 8 --total-steps 64 --episodes 1 --out {tmp_path}"
    )
    assert on_ranks(2, lambda: main(command.split())) == [None, None]
    assert capfd.readouterr().out.count("agent saved as") == 1
    assert PPO.load(tmp_path / "checkpoint.pt", "CartPole-v1").is_finished


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR expected, but not set"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK='x'; use a whole number"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x'; use a whole number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE='-1'; use a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0; use the number of ranks, 1 or more"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK=5 with WORLD_SIZE=2; use a rank from 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "p"}, "MASTER_PORT='p'; use a whole"),
        ({"RANK": "1"}, "WORLD_SIZE expected, but not set"),
        ({"WORLD_SIZE": "2", "ESPER_TIMEOUT_S": "soon"}, "ESPER_TIMEOUT_S='soon'; use a number"),
    ],
)
def test_bad_variables_are_named(variables, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a GPU asks for LOCAL_RANK first
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    join_ranks.cache_clear()
    with pytest.raises(ValueError, match=message):
        join_ranks()


def test_a_group_of_the_users_script_is_joined():
    """With NCCL alone it cannot send CPU tensors, so a gloo group is added; here it is its double."""

    def work():
        torch.distributed.init_process_group("gloo")
        ranks = join_ranks()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
            join_ranks.cache_clear()
            added = join_ranks()
        found = [each.sum(torch.tensor(each.rank + 1)).item() for each in (ranks, added)]
        return (
            found,
            added.cpu_group is not None,
            added.gather(added.rank),
            added.broadcast(added.rank),
        )

    assert on_ranks(2, work) == [([3, 3], True, [0, 1], 0)] * 2


def test_ranks_that_share_a_gpu_use_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for ranks, backend in ((2, "cpu:gloo,cuda:nccl"), (4, "gloo")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert _backend() == backend


def test_a_rank_with_other_settings_stops_all():
    def work() -> None:
        ranks = join_ranks()
        GrowthTraining(replace(ORACLE, rounds=3 + ranks.rank), ranks)

    for error in on_ranks(2, work):
        assert isinstance(error, ValueError)
        assert "rank 1 has other settings than rank 0: rounds is 4, not 3. " in str(error)


def with_heads(rank):
    """The last head depends on another one of each rank."""
    last = Head("c", 2, given=("ab"[rank],))
    PPO(vector(BestActions, 2), (Head("a", 3), Head("b", 4), last))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: PPO(f"CartPole-v{rank}"), "env is CartPole-v1, not CartPole-v0"),
        (lambda rank: PPO(vector(BestActions, 2 + rank)), "num_envs is 3, not 2"),
        (
            lambda rank: PPO(vector((BestActions, CueMemory)[rank], 2)),
            "; observation is numbers (3,), not choices (3,)",
        ),
        (with_heads, "heads is a[3], b[4], c[2] given b, not a[3], b[4], c[2] given a"),
        (lambda rank: PPO("CartPole-v1").learn(64 + rank), "steps is 65, not 64"),
        (lambda rank: gym("CartPole-v1", save_every=9 - rank), "save_every is 8, not 9"),
        (lambda rank: gym(f"CartPole-v{rank}"), "env_id is CartPole-v1, not CartPole-v0"),
    ],
)
def test_a_rank_with_another_environment_stops_all(make, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for error in on_ranks(2, lambda: make(join_ranks().rank)):
        assert isinstance(error, ValueError)
        assert "rank 1 has other settings than rank 0: " in str(error)
        assert message in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stopper", [0, 1])
def test_a_callback_on_any_rank_stops_all(stopper):
    def work():
        model = PPO(
            "CartPole-v1", config=GymConfig(num_envs=2, horizon=8, policy=POLICY, ppo=SHORT)
        )
        is_on = join_ranks().rank != stopper
        model.learn(64, lambda steps, metrics: is_on or metrics["progress/rounds"] < 2)
        return model.trainer.progress.rounds

    assert on_ranks(2, work) == [2, 2]


def test_a_killed_rank_is_named_by_the_others():
    def work() -> None:
        ranks = join_ranks()
        ranks.broadcast(None)
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            ranks.any(False)
        finally:
            assert time.monotonic() - started < 30

    first, killed = on_ranks(2, work)
    assert killed is None
    assert isinstance(first, RankLost)
    assert re.match(r"rank 1 \(process \d+ on .*\) has ended, so rank 0 stops", str(first))
