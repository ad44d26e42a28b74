"""Checkpoints: exact, atomic, plain, and refused with a reason when they do not fit."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from esper.leyline.files import (
    UnreadableFile,
    read_file,
    require_same_layout,
    write_file,
)
from esper.simic.agent.ppo import PPOConfig
from esper.simic.training.gymnasium import GymConfig, GymTraining
from esper.tamiyo.policy.network import PolicyConfig
from support.gym_environments import BestActions, CueMemory, RowThenColumn, vector
from support.processes import child_process

NUM_ENVS, HORIZON = 4, 20
CONFIG = GymConfig(
    horizon=HORIZON,
    policy=PolicyConfig(lstm_hidden_dim=8),
    ppo=PPOConfig(ppo_epochs=2, num_minibatches=2),
)
TOTAL_STEPS = 5 * NUM_ENVS * HORIZON


def start(make=CueMemory, mode=AutoresetMode.NEXT_STEP, config=CONFIG, heads=None):
    return GymTraining(vector(make, NUM_ENVS, mode), TOTAL_STEPS, config, action_space=heads)


def run_steps(training: GymTraining, count: int) -> None:
    """Run until `count` more decisions were made in every env."""
    left = iter(range(count))
    training.run(should_stop=lambda: next(left, None) is None)


def all_that_matters(training: GymTraining) -> dict:
    return {
        "agent": training.agent.ppo.state_dict(),
        "progress": vars(training.progress),
        "recent": list(training.recent),
        "state": tuple(training.state),
        "rng": training.action_rng.get_state(),
    }


# a NEXT_STEP env rests on a pending reset after steps 8, 17, ...: 8 and 28 stop there
@pytest.mark.parametrize("stop_after", [0, 8, 28])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(tmp_path, mode, stop_after):
    whole = start(mode=mode)
    whole.run()

    stopped = start(mode=mode)
    run_steps(stopped, stop_after)
    stopped.save(tmp_path / "run.pt")
    resumed = GymTraining.resume(tmp_path / "run.pt", vector(CueMemory, NUM_ENVS, mode))
    resumed.run()

    torch.testing.assert_close(
        all_that_matters(resumed), all_that_matters(whole), rtol=0, atol=0, equal_nan=True
    )


def test_conditional_masks_survive_a_checkpoint(tmp_path):
    whole = start(RowThenColumn, heads=RowThenColumn.action_heads)
    whole.run()
    stopped = start(RowThenColumn, heads=RowThenColumn.action_heads)
    run_steps(stopped, 25)
    stopped.save(tmp_path / "run.pt")
    resumed = GymTraining.resume(tmp_path / "run.pt", vector(RowThenColumn, NUM_ENVS))
    resumed.run()
    torch.testing.assert_close(all_that_matters(resumed), all_that_matters(whole), rtol=0, atol=0)


def test_without_environment_state_the_round_is_collected_anew(tmp_path):
    class Forgetful(CueMemory):
        get_state = property()  # reading it raises AttributeError: the environment has none

    training = start(Forgetful)
    first = training.envs.features
    run_steps(training, HORIZON)
    episodes, recent = training.progress.episodes, list(training.recent)
    run_steps(training, 15)
    assert 0 < episodes < training.progress.episodes
    training.save(tmp_path / "run.pt")
    resumed = GymTraining.resume(tmp_path / "run.pt", vector(Forgetful, NUM_ENVS))
    assert resumed.progress.rounds == 1
    assert resumed.progress.round_steps == 0
    assert resumed.progress.steps == training.progress.steps_before_round
    assert resumed.progress.episodes == episodes
    assert list(resumed.recent) == recent
    assert len(resumed.buffer) == 0
    assert not torch.equal(resumed.envs.features, first)  # not the first episodes once more
    resumed.run()
    assert resumed.is_finished


class Limited(CueMemory):
    """Goes on for ever; only a TimeLimit around it knows when an episode is cut."""

    limit = 10**6


def test_a_time_limit_survives_a_checkpoint(tmp_path):
    def limited():
        return TimeLimit(OrderEnforcing(Limited()), 7)

    whole = start(limited)
    whole.run()
    assert whole.progress.episodes > 0
    stopped = start(limited)
    run_steps(stopped, 25)
    stopped.save(tmp_path / "run.pt")
    resumed = GymTraining.resume(tmp_path / "run.pt", vector(limited, NUM_ENVS))
    resumed.run()
    torch.testing.assert_close(all_that_matters(resumed), all_that_matters(whole), rtol=0, atol=0)


def test_a_wrapper_that_may_remember_something_is_not_taken_for_exact():
    class StatefulController(gymnasium.Wrapper):
        pass

    assert start(CueMemory).envs.can_save_state
    assert not start(lambda: StatefulController(CueMemory())).envs.can_save_state
    inside = vector(CueMemory, NUM_ENVS)
    around = gymnasium.wrappers.vector.RecordEpisodeStatistics(inside)
    assert not GymTraining(around, TOTAL_STEPS, CONFIG).envs.can_save_state


def test_another_environment_is_refused_with_what_differs(tmp_path):
    start().save(tmp_path / "run.pt")
    with pytest.raises(
        ValueError, match=r"not those of the policy: .*head sizes is \(3, 4, 2\), expected \(3,\)"
    ):
        GymTraining.resume(tmp_path / "run.pt", vector(BestActions, NUM_ENVS))
    with pytest.raises(UnreadableFile, match="a run of 4 envs; 6 were given"):
        GymTraining.resume(tmp_path / "run.pt", vector(CueMemory, 6))


def test_other_shapes_missing_and_unknown_keys_are_named():
    expected = {"net": {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, "count": 0}
    found = {"net": {"weight": torch.zeros(5, 2), "extra": torch.zeros(1)}, "count": 1.5}
    with pytest.raises(UnreadableFile) as caught:
        require_same_layout(found, expected, "a.pt")
    for part in (
        r"net.weight: found float32 [5, 2], expected float32 [3, 2]",
        "net.bias: missing",
        "net.extra: not expected",
        "count: found float, expected int",
    ):
        assert part in str(caught.value)


def test_another_version_kind_or_file_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    write_file(path, "apple", {})
    with pytest.raises(UnreadableFile, match="holds a apple, expected a pear"):
        read_file(path, "pear")
    with pytest.raises(UnreadableFile, match="version 1 of a apple; this library reads version 7"):
        read_file(path, "apple", version=7)
    torch.save({"weights": torch.zeros(2)}, path)
    with pytest.raises(UnreadableFile, match="not a checkpoint"):
        read_file(path, "apple")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnreadableFile, match="not a checkpoint, or a damaged one"):
        read_file(path, "apple")
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none.pt", "apple")


def test_a_flipped_byte_is_refused_or_changes_nothing(tmp_path):
    path, damaged = tmp_path / "a.pt", tmp_path / "damaged.pt"
    write_file(path, "apple", {"n": 1, "weights": torch.arange(40.0)})
    whole, refused = path.read_bytes(), 0
    for place in range(len(whole)):
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 0x90]) + whole[place + 1 :])
        try:
            contents = read_file(damaged, "apple")
        except UnreadableFile:
            refused += 1
        else:
            assert contents["n"] == 1
            assert torch.equal(contents["weights"], torch.arange(40.0)), place
    assert refused > 100


def test_a_zip_file_of_another_kind_is_no_checkpoint(tmp_path):
    with ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("readme.txt", "hello")
    with pytest.raises(UnreadableFile, match="not a checkpoint of this library"):
        read_file(tmp_path / "a.pt", "apple")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_file_that_would_execute_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": "esper checkpoint", "contents": Malicious()}, "a.pt")
    with pytest.raises(UnreadableFile, match="more than tensors and plain containers"):
        read_file("a.pt", "apple")
    assert not Path("executed").exists()


def test_what_cannot_be_read_without_executing_code_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"contents\['a'\]\[1\] is a PosixPath"):
        write_file(tmp_path / "a.pt", "apple", {"a": [1, Path("x")]})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    write_file(path, "apple", {"n": 1})

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_file(path, "apple", {"n": 2})
    assert read_file(path, "apple") == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


WRITER = """
import sys, torch
from esper.leyline.files import write_file
n = 0
while True:
    n += 1
    write_file(sys.argv[1], "apple", {"n": n, "same": torch.full((500_000,), float(n))})
    print(n, flush=True)
"""


def test_a_kill_during_writing_leaves_the_last_good_checkpoint(tmp_path):
    path = tmp_path / "a.pt"
    for delay_s in (0.002, 0.006):
        command = [sys.executable, "-c", WRITER, str(path)]
        with child_process(command, stdout=subprocess.PIPE, text=True) as writer:
            written = [int(writer.stdout.readline()) for _ in range(3)][-1]
            time.sleep(delay_s)  # into the middle of a write; on any machine some moment will do
            writer.send_signal(signal.SIGKILL)
            written = max([written, *map(int, writer.stdout.read().split())])
        contents = read_file(path, "apple")
        assert contents["n"] in (written, written + 1)
        assert bool((contents["same"] == contents["n"]).all())


def test_the_config_travels_with_the_checkpoint(tmp_path):
    config = replace(CONFIG, rng_seed=5, ppo=replace(CONFIG.ppo, clip=0.1))
    start(config=config).save(tmp_path / "run.pt")
    assert GymTraining.resume(tmp_path / "run.pt", vector(CueMemory, NUM_ENVS)).config == config


def test_a_run_goes_on_where_the_device_it_was_on_is_missing(tmp_path):
    path = tmp_path / "run.pt"
    training = start()
    run_steps(training, HORIZON + 5)
    training.save(path)
    contents = torch.load(path, weights_only=True)
    contents["contents"]["config"]["device"] = "cuda:99"
    contents["contents"]["action_rng"] = torch.zeros(16, dtype=torch.uint8)  # a GPU's
    torch.save(contents, path)
    with pytest.raises(ValueError, match="device=cuda:99 cannot be used here"):
        GymTraining.resume(path, vector(CueMemory, NUM_ENVS))
    first, second = (
        GymTraining.resume(path, vector(CueMemory, NUM_ENVS), device="cpu") for _ in range(2)
    )
    assert first.config == training.config
    assert first.progress == training.progress
    for resumed in (first, second):
        resumed.run()
    torch.testing.assert_close(all_that_matters(first), all_that_matters(second), rtol=0, atol=0)
    assert first.action_rng.initial_seed() != CONFIG.rng_seed  # not the run's first draws again


def test_settings_that_this_version_does_not_have_are_refused_by_name(tmp_path):
    path = tmp_path / "run.pt"
    start().save(path)
    contents = torch.load(path, weights_only=True)
    contents["contents"]["config"]["ppo"]["cilp"] = 0.1
    torch.save(contents, path)
    with pytest.raises(ValueError, match="no setting 'ppo.cilp'; did you mean 'clip'"):
        GymTraining.resume(path, vector(CueMemory, NUM_ENVS))
