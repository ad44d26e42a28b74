"""Grow a model in the Trainer of `transformers`.

    pip install "esper-lite[tasks]" transformers accelerate
    python examples/05_grow_in_transformers_trainer.py

The callback calls a `Growth` where your own loop would: after every optimizer step, and once an
epoch for a decision. Leave `load_best_model_at_end` off: it would load weights without seeds.
"""

from typing import Any

import torch
import transformers
from sklearn.datasets import load_digits
from torch import nn

import esper


class GrowthCallback(transformers.TrainerCallback):
    """Grows the Trainer's model; `options` are those of `esper.Growth`."""

    def __init__(self, example: torch.Tensor, **options: Any):
        self.example, self.options = example, options

    def on_train_begin(self, args, state, control, model, optimizer, lr_scheduler, **_) -> None:
        optimizer = optimizer.optimizer  # inside that of accelerate
        self.growth = esper.Growth(
            model, optimizer, scheduler=lr_scheduler, example=self.example.to(model.device),
            decisions=int(args.num_train_epochs), **self.options,
        )  # fmt: skip

    def on_pre_optimizer_step(self, args, state, control, **_) -> None:
        """Clip the seeds too; the Trainer has clipped the model."""
        nn.utils.clip_grad_norm_(self.growth.parameters(), args.max_grad_norm)

    def on_step_end(self, args, state, control, **_) -> None:
        self.growth.after_step()

    def on_epoch_end(self, args, state, control, **_) -> None:
        decision = self.growth.decide()
        action = f"{decision.op} {decision.site or ''}" if decision else "closed"
        print(f"accuracy {self.growth.ledger.steps[-1].metric:.3f}  {action}")


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()  # every image is a text of 64 grey levels
    texts, labels = torch.tensor(digits.data).long(), torch.tensor(digits.target)
    pairs = zip(texts[:1400], labels[:1400], strict=True)
    rows = [{"input_ids": text, "labels": label} for text, label in pairs]
    config = transformers.BertConfig(
        vocab_size=17, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64, num_labels=10,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)

    def score(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = (part.to(model.device) for part in batch)
        return (model(inputs).logits.argmax(1) == targets).float()

    callback = GrowthCallback(
        example=texts[:32], budget=esper.Budget(params=12_000),
        val_loader=[(texts[1400:], labels[1400:])], score=score,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        num_train_epochs=10, per_device_train_batch_size=32, learning_rate=3e-3,
        use_cpu=True, save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    growth = callback.growth
    print(f"{growth.ledger.before.params} -> {growth.params} parameters: {growth.seeds}")
    torch.save(growth.plain_model(), "grown.pt")


if __name__ == "__main__":
    main()
