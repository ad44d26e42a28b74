"""Counter-based random numbers: a function of a key, not of the order of sampling.

A key is made of the rng seed, a host id and a purpose; the n-th number is a hash of the key and n.
So the numbers of host i do not depend on the number of hosts, their order or the device.
"""

import torch
from torch import Tensor


def fold(rng_seed: int, *parts: Tensor | int) -> Tensor:
    """A key from an rng seed and more parts: `fold(rng_seed, host_ids, slot)` is one per host."""
    key = hash64(torch.tensor(rng_seed))
    for part in parts:
        key = hash64(key + part)
    return key


def uniform(keys: Tensor, count: int) -> Tensor:
    """The first `count` numbers of each key, float64 in [0, 1), `[*keys.shape, count]`."""
    bits = hash64(keys.unsqueeze(-1) + torch.arange(1, count + 1, device=keys.device))
    return _shifted(bits, 11).double() * 2.0**-53


def hash64(x: Tensor) -> Tensor:
    """64 well-mixed bits of an int64 each: the output function of SplitMix64 (Steele 2014)."""
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
    x ^= _shifted(x, 30)  # in place: large samples are bound by memory
    x *= -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x ^= _shifted(x, 27)
    x *= -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    x ^= _shifted(x, 31)
    return x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical right shift: it fills with zeros, not with the sign."""
    x = x >> bits
    x &= (1 << (64 - bits)) - 1
    return x
