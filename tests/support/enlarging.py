"""Runs in which layers get wider or stacks deeper, shared by their tests."""

import torch


def train(growth, x, steps=2):
    for _ in range(steps):
        growth.optimizer.zero_grad()
        growth.model(x).square().mean().backward()
        growth.optimizer.step()
        growth.after_step()


def outputs(model, x):
    was_training = model.training
    y = model.eval()(x).detach()  # with gradients: torch's fused encoder rounds differently
    model.train(was_training)
    return y


def check_that_it_resumes(start, saved_at, path):
    """A run of eight decisions, saved before one of them, goes on bit-exactly."""
    growth, x = start()
    for step in range(9):
        if step == saved_at:
            growth.save(path)
        if step < 8:
            growth.decide(0.1 * step)
            train(growth, x)
    again, _ = start()
    again.load(path)
    for step in range(saved_at, 8):
        again.decide(0.1 * step)
        train(again, x)
    assert again.params == growth.params
    assert torch.equal(outputs(again.model, x), outputs(growth.model, x))
