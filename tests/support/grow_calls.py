"""Small runs of the one call, `esper.grow`."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import esper
from support.models import blobs, loaders, mlp

STEPS, DECISIONS = 24, 6


def run(controller="heuristic", rng_seed=0, model=None, lr=3e-2, **options):
    torch.manual_seed(rng_seed)
    model = model or mlp()
    train, val = loaders()
    settings = dict(
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        steps=STEPS,
        decisions=DECISIONS,
        progress=False,
    )
    return esper.grow(model, train, val, controller=controller, **{**settings, **options})


def accuracy(model: nn.Module) -> float:
    """On the validation loader's batches of 32: in another batch size a row rounds differently."""
    model.eval()
    x, y = blobs(64, rng_seed=1)
    with torch.no_grad():  # no loader: it would draw from the generator that training uses
        output = torch.cat([model(batch) for batch in x.split(32)])
    return float((output.argmax(1) == y).double().mean())


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-2)


def plain_training(rng_seed=0) -> list[float]:
    """Validation accuracies of the loop that a user would write, before each decision and after."""
    torch.manual_seed(rng_seed)
    model = mlp()
    train, _ = loaders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    found, steps = [accuracy(model)], 0
    model.train()
    while steps < STEPS:
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
            if steps % (STEPS // DECISIONS) == 0:
                found.append(accuracy(model))
                model.train()
    return found


def refused(message, **options):
    train, val = loaders()
    model = options.pop("model", None) or mlp()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), 0.1)
    arguments = dict(
        train_loader=train,
        val_loader=val,
        loss=F.cross_entropy,
        optimizer=optimizer,
        steps=20,
        decisions=8,
        progress=False,
    )
    with pytest.raises(ValueError, match=message):
        esper.grow(model, **{**arguments, **options})
