"""Saved PPO models: they resume bit-exact, and refuse environments that do not fit."""

from contextlib import nullcontext
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from esper.simic.agent.ppo import PPOConfig
from esper.simic.gym.ppo_model import PPO, GymConfig
from esper.tamiyo.policy.network import PolicyConfig
from support.gym_environments import BestActions, CueMemory, RowThenColumn, vector

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


# a NEXT_STEP env rests on a pending reset after steps 8, 17, ...: 8 and 28 stop there
@pytest.mark.parametrize("stop_after", [0, 8, 28])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(tmp_path, mode, stop_after):
    whole = start(mode=mode)
    whole.learn(TOTAL_STEPS)

    stopped = start(mode=mode)
    run_steps(stopped, stop_after)
    stopped.save(tmp_path / "run.pt")
    PPO.load(tmp_path / "run.pt").save(tmp_path / "run.pt")  # without environments: the same file
    resumed = PPO.load(tmp_path / "run.pt", vector(CueMemory, NUM_ENVS, mode))
    resumed.learn()

    torch.testing.assert_close(
        all_that_matters(resumed), all_that_matters(whole), rtol=0, atol=0, equal_nan=True
    )


def test_conditional_masks_survive_a_checkpoint(tmp_path):
    whole = start(RowThenColumn, heads=RowThenColumn.action_heads)
    whole.learn(TOTAL_STEPS)
    stopped = start(RowThenColumn, heads=RowThenColumn.action_heads)
    run_steps(stopped, 25)
    stopped.save(tmp_path / "run.pt")
    resumed = PPO.load(tmp_path / "run.pt", vector(RowThenColumn, NUM_ENVS))
    resumed.learn()
    torch.testing.assert_close(all_that_matters(resumed), all_that_matters(whole), rtol=0, atol=0)


def test_without_environment_state_the_round_is_collected_again(tmp_path):
    class Forgetful(CueMemory):
        get_state = property()  # reading it raises AttributeError: the environment has none

    model = start(Forgetful)
    first = model.envs.features
    run_steps(model, HORIZON)
    progress, recent = vars(model.trainer.progress).copy(), list(model.envs.log.recent)
    run_steps(model, 15)
    assert 0 < progress["episodes"] < model.trainer.progress.episodes
    model.save(tmp_path / "run.pt")
    resumed = PPO.load(tmp_path / "run.pt", vector(Forgetful, NUM_ENVS))
    assert vars(resumed.trainer.progress) == progress
    assert progress["rounds"] == 1
    assert progress["round_steps"] == 0
    assert list(resumed.envs.log.recent) == recent
    assert len(resumed.trainer.buffer) == 0
    assert not torch.equal(resumed.envs.features, first)  # not the first episodes again
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
def test_learning_after_an_interrupted_step_equals_the_uninterrupted_run(mode):
    whole = start(mode=mode).learn(TOTAL_STEPS)
    model = start(interrupted(CueMemory), mode=mode)
    with pytest.raises(KeyboardInterrupt):
        model.learn(TOTAL_STEPS)
    assert model.num_steps == model.trainer.progress.steps_before_round > 0
    model.learn()
    torch.testing.assert_close(
        all_that_matters(model), all_that_matters(whole), rtol=0, atol=0, equal_nan=True
    )


def test_learning_after_an_interrupted_step_starts_new_episodes_without_environment_state():
    class Forgetful(CueMemory):
        get_state = property()

        def observation(self):
            return np.full(3, self.elapsed, dtype=np.float32)

    model = start(interrupted(Forgetful), AutoresetMode.SAME_STEP)
    with pytest.raises(KeyboardInterrupt):
        model.learn(TOTAL_STEPS)
    model.trainer.collect()  # the environments assert that every choice is legal
    fields = model.trainer.buffer.fields
    age = torch.arange(HORIZON) % CueMemory.limit
    assert torch.equal(fields["states"][..., -1], age.float().expand(NUM_ENVS, -1))
    assert torch.equal(fields["truncated"], (age == CueMemory.limit - 1).expand(NUM_ENVS, -1))
    assert not fields["hidden_h"][:, 0].any()


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


class Limited(CueMemory):
    """Goes on for ever; only a TimeLimit around it knows when an episode is cut."""

    limit = 10**6


def test_a_time_limit_survives_a_checkpoint(tmp_path):
    def limited():
        return TimeLimit(OrderEnforcing(Limited()), 7)

    whole = start(limited)
    whole.learn(TOTAL_STEPS)
    assert whole.trainer.progress.episodes > 0
    stopped = start(limited)
    run_steps(stopped, 25)
    stopped.save(tmp_path / "run.pt")
    resumed = PPO.load(tmp_path / "run.pt", vector(limited, NUM_ENVS))
    resumed.learn()
    torch.testing.assert_close(all_that_matters(resumed), all_that_matters(whole), rtol=0, atol=0)


def test_a_wrapper_that_may_remember_something_is_not_taken_for_exact():
    class Remembering(gymnasium.Wrapper):
        pass

    assert start(CueMemory).envs.can_save_state
    assert not start(lambda: Remembering(CueMemory())).envs.can_save_state
    inside = vector(CueMemory, NUM_ENVS)
    around = gymnasium.wrappers.vector.RecordEpisodeStatistics(inside)
    assert not PPO(around, config=CONFIG).envs.can_save_state


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
    assert (before.rounds, before.steps) == (1, old.steps_before_round)
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
    assert first.config == model.config
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
