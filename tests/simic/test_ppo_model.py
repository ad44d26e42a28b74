"""`esper.PPO` as a user meets it: any environment, evaluation, callbacks, curves, mixed actions."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import esper
from esper.leyline.factored_actions import ActionMasks
from esper.tamiyo.policy import plain_heads
from support.gym_environments import CueMemory, vector
from support.rollouts import stored_fields

CONFIG = esper.GymConfig(
    horizon=16, policy=esper.PolicyConfig(lstm_hidden_dim=8), ppo=esper.PPOConfig(ppo_epochs=1)
)


class Stranger(gymnasium.Env):
    """Sees a picture, a number and a mask. Right is: fire (1) left or right of the bright half.

    Aiming matters to firing only: the best aim is 0.5 towards the bright side. Choice 0 (wait)
    earns nothing; choice 2 is never legal.
    """

    def __init__(self):
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (12, 12, 3), np.uint8),
                "fuel": spaces.Box(0, 1, (1,)),
                "action_mask": spaces.MultiBinary(3),
            }
        )
        self.action_space = spaces.Dict(
            {"move": spaces.Discrete(3), "aim": spaces.Box(-1, 1, (1,))}
        )

    def observe(self):
        self.side = int(self.np_random.integers(2))
        camera = self.np_random.integers(60, size=(12, 12, 3), dtype=np.uint8)
        camera[:, 6 * self.side : 6 * self.side + 6] += 120
        mask = np.array([1, 1, 0], dtype=np.int8)
        return {"camera": camera, "fuel": np.float32([1 - self.age / 8]), "action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        assert action["move"] < 2, "not legal"
        best = 0.5 if self.side else -0.5
        reward = float(action["move"]) * (1.0 - abs(action["aim"][0] - best))
        self.age += 1
        return self.observe(), float(reward), False, self.age == 8, {}


@pytest.mark.slow
def test_a_strangers_environment_is_learned():
    model = esper.PPO(Stranger()).learn(1_500)
    returns = esper.evaluate(model, Stranger(), episodes=20).returns
    assert returns.mean() > 5.0  # of 8; always aiming at 0 earns 4, and at random 3 at most


def test_a_strangers_environment_trains_from_five_lines(tmp_path):
    env = Stranger()
    model = esper.PPO(env)
    model.learn(150)
    model.save(tmp_path / "model.pt")
    assert model.trainer.agent.policy.heads.images == ((3, 12, 12),)
    loaded = esper.PPO.load(tmp_path / "model.pt")
    observation, _ = env.reset(seed=0)
    (first, _), (second, _) = model.predict(observation), loaded.predict(observation)
    np.testing.assert_equal(first, second)
    assert env.action_space.contains(first)


class Corner(gymnasium.Env):
    """Sees a picture and nothing else. Right is to name its bright corner."""

    observation_space = spaces.Box(0, 255, (7, 7, 3), np.uint8)
    action_space = spaces.Discrete(4)

    def observe(self):
        self.corner = int(self.np_random.integers(4))
        picture = np.zeros((7, 7, 3), np.uint8)
        picture[6 * (self.corner // 2), 6 * (self.corner % 2)] = 255
        return picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.observe(), {}

    def step(self, action):
        is_right = action == self.corner
        self.age += 1
        return self.observe(), float(is_right), False, self.age == 10, {}


def test_an_observation_of_a_picture_alone_is_learned_saved_and_evaluated(tmp_path):
    policy = replace(CONFIG.policy, memory=False)
    config = replace(CONFIG, policy=policy, ppo=esper.PPOConfig(), horizon=64)
    model = esper.PPO(vector(Corner, 8), config=config).learn(6_000)
    assert model.trainer.buffer.states.shape[-1] == 0
    model.save(tmp_path / "model.pt")
    loaded = esper.PPO.load(tmp_path / "model.pt")
    returns = [esper.evaluate(m, vector(Corner, 4), 8).returns for m in (model, loaded)]
    assert returns[0].mean() > 9  # of 10; at random 2.5
    np.testing.assert_array_equal(*returns)
    env = Corner()
    pictures, corners = zip(*((env.reset(seed=n)[0], env.corner) for n in range(5)), strict=True)
    assert [loaded.predict(picture)[0] for picture in pictures] == [*corners]
    assert loaded.predict(np.stack(pictures))[0].tolist() == [*corners]


def test_a_policy_that_sees_pictures_says_when_it_gets_none_or_others():
    agent = esper.PPO(vector(Corner, 2), config=CONFIG).agent
    masks = ActionMasks.all_legal(agent.policy.action_space, 2)
    features = torch.zeros(2, 4)  # the previous action
    state = agent.policy.initial_state(2)
    with pytest.raises(ValueError, match="sees pictures; pass them as frames=, uint8 147 bytes"):
        agent.act(features, masks, state)
    for frames in (torch.zeros(2, 147), torch.zeros(2, 146, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"frames: got .* torch.uint8 \(2, 147\) \(N, P\)"):
            agent.value(features, state, frames)


def test_ratios_are_one_before_the_first_step_with_images_and_mixed_actions():
    errors = []
    heads = (esper.Head("move", 3), esper.Head("aim_0", given=("move",), continuous=True))

    class Asks(Stranger):  # the aim counts only when firing
        def observe(self):
            observation = super().observe()
            move = observation["action_mask"]
            return observation | {"action_mask": {"move": move, "aim_0": np.int8([0, 1, 1])}}

        def __init__(self):
            super().__init__()
            self.observation_space["action_mask"] = spaces.Dict(
                {"move": spaces.MultiBinary(3), "aim_0": spaces.MultiBinary(3)}
            )

    envs = gymnasium.vector.SyncVectorEnv([Asks] * 3)
    model = esper.PPO(envs, heads, CONFIG)
    torch.nn.init.constant_(model.agent.policy.log_std, -0.7)
    model.learn(300, lambda _, metrics: errors.append(metrics["ppo/first_ratio_error"]))
    assert len(errors) > 3
    assert max(errors) < 1e-5
    assert model.agent.policy.log_std.item() != pytest.approx(-0.7)  # it is learned
    fields, counts = stored_fields(model.trainer.buffer), model.trainer.buffer.step_counts
    assert fields["actions"].dtype == torch.float32
    valid = torch.arange(16) < counts[:, None]
    waits = (fields["actions"][..., 0] == 0) & valid
    fires = (fields["actions"][..., 0] == 1) & valid
    assert (fields["log_probs"][waits][:, 1] == 0).all()
    assert (fields["actions"][waits][:, 1] == 0).all()
    assert (fields["log_probs"][fires][:, 1] != 0).all()
    assert waits.sum() > 5
    assert fires.sum() > 5
    observation, _ = Asks().reset(seed=0)
    action, _ = model.predict(observation)
    assert action["move"] < 2


def test_a_run_with_images_and_mixed_actions_resumes(tmp_path):
    stopped = esper.PPO(vector(Stranger, 2), config=CONFIG)
    left = iter(range(23))
    stopped.learn(100, should_stop=lambda: next(left, None) is None)
    stopped.save(tmp_path / "run.pt")
    resumed = esper.PPO.load(tmp_path / "run.pt", vector(Stranger, 2))
    torch.testing.assert_close(resumed.agent.state_dict(), stopped.agent.state_dict())
    assert resumed.learn().is_finished


class Target(gymnasium.Env):
    """One step: say the number that is shown."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Box(-2, 2, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.target, {}

    def step(self, action):
        return self.target, -float(abs(action - self.target)[0]), True, False, {}


def test_continuous_actions_are_learned():
    envs = gymnasium.vector.SyncVectorEnv([Target] * 8)
    config = esper.GymConfig(horizon=32, policy=esper.PolicyConfig(lstm_hidden_dim=16))
    model = esper.PPO(envs, config=config).learn(5_000)
    assert esper.evaluate(model, Target(), episodes=100).returns.mean() > -0.25  # at random: -1.1


@pytest.mark.parametrize("num_envs", [1, 2, 3, 5, 6, 7])
def test_any_number_of_envs_learns_from_every_row(num_envs):
    seen = []
    config = replace(CONFIG, ppo=esper.PPOConfig(ppo_epochs=2))
    model = esper.PPO(vector(CueMemory, num_envs), config=config)
    outputs = model.agent.policy.outputs

    def watched(steps):
        seen.append(steps.features.shape[1])  # envs
        return outputs(steps)

    model.agent.policy.outputs = watched
    model.learn(1)
    assert sum(seen) == 2 * num_envs
    assert len(seen) >= 2 * min(num_envs, 3)
    assert max(seen) - min(seen) <= 1


def test_an_id_makes_as_many_environments_as_configured():
    model = esper.PPO("CartPole-v1", config=replace(CONFIG, num_envs=3))
    assert model.envs.num_envs == 3
    model.learn(1)
    assert len(esper.evaluate(model, "CartPole-v1", 4).returns) == 4


def test_a_callback_that_returns_false_stops_and_learn_resumes():
    rounds = []

    def callback(steps, metrics):
        rounds.append(steps)
        return len(rounds) < 2

    model = esper.PPO(vector(CueMemory, 4), config=CONFIG).learn(400, callback)
    assert len(rounds) == 2
    assert not model.is_finished
    model.learn(callback=lambda *_: None)  # None is not False
    assert model.is_finished


def test_evaluation_during_training_is_logged_and_leaves_training_as_it_was(tmp_path):
    def run(**settings):
        rows = []
        model = esper.PPO(vector(CueMemory, 4), config=CONFIG)
        model.learn(250, lambda steps, metrics: rows.append((steps, metrics)), **settings)
        return model, rows

    plain, _ = run()
    model, rows = run(
        eval_env=vector(CueMemory, 2), log_dir=tmp_path, eval_every=2, eval_episodes=3
    )
    torch.testing.assert_close(model.agent.state_dict(), plain.agent.state_dict(), rtol=0, atol=0)
    evaluated = [index + 1 for index, (_, metrics) in enumerate(rows) if "eval/return" in metrics]
    assert evaluated == [*range(2, len(rows), 2), len(rows)] or evaluated == [
        *range(2, len(rows) + 1, 2)
    ]
    assert all(m["eval/length"] == CueMemory.limit for _, m in rows if "eval/length" in m)
    curves = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in curves.Scalars("ppo/kl")] == [steps for steps, _ in rows]
    assert len(curves.Scalars("eval/return")) == len(evaluated)


def test_the_training_environments_are_no_place_to_evaluate_during_training():
    envs, env = vector(CueMemory, 2), CueMemory()
    for training, other in ((envs, envs), (env, env), (env, gymnasium.wrappers.TimeLimit(env, 5))):
        model = esper.PPO(training, config=CONFIG)
        with pytest.raises(ValueError, match="environments that the model learns in.* Make others"):
            model.learn(50, eval_env=other)
        assert model.num_steps == 0  # found before the first step
        with pytest.raises(ValueError, match="environments that the model learns in.* Make others"):
            model.learn(50, lambda *_, m=model, o=other: esper.evaluate(m, o, 1) and None)
        assert len(esper.evaluate(model, other, 2).returns) == 2  # allowed afterwards
        model.learn(np.int64(50))


def test_evaluation_environments_that_do_not_fit_are_found_before_the_first_step():
    class NoMasks(CueMemory):
        def reset(self, **kwargs):
            return super().reset(**kwargs)[0], {}

    model = esper.PPO(vector(CueMemory, 2), config=CONFIG)
    for other, message in ((NoMasks, "gave no info"), (Stranger, "not those of the policy")):
        with pytest.raises(ValueError, match=f"eval_env: .*{message}"):
            model.learn(50, eval_env=vector(other, 2))
        assert model.num_steps == 0


class Halves(nn.Module):
    """A custom encoder: the brightness of each half, and the numbers."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3, 5)

    def forward(self, numbers, camera):
        sides = camera.mean(dim=(1, 2)).unflatten(-1, (2, 6)).mean(dim=-1)
        return self.mix(torch.cat([numbers, sides], dim=-1))


def test_a_custom_encoder_is_used_saved_and_loaded(tmp_path):
    encoder = Halves()
    model = esper.PPO(Stranger(), config=CONFIG, encoder=encoder)
    before = encoder.mix.weight.clone()
    model.learn(64)
    assert isinstance(model.agent.policy.heads.encoder, Halves)
    assert torch.equal(encoder.mix.weight, before)  # a copy learns
    assert not torch.equal(model.agent.policy.heads.encoder.mix.weight, before)
    model.save(tmp_path / "model.pt")
    loaded = esper.PPO.load(tmp_path / "model.pt", Stranger(), encoder=Halves())
    torch.testing.assert_close(loaded.agent.state_dict(), model.agent.state_dict())
    loaded.learn(16)
    with pytest.raises(
        ValueError, match="model.pt holds a model with a custom encoder; pass encoder="
    ):
        esper.PPO.load(tmp_path / "model.pt")


def test_an_encoder_that_does_not_return_rows_is_refused():
    class Same(nn.Module):
        def forward(self, numbers, camera):
            return camera

    with pytest.raises(ValueError, match=r"encoder returned \(2, 3, 12, 12\) for 2 rows; expected"):
        esper.PPO(Stranger(), encoder=Same())


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (Halves, "encoder is <class .*Halves'>; pass an nn.Module, such as"),
        (nn.Linear(5, 2), r"failed when it was called with \(2, 1\), \(2, 3, 12, 12\), which"),
        (nn.Sequential(nn.BatchNorm1d(1)), "encoder's 0 is a BatchNorm1d: .*use LayerNorm or"),
    ],
)
def test_mistakes_in_an_encoder_are_named(encoder, message):
    with pytest.raises(ValueError, match=message):
        esper.PPO(Stranger(), encoder=encoder)


def test_predicting_without_the_mask_entry_says_what_to_pass():
    model, (observation, _) = esper.PPO(Stranger(), config=CONFIG), Stranger().reset(seed=0)
    mask = observation.pop("action_mask")
    with pytest.raises(ValueError, match="observation has no mask 'action_mask'; add it, or pass"):
        model.predict(observation)
    assert model.predict(observation, mask=mask)[0]["move"] < 2


def test_the_scale_of_pixels_is_taken_from_the_first_rollout_and_kept(monkeypatch):
    monkeypatch.setattr(plain_heads, "_ROWS_AS_FLOATS", 5)  # at a time
    model = esper.PPO(Stranger(), config=CONFIG).learn(1)
    (scales,) = model.agent.policy.heads.image_scales
    (mean, std), count = (scales.mean.clone(), scales.std.clone()), scales.count.clone()
    assert count == 16 * 144
    pixels = model.trainer.buffer.frames[model.trainer.buffer.valid_mask].double() / 255
    by_channel = pixels.unflatten(-1, (3, -1)).movedim(1, 0).flatten(1)
    torch.testing.assert_close(mean, by_channel.mean(1), atol=1e-6, rtol=1e-5)
    expected = (by_channel.var(1, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(std, expected, atol=1e-6, rtol=1e-5)
    model.learn(64)
    assert scales.count == count
    torch.testing.assert_close((scales.mean, scales.std), (mean, std), rtol=0, atol=0)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_stores_dict_observations_with_their_masks(mode):
    model = esper.PPO(vector(Stranger, 3, mode), config=replace(CONFIG, horizon=30))
    trainer = model.trainer
    trainer.collect()
    stored, counts = stored_fields(trainer.buffer), trainer.buffer.step_counts
    for env, count in enumerate(counts.tolist()):
        fuel = 1 - (torch.arange(count) % 8) / 8
        torch.testing.assert_close(stored["states"][env, :count, -1], fuel)
        ends = torch.arange(count) % 8 == 7
        assert torch.equal(stored["truncated"][env, :count], ends)
        assert stored["bootstrap_values"][env, :count][ends].isfinite().all()
        legal = [True, True, False]
        part = model.spaces.action_space.slices[model.spaces.action_space.index("move")]
        assert all(row == legal for row in stored["masks"][env, :count, part].tolist())


def test_new_cells_keep_what_they_saw_for_one_step_up_to_memory_steps():
    config = replace(CONFIG, policy=esper.PolicyConfig(lstm_hidden_dim=8, memory_steps=10))
    core = esper.PPO("CartPole-v1", config=config).agent.policy.core
    taken_in, kept, *_ = (core.bias_ih_l0 + core.bias_hh_l0).sigmoid().chunk(4)
    torch.testing.assert_close(kept[[0, -1]], torch.tensor([1 / 2, 9 / 10]))  # T / (1 + T)
    torch.testing.assert_close(taken_in, 1 - kept)
