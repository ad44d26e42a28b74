"""Grow a network in the Trainer of Lightning.

    pip install "esper-lite[tasks]" lightning
    python examples/06_grow_in_lightning.py

The callback calls a `Growth` where your own loop would: after every optimizer step, and once an
epoch for a decision. Lightning's checkpoints do not contain seeds: save with `growth.save`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper


class GrowthCallback(Callback):
    """Grows the module's `net`; `options` are those of `esper.Growth`."""

    def __init__(self, **options: Any):
        self.options, self.steps = options, 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.growth = esper.Growth(
            module.net, trainer.optimizers[0], scheduler=trainer.lr_scheduler_configs[0].scheduler,
            decisions=trainer.max_epochs, score=module.score, **self.options,
        )  # fmt: skip

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > self.steps:  # not while gradients accumulate
            self.steps = trainer.global_step
            self.growth.after_step()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        decision = self.growth.decide()
        action = f"{decision.op} {decision.site or ''}" if decision else "closed"
        print(f"accuracy {self.growth.ledger.steps[-1].metric:.3f}  {action}")


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def score(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.net(batch[0]).argmax(1) == batch[1]).float()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)]


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    rows, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    budget, held_out = esper.Budget(params=2_000), [(rows[1400:], labels[1400:])]
    callback = GrowthCallback(example=rows[:64], budget=budget, val_loader=held_out)
    loader = DataLoader(TensorDataset(rows[:1400], labels[:1400]), 64, shuffle=True)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    Trainer(max_epochs=12, callbacks=[callback], **options).fit(Classifier(), loader)
    growth = callback.growth
    print(f"{growth.ledger.before.params} -> {growth.params} parameters: {growth.seeds}")
    torch.save(growth.plain_model(), "grown.pt")


if __name__ == "__main__":
    main()
