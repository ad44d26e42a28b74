"""What is wrong with the tensors of an environment is named: the env, the entry, and when."""

from dataclasses import replace

import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorWrapper

from esper.simic.gym.evaluation import evaluate
from esper.simic.gym.ppo_model import PPO
from support.batched_environments import Counters
from support.torch_models import CONFIG, NEXT_STEP, SAME_STEP, counters, model_of


class Spoiled(VectorWrapper):
    """Changes the outcome of one step: `change(observations, rewards, terminated, truncated, infos)`."""

    def __init__(self, envs, change, step):
        super().__init__(envs)
        self.change, self.last_step, self.steps = change, step, 0

    def step(self, actions):
        outcome = list(self.env.step(actions))
        self.steps += 1
        if self.steps == self.last_step:
            self.change(outcome)
        return tuple(outcome)


def put(part, path, place, value):
    """Set one element of an entry of the outcome."""

    def change(outcome):
        array = outcome[part]
        for key in path:
            array = array[key]
        array[place] = value

    return change


def as_other_numbers(outcome):
    outcome[4]["action_mask"] = outcome[4]["action_mask"].int()
    outcome[4]["action_mask"][3, 1] = 2


def without_columns(outcome):
    outcome[4]["action_mask"]["row"][3, 1] = True
    outcome[4]["action_mask"]["column"][3, 1] = False


def learns_spoiled(change, *, kind="masks in a dict", mode=SAME_STEP, step=2, config=CONFIG):
    model = model_of(Spoiled(counters(mode, kind), change, step), kind, config)
    return model, lambda: model.learn(64)


@pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            put(0, ["numbers"], (1, 0), torch.nan),
            r"env 1, round 1: the observation\['numbers'\] holds nan at position 0; the environment",
        ),
        (put(0, ["step"], 3, 8), r"env 3, round 1: the observation\['step'\] is not within 0 to 7"),
        (
            put(0, ["action_mask"], (3, 1), 2),
            r"env 3, step 2: action mask of heads \{'action': 3\} holds 2; use 1 for legal and 0",
        ),
        (put(1, [], 1, torch.nan), "env 1, round 1: the reward is nan; give finite numbers"),
    ],
)
def test_bad_tensors_are_named_with_env_entry_and_time(change, message, mode):
    model, learn = learns_spoiled(change, mode=mode)
    with pytest.raises(ValueError, match=message):
        learn()
    model.learn(64)  # the round is collected again


@pytest.mark.parametrize("mode", AutoresetMode)
def test_bad_masks_in_info_are_named_with_env_head_and_step(mode):
    _, learn = learns_spoiled(as_other_numbers, kind="masks in info", mode=mode)
    with pytest.raises(ValueError, match=r"env 3, step 2: action mask .* holds 2; use 1 for legal"):
        learn()
    _, learn = learns_spoiled(without_columns, kind="dependent heads", mode=mode)
    message = "env 3, step 2: row=1 is legal, but then head 'column' has no legal choice"
    with pytest.raises(ValueError, match=message):
        learn()


def test_a_bad_final_observation_is_named_with_its_env():
    change = put(4, ["final_obs", "numbers"], (0, 1), torch.inf)  # env 0 is cut at step 3
    _, learn = learns_spoiled(change, step=3)
    message = r"env 0, round 1: the observation\['numbers'\] holds inf at position 1"
    with pytest.raises(ValueError, match=message):
        learn()
    # env 2 is cut at every step, together with env 0 here
    _, learn = learns_spoiled(put(4, ["final_obs", "numbers"], (2, 1), torch.inf), step=4)
    with pytest.raises(ValueError, match="env 2, round 1"):
        learn()
    # of envs that are not cut nothing is read
    _, learn = learns_spoiled(put(4, ["final_obs", "numbers"], (3, 1), torch.inf), step=4)
    learn()


def test_a_reward_that_is_not_finite_is_named_without_previous_rewards():
    config = replace(CONFIG, previous_reward=False)
    _, learn = learns_spoiled(put(1, [], 1, torch.nan), config=config)
    with pytest.raises(ValueError, match="env 1, step 1: the reward is not finite"):
        learn()


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (1, lambda x: x[:, None], r"reward: got shape \(4, 1\), expected \(envs,\) = \(4,\)"),
        (2, lambda x: x[:3], r"terminated: got shape \(3,\), expected \(envs,\) = \(4,\)"),
        (3, lambda x: x.float(), "truncated is torch.float32; the environment must give bools"),
        (2, lambda x: x.long(), "terminated is torch.int64; the environment must give bools"),
    ],
)
def test_rewards_and_flags_of_another_shape_or_type_are_refused(place, change, message):
    def changed(outcome):
        outcome[place] = change(outcome[place])

    _, learn = learns_spoiled(changed)
    with pytest.raises(ValueError, match=message):
        learn()


def test_masks_that_stop_coming_are_named():
    _, learn = learns_spoiled(lambda outcome: outcome[4].clear(), kind="masks in info")
    with pytest.raises(ValueError, match=r"envs \[0, 1, 2, 3\] gave no info\['action_mask'\]"):
        learn()


# -- on a GPU: at the end of the round --------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            put(0, ["numbers"], (1, 0), torch.nan),
            "masks in a dict",
            r"env 1, step 2, round 1: the observation\['numbers'\] holds nan at position 0",
        ),
        (
            as_other_numbers,
            "masks in info",
            "env 3, step 2: action mask .* holds other values than 0 and 1",
        ),
        (
            without_columns,
            "dependent heads",
            "env 3, step 2: a choice of row is legal, but then head 'column' has no legal choice",
        ),
    ],
)
def test_bad_tensors_on_a_gpu_are_named_at_the_end_of_the_round(change, kind, message):
    envs = Spoiled(counters(SAME_STEP, kind, device="cuda"), change, step=2)
    model = model_of(envs, kind)
    with pytest.raises(ValueError, match=message):
        model.learn(64)
    model.learn(64)  # the round is collected again


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_bad_mask_of_the_first_reset_is_named(device):
    class WrongAtFirst(Counters):
        def reset(self, **options):
            observations, infos = super().reset(**options)
            infos["action_mask"] = infos["action_mask"].int()
            infos["action_mask"][3, 1] = 2
            return observations, infos

    with pytest.raises(ValueError, match="env 3, step 0: action mask .* holds"):
        PPO(WrongAtFirst(NEXT_STEP, masks="info", xp=torch, device=device), config=CONFIG).learn(64)


@pytest.mark.gpu
def test_evaluation_on_a_gpu_names_an_observation_that_is_not_finite():
    model = model_of(counters(SAME_STEP, device="cuda"))
    change = put(0, [], (1, 0), torch.nan)
    envs = Spoiled(counters(SAME_STEP, device="cuda"), change, step=2)
    with pytest.raises(ValueError, match="env 1: the observation holds nan at position 0"):
        evaluate(model, envs, episodes=8)
