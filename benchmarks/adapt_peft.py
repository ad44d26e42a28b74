"""`esper.adapt` against `peft`'s LoRA on a `transformers` model, with few rows.

    pip install peft transformers
    python benchmarks/adapt_peft.py [--quick]

A small BERT classifier is trained on MNIST-1D as 40 tokens of 24 levels. Then the data shift.
Both get the same 200 labelled rows, 300 steps of 32 rows and three learning rates chosen on a
quarter of the rows (LoRA) or three trainings (the controller's two tries and LP-FT), and are trained
again on all rows. LoRA: rank 8, alpha 16, queries and values, classifier trained too. Full
fine-tuning is treated the same way.
"""

import argparse
import copy
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from adapt_practice.scenarios import series
from adapt_practice.shifts import Shift
from esper.adapting.plans import RATES

LEVELS, ROWS, TEST_ROWS = 24, 200, 1000
KINDS = ("sign", "reverse", "noise", "permute_labels")


def tokens(x: Tensor) -> Tensor:
    return ((x.flatten(1).clamp(-2.4, 2.4) + 2.4) / 4.8 * (LEVELS - 1)).round().long()


def new_model() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=LEVELS, max_position_embeddings=40, intermediate_size=128, num_labels=10,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes,
        )
    )  # fmt: skip


def train(model: nn.Module, ids: Tensor, y: Tensor, rate: float, steps: int, batch: int) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rng = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(ids), (batch,), generator=rng)
        loss = F.cross_entropy(model(input_ids=ids[rows]).logits, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, ids: Tensor, y: Tensor) -> float:
    parts = [model(input_ids=part).logits.argmax(1) for part in ids.split(250)]
    return float((torch.cat(parts) == y).float().mean())


def lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], task_type="SEQ_CLS")
    return get_peft_model(copy.deepcopy(model), config)


def tuned(make: Callable[[], nn.Module], ids: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Trained at three rates on three quarters of the rows; the best rate again on all."""
    held_out = len(y) // 4
    scores = []
    for rate in RATES:
        model = make()
        train(model, ids[held_out:], y[held_out:], rate, steps, 32)
        scores.append(accuracy(model, ids[:held_out], y[:held_out]))
    model = make()
    train(model, ids, y, RATES[scores.index(max(scores))], steps, 32)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less training, two shifts")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    torch.set_num_threads(2)
    (x, y), (fresh, labels) = series()
    model = new_model()
    train(model, tokens(x), y, 1e-3, 150 if quick else 1500, 64)
    model.eval()
    print(
        "as trained:",
        round(100 * accuracy(model, tokens(fresh[:TEST_ROWS]), labels[:TEST_ROWS]), 1),
    )
    results: dict[str, list[float]] = {
        "as it is": [],
        "full fine-tuning": [],
        "peft LoRA": [],
        "esper": [],
    }
    for number, kind in enumerate(KINDS[:2] if quick else KINDS):
        shifted, y_shifted = Shift(kind, 0.5, 50 + number)(
            fresh[: ROWS + TEST_ROWS], labels[: ROWS + TEST_ROWS], 10
        )
        ids = tokens(shifted)
        few, few_y, test, test_y = ids[:ROWS], y_shifted[:ROWS], ids[ROWS:], y_shifted[ROWS:]
        steps = 60 if quick else 300
        ours = esper.adapt(model, {"input_ids": few}, few_y, steps=steps, progress=False)
        models = {
            "as it is": model,
            "full fine-tuning": tuned(lambda: copy.deepcopy(model), few, few_y, steps),
            "peft LoRA": tuned(lambda: lora(model), few, few_y, steps),
            "esper": ours.model,
        }
        for name, found in models.items():
            results[name].append(100 * accuracy(found, test, test_y))
        shown = ", ".join(f"{name} {values[-1]:.1f}" for name, values in results.items())
        print(f"{kind}: {shown}; {ours.plan}", flush=True)
    lead = sum(results["esper"]) / len(results["esper"]) - sum(results["peft LoRA"]) / len(
        results["peft LoRA"]
    )
    bars = {"above_peft_lora": {"value": round(lead, 1), "bar": 0.0, "met": lead > 0}}
    print(json.dumps({"benchmark": "adapt_peft", "device": "cpu", "bars": bars}))


if __name__ == "__main__":
    main()
