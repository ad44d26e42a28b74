"""A small problem to train on, and torch's own Adam and cosine schedule as the oracle."""

import math

import torch
import torch.nn.functional as F
from torch import nn

STEPS, RATE = 11, 0.03
HEAD = ("head", "bias")  # names that train first


def problem():
    """A net of two layers in float64, its loss on one minibatch per step, and the minibatches."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"body": (4, 5), "scale": (), "head": (3, 4), "bias": (3,)}
    start = {
        n: torch.randn(s, generator=rng, dtype=torch.float64) + (n == "scale")
        for n, s in shapes.items()
    }
    x = torch.randn(STEPS, 16, 5, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (STEPS, 16), generator=rng)

    def loss(change, step):
        hidden = torch.tanh(change["scale"] * x[step] @ change["body"].T)
        return F.cross_entropy(hidden @ change["head"].T + change["bias"], y[step])

    return start, loss


def by_torch(start, loss, phases, steps=STEPS):
    """Each phase: (names that learn, steps). Adam and a cosine schedule of torch."""
    leaves = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    adam = torch.optim.Adam(leaves.values(), lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    step = 0
    for active, count in phases:
        for _ in range(count):
            gradients = torch.autograd.grad(loss(leaves, step), [leaves[n] for n in active])
            for leaf in leaves.values():
                leaf.grad = None  # Adam skips it
            for name, gradient in zip(active, gradients, strict=True):
                leaves[name].grad = gradient
            adam.step()
            cosine.step()
            step += 1
    return leaves


def assert_same(found, expected, **tolerance):
    assert set(found) == set(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.detach(), expected[name].detach(), **tolerance)
