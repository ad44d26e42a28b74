"""Rewards against siblings: what all of them share cancels, and nobody is judged by itself."""

import pytest
import torch

from esper.simic.growth.rewards import siblings_mean


def test_each_env_is_compared_with_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0])
    expected = torch.tensor([4.0, 3.5, 1.5, 5.0, 5.0, 5.0])
    torch.testing.assert_close(siblings_mean(rewards, 3), expected)


def test_what_siblings_share_cancels():
    torch.manual_seed(0)
    rewards, luck = torch.randn(24), torch.randn(6).repeat_interleave(4)
    with_luck = rewards + luck
    torch.testing.assert_close(
        with_luck - siblings_mean(with_luck, 4), rewards - siblings_mean(rewards, 4), rtol=0, atol=1e-5
    )  # fmt: skip


@pytest.mark.parametrize("siblings", [2, 3, 8])
def test_what_an_env_is_compared_with_does_not_depend_on_itself(siblings):
    torch.manual_seed(0)
    rewards = torch.randn(2 * siblings)
    changed = rewards.clone()
    changed[0] += 1.0
    difference = siblings_mean(changed, siblings) - siblings_mean(rewards, siblings)
    expected = torch.zeros(2 * siblings)
    expected[1:siblings] = 1.0 / (siblings - 1)
    torch.testing.assert_close(difference, expected)


def test_an_only_child_is_compared_with_nothing():
    assert siblings_mean(torch.randn(5), 1).tolist() == [0.0] * 5
