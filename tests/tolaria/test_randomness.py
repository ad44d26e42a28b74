"""Random numbers are hashes of what they are for."""

import torch

from esper.tolaria.randomness import hash64


def test_hashes_are_splitmix64():
    def splitmix64(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    values = [0, 1, 2**40, -1, -(2**63), 2**63 - 1]
    expected = [splitmix64(value % 2**64) for value in values]
    assert [h % 2**64 for h in hash64(torch.tensor(values)).tolist()] == expected
