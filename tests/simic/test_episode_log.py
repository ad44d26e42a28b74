"""Returns and lengths of episodes, against counting them one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.factored_actions import FactoredActionSpace, Head
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.gym.episode_log import RECENT_EPISODES, EpisodeLog

NUM_ENVS, HORIZON = 3, 5
ENDS = ("goes on", "terminated", "truncated", "not stored")


def empty_buffer(num_envs=NUM_ENVS, horizon=HORIZON):
    return TamiyoRolloutBuffer(num_envs, horizon, 1, FactoredActionSpace((Head("action", 2),)))


def write(buffer, rewards, ends):
    """One step of every env; some are not stored."""
    row = buffer.row()
    is_real = torch.tensor([end != "not stored" for end in ends])
    # what is not stored may hold anything
    row.rewards.copy_(torch.tensor(rewards).where(is_real, torch.nan))
    row.terminated.copy_(torch.tensor([end == "terminated" for end in ends]) | ~is_real)
    row.truncated.copy_(torch.tensor([end == "truncated" for end in ends]))
    buffer.commit(row, is_real)


def counted(rounds):
    """Of each env the episodes that ended: their return and length, by round."""
    unfinished = [(0.0, 0)] * NUM_ENVS
    found = []
    for steps in rounds:
        for rewards, ends in steps:
            for env, (reward, end) in enumerate(zip(rewards, ends, strict=True)):
                if end == "not stored":
                    continue
                total, length = unfinished[env]
                unfinished[env] = (total + reward, length + 1)
                if end != "goes on":
                    found.append((env, *unfinished[env]))
                    unfinished[env] = (0.0, 0)
    return found


def by_env(episodes):
    """Ordered by env; those of one env stay in the order in which they ended."""
    return sorted(episodes, key=lambda episode: episode[0])


a_reward = st.integers(-8, 8).map(lambda number: number / 4)  # sums are exact
a_step = st.tuples(
    st.lists(a_reward, min_size=NUM_ENVS, max_size=NUM_ENVS),
    st.lists(st.sampled_from(ENDS), min_size=NUM_ENVS, max_size=NUM_ENVS),
)
a_round = st.lists(a_step, min_size=1, max_size=HORIZON)


@given(rounds=st.lists(a_round, min_size=1, max_size=4))
def test_episodes_across_ragged_rounds_are_those_counted_one_by_one(rounds):
    buffer = empty_buffer()
    log = EpisodeLog(NUM_ENVS)
    for steps in rounds:
        buffer.reset()
        for rewards, ends in steps:
            write(buffer, rewards, ends)
        log.add_round(buffer)
    expected = counted(rounds)
    assert by_env(map(tuple, log.recent)) == by_env(expected)
    if not expected:
        assert log.means() == {}
        return
    _, returns, lengths = zip(*expected, strict=True)
    assert log.means() == pytest.approx(
        {
            "episode/return": sum(returns) / len(returns),
            "episode/length": sum(lengths) / len(lengths),
        }
    )


def test_the_means_are_over_the_episodes_that_ended_last():
    buffer = empty_buffer(num_envs=1, horizon=RECENT_EPISODES + 20)
    log = EpisodeLog(1)
    for number in range(RECENT_EPISODES + 20):
        write(buffer, [float(number)], ["truncated"])
    log.add_round(buffer)
    assert [episode.total_reward for episode in log.recent] == list(range(20, 120))
    assert log.means() == {"episode/return": 69.5, "episode/length": 1.0}
