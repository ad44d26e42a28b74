"""Signals of many models at once are those of each alone."""

import pytest
import torch

from adapt_practice.fitting import over_models
from esper.adapting.signals import measure
from support.adaptations import build


@pytest.mark.parametrize("name", ["mlp", "series", "residual"])
def test_many_models_give_the_signals_of_each_alone(name):
    models = [build(name, seed) for seed in range(3)]
    model, _, places = models[0]
    classes = model(models[0][1]).shape[1]
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, *models[0][1].shape[1:], generator=rng)
    y = torch.randint(classes, (3, 20), generator=rng)
    counts = torch.tensor([20, 11, 16])
    states = [m.state_dict() for m, *_ in models]
    weights = {n: torch.stack([s[n] for s in states]) for n in states[0]}
    source = x.flip(1)
    together = measure(model, places, weights, x, y, counts, source, over_models)
    for i in range(3):
        one = {n: w[i : i + 1] for n, w in weights.items()}
        part = (rows[i : i + 1] for rows in (x, y, counts, source))
        alone = measure(model, places, one, *part)
        torch.testing.assert_close(together[i], alone[0], rtol=1e-3, atol=1e-4)
