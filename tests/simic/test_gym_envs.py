"""The loop over Gymnasium environments: what is stored, what is not, and what is refused."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from esper.leyline.factored_actions import ActionMasks
from esper.simic.agent.ppo import PPOConfig
from esper.simic.gym import evaluation
from esper.simic.gym.evaluation import evaluate
from esper.simic.gym.gym_envs import GymEnvs
from esper.simic.gym.gym_spaces import GymSpaces
from esper.simic.gym.ppo_model import PPO, GymConfig, PolicyState
from esper.tamiyo.policy.network import PolicyConfig
from support.agents import stir
from support.gym_environments import BestActions, CueMemory, RowThenColumn, vector, vector_of
from support.rollouts import act_and_step, stored_fields

CONFIG = GymConfig(
    horizon=16,
    policy=PolicyConfig(lstm_hidden_dim=8),
    ppo=PPOConfig(num_minibatches=1, ppo_epochs=1),
    previous_action=False,  # features are the observation alone
    previous_reward=False,
)


MODES = [*AutoresetMode, None]  # None: environments that are stepped one by one


def train(envs, total_steps, config=CONFIG, heads=None, callback=None):
    return PPO(envs, heads, config).learn(total_steps, callback)


def world_of(envs, heads=None):
    return GymEnvs(envs, GymSpaces.of(envs, heads), rng_seed=0)


class Counter(gymnasium.Env):
    """Shows the number of its next step; ends itself or is cut off at a length of its own."""

    observation_space = spaces.Box(0, 100, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, length: int, *, terminates: bool):
        self.length, self.terminates = length, terminates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.count += 1
        over = self.count == self.length
        observation = np.full(1, self.count + 1, np.float32)
        return observation, float(self.count), over and self.terminates, over, {}


def counters(mode: AutoresetMode | None) -> SyncVectorEnv:
    makers = [
        lambda: Counter(3, terminates=False),
        lambda: Counter(4, terminates=True),
        lambda: Counter(1, terminates=False),
    ]
    return vector_of(makers, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_holds_exactly_the_steps_taken_in_every_autoreset_mode(mode):
    trainer = PPO(counters(mode), config=CONFIG).trainer
    trainer.collect()
    stored, counts = stored_fields(trainer.buffer), trainer.buffer.step_counts
    for env, length in enumerate((3, 4, 1)):
        # with NEXT_STEP one call in length + 1 is an autoreset step
        calls = np.arange(CONFIG.horizon)
        taken = calls[calls % (length + 1) != length] if mode == AutoresetMode.NEXT_STEP else calls
        assert counts[env] == len(taken)
        age = np.arange(len(taken)) % length  # of the observation that was decided on
        rows = slice(0, len(taken))
        np.testing.assert_array_equal(stored["states"][env, rows, 0], age + 1)
        np.testing.assert_array_equal(stored["rewards"][env, rows], age + 1)
        is_end = age == length - 1
        np.testing.assert_array_equal(stored["terminated"][env, rows], is_end & (env == 1))
        np.testing.assert_array_equal(stored["truncated"][env, rows], is_end & (env != 1))
    trainer.learn()
    assert trainer.progress.steps == int(counts.sum())


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED, None])
@pytest.mark.parametrize("make", [CueMemory, RowThenColumn])
def test_every_autoreset_mode_stores_bit_exact_the_same_rows(make, mode):
    def collected(mode):
        heads = RowThenColumn.action_heads if make is RowThenColumn else None
        config = replace(CONFIG, horizon=40)
        trainer = PPO(vector(make, 3, mode), heads, config).trainer
        trainer.collect(deterministic=True)
        buffer = trainer.buffer
        return {"fields": stored_fields(buffer), "step_counts": buffer.step_counts}

    rows, same_step = collected(mode), collected(AutoresetMode.SAME_STEP)
    assert int(same_step["fields"]["truncated"].sum()) >= 9
    for env, count in enumerate(rows["step_counts"].tolist()):
        assert count == (36 if mode == AutoresetMode.NEXT_STEP else 40)  # 4 of 40 are fillers
        for name, field in rows["fields"].items():
            expected = same_step["fields"][name][env, :count]
            if name == "bootstrap_values":  # asked for where a row was cut
                expected = torch.where(
                    rows["fields"]["truncated"][env, :count], expected, torch.nan
                )
                field = torch.where(rows["fields"]["truncated"], field, torch.nan)
            torch.testing.assert_close(
                field[env, :count], expected, rtol=0, atol=0, equal_nan=True, msg=name
            )


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_row_bootstraps_from_the_final_observation_and_the_state_that_saw_it(mode):
    model = PPO(counters(mode), config=CONFIG)
    model.trainer.collect()
    stored, ppo = stored_fields(model.trainer.buffer), model.agent
    # env 0, its first episode: rows 0 to 2; replay it from a zero state
    state = ppo.policy.initial_state(1)
    masks = ActionMasks.all_legal(model.spaces.action_space, 1)
    for age in range(3):
        state = ppo.act(torch.tensor([[age + 1.0]]), masks, state).state
    expected = ppo.value(torch.tensor([[4.0]]), state)
    torch.testing.assert_close(stored["bootstrap_values"][0, 2], expected[0])


class Camera(gymnasium.Env):
    """Shows pictures that no other step shows, and nothing else; remembers them by episode."""

    observation_space = spaces.Box(0, 255, (5, 4, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int, shown: list):
        self.length, self.shown = length, shown

    def observe(self):
        picture = self.np_random.integers(256, size=(5, 4, 3), dtype=np.uint8)
        self.shown[-1].append(picture)
        return picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown.append([])
        return self.observe(), {}

    def step(self, action):
        picture = self.observe()
        return picture, 1.0, False, len(self.shown[-1]) == self.length + 1, {}


@pytest.mark.parametrize("mode", MODES)
def test_pictures_are_stored_and_valued_as_the_bytes_that_the_environment_shows(mode):
    lengths = (3, 1)
    shown = [[] for _ in lengths]  # a list of each episode's pictures, the final one last
    makers = [lambda env=env: Camera(lengths[env], shown[env]) for env in range(len(lengths))]
    config = replace(CONFIG, policy=replace(CONFIG.policy, memory=False))
    model = PPO(vector_of(makers, mode), config=config)
    trainer, agent = model.trainer, model.agent
    stir(agent.policy)  # V would be 0
    assert trainer.envs.spec.num_features == 0
    trainer.collect()
    fields, counts = stored_fields(trainer.buffer), trainer.buffer.step_counts.tolist()
    assert fields["frames"].dtype == torch.uint8
    for env, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        episodes = [np.moveaxis(np.stack(pictures), -1, 1) for pictures in shown[env]]
        decided = np.concatenate([pictures[:length] for pictures in episodes])[:count]
        stored = fields["frames"][env, :count]
        np.testing.assert_array_equal(stored, decided.reshape(count, -1))
        cut = fields["truncated"][env, :count]
        final = [pictures[length] for pictures in episodes[: int(cut.sum())]]
        followed = torch.from_numpy(np.stack([*final, episodes[-1][-1]])).flatten(1)
        state = agent.policy.initial_state(len(followed))
        expected = agent.value(torch.zeros(len(followed), 0), state, followed)
        assert expected.std() > 1e-3
        torch.testing.assert_close(fields["bootstrap_values"][env, :count][cut], expected[:-1])
        torch.testing.assert_close(trainer._last_values[env], expected[-1])
    trainer.learn()


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_counts_whole_episodes_of_every_env(mode):
    model = train(counters(AutoresetMode.SAME_STEP), 48)
    result = evaluate(model, counters(mode), episodes=7)
    # three of env 0, two each of the others, whichever ends first
    assert sorted(result.lengths) == [1, 1, 3, 3, 3, 4, 4]
    assert sorted(result.returns) == [1, 1, 6, 6, 6, 10, 10]


def test_an_episode_that_does_not_end_warns(monkeypatch):
    monkeypatch.setattr(evaluation, "LONG_EPISODE", 3)
    model = PPO(counters(AutoresetMode.SAME_STEP), config=CONFIG)
    with pytest.warns(UserWarning, match="3 steps and may never end; .*TimeLimit"):
        evaluate(model, Counter(4, terminates=True), episodes=1)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_evaluated_in_its_own_environments_continues_with_new_episodes(mode):
    envs = counters(mode)
    model = PPO(envs, config=CONFIG)
    model.learn(100, should_stop=iter([False] * 20 + [True]).__next__)  # within the second round
    steps, episodes = model.trainer.progress.steps, list(model.envs.log.recent)
    evaluate(model, envs, episodes=4)
    assert model.num_steps == steps
    assert list(model.envs.log.recent) == episodes
    trainer = model.trainer
    trainer.collect()
    stored, counts = stored_fields(trainer.buffer), trainer.buffer.step_counts
    for env, count in enumerate(counts.tolist()):
        assert stored["states"][env, 0, 0] == 1
        assert not trainer.buffer.initial_hidden_h[env].any()
        # Counter pays the number that it shows
        assert torch.equal(stored["states"][env, :count, 0], stored["rewards"][env, :count])


def test_autoreset_steps_do_not_enter_the_normaliser():
    trainer = PPO(counters(AutoresetMode.NEXT_STEP), config=CONFIG).trainer
    trainer.collect()
    seen = trainer.buffer.states[trainer.buffer.valid_mask]
    trainer.learn()
    normalizer = trainer.agent.policy.heads.scales
    assert normalizer.count == len(seen)
    torch.testing.assert_close(normalizer.mean, seen.double().mean(dim=0))


# -- masks ------------------------------------------------------------------------------------


class MethodMasks(CueMemory):
    """Masks as sb3-contrib takes them: from a method, as a list."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {}

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {}

    def action_masks(self) -> list[bool]:
        return self.masks().tolist()


class NoMasks(CueMemory):
    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {}

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {}

    def masks(self):
        return np.ones(3, dtype=bool)


@pytest.mark.parametrize(
    ("make", "source"), [(CueMemory, "info"), (MethodMasks, "method"), (NoMasks, "none")]
)
def test_the_source_of_masks_is_found_at_the_first_reset(make, source):
    assert world_of(vector(make, 2)).mask_source == source


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [CueMemory, MethodMasks, BestActions])
def test_masks_are_those_of_the_current_observation(make, mode):
    envs = vector(make, 5, mode)
    world = world_of(envs)
    seen_pending = 0
    for _ in range(30):  # the environments assert that every choice is legal
        choices = torch.stack(
            [
                m.float().multinomial(1)[:, 0]
                for m in world.masks.action_space.split(world.masks.groups[0]).values()
            ],
            dim=1,
        )
        act_and_step(world, choices)
        expected = np.stack([env.masks() for env in envs.envs]).astype(bool)
        expected[world.pending] = True
        np.testing.assert_array_equal(world.masks.groups[0], expected)
        seen_pending += world.pending.sum()
    assert (seen_pending > 0) == (mode == AutoresetMode.NEXT_STEP)


def test_conditional_masks_come_as_a_mapping():
    envs = vector(RowThenColumn, 3)
    world = world_of(envs, RowThenColumn.action_heads)
    for name in ("row", "column"):
        expected = np.stack([env.masks()[name] for env in envs.envs])
        np.testing.assert_array_equal(world.masks[name], expected)


def test_masks_work_across_processes():
    envs = AsyncVectorEnv([MethodMasks] * 2, context="fork")
    try:
        assert world_of(envs).mask_source == "method"
    finally:
        envs.close()


# -- mistakes ---------------------------------------------------------------------------------


def test_heads_that_do_not_match_the_environment_are_refused():
    with pytest.raises(ValueError, match=r"sizes \(3, 4\).* needs \(3, 4, 2\)"):
        PPO(vector(BestActions, 2), heads=RowThenColumn.action_heads)


def test_a_mask_of_the_wrong_shape_is_refused():
    class Wrong(CueMemory):
        def masks(self):
            return np.ones(2, dtype=bool)

    with pytest.raises(ValueError, match=r"'action': 3.*got shape \(2, 2\), expected \(envs, 3\)"):
        PPO(vector(Wrong, 2))


def test_masks_of_heads_one_by_one_are_refused_with_what_works():
    class Apart(BestActions):
        def masks(self):
            return [np.ones(size) for size in self.sizes]

    with pytest.raises(ValueError, match=r"'action_2': 2.*expected one array \(envs, 9\)"):
        PPO(vector(Apart, 2))


def test_a_missing_mask_names_the_env():
    class Sometimes(CueMemory):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, info if self.np_random_seed == 0 else {}

    model = PPO(vector(Sometimes, 2), config=CONFIG)
    with pytest.raises(ValueError, match=r"envs \[1\] gave no info\['action_mask'\]"):
        model.learn(100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("as_list", [False, True])
def test_an_episodes_last_step_needs_no_mask(mode, as_list):
    class Lasts(CueMemory):
        def masks(self):
            masks = super().masks()
            return masks.tolist() if as_list else masks

        def step(self, action):
            *rest, truncated, info = super().step(action)
            return *rest, truncated, {} if truncated else info

    envs = vector(Lasts, 3, mode)
    model = PPO(envs, config=CONFIG)
    progress = model.trainer.progress
    model.learn(100, should_stop=lambda: progress.episodes >= 3)  # all end together
    envs.envs[1].elapsed = 4
    model.learn()  # one ends alone; the environments assert that every choice is legal
    assert progress.episodes >= 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(horizon=1), "horizon=1; use 2 or more"),
        (dict(horizon=2.5), "horizon=2.5; use a whole number"),
        (dict(num_envs=True), "num_envs=True; use a whole number"),
        (dict(rng_seed=None), "rng_seed=None; use a whole number"),
        (dict(rng_seed=2**63), "use less than 2"),
        (dict(masks="infos"), "masks='infos'; use one of .*'observation', 'info'"),
    ],
)
def test_mistakes_in_the_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        GymConfig(**settings)


def test_mistakes_are_found_before_the_first_step():
    for steps, message in (
        (0, "steps=0; use 1 or more"),
        (1e3, "steps=1000.0; use a whole number"),
        (True, "steps=True; use a whole number"),
        (None, r"no `learn` to finish; give steps, such as learn\(50_000\)"),
    ):
        with pytest.raises(ValueError, match=message):
            PPO(vector(CueMemory, 4)).learn(steps)
    with pytest.raises(
        ValueError, match="is a list; use the id of an environment, a gymnasium.Env"
    ):
        PPO([CueMemory])
    with pytest.raises(ValueError, match="NoSuch.*doesn't exist.*lists all"):
        PPO("NoSuch-v0")
    with pytest.raises(ValueError, match=r"heads holds a GymConfig; use esper.Head, and config="):
        PPO(vector(CueMemory, 4), GymConfig())
    with pytest.raises(ValueError, match=r"heads holds a int; use esper.Head"):
        PPO(vector(BestActions, 4), [2, 3])
    with pytest.raises(ValueError, match=r"config is a PPOConfig; use GymConfig\(ppo="):
        PPO(vector(CueMemory, 4), config=PPOConfig())
    with pytest.raises(ValueError, match=r"no sub-environments with an action_masks\(\) method"):
        PPO(vector(NoMasks, 4), config=GymConfig(masks="method"))
    with pytest.raises(ValueError, match=r"envs \[0, 1, 2, 3\] gave no info"):
        PPO(vector(NoMasks, 4), config=GymConfig(masks="info"))
    with pytest.raises(ValueError, match="episodes=0"):
        evaluate(train(vector(CueMemory, 2), 32), vector(CueMemory, 2), 0)


def test_an_environment_without_an_autoreset_mode_is_refused():
    envs = vector(CueMemory, 2)
    envs.metadata = {}
    with pytest.raises(ValueError, match="autoreset_mode"):
        PPO(envs)


# -- the model --------------------------------------------------------------------------------


def test_a_saved_model_predicts_the_same(tmp_path):
    model = train(vector(RowThenColumn, 2), 64, heads=RowThenColumn.action_heads.heads)
    model.save(tmp_path / "model.pt")
    PPO.load(tmp_path / "model.pt").save(tmp_path / "again.pt")
    loaded = PPO.load(tmp_path / "again.pt")
    env, state, loaded_state = RowThenColumn(), None, None
    observation, info = env.reset(seed=3)
    for _ in range(5):
        action, state = model.predict(observation, state, mask=info["action_mask"])
        mask = MappingProxyType(info["action_mask"])  # any mapping does
        again, loaded_state = loaded.predict(observation, loaded_state, mask=mask)
        np.testing.assert_array_equal(action, again)
        observation, _, _, _, info = env.step(action)  # asserts that the action is legal
    torch.testing.assert_close(tuple(state), tuple(loaded_state), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"loaded without environments; use PPO.load\(path, env\)"):
        loaded.learn(100)


def test_an_episode_start_resets_the_state_of_its_env_alone():
    model = train(vector(NoMasks, 2), 32)
    first, second = np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)[::-1].copy()
    _, before = model.predict(first)
    _, state = model.predict(second, before, episode_start=[False, True, False])
    _, continued = model.predict(second, before)
    _, restarted = model.predict(second)
    for part, expected, fresh in zip(state[:2], continued[:2], restarted[:2], strict=True):
        torch.testing.assert_close(part[[0, 2]], expected[[0, 2]])
        torch.testing.assert_close(part[1], fresh[1])
        assert not torch.equal(part[1], expected[1])
    _, alone = model.predict(second[0], PolicyState(*(p[:1] for p in before)), True)
    torch.testing.assert_close(alone.h[0], restarted.h[0])


def test_learning_again_adds_steps_and_restarts_the_schedules():
    rates = []
    config = replace(CONFIG, ppo=replace(CONFIG.ppo, learning_rate_schedule="linear"))
    model = PPO(vector(CueMemory, 2, AutoresetMode.SAME_STEP), config=config)
    for total in (64, 65):
        model.learn(total, lambda _, metrics: rates.append(metrics["ppo/learning_rate"]))
    assert model.num_steps == 64 + 96
    expected = [1, 0.5, 1, 1 - 32 / 65, 1 - 64 / 65]
    np.testing.assert_allclose(rates, np.multiply(expected, config.ppo.learning_rate))


def test_predicting_for_one_env_or_for_many_is_the_same():
    model = train(vector(CueMemory, 2), 64)
    observations = np.eye(3, dtype=np.float32)
    masks = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
    together, state = model.predict(observations, mask=masks)
    for row in range(3):
        alone, alone_state = model.predict(observations[row], mask=masks[row])
        assert alone == together[row]
        assert masks[row][alone - 1]  # actions start at 1
        torch.testing.assert_close(tuple(alone_state), tuple(part[row : row + 1] for part in state))


@pytest.mark.parametrize("mode", MODES)
def test_features_begin_with_the_previous_action_and_reward_within_an_episode(mode):
    config = replace(CONFIG, previous_action=True, previous_reward=True)
    trainer = PPO(counters(mode), config=config).trainer
    trainer.collect()
    stored, lengths = stored_fields(trainer.buffer), (3, 4, 1)
    for env, length in enumerate(lengths):
        count = int(trainer.buffer.step_counts[env])
        states, actions = stored["states"][env, :count], stored["actions"][env, :count, 0]
        for t in range(count):
            expected = torch.zeros(3)
            if t % length:  # a reward is the number of its step
                expected[int(actions[t - 1])] = 1.0
                expected[2] = t % length
            assert torch.equal(states[t, :3], expected)
            assert states[t, 3] == t % length + 1


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_row_is_valued_with_the_action_and_reward_before_the_cut(mode):
    spaces_ = replace(GymSpaces.of(counters(mode)), previous_action=True, previous_reward=True)
    world = GymEnvs(counters(mode), spaces_, rng_seed=0)
    stepped, row = act_and_step(world, [[1], [1], [1]])  # cuts env 2 after its first step
    assert row.truncated.tolist() == [False, False, True]
    assert stepped.final_features[2].tolist() == [0.0, 1.0, 1.0, 2.0]


def test_predict_sees_what_training_saw():
    config = replace(CONFIG, previous_action=True, previous_reward=True)
    model = PPO(counters(AutoresetMode.SAME_STEP), config=config)
    env, state, reward, seen = Counter(4, terminates=True), None, None, []
    act = model.agent.act
    model.agent.act = lambda features, *rest, **named: (
        seen.append(features[0].tolist()), act(features, *rest, **named)
    )[1]  # fmt: skip
    observation, _ = env.reset(seed=0)
    actions = []
    for _ in range(3):
        action, state = model.predict(observation, state, reward=reward)
        observation, reward, *_ = env.step(action)
        actions.append(int(action))
    assert seen[0] == [0.0, 0.0, 0.0, 1.0]
    for t in (1, 2):
        assert seen[t] == [1.0 - actions[t - 1], float(actions[t - 1]), float(t), t + 1.0]
    model.predict(observation, state, episode_start=True)
    assert seen[-1][:3] == [0.0, 0.0, 0.0]
    with pytest.warns(UserWarning, match="predict got none, so 0 is used; pass reward="):
        model.predict(observation, state)


def test_predict_refuses_the_state_or_the_rewards_of_other_envs():
    config = replace(CONFIG, previous_action=True, previous_reward=True)
    model = PPO(counters(AutoresetMode.SAME_STEP), config=config)
    one, three = np.ones((1, 1), dtype=np.float32), np.ones((3, 1), dtype=np.float32)
    _, state = model.predict(one)
    with pytest.raises(ValueError, match="the state is that of 1 envs, the observation of 3; pass"):
        model.predict(three, state, episode_start=[True, False, False], reward=1.0)
    _, state = model.predict(three)
    with pytest.raises(ValueError, match="the state is a tuple, the observation of 3; pass what"):
        model.predict(three, tuple(state))
    with pytest.raises(ValueError, match=r"episode_start: got shape \(2,\), expected \(3,\)"):
        model.predict(three, state, episode_start=[True, False])
    for reward in ([1.0, 2.0], [[1.0]] * 3):
        with pytest.raises(ValueError, match=r"reward: got shape .*, expected \(3,\)"):
            model.predict(three, state, reward=reward)


def test_continuous_choices_come_back_as_numbers_between_minus_one_and_one():
    class Mixed(Counter):
        action_space = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,))))

    envs = SyncVectorEnv([lambda: Mixed(3, terminates=True)] * 2)
    found = replace(GymSpaces.of(envs), previous_action=True)
    columns = found.previous(torch.tensor([[1.0, 0.5], [0.0, -30.0]]), torch.zeros(2))
    np.testing.assert_allclose(columns, [[0, 1, np.tanh(0.5)], [1, 0, -1]], rtol=1e-6)


def test_a_reward_that_is_not_finite_is_named():
    class Broken(Counter):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, float("nan"), *rest

    config = replace(CONFIG, previous_reward=True)
    with pytest.raises(ValueError, match="env 0, round 1: the reward is nan; give finite numbers"):
        PPO(SyncVectorEnv([lambda: Broken(3, terminates=True)]), config=config).learn(16)


def test_a_model_is_not_evaluated_on_other_spaces():
    model = train(vector(CueMemory, 2), 32)
    with pytest.raises(
        ValueError,
        match=r"not those of the policy: the action is choices .*\(3, 4, 2\).*expected choices \(3,\)",
    ):
        evaluate(model, vector(BestActions, 2), 1)


def test_an_observation_of_another_space_is_refused():
    model = train(vector(CueMemory, 2), 32)
    with pytest.raises(ValueError, match=r"got shape \(1, 4\), expected \(envs, 3\)"):
        model.predict(np.zeros(4))
    model = train(vector(BestActions, 2), 32)
    for outside in (-1, 3):
        with pytest.raises(ValueError, match="env 0: the observation is not within 0 to 2"):
            model.predict(outside)


def test_runs_with_the_same_seed_are_the_same_and_with_another_are_not():
    def weights(rng_seed: int) -> torch.Tensor:
        model = train(vector(CueMemory, 2), 64, replace(CONFIG, rng_seed=rng_seed))
        return model.agent.policy.readout.weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_every_logged_name_is_explained_in_the_docs():
    rounds = []
    train(vector(CueMemory, 2), 64, callback=lambda _, metrics: rounds.append(metrics))
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for name in {name for metrics in rounds for name in metrics}:
        assert f"`{name.replace('/action', '/HEAD')}`" in page, name


@pytest.mark.parametrize("mode", MODES)
def test_episodes_that_end_with_the_round_leave_no_state_to_the_next(mode):
    """With NEXT_STEP, the next round then begins with a filler."""
    errors = []
    envs = vector(CueMemory, 4, mode)
    model = PPO(envs, config=replace(CONFIG, horizon=CueMemory.limit))
    for part in model.agent.policy.core.parameters():
        part.data.mul_(3.0)
    model.learn(200, lambda _, metrics: errors.append(metrics["ppo/first_ratio_error"]))
    assert len(errors) > 3
    assert max(errors) < 1e-5


class KeepsItsAction(gymnasium.Env):
    """Pays the distance of an action from the one before, which it keeps and then spoils."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.MultiDiscrete([5])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.elapsed, self.kept = 0, np.zeros(1, np.int64)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        reward = float(abs(action - self.kept)[0])
        self.kept[:] = action
        action[:] = 0
        self.elapsed += 1
        return np.zeros(1, np.float32), reward, False, self.elapsed == 8, {}


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_may_keep_and_change_its_actions(mode):
    model = PPO(vector(KeepsItsAction, 3, mode), config=CONFIG)
    model.trainer.collect()
    stored = stored_fields(model.trainer.buffer)
    for env, count in enumerate(model.trainer.buffer.step_counts.tolist()):
        actions = stored["actions"][env, :count, 0]
        before = torch.cat([actions.new_zeros(1), actions[:-1]])
        before[::8] = 0  # an episode's first step
        assert torch.equal(stored["rewards"][env, :count], (actions - before).abs().float())
    assert actions.unique().numel() > 1


class Loose(gymnasium.Env):
    """Observations as lists, with an entry that is in no space."""

    observation_space = spaces.Dict(
        {"a": spaces.Tuple([spaces.Box(0, 9, (2,)), spaces.Discrete(3)])}
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.elapsed = 0
        return self.observe(), {}

    def observe(self):
        return {"a": [np.full(2, self.elapsed, np.float32), 1], "extra": [[1], [2, 3]]}

    def step(self, action):
        self.elapsed += 1
        return self.observe(), 1.0, False, self.elapsed == 3, {}


def test_final_observations_may_be_lists_and_hold_more_than_their_space():
    model = PPO(SyncVectorEnv([Loose] * 2), config=CONFIG).learn(40)
    assert model.trainer.buffer.truncated.any()


def test_a_round_without_any_choice_has_metrics_of_0():
    class OneWay(BestActions):
        def masks(self):
            return np.concatenate([np.arange(size) == 0 for size in self.sizes]).astype(np.int8)

        def reward(self, action):
            return 1.0

    seen = []
    PPO(vector(OneWay, 2), config=CONFIG).learn(20, lambda _, metrics: seen.append(metrics))
    assert seen[0]["ppo/decided_fraction"] == 0
    for name in ("policy_loss", "kl", "clip_fraction"):
        assert seen[0][f"ppo/{name}"] == 0


def test_an_interrupted_update_leaves_the_weights_and_the_round_is_collected_again(monkeypatch):
    model = train(vector(CueMemory, 4), 64)
    before = {name: part.clone() for name, part in model.agent.policy.state_dict().items()}
    steps = model.num_steps
    calls = iter(range(100))

    def interrupted(loss):
        norm = step(loss)
        if next(calls) == 1:
            raise KeyboardInterrupt
        return norm

    step = model.agent._optimizer_step
    monkeypatch.setattr(model.agent, "config", replace(model.agent.config, ppo_epochs=3))
    monkeypatch.setattr(model.agent, "_optimizer_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.learn(64)
    torch.testing.assert_close(model.agent.policy.state_dict(), before, rtol=0, atol=0)
    monkeypatch.undo()
    assert model.num_steps == steps
    model.trainer.collect()
    assert not model.trainer.buffer.initial_hidden_h.any()  # in new episodes
