"""The command line, end to end."""

import signal
import subprocess
import sys
import time

import gymnasium
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.cli import main
from esper.simic.training.gymnasium import GymAgent, GymTraining

SMALL = ["--num-envs", "4", "--horizon", "16", "--policy.lstm-hidden-dim", "8"]


def test_gym_trains_evaluates_and_leaves_agent_checkpoint_and_curves(tmp_path, capsys):
    main(["gym", "CartPole-v1", *SMALL, "--total-steps", "192", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "heads action[2], masks: none, all legal" in printed
    assert "return " in printed
    assert GymAgent.load(tmp_path / "agent.pt").spaces.num_features == 4
    assert (tmp_path / "checkpoint.pt").exists()
    curves = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert {"episode/return", "ppo/kl", "time/env", "progress/rounds"} <= set(curves)


def test_ctrl_c_saves_and_the_command_it_prints_goes_on(tmp_path):
    arguments = ["gym", "CartPole-v1", *SMALL, "--out", str(tmp_path)]
    command = [sys.executable, "-m", "esper.cli", *arguments, "--total-steps", "1000000"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    first = run.stdout.readline()
    while not list(tmp_path.glob("events*")):  # training is about to begin
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    rest, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    assert "4 envs" in first
    assert f"esper gym CartPole-v1 --num-envs 4 --out {tmp_path} --resume" in " ".join(rest.split())
    resumed = GymTraining.resume(
        tmp_path / "checkpoint.pt", gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync")
    )
    assert resumed.total_steps == 1_000_000


def test_an_unknown_flag_is_refused():
    with pytest.raises(SystemExit):
        main(["gym", "CartPole-v1", "--ppo.no-such-field", "1"])


@pytest.mark.parametrize(
    ("env_id", "message"),
    [("Pendulum-v1", "Box.*is not supported: use a Discrete"), ("NoSuch-v0", "doesn't exist")],
)
def test_a_mistake_is_one_line_and_not_a_traceback(env_id, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"esper: .*{message}"):
        main(["gym", env_id])
