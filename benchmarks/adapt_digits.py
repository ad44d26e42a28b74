"""`esper.adapt` as a user meets it: digits and a table, against plain fine-tuning.

    python benchmarks/adapt_digits.py [--quick]

A CNN with batch norm and dropout is trained on scikit-learn's digits, an MLP on a table that
`make_classification` draws. Then the data shift. Both sides get the same labelled rows.
Fine-tuning: all weights, eval mode, Adam at a constant rate, 300 steps of 32 rows, no schedule and
no choice of rate. `esper.adapt`: its defaults. Means of three draws of the labelled rows.
"""

import argparse
import copy
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, make_classification
from torch import Tensor, nn

import esper

RATES = (1e-3, 4e-3)
Rows = tuple[Tensor, Tensor]


def digits() -> Rows:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - x.mean()) / x.std())[order], torch.tensor(labels)[order]


def table() -> Rows:
    x, y = make_classification(
        3000, 20, n_informative=12, n_classes=5, n_clusters_per_class=2, random_state=0
    )
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
    )


def noisy(x: Tensor, y: Tensor) -> Rows:
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1)), y


def rescaled(x: Tensor, y: Tensor) -> Rows:
    rng = torch.Generator().manual_seed(2)
    return x * (0.5 + 2 * torch.rand(20, generator=rng)) + torch.randn(20, generator=rng), y


# name -> (data, labelled rows, shift)
CASES: dict[str, tuple[str, int, Callable[[Tensor, Tensor], Rows]]] = {
    "digits, inverted": ("digits", 100, lambda x, y: (-x, y)),
    "digits, labels permuted": ("digits", 60, lambda x, y: (x, (y * 3 + 1) % 10)),
    "digits, turned by 90 degrees": ("digits", 100, lambda x, y: (x.rot90(1, (2, 3)), y)),
    "digits, noise": ("digits", 150, noisy),
    "table, features rescaled": ("table", 100, rescaled),
}


def train(model: nn.Module, x: Tensor, y: Tensor, rate: float, steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), rate)
    rng = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(x), (32,), generator=rng)
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100 * float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one draw, fewer steps")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    torch.set_num_threads(1)
    steps, draws = (60, 1) if quick else (300, 3)
    data = {"digits": digits(), "table": table()}
    models = {"digits": cnn(), "table": mlp()}
    for name, model in models.items():
        x, y = data[name]
        train(model, x[: len(x) // 2], y[: len(x) // 2], 2e-3, 150 if quick else 600).eval()
    print("| case (rows) | as it is | fine-tuned, 1e-3 | fine-tuned, 4e-3 | esper.adapt | plans |")
    print("|---|---|---|---|---|---|")
    wins = 0
    for case, (name, labelled, shift) in CASES.items():
        model, (x, y) = models[name], data[name]
        x, y = shift(x[len(x) // 2 :], y[len(y) // 2 :])
        test = x[500:], y[500:]
        tuned, ours, plans = [0.0] * len(RATES), 0.0, []
        for draw in range(draws):
            rows = torch.randperm(500, generator=torch.Generator().manual_seed(draw))[:labelled]
            few = x[rows], y[rows]
            for i, rate in enumerate(RATES):
                tuned[i] += accuracy(train(copy.deepcopy(model), *few, rate, steps), *test) / draws
            result = esper.adapt(model, *few, steps=steps, rng_seed=draw, progress=False)
            ours += accuracy(result.model, *test) / draws
            plans.append(str(result.plan))
        wins += ours > max(tuned)
        cells = [accuracy(model, *test), *tuned, ours]
        shown = " | ".join(f"{cell:.1f}" for cell in cells)
        print(f"| {case} ({labelled}) | {shown} | {', '.join(plans)} |", flush=True)
    bar = {"value": wins, "bar": len(CASES), "met": wins == len(CASES)}
    print(json.dumps({"benchmark": "adapt_digits", "device": "cpu", "bars": {"cases_won": bar}}))


if __name__ == "__main__":
    main()
