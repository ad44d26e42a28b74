"""Grow your own model in your own training loop; the result is a plain PyTorch model.

    python examples/03_grow_your_model.py

The model does not use Esper. Growth finds sites in it, tries seeds there while it trains, keeps
those that pay for their size and stays within the budget.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import esper

EPOCHS, BATCH = 12, 64


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits of 8 x 8 pixels, shuffled."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(data.target)[order]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = digits()
    val_images, val_labels = images[1200:], labels[1200:]
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

    growth = esper.Growth(  # line 1
        model,
        optimizer,
        example=images[:BATCH],
        budget=esper.Budget(params=1_000),
        decisions=EPOCHS,
        val_loader=[(val_images, val_labels)],
        score=lambda batch: (model(batch[0]).argmax(1) == batch[1]).float(),
    )
    print(growth.describe())
    for epoch in range(EPOCHS):
        for rows in torch.randperm(1200).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            growth.after_step(loss)  # line 2
        decision = growth.decide()  # line 3
        action = f"{decision.op} {decision.site or ''}" if decision else "closed"
        print(f"epoch {epoch:>2}  accuracy {growth.ledger.steps[-1].metric:.3f}  {action}")

    print(f"{growth.ledger.before.params} -> {growth.params} parameters: {growth.seeds}")
    print(f"accuracy {growth.best_metric:.3f}")
    for name, path in growth.export("grown", formats=("torch", "source")).items():
        print(f"exported as {name}: {path}")


if __name__ == "__main__":
    main()
