"""Environments that give tensors: the same rollouts, and the same words where something is wrong."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NumpyToTorch

from esper.leyline.factored_actions import ActionMasks
from esper.simic import trainer
from esper.simic.device_collect import DeviceCollect
from esper.simic.gym.evaluation import evaluate
from esper.simic.gym.ppo_model import PPO
from esper.tamiyo.policy.distributions import draw_noise
from support.batched_environments import PointMasses
from support.rollouts import stored_fields
from support.torch_models import CONFIG, KINDS, MASSES, NEXT_STEP, SAME_STEP, counters, model_of


def two_rounds(envs, kind="numbers", config=CONFIG):
    """Everything that two rounds stored; the policy learned between them."""
    model = model_of(envs, kind, config)
    buffer = model.trainer.buffer
    rounds = []
    for _ in range(2):
        model.trainer.collect()
        fields = {name: field.clone() for name, field in stored_fields(buffer).items()}
        last_values = model.trainer._last_values
        rounds.append(fields | {"last_values": last_values, "step_counts": buffer.step_counts + 0})
        model.trainer.learn()
    return model, rounds


# -- the same rollouts ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_give_the_rollouts_of_arrays_to_the_bit(kind, mode):
    _, expected = two_rounds(counters(mode, kind, np), kind)
    wrapped = NumpyToTorch(counters(mode, kind, np))
    for envs in (wrapped, counters(mode, kind)):
        model, rounds = two_rounds(envs, kind)
        assert model.envs.is_torch
        assert int(envs.unwrapped.num_illegal) == 0
        torch.testing.assert_close(rounds, expected, rtol=0, atol=0, equal_nan=True)
    first = expected[0]
    assert first["truncated"].sum() >= 8
    assert first["terminated"].sum() >= 4
    assert first["step_counts"].tolist() == (
        [12, 13, 8, 14] if mode == NEXT_STEP else [16, 16, 16, 16]
    )


def test_arrays_and_tensors_are_told_apart_at_the_first_reset():
    assert not model_of(counters(SAME_STEP, xp=np)).envs.is_torch
    assert model_of(counters(SAME_STEP)).envs.is_torch


def test_a_vector_environment_of_gymnasium_learns_behind_its_wrapper():
    make = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=9)] * 3
    model, rounds = two_rounds(NumpyToTorch(SyncVectorEnv(make)))
    assert model.envs.is_torch
    assert rounds[0]["truncated"].any()


def test_environments_of_jax_give_the_rollouts_of_arrays():
    jax = pytest.importorskip("jax")
    from gymnasium.wrappers.vector import JaxToTorch

    for mode in AutoresetMode:
        _, expected = two_rounds(counters(mode, "dependent heads", np), "dependent heads")
        with jax.enable_x64(True):
            envs = JaxToTorch(counters(mode, "dependent heads", jax.numpy))
            _, rounds = two_rounds(envs, "dependent heads")
        torch.testing.assert_close(rounds, expected, rtol=0, atol=0, equal_nan=True)


# -- time limits ------------------------------------------------------------------------------


def replayed_value(model, env, end, observation):
    """V of what followed row `end` of an env, with the state of an episode played from zeros."""
    stored = stored_fields(model.trainer.buffer)
    ended = stored["terminated"][env] | stored["truncated"][env]
    earlier_ends = ended[:end].nonzero()[:, 0].tolist()
    first = earlier_ends[-1] + 1 if earlier_ends else 0
    agent = model.agent
    state = agent.policy.initial_state(1)
    masks = ActionMasks.all_legal(model.spaces.action_space, 1)
    for t in range(first, end + 1):
        state = agent.act(stored["states"][env, t : t + 1], masks, state).state
    actions, rewards = stored["actions"][env, end], stored["rewards"][env, end : end + 1]
    previous = model.spaces.previous(actions.unsqueeze(0), rewards)
    features = torch.cat([previous, observation.unsqueeze(0)], dim=1)
    return agent.value(features, state)[0]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_cut_row_bootstraps_from_the_tensors_that_followed_it(mode):
    model = model_of(counters(mode))
    model.trainer.collect()
    stored = stored_fields(model.trainer.buffer)
    for episode in (1, 2, 3):  # of env 0, which is cut after 3 steps
        end = 3 * episode - 1
        assert stored["truncated"][0, end]
        expected = replayed_value(model, 0, end, torch.tensor([1.0, 0.125 * episode]))
        torch.testing.assert_close(stored["bootstrap_values"][0, end], expected)


def cut_rows(model):
    return model.trainer.buffer.truncated.nonzero().tolist()


def test_a_simulators_final_observations_are_valued():
    model = model_of(PointMasses(6), config=MASSES)
    model.trainer.collect()
    stored = stored_fields(model.trainer.buffer)
    cut = cut_rows(model)
    assert len(cut) > 6
    for env, t in cut:
        place, speed = stored["states"][env, t, -2:]
        speed = speed + 0.3 * stored["actions"][env, t, 0].tanh()
        final = torch.stack([place + 0.3 * speed, speed])
        expected = replayed_value(model, env, t, final)
        torch.testing.assert_close(stored["bootstrap_values"][env, t], expected)


class OneByOne(PointMasses):
    """Final observations as an array of objects, None where no episode ended."""

    def step(self, actions):
        *rest, terminated, truncated, extras = super().step(actions)
        places = (terminated | truncated).nonzero()[:, 0].tolist()
        final = np.full(self.num_envs, None)
        for place in places:
            final[place] = {"policy": extras["final_obs"]["policy"][place]}
        return *rest, terminated, truncated, {"final_obs": final}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_final_observations_may_come_one_by_one(device):
    rollouts = []
    for make in (PointMasses, OneByOne):
        model = model_of(make(6, device), config=MASSES)
        rollouts.append(stored_on_cpu(model))
    assert rollouts[0][0]["truncated"].any()
    torch.testing.assert_close(*rollouts, rtol=0, atol=0, equal_nan=True)


def test_without_final_observations_a_cut_row_bootstraps_from_its_own_value(capsys):
    model = model_of(PointMasses(6, compute_final_obs=False), config=MASSES)
    model.trainer.collect()
    stored = stored_fields(model.trainer.buffer)
    is_cut = stored["truncated"]
    assert is_cut.sum() > 6
    assert torch.equal(stored["bootstrap_values"][is_cut], stored["values"][is_cut])
    model.learn(300)
    line = "final observations: not given where a time limit cut an episode, so the value of the "
    assert capsys.readouterr().out.count(line) == 1
    model_of(PointMasses(6), config=MASSES).learn(300)
    assert line not in capsys.readouterr().out


# -- the model --------------------------------------------------------------------------------


def play(model, env, quota):
    """Returns and lengths of each env's first episodes, by `predict` alone."""
    observation, _ = env.reset(seed=0)
    state, rewards, starts = None, None, None
    played = [[(0.0, 0)] for _ in range(env.num_envs)]
    while any(len(episodes) <= quota for episodes in played):
        actions, state = model.predict(observation, state, starts, reward=rewards)
        assert actions.abs().max() <= 1
        observation, rewards, terminated, truncated, _ = env.step(actions)
        starts = terminated | truncated
        for episodes, reward, has_ended in zip(played, rewards, starts, strict=True):
            total, length = episodes[-1]
            episodes[-1] = (total + float(reward), length + 1)
            if has_ended:
                episodes.append((0.0, 0))
    return sorted(episode for episodes in played for episode in episodes[:quota])


def test_evaluating_a_simulator_counts_the_episodes_that_predict_plays():
    model = model_of(PointMasses(6), config=MASSES).learn(96)
    result = evaluate(model, PointMasses(3), episodes=6)
    found = sorted(zip(result.returns.tolist(), result.lengths.tolist(), strict=True))
    expected = play(model, PointMasses(3), quota=2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_predict_takes_tensors_and_gives_tensors():
    model = model_of(PointMasses(6), config=MASSES)
    observation, _ = PointMasses(6).reset(seed=0)
    actions, _ = model.predict(observation)
    assert actions.dtype == torch.float32
    assert actions.shape == (6, 1)
    alone, _ = model.predict({"policy": observation["policy"][2]})
    torch.testing.assert_close(alone, actions[2])
    arrays, _ = model.predict({"policy": observation["policy"].numpy()})
    assert isinstance(arrays, np.ndarray)
    np.testing.assert_array_equal(arrays, actions)


def test_predict_takes_masks_as_tensors():
    envs = counters(SAME_STEP, "dependent heads")
    model = model_of(envs, "dependent heads").learn(64)
    observation, infos = envs.reset()
    actions, _ = model.predict(observation, mask=infos["action_mask"])
    again = {name: mask.numpy() for name, mask in infos["action_mask"].items()}
    expected, _ = model.predict(observation, mask=again)
    assert torch.equal(actions, expected)
    of_one = {name: entry[1] for name, entry in observation.items()}
    mask = {name: mask[1] for name, mask in infos["action_mask"].items()}
    alone, _ = model.predict(of_one, mask=mask)
    assert torch.equal(alone, actions[1])


def test_a_model_of_a_simulator_is_saved_loaded_and_resumed(tmp_path):
    path = tmp_path / "masses.pt"
    model = model_of(PointMasses(6), config=MASSES)
    model.learn(400, lambda steps, _: steps < 200)
    model.save(path)
    observation, _ = PointMasses(4).reset(seed=3)
    expected, _ = model.predict(observation)
    loaded = PPO.load(path)
    assert torch.equal(loaded.predict(observation)[0], expected)
    resumed = [PPO.load(path, PointMasses(6)).learn() for _ in range(2)]
    assert all(model.num_steps >= 400 for model in resumed)
    first, second = (list(model.agent.policy.parameters()) for model in resumed)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert evaluate(loaded, PointMasses(2), episodes=2).lengths.max() <= 6


def test_a_model_may_be_evaluated_in_its_own_simulator_and_in_that_of_another_size():
    env = PointMasses(6)
    model = model_of(env, config=MASSES)
    curve = []
    model.learn(300, lambda _, metrics: curve.append(metrics), PointMasses(3), eval_every=1)
    assert all("eval/return" in metrics for metrics in curve)
    evaluate(model, env, episodes=3)
    model.learn(96)
    with pytest.raises(ValueError, match="these are the environments that the model learns in"):
        model.learn(96, eval_env=env)


def test_numbers_without_bounds_need_some():
    with pytest.raises(ValueError, match=r"without bounds; set GymConfig\(action_bound=1.0\)"):
        PPO(PointMasses(2), config=CONFIG)
    space = model_of(PointMasses(2), config=replace(CONFIG, action_bound=2.5)).spaces
    assert float(space.actions(torch.tensor([[90.0]]), as_tensors=True)) == 2.5


# -- on a GPU ---------------------------------------------------------------------------------


@pytest.fixture
def same_noise(monkeypatch):
    """The same random numbers on every device."""

    def draw(space, size, device, _):
        generator = torch.Generator().manual_seed(0)
        return draw_noise(space, size, torch.device("cpu"), generator).to(device)

    monkeypatch.setattr(trainer, "draw_noise", draw)


def stored_on_cpu(model):
    """The steps of two rounds without learning in between; bootstraps where episodes were cut."""
    rounds = []
    buffer = model.trainer.buffer
    for _ in range(2):
        model.trainer.collect()
        fields = stored_fields(buffer)
        is_cut = fields["truncated"]
        fields["bootstrap_values"] = fields["bootstrap_values"].where(is_cut, torch.nan)
        steps = {name: field[buffer.valid_mask].cpu() for name, field in fields.items()}
        last_values = model.trainer._last_values.cpu()
        rounds.append(steps | {"last_values": last_values, "step_counts": buffer.step_counts.cpu()})
    return rounds


@pytest.mark.gpu
@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_on_a_gpu_is_that_on_the_cpu(kind, mode):
    on_cpu = stored_on_cpu(model_of(counters(mode, kind), kind))
    envs = counters(mode, kind, device="cuda")
    model = model_of(envs, kind)
    assert model.agent.device.type == model.envs.device.type == "cuda"
    on_gpu = stored_on_cpu(model)
    assert int(envs.num_illegal) == 0
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize("compute_final_obs", [True, False])
def test_a_simulators_rollout_on_a_gpu_is_that_on_the_cpu(compute_final_obs):
    on_cpu, on_gpu = (
        stored_on_cpu(
            model_of(PointMasses(6, device, compute_final_obs=compute_final_obs), config=MASSES)
        )
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-5, equal_nan=True)


def collect_without_waiting(model, monkeypatch):
    """A round whose steps raise an error where they wait for the GPU, after one of warming up."""
    model.learn(1)
    value_cut_rows = DeviceCollect.value_cut_rows

    def watch():
        torch.cuda.set_sync_debug_mode("error")
        return False

    def value_unwatched(collect):  # after the last step, the round's one look
        torch.cuda.set_sync_debug_mode("default")
        value_cut_rows(collect)

    monkeypatch.setattr(DeviceCollect, "value_cut_rows", value_unwatched)
    try:
        assert model.trainer.collect(watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP])
@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_a_round_never_wait_for_the_gpu(kind, mode, monkeypatch):
    collect_without_waiting(model_of(counters(mode, kind, device="cuda"), kind), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_final_obs", [True, False])
def test_a_simulators_steps_never_wait_for_the_gpu(compute_final_obs, monkeypatch):
    env = PointMasses(6, "cuda", compute_final_obs=compute_final_obs)
    collect_without_waiting(model_of(env, config=MASSES), monkeypatch)


@pytest.mark.gpu
def test_a_method_may_give_masks_as_arrays_for_observations_on_a_gpu():
    envs = counters(NEXT_STEP, "pictures", device="cuda")
    envs.action_masks = lambda: envs.legal().cpu().numpy()
    model_of(envs, "pictures").learn(64)
    assert int(envs.num_illegal) == 0


@pytest.mark.gpu
def test_a_model_moves_between_a_gpu_and_the_cpu(tmp_path):
    path = tmp_path / "masses.pt"
    model = model_of(PointMasses(6, "cuda"), config=MASSES).learn(96)
    model.save(path)
    observation, _ = PointMasses(4, "cuda").reset(seed=3)
    expected, _ = model.predict(observation)
    assert expected.is_cuda
    on_cpu = PPO.load(path)
    assert on_cpu.agent.device.type == "cpu"
    torch.testing.assert_close(on_cpu.predict(observation)[0], expected, rtol=1e-5, atol=1e-5)
    lengths = evaluate(on_cpu, PointMasses(3, "cuda"), episodes=3).lengths
    assert sorted(lengths) == sorted(evaluate(model, PointMasses(3), episodes=3).lengths)
    assert PPO.load(path, PointMasses(6)).learn(96).agent.device.type == "cpu"
    assert PPO.load(path, PointMasses(6, "cuda")).learn(96).agent.device.type == "cuda"
