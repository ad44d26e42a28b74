"""Gymnasium spaces as features, heads and masks: like Gymnasium's own flattening, or refused."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces.utils import flatten
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper.leyline.factored_actions import Head
from esper.runtime.plain_config import from_plain, to_plain
from esper.simic.gym.gym_masks import read_masks
from esper.simic.gym.gym_spaces import GymSpaces
from esper.simic.gym.ppo_model import PPO, GymConfig
from esper.simic.gym.round_checks import RoundChecks

NESTED = spaces.Dict(
    {
        "where": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
        "level": spaces.Discrete(4, start=-1),
        "inner": spaces.Tuple(
            (spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [0, 5]]), spaces.MultiBinary(3))
        ),
        "scalar": spaces.Box(0, 1, ()),
    }
)
MIXED = spaces.Dict(
    {
        "kind": spaces.Discrete(3, start=1),
        "aim": spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64),
        "flags": spaces.MultiBinary(2),
        "pair": spaces.Tuple((spaces.MultiDiscrete([2, 4], start=[3, 0]), spaces.Box(0, 1, ()))),
    }
)


class AnySpaces(gymnasium.Env):
    """Shows and takes samples of any spaces; every action is checked."""

    def __init__(self, observation_space, action_space, infos=lambda: {}):
        self.observation_space, self.action_space = observation_space, action_space
        self.infos, self.age = infos, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.observation_space.sample(), self.infos()

    def step(self, action):
        assert self.action_space.contains(action), action
        self.age += 1
        return self.observation_space.sample(), 1.0, False, self.age == 5, self.infos()


TWO = spaces.Discrete(2)


def envs_of(observation=TWO, action=TWO, infos=lambda: {}, num_envs=2):
    return SyncVectorEnv([lambda: AnySpaces(observation, action, infos)] * num_envs)


SMALL = GymConfig(horizon=12)


def read(layout, masks):
    return read_masks(layout.action_space, masks, RoundChecks())


# -- observations -----------------------------------------------------------------------------


@pytest.mark.parametrize("space", [NESTED, *NESTED.spaces.values()], ids=lambda s: type(s).__name__)
def test_features_are_gymnasiums_own_flattening(space):
    space.seed(0)
    envs = envs_of(space, num_envs=3)
    observations, _ = envs.reset()
    alone = [space.sample() for _ in range(3)]
    layout = GymSpaces.of(envs)
    expected = np.stack([flatten(space, o) for o in alone]).astype(np.float32)
    np.testing.assert_array_equal(layout.read(alone, one_by_one=True).features, expected)
    assert layout.read(observations).features.shape == expected.shape
    assert layout.num_rows(alone[0]) is None
    assert layout.num_rows(observations) == 3


def test_batched_observations_are_flattened_like_single_ones():
    envs = envs_of(NESTED, num_envs=3)
    observations, _ = envs.reset(seed=0)
    layout = GymSpaces.of(envs)
    alone = list(gymnasium.vector.utils.iterate(envs.observation_space, observations))
    torch.testing.assert_close(layout.read(observations), layout.read(alone, one_by_one=True))


def test_a_list_of_a_tuples_entries_is_read_like_the_tuple():
    box = spaces.Box(-9, 9, (2,))
    model = PPO(envs_of(spaces.Tuple((box, box))))
    entries = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0], [7.0, 8.0]])]
    rows = model.spaces.read(entries).features[:, -4:]
    assert rows.tolist() == [[1, 2, 5, 6], [3, 4, 7, 8]]
    (actions, _), (expected, _) = model.predict(entries), model.predict(tuple(entries))
    assert (actions == expected).all()


@pytest.mark.parametrize("shape", [(7, 5, 3), (3, 7, 5), (7, 7, 9), (9, 7, 7)])
def test_images_are_bytes_channels_first_beside_the_numbers(shape):
    image = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    space = spaces.Dict({"a": spaces.Box(0, 255, shape, np.uint8), "b": spaces.Box(0, 1, (2,))})
    layout = GymSpaces.of(envs_of(space))
    channels = min(shape) if shape[0] != 9 and shape[2] != 9 else 9
    axis = shape.index(channels)
    (found,) = layout.images
    assert found == (channels, *(side for i, side in enumerate(shape) if i != axis))
    shown = [{"a": image, "b": np.array([0.25, 0.5])}]
    features, frames = layout.read(shown, one_by_one=True)
    assert features.tolist() == [[0.25, 0.5]]
    assert frames.dtype == torch.uint8
    assert (layout.num_features, layout.frame_size) == (2, image.size)
    np.testing.assert_array_equal(frames[0].reshape(found), np.moveaxis(image, axis, 0))


def test_several_images_follow_one_another_in_the_order_of_their_shapes():
    space = spaces.Dict(
        {
            "far": spaces.Box(0, 255, (4, 5, 1), np.uint8),
            "level": spaces.Discrete(2),
            "near": spaces.Box(0, 255, (2, 6, 6), np.uint8),
        }
    )
    layout = GymSpaces.of(envs_of(space))
    assert layout.images == ((1, 4, 5), (2, 6, 6))
    space.seed(0)
    shown = [space.sample() for _ in range(3)]
    features, frames = layout.read(shown, one_by_one=True)
    assert features.tolist() == np.eye(2)[[o["level"] for o in shown]].tolist()
    for row, observation in zip(frames.numpy(), shown, strict=True):
        np.testing.assert_array_equal(row[:20], observation["far"].flatten())
        np.testing.assert_array_equal(row[20:], observation["near"].flatten())


@pytest.mark.parametrize("bad", [0.5, -1.0, 256.0, np.nan])
def test_pixels_that_are_no_bytes_are_refused_and_whole_numbers_are_taken(bad):
    layout = GymSpaces.of(envs_of(spaces.Dict({"eye": spaces.Box(0, 255, (2, 2, 1), np.uint8)})))
    image = np.array([0.0, 1.0, 7.0, 255.0])
    frames = layout.read({"eye": image.reshape(1, 2, 2, 1)}).frames
    assert frames.tolist() == [[0, 1, 7, 255]]
    image[2] = bad
    with pytest.raises(ValueError, match=rf"observations\['eye'\] holds {bad}; the pixels of an"):
        layout.read({"eye": image.reshape(1, 2, 2, 1)})


def test_the_mask_entry_is_no_feature():
    space = spaces.Dict(
        {"observation": spaces.Box(0, 1, (3,)), "action_mask": spaces.MultiBinary(2)}
    )
    assert GymSpaces.of(envs_of(space)).num_features == 3
    assert GymSpaces.of(envs_of(space), mask_entry=None).num_features == 5


def test_spaces_survive_a_file():
    layout = GymSpaces.of(envs_of(NESTED, MIXED))
    assert from_plain(GymSpaces, to_plain(layout)) == layout


# -- actions ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Casting input x")  # gymnasium splits a Box () into numbers
@pytest.mark.parametrize("space", [MIXED, *MIXED.spaces.values()], ids=lambda s: type(s).__name__)
def test_every_choice_is_an_action_of_the_space(space):
    layout = GymSpaces.of(envs_of(action=space, num_envs=50))
    columns = []
    for head in layout.action_space:
        numbers = 20 * torch.randn(50)  # tanh is 1 in float32: the bounds themselves
        columns.append(numbers if head.continuous else torch.randint(head.size, (50,)))
    choices = torch.stack(columns, dim=1)
    actions = layout.actions(choices)
    batched = gymnasium.vector.utils.batch_space(space, 50)
    alone = list(gymnasium.vector.utils.iterate(batched, actions))
    assert all(space.contains(action) for action in alone)
    first = layout.actions(choices[0])
    np.testing.assert_equal(first, alone[0])
    assert space.contains(first)


def test_numbers_span_the_box_and_heads_are_named_after_the_action():
    layout = GymSpaces.of(envs_of(action=MIXED))
    names = ["aim_0", "aim_1", "flags_0", "flags_1", "kind", "pair_0_0", "pair_0_1", "pair_1"]
    assert list(layout.action_space.names) == names
    row = torch.tensor([[0.0, -50.0, 1, 0, 2, 1, 3, 0.5493061]])  # tanh: 0, -1 and 0.5
    action = layout.actions(row[0])
    np.testing.assert_allclose(action["aim"], [0.0, 0.0])
    assert action["kind"] == 3
    assert action["flags"].tolist() == [1, 0]
    assert action["pair"][0].tolist() == [4, 3]
    assert action["pair"][1] == pytest.approx(0.75)


def test_heads_match_the_entries_by_name_in_any_order():
    space = spaces.Dict({"aim": spaces.Box(-1, 1, ()), "kind": spaces.Discrete(3)})
    heads = (Head("kind", 3), Head("aim", given=("kind",), continuous=True))
    layout = GymSpaces.of(envs_of(action=space), heads)
    action = layout.actions(torch.tensor([2.0, 9.0]))
    assert action == {"aim": pytest.approx(1.0), "kind": 2}
    with pytest.raises(
        ValueError, match=r"\(3, 'continuous'\).* needs \('continuous', 3\); its heads"
    ):
        GymSpaces.of(envs_of(action=space), (Head("what", 3), Head("where", continuous=True)))


def test_one_head_needs_no_tuple():
    head = Head("only", 2)
    assert GymSpaces.of(envs_of(), head).action_space.heads == (head,)


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_stack_of_images_is_an_image_with_all_their_channels(channels_last):
    frames = np.random.default_rng(0).integers(256, size=(2, 4, 3, 8, 9), dtype=np.uint8)
    shown = np.moveaxis(frames, 2, -1) if channels_last else frames
    layout = GymSpaces.of(envs_of(spaces.Box(0, 255, shown.shape[1:], np.uint8)))
    assert layout.images == ((12, 8, 9),)
    np.testing.assert_array_equal(layout.read(shown).frames, frames.reshape(2, -1))


# -- refusals, and that their remedies work -----------------------------------------------------


def test_a_text_entry_is_refused_and_filtering_it_works():
    space = spaces.Dict({"mission": spaces.Text(9), "view": spaces.Box(0, 1, (2,))})
    with pytest.raises(ValueError, match=r"observation\['mission'\] is a Text.*FilterObservation"):
        PPO(AnySpaces(space, spaces.Discrete(2)))
    env = gymnasium.wrappers.FilterObservation(AnySpaces(space, spaces.Discrete(2)), ["view"])
    PPO(env, config=SMALL).learn(12)


def test_an_observation_without_a_size_is_refused_and_transforming_it_works():
    env = AnySpaces(spaces.Sequence(spaces.Box(0, 1, (2,))), spaces.Discrete(2))
    with pytest.raises(ValueError, match=r"observation is a Sequence.*TransformObservation"):
        PPO(env)
    box = spaces.Box(-np.inf, np.inf, (1,))
    wrapped = gymnasium.wrappers.TransformObservation(env, lambda o: np.float32([len(o)]), box)
    PPO(wrapped, config=SMALL).learn(12)


def test_a_bound_that_leaves_no_numbers_is_refused():
    env = AnySpaces(spaces.Discrete(2), spaces.Box(5.0, np.inf, (1,)))
    with pytest.raises(ValueError, match=r"action_bound=1.0 leaves no numbers"):
        PPO(env, config=replace(SMALL, action_bound=1.0))
    PPO(env, config=replace(SMALL, action_bound=9.0)).learn(12)


def test_a_choice_that_is_no_whole_number_is_refused():
    layout = GymSpaces.of(envs_of(spaces.MultiDiscrete([3, 3])))
    features = layout.read(np.array([[0.6, 1.0], [2.0, 1.0]])).features
    with pytest.raises(ValueError, match="env 0: the observation is not within 0, 0 to 2, 2"):
        layout.require_finite(features)


def test_a_box_without_bounds_is_refused_and_bounding_it_works():
    env = AnySpaces(spaces.Discrete(2), spaces.Box(-np.inf, np.inf, (2,)))
    with pytest.raises(
        ValueError, match=r"action is a Box.*without bounds.*TransformAction.*high, \(2,\)\)"
    ):
        PPO(env)
    box = spaces.Box(-3, 3, (2,))
    PPO(gymnasium.wrappers.TransformAction(env, lambda a: a, box), config=SMALL).learn(12)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            spaces.Box(0, 3, (2,), np.int32),
            r"whole numbers; use MultiDiscrete\(high - low \+ 1, start=",
        ),
        (spaces.Text(3), "the action is a Text.*; use Discrete, MultiDiscrete, MultiBinary, Box"),
        (
            spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Graph(spaces.Box(0, 1), None)}),
            r"the action\['b'\] is a Graph",
        ),
        (
            spaces.Dict({"a": spaces.MultiBinary(2), "a_0": spaces.Discrete(3)}),
            r"entries \['a'\] and \['a_0'\] of .* both give a head 'a_0'; rename one",
        ),
        (spaces.Box(0, 1, (0,)), r"action space Box.* holds no choices and no numbers"),
    ],
)
def test_other_actions_are_refused_with_what_works(action, message):
    with pytest.raises(ValueError, match=message):
        PPO(AnySpaces(spaces.Discrete(2), action))


def test_an_observation_without_numbers_is_refused():
    with pytest.raises(ValueError, match="holds no numbers"):
        PPO(AnySpaces(spaces.Dict({"action_mask": spaces.MultiBinary(2)}), spaces.Discrete(2)))


# -- masks that would be misread ----------------------------------------------------------------


def test_a_mask_of_logits_is_refused():
    envs = envs_of(infos=lambda: {"action_mask": np.array([0.0, -1e9])})
    with pytest.raises(
        ValueError, match=r"'action': 2.* holds -1000000000.0; use 1 for legal and 0"
    ):
        PPO(envs)
    envs = envs_of(infos=lambda: {"action_mask": np.array([0, 2])})
    with pytest.raises(ValueError, match="holds 2; use 1 for legal"):
        PPO(envs)


NO_MASKS = "masks: none found, all actions legal\n"


def test_a_line_says_that_no_masks_were_found(capsys):
    """Once, when the model is made; not where the caller asked for no masks."""
    model = PPO(envs_of(infos=lambda: {"legal_actions": [1, 0]}))
    assert model.mask_source == "none"
    assert capsys.readouterr().out == NO_MASKS
    model.learn(24, eval_env=envs_of(), eval_episodes=1)
    PPO(envs_of(), config=GymConfig(masks="none"))
    PPO(envs_of(infos=lambda: {"action_mask": np.array([1, 0])}))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["legal_actions", "mask"])
def test_a_mask_under_another_name_is_read_if_it_is_named(name, capsys):
    config = GymConfig(mask_key=name)
    model = PPO(envs_of(infos=lambda: {name: np.array([1, 0])}), config=config)
    assert model.mask_source == "info"
    assert model.envs.masks["action"].tolist() == [[True, False]] * 2
    space = spaces.Dict({"view": spaces.Discrete(3), name: spaces.MultiBinary(2)})
    model = PPO(envs_of(space), config=config)
    assert model.mask_source == "observation"
    assert model.spaces.observation[0].width == 3
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="no entry 'action_mask' with the mask"):
        PPO(envs_of(), config=GymConfig(masks="observation"))


def test_a_key_that_the_environment_never_gives_is_refused():
    class Method(AnySpaces):
        def action_masks(self):
            return [1, 0]

    config, space = GymConfig(mask_key="legal"), spaces.Dict({"view": TWO})
    for envs in (envs_of(infos=lambda: {"a": 1}), SyncVectorEnv([lambda: Method(TWO, TWO)])):
        with pytest.raises(ValueError, match="mask_key='legal': the first reset gave no such mask"):
            PPO(envs, config=config)
        assert PPO(envs, config=replace(config, masks="none")).mask_source == "none"
    assert PPO(envs, config=replace(config, masks="method")).mask_source == "method"
    with pytest.raises(ValueError, match=r"observation has \['view'\], info \['a'\]"):
        PPO(envs_of(space, infos=lambda: {"a": 1}), config=config)


def test_environments_without_the_method_of_the_others_are_named():
    def make(has_method):
        env = AnySpaces(TWO, TWO)
        if has_method:
            env.action_masks = lambda: [1, 0]
        return env

    envs = SyncVectorEnv([lambda has=has: make(has) for has in (True, False, True, False)])
    for masks in ("auto", "method"):
        with pytest.raises(ValueError, match=r"envs \[1, 3\] have no action_masks\(\) method"):
            PPO(envs, config=GymConfig(masks=masks))
    assert PPO(envs, config=GymConfig(masks="none")).mask_source == "none"


def test_a_mask_that_comes_only_after_the_reset_is_refused():
    infos = iter([{}] + [{"action_mask": np.array([1, 0])}] * 20)
    model = PPO(
        AnySpaces(spaces.Discrete(2), spaces.Discrete(2), lambda: next(infos)), config=SMALL
    )
    with pytest.raises(
        ValueError, match="info has 'action_mask', but .* give it at every reset and step"
    ):
        model.learn(12)


CELLS = (Head("row", 2), Head("column", 3, given=("row",)))
OPEN = {"row": np.array([1, 1]), "column": np.array([[1, 0, 0], [0, 0, 0]])}


def test_a_legal_row_without_a_legal_column_is_refused_unless_declared():
    envs = envs_of(action=spaces.MultiDiscrete([2, 3]), infos=lambda: {"action_mask": OPEN})
    with pytest.raises(
        ValueError, match="env 0, step 0: row=1 is legal, but then head 'column' has no legal"
    ):
        PPO(envs, CELLS)
    PPO(envs, (CELLS[0], Head("column", 3, given=("row",), optional=True)))
    closed = OPEN | {"row": np.array([1, 0])}
    PPO(envs_of(action=spaces.MultiDiscrete([2, 3]), infos=lambda: {"action_mask": closed}), CELLS)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_mask_of_an_episodes_last_observation_is_not_read(mode):
    class Ends(AnySpaces):
        def step(self, action):
            *rest, truncated, info = super().step(action)
            return *rest, truncated, {"action_mask": OPEN} if truncated else info

    closed = OPEN | {"row": np.array([1, 0])}
    space = spaces.MultiDiscrete([2, 3])
    envs = SyncVectorEnv(
        [lambda: Ends(TWO, space, lambda: {"action_mask": closed})] * 2, autoreset_mode=mode
    )
    model = PPO(envs, CELLS, SMALL).learn(60)
    assert model.trainer.progress.episodes > 4


def test_a_chain_of_choices_is_checked_along_the_legal_ones():
    heads = (Head("a", 2), Head("b", 2, given=("a",)), Head("c", 2, given=("b", "a")))
    masks = {"a": np.ones(2), "b": np.array([[1, 0], [1, 1]]), "c": np.ones((2, 2, 2))}
    masks["c"][1, 0] = 0  # b=1 after a=0: not legal, so it needs no choice
    layout = GymSpaces.of(envs_of(action=spaces.MultiDiscrete([2, 2, 2])), heads)
    read(layout, {name: mask[None] for name, mask in masks.items()})
    masks["c"][1, 1] = 0
    with pytest.raises(ValueError, match="env 0: b=1, a=1 is legal, but then head 'c'"):
        read(layout, {name: mask[None] for name, mask in masks.items()})


@pytest.mark.parametrize(
    ("a", "b"), [([1, 1], [[1, 1, 0], [0, 1, 0]]), ([1, 0], [[1, 1, 0], [1, 1, 1]])]
)
def test_a_choice_that_no_earlier_one_allows_needs_no_later_one(a, b):
    heads = (Head("a", 2), Head("b", 3, given=("a",)), Head("c", 2, given=("b",)))
    layout = GymSpaces.of(envs_of(action=spaces.MultiDiscrete([2, 3, 2])), heads)
    masks = {"a": np.array([a]), "b": np.array([b]), "c": np.array([[[1, 1], [0, 1], [0, 0]]])}
    assert read(layout, masks)["b"].tolist() == [np.array(b, dtype=bool).tolist()]
    masks["b"][0, 0, 2] = 1
    with pytest.raises(ValueError, match="env 0: b=2 is legal, but then head 'c' has no legal"):
        read(layout, masks)


def test_dependent_heads_without_masks_warn():
    envs = envs_of(action=spaces.MultiDiscrete([2, 3]))
    with pytest.warns(
        UserWarning, match=r"heads \['column'\] depend on earlier heads, but .* no masks"
    ) as caught:
        PPO(envs, CELLS)
    assert caught[0].filename == __file__
    PPO(envs, CELLS, GymConfig(masks="none"))


def test_predicting_without_the_masks_that_were_learned_with_warns():
    model = PPO(envs_of(infos=lambda: {"action_mask": np.array([1, 0])}))
    with pytest.warns(UserWarning, match="learned with masks, but predict got none"):
        model.predict(0)
    assert model.predict(0, mask=[1, 0])[0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_observation_that_is_not_finite_is_named_with_env_and_round(value):
    space = spaces.Dict({"speed": spaces.Box(-np.inf, np.inf, (3,)), "level": spaces.Discrete(2)})

    class Breaks(AnySpaces):
        steps = 0

        def step(self, action):
            observation, *rest = super().step(action)
            self.steps += 1
            if self.steps == 25 and self.breaks:
                observation["speed"][2] = value
            return observation, *rest

    envs = SyncVectorEnv([lambda: Breaks(space, spaces.Discrete(2)) for _ in range(3)])
    for index, env in enumerate(envs.envs):
        env.breaks = index == 1
    model = PPO(envs, config=GymConfig(horizon=12))
    with pytest.raises(
        ValueError, match=rf"env 1, round 3: the observation\['speed'\] holds {value} at position 2"
    ):
        model.learn(1000)
    bad = {"speed": np.array([0, value, 0]), "level": 1}
    with pytest.raises(ValueError, match=rf"env 0: the observation\['speed'\] holds {value}"):
        model.predict(bad)


def test_masks_of_mixed_heads_may_leave_the_numbers_out():
    layout = GymSpaces.of(
        envs_of(action=spaces.Dict({"kind": spaces.Discrete(3), "aim": spaces.Box(0, 1, (2,))}))
    )
    masks = read(layout, np.array([[1, 0, 1]]))
    assert masks["kind"].tolist() == [[True, False, True]]
    assert masks["aim_0"].tolist() == [[True]]
    heads = (
        Head("kind", 3),
        Head("aim_0", given=("kind",), continuous=True),
        Head("aim_1", continuous=True),
    )
    layout = GymSpaces.of(
        envs_of(action=spaces.Dict({"kind": spaces.Discrete(3), "aim": spaces.Box(0, 1, (2,))})),
        heads,
    )
    for shape in ((1, 3), (1, 3, 1)):
        used = np.array([0, 1, 1]).reshape(shape)
        masks = read(layout, {"kind": np.ones((1, 3)), "aim_0": used})
        assert masks["aim_0"].flatten().tolist() == [False, True, True]
        assert masks["aim_1"].all()
