"""Adapt a trained model to two new sites, with 60 labelled rows each.

    python examples/04_adapt_a_model.py

A small CNN is trained on handwritten digits. At one site the camera gives negatives, at the other
the classes have other numbers. The same call changes the model in another way for each.
"""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import esper

LABELLED, STEPS = 60, 300


def digits() -> tuple[Tensor, Tensor]:
    """1,797 handwritten digits of 8 x 8 pixels, shuffled and standardised."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    return ((images - images.mean()) / images.std())[order], torch.tensor(data.target)[order]


def train(model: nn.Module, x: Tensor, y: Tensor, rate: float, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        rows = torch.randint(len(x), (32,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> str:
    with torch.no_grad():
        return f"{100 * float((model(x).argmax(1) == y).float().mean()):.1f} %"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y = digits()
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(384, 48), nn.ReLU()),
        nn.Linear(48, 10),
    )
    train(model, x[:900], y[:900], rate=2e-3, steps=400)
    model.eval()
    print("trained model, its own data:", accuracy(model, x[900:], y[900:]))

    for site, (site_x, site_y) in {
        "negatives": (-x, y),
        "renumbered": (x, (3 * y + 1) % 10),
    }.items():
        few = site_x[900:][:LABELLED], site_y[900:][:LABELLED]
        test = site_x[1100:], site_y[1100:]
        print(f"\n{site}: as it is  ", accuracy(model, *test))
        tuned = copy.deepcopy(model)
        train(tuned, *few, rate=1e-3, steps=STEPS)
        print(f"{site}: fine-tuned", accuracy(tuned, *test))
        result = esper.adapt(model, *few, steps=STEPS, progress=False)
        print(f"{site}: adapted   ", accuracy(result.model, *test))
        print(result)


if __name__ == "__main__":
    main()
