"""Rewards against siblings: what all of them share cancels, and nobody is judged by itself."""

import pytest
import torch

from esper.simic.rewards import against_siblings


def test_each_env_is_compared_with_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0])
    relative = against_siblings(rewards, 3)
    torch.testing.assert_close(relative, torch.tensor([-3.0, -1.5, 4.5, 0.0, 0.0, 0.0]))


def test_what_siblings_share_cancels():
    torch.manual_seed(0)
    rewards, luck = torch.randn(24), torch.randn(6).repeat_interleave(4)
    torch.testing.assert_close(
        against_siblings(rewards + luck, 4), against_siblings(rewards, 4), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("siblings", [2, 3, 8])
def test_what_an_env_is_compared_with_does_not_depend_on_itself(siblings):
    torch.manual_seed(0)
    rewards = torch.randn(2 * siblings)
    changed = rewards.clone()
    changed[0] += 1.0
    difference = against_siblings(changed, siblings) - against_siblings(rewards, siblings)
    expected = torch.zeros(2 * siblings)
    expected[0], expected[1:siblings] = 1.0, -1.0 / (siblings - 1)
    torch.testing.assert_close(difference, expected)


def test_an_only_child_keeps_its_reward():
    rewards = torch.randn(5)
    assert against_siblings(rewards, 1) is rewards
