"""The overhead of growth without seeds, and its gain on a user's MNIST-1D model.

    python benchmarks/grow.py [--quick] [--rng-seeds 5]

1. CPU time of a training step with all slots dormant, compared with the same step without Esper:
   medians of interleaved blocks in one process, for a small MLP and a residual CNN.
2. A typical script: a small convolutional network, AdamW with a decaying learning rate,
   `esper.grow` with defaults. The network is chosen on validation rows; test rows are read once at
   the end. It is compared with its ungrown twin (same steps, batches and randomness) and with two
   wider static networks trained the same way: one with as many parameters, one with as many
   multiply-adds.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growing.sites import count_macs, count_params

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.models import ResidualCNN

OVERHEAD_BAR = 0.03
CALLS = 10  # steps per measurement
STEPS, BATCH = 1_000, 100
LEARNING_RATE, WEIGHT_DECAY = 2e-2, 0.01


def wide_mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 64-128-128-10, batch 64": (wide_mlp, (64, 64)),
    "residual CNN, 8 channels, 16 x 16, batch 32": (
        lambda: ResidualCNN(8, classes=10),
        (32, 1, 16, 16),
    ),
}


def training_steps(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Callable[[], None], ...]:
    """A step without Esper and one with dormant slots, for the same weights.

    Both use one model, because its place in memory changes a step's time by some per cent. Growth
    adds only a call, a step hook and parameter groups.
    """
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    own_groups, own_hooks = list(optimizer.param_groups), optimizer._optimizer_step_pre_hooks.copy()
    growth = esper.Growth(model, optimizer, example=x, decisions=8)
    all_groups, all_hooks = optimizer.param_groups, optimizer._optimizer_step_pre_hooks

    def train(groups: list[dict[str, Any]], hooks: Any) -> None:
        optimizer.param_groups, optimizer._optimizer_step_pre_hooks = groups, hooks
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def plain() -> None:
        train(own_groups, own_hooks)

    def dormant() -> None:
        train(all_groups, all_hooks)
        growth.after_step()

    return plain, dormant


def overhead(case: str, blocks: int) -> tuple[float, float]:
    """Milliseconds of a plain step, and the share that dormant slots add to it."""
    make, shape = CASES[case]
    torch.manual_seed(0)
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
    plain, dormant = training_steps(make(), x, y)
    cpu_seconds(plain), cpu_seconds(dormant)
    times: dict[Callable[[], None], list[float]] = {plain: [], dormant: []}
    for block in range(blocks):
        for step in (plain, dormant) if block % 2 else (dormant, plain):
            times[step].append(cpu_seconds(step))
    # paired: load on the machine affects neighbouring blocks equally
    ratios = [with_slots / alone for alone, with_slots in zip(*times.values(), strict=True)]
    return 1e3 * statistics.median(times[plain]), statistics.median(ratios) - 1


def cpu_seconds(step: Callable[[], None]) -> float:
    """CPU seconds of one step on one thread; other work on the machine does not count."""
    start = time.process_time()
    for _ in range(CALLS):
        step()
    return (time.process_time() - start) / CALLS


def network(width: int) -> nn.Sequential:
    """As published with MNIST-1D, narrower."""
    return nn.Sequential(
        nn.Conv1d(1, width, 5, 2, 1),
        nn.ReLU(),
        nn.Conv1d(width, width, 3, 2, 1),
        nn.ReLU(),
        nn.Conv1d(width, width, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * width, 10),
    )


def mnist1d() -> tuple[TensorDataset, TensorDataset, tuple[Tensor, Tensor]]:
    """3,200 rows to train on, 800 to validate, and the 1,000 test rows."""
    from mnist1d.data import get_dataset_args, make_dataset

    data = make_dataset(get_dataset_args())

    def tensors(x: Any, y: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor(x, dtype=torch.float32).unsqueeze(1), torch.tensor(y)

    x, y = tensors(data["x"], data["y"])
    test = tensors(data["x_test"], data["y_test"])
    return TensorDataset(x[:3200], y[:3200]), TensorDataset(x[3200:], y[3200:]), test


def falling(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Constant for 70 % of the steps, then a straight line down to 2 %."""
    share = lambda step: 1 - 0.98 * max(0.0, step / steps - 0.7) / 0.3  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def accuracy(model: nn.Module, rows: tuple[Tensor, Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(rows[0]).argmax(1) == rows[1]).float().mean())


def macs(model: nn.Module) -> int:
    return count_macs(model, torch.zeros(1, 1, 40))


class Outcome(NamedTuple):
    accuracy: float  # on the test rows
    params: int
    macs: int


def grow_one(width: int, rng_seed: int, steps: int) -> dict[str, Outcome]:
    """The grown network, its twin and two wider static ones."""
    train_rows, val_rows, test = mnist1d()
    train_loader = DataLoader(train_rows, batch_size=BATCH, shuffle=True)
    val_loader = DataLoader(val_rows, batch_size=len(val_rows))
    torch.manual_seed(rng_seed)
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    result = esper.grow(
        model,
        train_loader,
        val_loader,
        loss=F.cross_entropy,
        optimizer=optimizer,
        scheduler=falling(optimizer, steps),
        budget=esper.Budget(params=3 * count_params(model)),
        steps=steps,
        progress=False,
    )
    grown = result.growth.plain_model()
    networks = {"ungrown": result.ungrown, "grown": grown}
    for name, cost in (("as many parameters", count_params), ("as many multiply-adds", macs)):
        wider = next(w for w in range(width, 99) if cost(network(w)) >= cost(grown))
        networks[name] = train_alone(wider, rng_seed, steps, train_loader, val_rows.tensors)
    return {
        name: Outcome(accuracy(model, test), count_params(model), macs(model))
        for name, model in networks.items()
    }


def train_alone(
    width: int, rng_seed: int, steps: int, loader: DataLoader[Any], val_rows: tuple[Tensor, ...]
) -> nn.Module:
    """A static network trained the same way; the best of 25 validations."""
    torch.manual_seed(rng_seed)
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    scheduler = falling(optimizer, steps)
    best, weights, step = -1.0, {}, 0
    while step < steps:
        for x, y in loader:
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % max(1, steps // 25) == 0:
                found = accuracy(model, (val_rows[0], val_rows[1]))
                if found > best:
                    best, weights = found, copy.deepcopy(model.state_dict())
            if step == steps:
                break
    model.load_state_dict(weights)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer blocks, one short run")
    parser.add_argument("--rng-seeds", type=int, default=5)
    parser.add_argument("--width", type=int, default=8, help="channels of the user's network")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bars: dict[str, dict[str, float | bool]] = {}

    print(f"{'a training step':<46}{'plain':>10}{'dormant slots':>16}")
    for case in CASES:
        plain, share = overhead(case, blocks=21 if options.quick else 101)
        print(f"{case:<46}{plain:>8.2f}ms{share:>+15.1%}")
        name = "overhead_" + case.split()[0].lower()
        bars[name] = {"value": share, "bar": OVERHEAD_BAR, "met": share <= OVERHEAD_BAR}

    seeds, steps = (1, 100) if options.quick else (options.rng_seeds, STEPS)
    rows = [grow_one(options.width, rng_seed, steps) for rng_seed in range(seeds)]
    print(f"\nMNIST-1D test accuracy after {steps} steps (parameters, multiply-adds)")
    print(f"{'rng seed':<10}" + "".join(f"{name:>28}" for name in rows[0]))
    for rng_seed, row in enumerate(rows):
        cells = [f"{o.accuracy:.3f} ({o.params:,}, {o.macs:,})" for o in row.values()]
        print(f"{rng_seed:<10}" + "".join(f"{cell:>28}" for cell in cells))
    means = [statistics.mean(row[name].accuracy for row in rows) for name in rows[0]]
    print(f"{'mean':<10}" + "".join(f"{mean:>28.3f}" for mean in means))
    gains = [row["grown"].accuracy - row["ungrown"].accuracy for row in rows]
    print(f"gain over the ungrown twin: {statistics.mean(gains):+.3f}, least {min(gains):+.3f}")
    bars["least_gain_over_ungrown"] = {"value": min(gains), "bar": 0.0, "met": min(gains) > 0}
    print(json.dumps({"benchmark": "grow", "device": "cpu", "bars": bars}))


if __name__ == "__main__":
    main()
