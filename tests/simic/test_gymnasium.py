"""The loop over Gymnasium environments: what is stored, what is not, and what is refused."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import gymnasium
import numpy as np
import pytest
import torch
from environments import BestActions, CueMemory, RowThenColumn, vector
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from esper.simic.agent.ppo import PPOConfig
from esper.simic.training.gym_envs import GymEnvs
from esper.simic.training.gymnasium import GymAgent, GymConfig, GymTraining, evaluate, train
from esper.tamiyo.policy.network import PolicyConfig, RecurrentState

CONFIG = GymConfig(
    horizon=16,
    policy=PolicyConfig(lstm_hidden_dim=8),
    ppo=PPOConfig(num_minibatches=1, ppo_epochs=1),
)


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


def counters(mode: AutoresetMode) -> SyncVectorEnv:
    makers = [
        lambda: Counter(3, terminates=False),
        lambda: Counter(4, terminates=True),
        lambda: Counter(1, terminates=False),
    ]
    return SyncVectorEnv(makers, autoreset_mode=mode)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_rollout_holds_exactly_the_steps_taken_in_every_autoreset_mode(mode):
    training = GymTraining(counters(mode), 1000, CONFIG)
    for _ in range(CONFIG.horizon):
        training.step()
    stored, counts = training.buffer._fields, training.buffer.step_counts
    for env, length in enumerate((3, 4, 1)):
        # with NEXT_STEP one call in length + 1 is a filler
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
        begins = torch.from_numpy(age == 0)
        hidden = stored["hidden_h"][env, rows].flatten(1)
        assert bool((hidden[begins] == 0).all())
        assert bool((hidden[~begins] != 0).any(dim=1).all())
    assert training.progress.steps == int(counts.sum())


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("make", [CueMemory, RowThenColumn])
def test_every_autoreset_mode_stores_the_same_rows_to_the_bit(make, mode):
    def collected(mode):
        heads = RowThenColumn.action_heads if make is RowThenColumn else None
        training = GymTraining(vector(make, 3, mode), 1000, replace(CONFIG, horizon=40), action_space=heads)  # fmt: skip
        training.agent.ppo.act = partial(training.agent.ppo.act, deterministic=True)
        for _ in range(40):
            training.step()
        return training.buffer.state_dict()

    rows, same_step = collected(mode), collected(AutoresetMode.SAME_STEP)
    assert int(same_step["fields"]["truncated"].sum()) >= 9
    for env, count in enumerate(rows["step_counts"].tolist()):
        assert count == (40 if mode == AutoresetMode.DISABLED else 36)  # 4 of 40 are fillers
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


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_cut_row_bootstraps_from_the_final_observation_and_the_state_that_saw_it(mode):
    training = GymTraining(counters(mode), 1000, CONFIG)
    for _ in range(CONFIG.horizon):
        training.step()
    stored, ppo = training.buffer._fields, training.agent.ppo
    # env 0, its first episode: rows 0 to 2; replay it from a zero state
    state = ppo.policy.initial_state(1)
    masks = training.agent.spaces.masks(np.ones((1, 2)))
    for age in range(3):
        state = ppo.act(torch.tensor([[age + 1.0]]), masks, state).state
    expected = ppo.value(torch.tensor([[4.0]]), state)
    torch.testing.assert_close(stored["bootstrap_values"][0, 2], expected[0])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_evaluation_counts_whole_episodes_of_every_env(mode):
    agent = train(counters(AutoresetMode.SAME_STEP), 48, CONFIG)
    result = evaluate(agent, counters(mode), episodes=7)
    # three of env 0, two each of the others, whichever ends first
    assert sorted(result.lengths) == [1, 1, 3, 3, 3, 4, 4]
    assert sorted(result.returns) == [1, 1, 6, 6, 6, 10, 10]


def test_fillers_leave_the_normaliser_alone():
    training = GymTraining(counters(AutoresetMode.NEXT_STEP), 1000, CONFIG)
    for _ in range(CONFIG.horizon):
        training.step()
    seen = training.buffer._fields["states"][training.buffer._valid_mask()]
    training.learn()
    normalizer = training.agent.ppo.policy.heads.scales
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


@pytest.mark.parametrize(
    ("make", "source"), [(CueMemory, "info"), (MethodMasks, "method"), (NoMasks, "none")]
)
def test_the_source_of_masks_is_found_at_the_first_reset(make, source):
    assert GymEnvs(vector(make, 2), rng_seed=0).mask_source == source


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("make", [CueMemory, MethodMasks, BestActions])
def test_masks_are_those_of_the_observation_at_hand(make, mode):
    envs = vector(make, 5, mode)
    world = GymEnvs(envs, rng_seed=0)
    seen_pending = 0
    for _ in range(30):  # the environments assert that every choice is legal
        choices = torch.stack(
            [
                m.float().multinomial(1)[:, 0]
                for m in world.masks.action_space.split(world.masks.groups[0]).values()
            ],
            dim=1,
        )
        world.step(choices)
        expected = np.stack([env.masks() for env in envs.envs]).astype(bool)
        expected[world.pending] = True
        np.testing.assert_array_equal(world.masks.groups[0], expected)
        seen_pending += world.pending.sum()
    assert (seen_pending > 0) == (mode == AutoresetMode.NEXT_STEP)


def test_conditional_masks_come_as_a_mapping():
    envs = vector(RowThenColumn, 3)
    world = GymEnvs(envs, rng_seed=0, action_space=RowThenColumn.action_heads)
    for name in ("row", "column"):
        expected = np.stack([env.masks()[name] for env in envs.envs])
        np.testing.assert_array_equal(world.masks[name], expected)


def test_masks_work_across_processes():
    envs = AsyncVectorEnv([MethodMasks] * 2, context="fork")
    try:
        assert GymEnvs(envs, rng_seed=0).mask_source == "method"
    finally:
        envs.close()


# -- mistakes ---------------------------------------------------------------------------------


class AnySpaces(gymnasium.Env):
    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (spaces.Box(0, 1, (4, 4)), spaces.Discrete(2), "observation space Box.*FlattenObservation"),
        (spaces.MultiBinary(3), spaces.Discrete(2), "observation space MultiBinary.* Box of one"),
        (spaces.Discrete(2), spaces.Box(0, 1, (2,)), "action space Box.* use a Discrete"),
        (spaces.Discrete(2), spaces.MultiDiscrete([[2, 2]]), "action space MultiDiscrete"),
    ],
)
def test_spaces_that_do_not_work_are_refused_with_those_that_do(observation, action, message):
    envs = SyncVectorEnv([lambda: AnySpaces(observation, action)])
    with pytest.raises(ValueError, match=message):
        GymTraining(envs, 100)


def test_heads_that_do_not_match_the_environment_are_refused():
    with pytest.raises(ValueError, match=r"sizes \(3, 4\).* needs \(3, 4, 2\)"):
        GymTraining(vector(BestActions, 2), 100, action_space=RowThenColumn.action_heads)


def test_a_mask_of_the_wrong_shape_is_refused():
    class Wrong(CueMemory):
        def masks(self):
            return np.ones(2, dtype=bool)

    with pytest.raises(ValueError, match=r"'action': 3.*got shape \(2, 2\), expected \(envs, 3\)"):
        GymTraining(vector(Wrong, 2), 100)


def test_masks_of_heads_one_by_one_are_refused_with_what_works():
    class Apart(BestActions):
        def masks(self):
            return [np.ones(size) for size in self.sizes]

    with pytest.raises(ValueError, match=r"'action_2': 2.*expected one array \(envs, 9\)"):
        GymTraining(vector(Apart, 2), 100)


def test_a_missing_mask_names_the_env():
    class Sometimes(CueMemory):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, info if self.np_random_seed == 0 else {}

    training = GymTraining(vector(Sometimes, 2), 100, CONFIG)
    with pytest.raises(ValueError, match=r"envs \[1\] gave no info\['action_mask'\]"):
        training.step()


@pytest.mark.parametrize("mode", list(AutoresetMode))
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
    training = GymTraining(envs, 100, CONFIG)
    for _ in range(5):
        training.step()
    training.run(should_stop=lambda: training.progress.episodes >= 3)  # all end together
    envs.envs[1].elapsed = 4
    training.run()  # one ends alone; the environments assert that every choice is legal
    assert training.progress.episodes >= 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(horizon=1), "horizon=1; use 2 or more"),
        (dict(masks="infos"), "masks='infos'; use 'auto', 'info', 'method' or 'none'"),
    ],
)
def test_mistakes_in_the_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        GymConfig(**settings)


def test_mistakes_are_found_before_the_first_step():
    with pytest.raises(ValueError, match="num_envs=6 does not split into num_minibatches=4"):
        GymTraining(vector(CueMemory, 6), 100)
    for total_steps in (0, 1e3):
        with pytest.raises(ValueError, match=f"total_steps={total_steps}; use a whole number"):
            GymTraining(vector(CueMemory, 4), total_steps)
    with pytest.raises(ValueError, match="not a vector environment; use gymnasium.make_vec"):
        GymTraining(CueMemory(), 100)
    with pytest.raises(ValueError, match=r"no sub-environments with an action_masks\(\) method"):
        GymTraining(vector(NoMasks, 4), 100, GymConfig(masks="method"))
    with pytest.raises(ValueError, match=r"envs \[0, 1, 2, 3\] gave no info"):
        GymTraining(vector(NoMasks, 4), 100, GymConfig(masks="info"))
    with pytest.raises(ValueError, match="episodes=0"):
        evaluate(train(vector(CueMemory, 2), 32, CONFIG), vector(CueMemory, 2), 0)


def test_an_environment_that_does_not_say_how_it_resets_is_refused():
    envs = vector(CueMemory, 2)
    envs.metadata = {}
    with pytest.raises(ValueError, match="autoreset_mode"):
        GymTraining(envs, 100)


# -- the agent --------------------------------------------------------------------------------


def test_a_saved_agent_predicts_the_same(tmp_path):
    agent = train(vector(RowThenColumn, 2), 64, CONFIG, action_space=RowThenColumn.action_heads)
    agent.save(tmp_path / "agent.pt")
    loaded = GymAgent.load(tmp_path / "agent.pt")
    env, state, loaded_state = RowThenColumn(), None, None
    observation, info = env.reset(seed=3)
    for _ in range(5):
        action, state = agent.predict(observation, state, info["action_mask"])
        mask = MappingProxyType(info["action_mask"])  # any mapping does
        again, loaded_state = loaded.predict(observation, loaded_state, mask)
        np.testing.assert_array_equal(action, again)
        observation, _, _, _, info = env.step(action)  # asserts that the action is legal
    torch.testing.assert_close(tuple(state), tuple(loaded_state), rtol=0, atol=0)


def test_predicting_for_one_env_or_for_many_is_the_same():
    agent = train(vector(CueMemory, 2), 64, CONFIG)
    observations = np.eye(3, dtype=np.float32)
    masks = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
    together, state = agent.predict(observations, None, masks)
    for row in range(3):
        alone, alone_state = agent.predict(observations[row], None, masks[row])
        assert alone == together[row]
        assert masks[row][alone - 1]  # actions start at 1
        torch.testing.assert_close(
            tuple(alone_state), tuple(RecurrentState(*(part[row : row + 1] for part in state)))
        )


def test_an_agent_is_not_evaluated_on_other_spaces():
    agent = train(vector(CueMemory, 2), 32, CONFIG)
    with pytest.raises(
        ValueError, match=r"not those of the policy: .*head sizes is \(3, 4, 2\), expected \(3,\)"
    ):
        evaluate(agent, vector(BestActions, 2), 1)
    with pytest.raises(ValueError, match="not a vector environment"):
        evaluate(agent, CueMemory(), 1)


def test_an_observation_of_another_space_is_refused():
    agent = train(vector(CueMemory, 2), 32, CONFIG)
    with pytest.raises(ValueError, match=r"got shape \(1, 4\), expected \(envs, 3\)"):
        agent.predict(np.zeros(4))
    agent = train(vector(BestActions, 2), 32, CONFIG)
    for outside in (-1, 3):
        with pytest.raises(ValueError, match=rf"\[{outside}\] are not all within 0 to 2"):
            agent.predict(outside)


def test_runs_with_the_same_seed_are_the_same_and_with_another_are_not():
    def weights(rng_seed: int) -> torch.Tensor:
        config = GymConfig(horizon=16, rng_seed=rng_seed, policy=CONFIG.policy, ppo=CONFIG.ppo)
        return train(vector(CueMemory, 2), 64, config).ppo.policy.readout.weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_every_logged_name_is_explained_in_the_docs():
    rounds = []
    train(vector(CueMemory, 2), 64, CONFIG, on_round=lambda _, metrics: rounds.append(metrics))
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for name in {name for metrics in rounds for name in metrics}:
        assert f"`{name.replace('/action', '/HEAD')}`" in page, name
