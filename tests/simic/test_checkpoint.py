"""Saved PPO models: they resume in whole rounds, and refuse environments that do not fit."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from esper.simic.agent.ppo import PPOConfig
from esper.simic.gym.ppo_model import PPO, GymConfig
from esper.tamiyo.policy.network import PolicyConfig
from support.gym_environments import BestActions, CueMemory, RowThenColumn, vector
from support.rollouts import row_for, stored_fields

NUM_ENVS, HORIZON = 4, 20
CONFIG = GymConfig(
    horizon=HORIZON,
    policy=PolicyConfig(lstm_hidden_dim=8),
    ppo=PPOConfig(ppo_epochs=2, num_minibatches=2),
)
TOTAL_STEPS = 5 * NUM_ENVS * HORIZON


def start(make=CueMemory, mode=AutoresetMode.NEXT_STEP, config=CONFIG, heads=None):
    return PPO(vector(make, NUM_ENVS, mode), heads, config)


def run_steps(model: PPO, count: int) -> None:
    """Run until `count` more decisions were made in every env."""
    left = iter(range(count))
    total_steps = None if model.total_steps else TOTAL_STEPS
    model.learn(total_steps, should_stop=lambda: next(left, None) is None)


def all_that_matters(model: PPO) -> dict:
    return {
        "agent": model.agent.state_dict(),
        "progress": vars(model.trainer.progress),
        "recent": list(model.envs.log.recent),
        "state": tuple(model.trainer.state),
        "rng": model.trainer.action_rng.get_state(),
    }


def test_a_saved_model_holds_no_environments(tmp_path):
    model = start()
    run_steps(model, HORIZON + 5)
    model.save(tmp_path / "run.pt")
    contents = torch.load(tmp_path / "run.pt", weights_only=True)["contents"]
    assert set(contents["trainer"]["envs"]) == {"recent_episodes", "rounds"}
    assert "state" not in contents["trainer"]


@pytest.mark.parametrize("stop_after", [0, 8, 28])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_two_runs_that_resume_from_one_file_are_equal(tmp_path, mode, stop_after):
    stopped = start(mode=mode)
    run_steps(stopped, stop_after)
    stopped.save(tmp_path / "run.pt")
    PPO.load(tmp_path / "run.pt").save(tmp_path / "again.pt")  # without environments
    first, second = (
        PPO.load(tmp_path / name, vector(CueMemory, NUM_ENVS, mode)).learn()
        for name in ("run.pt", "again.pt")
    )
    assert first.is_finished
    torch.testing.assert_close(
        all_that_matters(first), all_that_matters(second), rtol=0, atol=0, equal_nan=True
    )


def test_a_run_with_conditional_masks_resumes(tmp_path):
    stopped = start(RowThenColumn, heads=RowThenColumn.action_heads)
    run_steps(stopped, 25)
    stopped.save(tmp_path / "run.pt")
    resumed = PPO.load(tmp_path / "run.pt", vector(RowThenColumn, NUM_ENVS))
    assert resumed.learn().is_finished  # the environments assert that every choice is legal


def first_features(model):
    row = row_for(model.envs)
    model.envs.observe(row)
    return row.states


def test_a_resumed_run_collects_the_round_again_in_new_episodes(tmp_path):
    model = start()
    first = first_features(model)
    run_steps(model, HORIZON)
    progress, recent = vars(model.trainer.progress).copy(), list(model.envs.log.recent)
    run_steps(model, 15)
    assert progress["episodes"] > 0
    assert len(model.trainer.buffer) > 0
    model.save(tmp_path / "run.pt")
    resumed = PPO.load(tmp_path / "run.pt", vector(CueMemory, NUM_ENVS))
    assert vars(resumed.trainer.progress) == progress
    assert progress["rounds"] == 1
    assert list(resumed.envs.log.recent) == recent
    assert len(resumed.trainer.buffer) == 0
    assert not torch.equal(first_features(resumed), first)  # not the first episodes again
    resumed.learn()
    assert resumed.is_finished


def interrupted(make):
    """Environments of which the second raises KeyboardInterrupt in its 30th step."""

    class Interrupted(make):
        calls = 0

        def step(self, action):
            if self.np_random_seed == 1:
                Interrupted.calls += 1
                if Interrupted.calls == 30:
                    raise KeyboardInterrupt
            return super().step(action)

    return Interrupted


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_learning_after_an_interrupted_step_starts_new_episodes(mode):
    """No episode of the rollout joins steps from before and after the interruption."""

    class ShowsItsAge(CueMemory):
        def observation(self):
            return np.full(3, self.elapsed, dtype=np.float32)

    model = start(interrupted(ShowsItsAge), mode)
    with pytest.raises(KeyboardInterrupt):
        model.learn(TOTAL_STEPS)
    assert model.num_steps == model.trainer.progress.steps > 0
    model.trainer.collect()  # the environments assert that every choice is legal
    fields, counts = stored_fields(model.trainer.buffer), model.trainer.buffer.step_counts
    stored = torch.arange(HORIZON) < counts[:, None]
    age = (torch.arange(HORIZON) % CueMemory.limit).expand(NUM_ENVS, -1)
    assert torch.equal(fields["states"][..., -1][stored], age.float()[stored])
    assert torch.equal(fields["truncated"][stored], (age == CueMemory.limit - 1)[stored])
    assert not model.trainer.buffer.initial_hidden_h.any()


@pytest.mark.parametrize("when", ["within a step", "between steps", "error in an environment"])
def test_processes_left_unusable_are_refused_and_others_continue(tmp_path, when):
    class Failing(CueMemory):
        def step(self, action):
            if self.elapsed == 5 and when == "error in an environment":
                raise RuntimeError
            return super().step(action)

    def interrupt(*_):
        raise KeyboardInterrupt

    def end_processes(*_):  # as a terminal does, which sends Ctrl-C to all of its processes
        for process in envs.processes:
            process.kill()
            process.join()
        raise KeyboardInterrupt

    envs = AsyncVectorEnv([Failing] * NUM_ENVS, context="fork")
    model = PPO(envs, config=CONFIG)
    if when == "within a step":
        envs.step_wait = interrupt
    is_error = when == "error in an environment"
    expected = RuntimeError if is_error else KeyboardInterrupt
    with pytest.warns() if is_error else nullcontext(), pytest.raises(expected):
        model.learn(TOTAL_STEPS, end_processes if when == "between steps" else None)
    try:
        with pytest.raises(
            ValueError, match=r"failed, and cannot be used again; make new .* PPO\.load\(path"
        ):
            model.learn()
        model.save(tmp_path / "run.pt")
        assert PPO.load(tmp_path / "run.pt", vector(CueMemory, NUM_ENVS)).learn().is_finished
    finally:
        for process in envs.processes:
            process.terminate()
        envs.closed = True  # gymnasium would wait for the processes


def test_closed_processes_are_named_as_such():
    envs = AsyncVectorEnv([CueMemory] * NUM_ENVS, context="fork")
    model = PPO(envs, config=CONFIG)
    envs.close()
    with pytest.raises(ValueError, match="were closed, and cannot be used again"):
        model.learn(TOTAL_STEPS)


def test_another_environment_is_refused_with_what_differs(tmp_path):
    start().save(tmp_path / "run.pt")
    with pytest.raises(
        ValueError,
        match=r"not those of the policy: the action is choices .*\(3, 4, 2\).*expected choices \(3,\)",
    ):
        PPO.load(tmp_path / "run.pt", vector(BestActions, NUM_ENVS))


class OtherCues(CueMemory):
    """Another environment with the same spaces."""

    limit = 5


@pytest.mark.parametrize(("make", "num_envs"), [(CueMemory, 6), (OtherCues, NUM_ENVS)])
def test_a_run_continues_in_other_environments_with_new_episodes(tmp_path, make, num_envs):
    model = start()
    run_steps(model, HORIZON + 5)  # within the second round
    model.save(tmp_path / "run.pt")
    moved = PPO.load(tmp_path / "run.pt", vector(make, num_envs))
    before, old = moved.trainer.progress, model.trainer.progress
    assert (before.rounds, before.steps) == (1, old.steps)
    torch.testing.assert_close(moved.agent.state_dict(), model.agent.state_dict())
    assert len(moved.trainer.buffer) == 0
    assert not moved.trainer.state.h.any()
    moved.learn()
    assert moved.is_finished
    assert {episode.length for episode in moved.envs.log.recent} == {make.limit}
    moved.learn(10)
    assert moved.num_steps > TOTAL_STEPS


def test_the_config_travels_with_the_checkpoint(tmp_path):
    ppo = replace(CONFIG.ppo, clip=0.1, ppo_epochs=np.int64(1))
    config = replace(CONFIG, rng_seed=np.int64(5), ppo=ppo)
    start(config=config).save(tmp_path / "run.pt")
    assert PPO.load(tmp_path / "run.pt", vector(CueMemory, NUM_ENVS)).config == config


def test_a_run_continues_on_another_device_if_its_own_is_missing(tmp_path):
    path = tmp_path / "run.pt"
    model = start()
    run_steps(model, HORIZON)
    model.save(path)
    file = torch.load(path, weights_only=True)
    file["contents"]["config"]["device"] = "cuda:99"
    file["contents"]["trainer"]["device"] = "cuda"
    file["contents"]["trainer"]["action_rng"] = torch.zeros(16, dtype=torch.uint8)
    torch.save(file, path)
    with pytest.raises(ValueError, match="device=cuda:99 cannot be used here"):
        PPO.load(path, vector(CueMemory, NUM_ENVS))
    first, second = (PPO.load(path, vector(CueMemory, NUM_ENVS), device="cpu") for _ in range(2))
    assert first.config == replace(model.config, device="cpu")
    assert first.trainer.progress == model.trainer.progress
    for resumed in (first, second):
        resumed.learn()
    torch.testing.assert_close(all_that_matters(first), all_that_matters(second), rtol=0, atol=0)
    assert first.trainer.action_rng.initial_seed() != CONFIG.rng_seed  # not the first samples again


def test_settings_that_this_version_does_not_have_are_refused_by_name(tmp_path):
    path = tmp_path / "run.pt"
    start().save(path)
    contents = torch.load(path, weights_only=True)
    contents["contents"]["config"]["ppo"]["cilp"] = 0.1
    torch.save(contents, path)
    with pytest.raises(ValueError, match="no setting 'ppo.cilp'; did you mean 'clip'"):
        PPO.load(path, vector(CueMemory, NUM_ENVS))
