"""Random numbers are hashes of what they are for."""

import torch

from esper.tolaria.randomness import fold, hash64, uniform


def test_hashes_are_splitmix64():
    def splitmix64(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    values = [0, 1, 2**40, -1, -(2**63), 2**63 - 1]
    expected = [splitmix64(value % 2**64) for value in values]
    assert [h % 2**64 for h in hash64(torch.tensor(values)).tolist()] == expected


def test_a_key_depends_on_every_part_and_on_their_order():
    parts = torch.arange(5)
    keys = torch.stack([fold(rng_seed, parts.unsqueeze(1), parts) for rng_seed in (0, 1)])
    assert len(keys.unique()) == 2 * 5 * 5


def test_numbers_are_uniform_and_a_longer_draw_goes_on():
    numbers = uniform(fold(3, torch.arange(20)), 5000)
    assert numbers.shape == (20, 5000)
    assert 0 <= numbers.min() < 1e-3 < 1 - 1e-3 < numbers.max() < 1
    assert abs(numbers.mean().item() - 0.5) < 0.005
    assert abs(numbers.var().item() - 1 / 12) < 0.002
    assert torch.equal(uniform(fold(3, torch.arange(20)), 10), numbers[:, :10])
