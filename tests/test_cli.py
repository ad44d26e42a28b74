"""The command line, end to end."""

import errno
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import get_args

import gymnasium
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import esper
from esper import cli
from esper.cli import evaluate, main, train
from esper.leyline.factored_actions import tamiyo_action_space
from esper.runtime import locked_folder
from esper.runtime.files import write_file
from esper.runtime.locked_folder import LockedFolder
from esper.simic.agent.ppo import TrainingFailed
from esper.simic.growth.comparison import PRESETS as COMPARISONS
from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.run_folder import RunFiles, RunFolder
from esper.simic.growth.train_config import PRESETS as TRAININGS
from esper.simic.gym.ppo_model import PPO
from esper.simic.trainer import Trainer
from esper.tamiyo.learned import LearnedController
from support.processes import Forked, child_process, wait_for_the_next_second, wait_until
from support.training_configs import ORACLE, flags

SMALL = [
    "--num-envs",
    "4",
    "--horizon",
    "16",
    "--policy.lstm-hidden-dim",
    "8",
    "--ppo.ppo-epochs",
    "1",
]


def test_gym_trains_evaluates_and_leaves_agent_checkpoint_and_curves(tmp_path, capsys):
    main(["gym", "CartPole-v1", *SMALL, "--total-steps", "192", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "heads action[2], masks: none, all legal" in printed
    assert "return " in printed
    assert PPO.load(tmp_path / "agent.pt").spaces.observation[0].width == 4
    assert (tmp_path / "checkpoint.pt").exists()
    curves = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert {"episode/return", "ppo/kl", "time/env", "progress/rounds"} <= set(curves)


@pytest.mark.usefixtures("default_signals")
def test_a_signal_saves_and_prints_the_command_that_continues(tmp_path):
    arguments = ["gym", "CartPole-v1", *SMALL, "--out", str(tmp_path)]
    command = [sys.executable, "-m", "esper", *arguments, "--total-steps", "1000000"]
    with child_process(command, stdout=subprocess.PIPE, text=True) as run:
        masks, run_line = run.stdout.readline(), run.stdout.readline()
        wait_until(lambda: any(tmp_path.glob("events*")), run)  # training is about to begin
        run.send_signal(signal.SIGTERM)
        rest, _ = run.communicate()
    assert run.returncode == 143
    assert masks == "masks: none found, all actions legal\n"
    assert "4 envs" in run_line
    assert f"esper gym CartPole-v1 --out {tmp_path} --resume" in " ".join(rest.split())
    resumed = PPO.load(
        tmp_path / "checkpoint.pt", gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync")
    )
    assert resumed.total_steps == 1_000_000


def test_a_closed_pipe_is_not_an_error():
    command = [sys.executable, "-m", "esper", "--help"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with child_process(command, **pipe) as run:
        run.stdout.close()
        assert run.stderr.read() == ""
        run.wait()
    assert run.returncode == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "No space left"), "esper: [Errno 28] No space left"),
        (FileNotFoundError(2, "No such file", "a.json"), "esper: a.json: No such file"),
        (ModuleNotFoundError(name="gymnasium"), "esper: gymnasium is not installed; run: pip"),
        (ModuleNotFoundError(name="rich.console"), "esper: rich is not installed"),
        (MemoryError(), "esper: out of memory (MemoryError); use smaller settings"),
        (RuntimeError("DefaultCPUAllocator: 8 GB"), "esper: out of memory (DefaultCPUAllocator: 8"),
        (torch.OutOfMemoryError("CUDA: 2 GiB"), "esper: out of memory (CUDA: 2 GiB); use smaller"),
    ],
)
def test_errors_of_the_machine_are_one_line(monkeypatch, error, status):
    def fail(_arguments):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(SystemExit) as stop:
        main(["train"])
    assert str(stop.value).startswith(str(status))


def test_an_error_of_the_program_keeps_its_traceback(monkeypatch):
    def fail(_arguments):
        raise RuntimeError("allocated twice")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(RuntimeError, match="allocated twice"):
        main(["train"])


def test_an_unknown_command_is_refused():
    with pytest.raises(SystemExit, match="no command 'trane'; did you mean 'train'\\? there are"):
        main(["trane"])


def test_a_missing_module_of_the_user_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli, "_run", lambda _arguments: import_module("no_such_module"))
    with pytest.raises(ModuleNotFoundError):
        main(["train"])


def test_a_command_that_is_not_on_the_path_is_shown_with_its_folder(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _name: "/usr/bin/esper")
    shown = {
        ".venv/bin/esper": ".venv/bin/esper",
        "/usr/bin/esper": "esper",
        "-c": "python -m esper",
    }
    for called, command in shown.items():
        monkeypatch.setattr(sys, "argv", [called])
        assert cli.this_command() == command


def test_the_version_is_printed(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"{esper.__version__}\n"


def test_an_unknown_flag_is_refused():
    with pytest.raises(SystemExit):
        main(["gym", "CartPole-v1", "--ppo.no-such-field", "1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("NoSuch-v0", "doesn't exist"),
        ("nomod:Env-v0", "nomod:Env-v0 cannot be made: No module named 'nomod'"),
        ("CartPole-v1 --save-every 0", "save_every=0; use 1 or more"),
        ("CartPole-v1 --episodes 0", "episodes=0; use 1 or more"),
        ("CartPole-v1 --num-envs 0", "num_envs=0; use 1 or more"),
        ("CartPole-v1 --total-steps 0", "total_steps=0; use 1 or more"),
        ("CartPole-v1 --device cuda:99", "device=cuda:99 cannot be used here"),
        ("CartPole-v1 --device gpu", "device=gpu cannot be used here"),
        ("CartPole-v1 --device meta", "device=meta cannot be used here"),
        ("CartPole-v1 --rng-seed -1", "rng_seed=-1; use 0 or more"),
        (f"CartPole-v1 --rng-seed {10**30}", "rng_seed=1000"),
        ("../x:Y", "../x:Y cannot be made"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"esper: .*{message}"):
        main(["gym", *arguments.split()])
    assert not list(tmp_path.iterdir())


def test_gym_does_not_write_to_a_file(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit, match="esper: .*file cannot be written: File exists"):
        main(["gym", "CartPole-v1", "--out", str(tmp_path / "file")])


def test_a_resumed_gym_run_has_its_own_settings_and_environment(tmp_path):
    main(["gym", "CartPole-v1", *SMALL, "--total-steps", "64", "--out", str(tmp_path)])
    resume = ["--out", str(tmp_path), "--resume"]
    for other in (["--total-steps", "3000"], ["--horizon", "64"], ["--num-envs", "2"]):
        with pytest.raises(SystemExit, match="--resume uses the settings in .*; leave"):
            main(["gym", "CartPole-v1", *resume, *other])
    with pytest.raises(SystemExit, match="not those of the policy: the action is choices .3,."):
        main(["gym", "Acrobot-v1", *resume])
    main(["gym", "CartPole-v1", *resume])


def test_gym_has_nothing_to_resume_without_a_checkpoint(tmp_path):
    with pytest.raises(SystemExit, match=r"esper: no .*checkpoint.pt to resume from"):
        main(["gym", "CartPole-v1", "--out", str(tmp_path), "--resume"])


def test_gym_refuses_a_folder_that_holds_a_run(tmp_path):
    command = ["gym", "CartPole-v1", *SMALL, "--total-steps", "64", "--out", str(tmp_path)]
    main(command)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    again = f"python -m esper gym CartPole-v1 --out {tmp_path} --resume"
    with pytest.raises(SystemExit, match=f"already holds a run; resume it with `{again}`"):
        main(command)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_gym_keeps_out_of_a_folder_at_work_and_clears_what_a_killed_run_left(tmp_path):
    partial = tmp_path / ".checkpoint.pt.1.partial"
    command = ["gym", "CartPole-v1", *SMALL, "--total-steps", "64", "--out", str(tmp_path)]
    with (
        LockedFolder(tmp_path),
        pytest.raises(SystemExit, match=rf"another run \(process {os.getpid()}\) is using"),
    ):
        main(command)
    partial.write_bytes(b"half")
    main(command)
    assert not partial.exists()


def test_gym_saves_many_times_on_its_way(tmp_path, monkeypatch):
    saved, save = [], PPO.save

    def save_and_note(model, path):
        saved.append(model.trainer.progress.rounds)
        save(model, path)

    monkeypatch.setattr(PPO, "save", save_and_note)
    main(["gym", "CartPole-v1", *SMALL, "--total-steps", "704", "--out", str(tmp_path)])
    assert saved[0] == 10
    assert saved[-1] > 10


def fail_after(rounds, monkeypatch):
    """Let the update of the next round fail."""
    learn = Trainer.learn

    def learn_or_fail(trainer, schedule):
        if trainer.progress.rounds == rounds:
            raise TrainingFailed("not finite")
        return learn(trainer, schedule)

    monkeypatch.setattr(Trainer, "learn", learn_or_fail)


@pytest.mark.parametrize("save_every", [1, 50])
def test_a_failed_gym_run_leaves_its_agent_and_names_the_last_checkpoint(
    tmp_path, monkeypatch, save_every
):
    fail_after(2, monkeypatch)
    with pytest.raises(SystemExit, match="esper: not finite") as stop:
        main(
            ["gym", "CartPole-v1", *SMALL, "--total-steps", "192", "--out", str(tmp_path),
             "--save-every", str(save_every)]
        )  # fmt: skip
    assert f"saved as {tmp_path / 'agent.pt'}" in str(stop.value)
    PPO.load(tmp_path / "agent.pt")
    is_saved = (tmp_path / "checkpoint.pt").exists()
    assert is_saved == (save_every == 1) == ("--resume" in str(stop.value))


def test_the_curves_of_a_resumed_gym_run_tell_each_round_once(tmp_path, monkeypatch, capsys):
    fail_after(3, monkeypatch)
    with pytest.raises(SystemExit, match="not finite"):
        main(
            ["gym", "CartPole-v1", *SMALL, "--total-steps", "320", "--out", str(tmp_path),
             "--save-every", "2"]
        )  # fmt: skip
    monkeypatch.undo()
    wait_for_the_next_second()
    main(["gym", "CartPole-v1", "--out", str(tmp_path), "--resume"])
    curve = EventAccumulator(str(tmp_path)).Reload().Scalars("progress/rounds")
    assert [event.value for event in curve] == list(range(1, len(curve) + 1))
    capsys.readouterr()
    main(["gym", "CartPole-v1", "--out", str(tmp_path), "--resume"])
    assert " / 320 steps" not in capsys.readouterr().out  # it was finished


# -- esper train ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """In the processes that tests start, too; they find `support`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def train_command(*arguments):
    return [sys.executable, "-m", "esper", "train", *arguments]


def read_all(folder):
    """Every file of a run, read as a user would; the scores of all episodes."""
    files = RunFiles(folder)
    files.read_config()
    for checkpoint in (files.checkpoint, files.previous_checkpoint):
        if checkpoint.exists():
            GrowthTraining.resume(checkpoint)
    if files.controller.exists():
        LearnedController.load(files.controller)
    EventAccumulator(str(folder)).Reload()
    with closing(sqlite3.connect(files.database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return connection.execute("SELECT round, env, rent, score FROM episodes").fetchall()


def wait_for_round(folder, number, run):
    """Until the database has so many rounds, read while it is written."""
    path = RunFiles(folder).database

    def is_there():
        if path.exists():
            with closing(sqlite3.connect(path)) as connection, suppress(sqlite3.OperationalError):
                return connection.execute("SELECT count(*) FROM rounds").fetchone()[0] >= number
        return False

    wait_until(is_there, run)


def test_train_leaves_a_folder_with_everything_in_it(tmp_path, capsys):
    main(["train", *flags(ORACLE), "--out", str(tmp_path / "run")])
    printed = " ".join(capsys.readouterr().out.split())
    assert "known_gains on no device, no kernels" in printed
    assert "4 rounds of 8 hosts x 12 decisions" in printed
    files = RunFiles(tmp_path / "run")
    assert f"watch {files.path}" in printed
    assert files.read_config() == ORACLE
    assert len(read_all(files.path)) == 4 * 8
    assert GrowthTraining.resume(files.checkpoint).is_finished
    assert GrowthTraining.resume(files.previous_checkpoint).rounds_done == 2
    curves = EventAccumulator(str(files.path)).Reload()
    assert {"episode/score", "ppo/kl", "time_share/hosts"} <= set(curves.Tags()["scalars"])
    assert [event.step for event in curves.Scalars("episode/score")] == [1, 2, 3, 4]


def test_training_without_names_takes_the_next_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one_round = flags(replace(ORACLE, rounds=1))
    main(["train", *one_round])
    main(["train", *one_round])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["config-1", "config-2"]


def test_a_run_killed_at_any_moment_is_readable_and_resumes_to_the_same_numbers(tmp_path):
    config = replace(ORACLE, rounds=8, checkpoint_every=1)
    expected = []
    training, began = GrowthTraining(config), time.perf_counter()
    training.run(lambda record: expected.append(record.episodes.scores.tolist()))
    round_s = (time.perf_counter() - began) / config.rounds
    folder, instants = tmp_path / "run", random.Random(0)
    command = ["train", *flags(config), "--out", str(folder)]
    for kill_after in (2, 5):
        run = Forked(partial(main, command))
        try:
            wait_for_round(folder, kill_after, run)
            time.sleep(2 * round_s * instants.random())
        finally:
            run.kill()
        rows = read_all(folder)
        told = max(number for number, *_ in rows)
        saved = GrowthTraining.resume(RunFiles(folder).checkpoint).rounds_done
        assert saved >= told - 1  # at most what came since the last checkpoint is lost
        command = ["train", "--resume", str(folder)]
        wait_for_the_next_second()
    main(command)
    rows = read_all(folder)
    assert len(rows) == 8 * 8
    for number, env, _, score in rows:
        assert score == expected[number - 1][env]
    curve = EventAccumulator(str(folder)).Reload().Scalars("episode/score")
    assert [event.step for event in curve] == list(range(1, 9))  # none is told twice
    finished = LearnedController.load(RunFiles(folder).controller)
    for name, weight in training.agent.policy.state_dict().items():
        assert torch.equal(weight, finished.policy.state_dict()[name])
    assert not list(folder.glob(".*.partial"))


@pytest.mark.usefixtures("default_signals")
def test_a_signal_saves_a_growth_run_and_prints_the_command_that_continues(tmp_path):
    folder, config = tmp_path / "run", replace(ORACLE, rounds=2000, checkpoint_every=1000)
    command = train_command(*flags(config), "--out", str(folder))
    with child_process(command, stdout=subprocess.PIPE, text=True) as run:
        wait_for_round(folder, 2, run)
        run.send_signal(signal.SIGINT)
        printed, _ = run.communicate()
    assert run.returncode == 130
    assert f"esper train --resume {folder}" in " ".join(printed.split())
    training = GrowthTraining.resume(RunFiles(folder).checkpoint)
    assert 2 <= training.rounds_done < 2000
    assert len(read_all(folder)) == training.rounds_done * 8


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    with (
        RunFolder.create(tmp_path / "run", ORACLE),
        pytest.raises(SystemExit, match=rf"another run \(process {os.getpid()}\) is using"),
    ):
        main(["train", "--resume", str(tmp_path / "run")])
    with pytest.raises(
        SystemExit, match="already holds a run; resume it with `esper train --resume"
    ):
        main(["train", *flags(ORACLE), "--out", str(tmp_path / "run")])


def test_settings_of_a_resumed_run_cannot_be_changed(tmp_path):
    RunFolder.create(tmp_path / "run", ORACLE).close()
    with pytest.raises(SystemExit, match="leave out other flags"):
        main(["train", "--resume", str(tmp_path / "run"), "--rounds", "9"])


def test_a_damaged_checkpoint_names_the_one_before(tmp_path):
    RunFolder.create(tmp_path / "run", ORACLE).close()
    files = RunFiles(tmp_path / "run")
    GrowthTraining(ORACLE).save(files.previous_checkpoint)
    files.checkpoint.write_bytes(b"not a checkpoint")
    copy = rf"cp {files.previous_checkpoint} {files.checkpoint}"
    with pytest.raises(SystemExit, match=f"checkpoint.pt is damaged(.|\n)*{copy}"):
        main(["train", "--resume", str(files.path)])
    files.checkpoint.unlink()
    with pytest.raises(SystemExit, match=f"checkpoint.pt is missing(.|\n)*{copy}"):
        main(["train", "--resume", str(files.path)])
    assert files.previous_checkpoint.exists()


def trained(folder, config=ORACLE):
    """A run that has ended, without its evaluation."""
    with RunFolder.create(folder, config) as run:
        train._train(GrowthTraining(config), run)
    return RunFiles(folder)


def test_a_changed_config_is_named_and_refused(tmp_path):
    files = trained(tmp_path / "run", replace(ORACLE, rounds=1))
    plain = json.loads(files.config.read_text())
    plain["rounds"], plain["ppo"]["clip"] = 9, 0.3
    files.config.write_text(json.dumps(plain))
    with pytest.raises(SystemExit, match=r"ppo.clip is 0.3, was 0.2; rounds is 9, was 1. Change"):
        main(["train", "--resume", str(files.path)])


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_missing_database_is_reported(tmp_path, capsys, is_empty):
    files = trained(tmp_path / "run", replace(ORACLE, rounds=2))
    files.database.unlink()
    if is_empty:
        files.database.touch()
    main(["train", "--resume", str(files.path)])
    assert "run.sqlite lacks 2 of the 2 rounds" in " ".join(capsys.readouterr().out.split())


def test_a_damaged_database_is_named_with_the_way_out(tmp_path):
    files = trained(tmp_path / "run", replace(ORACLE, rounds=1))
    files.database.write_bytes(b"not a database" * 100)
    with pytest.raises(SystemExit, match=rf"mv {files.database} {files.database}.old"):
        main(["train", "--resume", str(files.path)])


def test_a_resumed_run_warns_if_threads_or_cpu_have_changed(tmp_path, capsys, monkeypatch):
    files = trained(tmp_path / "run", replace(ORACLE, rounds=1))
    main(["train", "--resume", str(files.path)])
    assert "bit-exact" not in capsys.readouterr().out
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    main(["train", "--resume", str(files.path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "threads is 7, was " in printed
    assert "will not be bit-exact" in printed
    with closing(sqlite3.connect(files.database)) as connection:
        (details,) = connection.execute("SELECT details FROM runs ORDER BY rowid DESC").fetchone()
    assert json.loads(details)["threads"] == 7
    assert "cpu" in json.loads(details)


def test_a_run_in_which_every_host_broke_is_a_failure(tmp_path):
    files = trained(tmp_path / "run", replace(ORACLE, rounds=1))
    with closing(sqlite3.connect(files.database)) as connection, connection:
        connection.execute("UPDATE episodes SET score = NULL, rollback_reason = 'diverged'")
    with pytest.raises(SystemExit, match=r"every host was rolled back in every round .diverged."):
        main(["train", "--resume", str(files.path)])


def test_a_run_of_another_version_is_not_sent_to_a_checkpoint_that_is_no_better(tmp_path):
    RunFolder.create(tmp_path / "run", ORACLE).close()
    files = RunFiles(tmp_path / "run")
    for path in (files.checkpoint, files.previous_checkpoint):
        write_file(path, "growth run", {}, version=1)
        with pytest.raises(SystemExit, match=r"reads version \d+; start a new run"):
            main(["train", "--resume", str(files.path)])


@pytest.mark.parametrize(
    ("command", "presets"), [(train.PresetName, TRAININGS), (evaluate.PresetName, COMPARISONS)]
)
def test_every_preset_can_be_asked_for(command, presets):
    assert get_args(command) == tuple(presets)


def test_the_entropy_of_every_head_has_a_flag(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr(train, "GrowthTraining", lambda config: None)
    monkeypatch.setattr(train, "prepare", lambda config, settings: None)
    monkeypatch.setattr(train, "run_training", lambda folder, *_: folders.append(folder))
    main(["train", "--ppo.head-entropy-weights.op", "0.5", "--out", str(tmp_path / "run")])
    with folders[0] as folder:
        weights = folder.files.read_config().ppo.head_entropy_weights
    assert weights == dict.fromkeys(weights, 1.0) | {"op": 0.5, "blueprint": 10.0}
    assert tuple(weights) == tamiyo_action_space(1, 1).names


def test_a_folder_without_a_run_is_not_resumed(tmp_path):
    with pytest.raises(SystemExit, match="no-run is not the folder of a run"):
        main(["train", "--resume", str(tmp_path / "no-run")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rounds 0", "rounds=0"),
        (
            "--task known_gains --import support.synthetic_hosts --device cuda:99",
            "device=cuda:99 cannot be used here",
        ),
        (
            "--task known_gains --import support.synthetic_hosts --device meta",
            "device=meta cannot be used here",
        ),
        ("--host-learning-rate inf", "host_learning_rate=inf"),
        ("--host-learning-rate nan", "host_learning_rate=nan"),
        ("--rng-seed -1", "rng_seed=-1"),
        (f"--rng-seed {10**30}", "rng_seed=1000"),
        ("--num-layers 1000000", "num_layers=1000000 are more than 10,000 hosts"),
        ("--held-out-variants rows:0", "no variant 'rows:0'"),
        ("--held-out-variants rows:\u0663", "no variant 'rows:\u0663'"),
        (f"--held-out-variants rows:{'9' * 20}", "no variant 'rows:9999"),
        (f"--held-out-variants permuted:{'9' * 23}", "no variant 'permuted:9999"),
        (
            "--held-out-variants rows:999999999999",
            "mnist1d has 3200 training and 800 validation rows",
        ),
        ("--host abc", "abc"),
        ("--held-out-variants --held-out-widths", "nothing was held out"),
        ("--menu nope", "nope"),
    ],
)
def test_mistakes_in_training_are_one_line_and_leave_nothing(arguments, message, tmp_path):
    with pytest.raises(SystemExit, match="esper: ") as stop:
        main(["train", "--device=cpu", f"--out={tmp_path / 'run'}", *arguments.split()])
    assert message in str(stop.value)
    assert "\n" not in str(stop.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit, match="file/run cannot be written: Not a directory"):
        main(["train", *flags(ORACLE), "--out", str(tmp_path / "file" / "run")])


def test_too_little_room_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(locked_folder, "LEAST_FREE_BYTES", 2**62)
    with pytest.raises(SystemExit, match="MiB left; a run needs"):
        main(["train", *flags(ORACLE), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_disk_that_fills_up_stops_the_run_with_its_checkpoint_whole(tmp_path, monkeypatch):
    save = GrowthTraining.save

    def save_until_full(training, path):
        if training.rounds_done == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(training, path)

    monkeypatch.setattr(GrowthTraining, "save", save_until_full)
    with pytest.raises(SystemExit, match=r"No space left on device(.|\n)*esper train --resume"):
        main(["train", *flags(ORACLE), "--out", str(tmp_path / "run")])
    monkeypatch.undo()
    read_all(tmp_path / "run")
    assert GrowthTraining.resume(tmp_path / "run" / "checkpoint.pt").rounds_done == 2
    main(["train", "--resume", str(tmp_path / "run")])
    assert GrowthTraining.resume(tmp_path / "run" / "checkpoint.pt").is_finished


def test_a_full_disk_stops_a_gym_run_with_its_checkpoint_whole(tmp_path, monkeypatch):
    save, saved = PPO.save, []

    def save_until_full(model, path):
        if saved:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        saved.append(path)
        save(model, path)

    monkeypatch.setattr(PPO, "save", save_until_full)
    command = ["gym", "CartPole-v1", *SMALL, "--total-steps", "192", "--save-every", "1"]
    with pytest.raises(SystemExit, match=r"No space left on device(.|\n)*esper gym .*--resume"):
        main([*command, "--out", str(tmp_path)])
    monkeypatch.undo()
    main(["gym", "CartPole-v1", "--out", str(tmp_path), "--resume"])


def test_the_next_run_removes_what_a_killed_one_left(tmp_path):
    for name in (".checkpoint.pt.1.partial", ".probe.1.partial"):
        (tmp_path / name).write_bytes(b"half")
    LockedFolder(tmp_path).close()
    assert not list(tmp_path.glob(".*.partial"))


def test_training_on_networks_ends_with_the_arms(tmp_path, monkeypatch, capsys):
    asked = []
    bars = {"rent 0.05": {"host alone": (0.40, 0.01), "learned": (0.45, 0.02)}}
    report = SimpleNamespace(save=asked.append, brief=lambda: "It helped.", figures=lambda: bars)
    monkeypatch.setattr(train, "evaluate_with_bar", lambda *given: asked.append(given) or report)
    main(
        ["train", "--rounds=1", "--device=cpu", "--widths", "2", "4", "--held-out-widths", "4-2-4",
         "--host_batch.num-types=2", "--host_batch.minibatches=1", "--host_batch.batch-size=8",
         "--host_batch.validation-rows=20", "--host_batch.episode-steps=3", "--growth.num-steps=3",
         "--policy.lstm-hidden-dim=8", f"--out={tmp_path / 'run'}"]
    )  # fmt: skip
    assert asked == [(tmp_path / "run", "quick"), tmp_path / "run"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "mnist1d on" in printed
    assert "compiled kernels; seeds: depthwise7, separable" in printed
    assert "held out: 4-2-4 and permuted:3" in printed
    assert "points over ungrown siblings" in printed
    assert f'It helped. Grow your model with it: esper.grow(..., controller="{tmp_path}' in printed


SINK = """
class Sink:
    def __enter__(self):
        self.file = open("metrics.txt", "w")
        return self

    def record(self, step, metrics):
        print(step, metrics["episode/score"], file=self.file)

    def __exit__(self, *error):
        self.file.close()
"""


def test_a_sink_of_the_user_records_every_round(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_sinks.py").write_text(SINK)
    main(["train", *flags(ORACLE), "--sink", "my_sinks:Sink", "--out", "run"])
    lines = (tmp_path / "metrics.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4"]
    with pytest.raises(SystemExit, match="'my_sinks:Other' cannot be imported"):
        main(["train", *flags(ORACLE), "--sink", "my_sinks:Other", "--out", "other"])
    assert not (tmp_path / "other").exists()
