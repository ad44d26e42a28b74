"""The overhead of growth without seeds, and its gain on users' models of several families.

    python benchmarks/grow.py [--quick] [--rng-seeds 5] [--budget 2] [--families "tabular MLP" GRU]

1. CPU time of a training step with all slots dormant, compared with the same step without Esper:
   medians of interleaved blocks in one process, for a small MLP and a residual CNN.
2. Typical scripts: AdamW with a decaying learning rate, `esper.grow` with defaults and twice the
   parameters as budget. Networks are chosen on validation rows; test rows are read once at the end.
   The grown network is compared with its ungrown twin (same steps, batches and randomness) and with
   two wider static networks trained the same way: one with as many parameters, one with as many
   multiply-adds. The multiply-adds of growing and measuring, without the twin's training, are given
   relative to the training of the first.
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

import numpy as np
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
BATCH, WEIGHT_DECAY = 100, 0.01


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


class Family(NamedTuple):
    """A user's model and data; the loss and the score are of an output and its targets."""

    make: Callable[[int], nn.Module]  # by width
    width: int
    step: int  # between possible widths
    data: Callable[[], tuple[Tensor, Tensor]]  # rows: 64 % to train, 16 % to validate, 20 % to test
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]  # one per example, 0 to 1
    learning_rate: float
    steps: int


def series_cnn(width: int) -> nn.Module:
    """As published with MNIST-1D, narrower."""
    sizes = ((1, 5), (width, 3), (width, 3))
    convs = [
        part for n, k in sizes for part in (nn.Conv1d(n, width, k, stride=2, padding=1), nn.ReLU())
    ]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(5 * width, 10))


def mlp(inputs: int, width: int, outputs: int) -> nn.Module:
    hidden = (nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Transformer(nn.Module):
    """Two blocks, pre-norm: of tokens with a causal mask, or of image patches with a mean."""

    def __init__(self, embed: nn.Module, width: int, length: int, classes: int, *, causal: bool):
        super().__init__()
        self.embed, self.head = embed, nn.Linear(width, classes)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        mask = nn.Transformer.generate_square_subsequent_mask(length) if causal else None
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        x = self.norm(x)
        return self.head(x) if self.mask is not None else self.head(x.mean(1))


def mobile_cnn(width: int) -> nn.Module:
    """Inverted blocks: pointwise, depthwise, pointwise."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU6()]
    for _ in range(2):
        inner = 2 * width
        layers += [nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner), nn.ReLU6()]
        layers += [nn.Conv2d(inner, inner, 3, 2, 1, groups=inner), nn.BatchNorm2d(inner)]
        layers += [nn.ReLU6(), nn.Conv2d(inner, width, 1), nn.BatchNorm2d(width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Recurrent(nn.Module):
    """A GRU over the rows of an image."""

    def __init__(self, width: int):
        super().__init__()
        self.rnn = nn.GRU(8, width, batch_first=True)
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.rnn(x.squeeze(1))[0][:, -1])))


def mnist1d() -> tuple[Tensor, Tensor]:
    from mnist1d.data import get_dataset_args, make_dataset

    data = make_dataset(get_dataset_args())
    x, y = (np.concatenate((data[name], data[f"{name}_test"])) for name in ("x", "y"))
    return torch.tensor(x, dtype=torch.float32).unsqueeze(1), torch.tensor(y)


def tabular() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import make_classification

    x, y = make_classification(
        5000, 20, n_informative=15, n_classes=5, n_clusters_per_class=4, random_state=0
    )
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def regression() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(4000, noise=1.0, random_state=0)
    y = (y - y.mean()) / y.std()
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32).unsqueeze(1)


def text(length: int = 24, symbols: int = 12) -> tuple[Tensor, Tensor]:
    """Each symbol depends on the two before it; the target is the next symbol."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(symbols, symbols, symbols, generator=generator)
    rows = torch.randint(0, symbols, (4000, 2), generator=generator)
    for _ in range(length - 1):
        chances = logits[rows[:, -2], rows[:, -1]].softmax(1)
        rows = torch.cat((rows, chances.multinomial(1, generator=generator)), 1)
    return rows[:, :-1], rows[:, 1:]


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images / 8 - 1, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order].unsqueeze(1), torch.tensor(found.target)[order]


def patches() -> tuple[Tensor, Tensor]:
    x, y = digits()
    return x[:, 0].unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(x), 16, 4), y


def is_right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().reshape(len(target), -1).mean(1)


def closeness(output: Tensor, target: Tensor) -> Tensor:
    """The targets have a variance of 1."""
    return 1 / (1 + (output - target).square().mean(1))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


FAMILIES = {
    "series CNN": Family(series_cnn, 8, 1, mnist1d, F.cross_entropy, is_right, 2e-2, 1000),
    "tabular MLP": Family(
        lambda w: mlp(20, w, 5), 16, 1, tabular, F.cross_entropy, is_right, 5e-3, 2000
    ),
    "regression MLP": Family(
        lambda w: mlp(10, w, 1), 8, 1, regression, F.mse_loss, closeness, 5e-3, 1500
    ),
    "small GPT": Family(
        lambda w: Transformer(nn.Embedding(12, w), w, 24, 12, causal=True),
        *(16, 2, text, token_loss, is_right, 3e-3, 600),
    ),
    "small ViT": Family(
        lambda w: Transformer(nn.Linear(4, w), w, 16, 10, causal=False),
        *(16, 2, patches, F.cross_entropy, is_right, 3e-3, 600),
    ),
    "residual CNN": Family(
        lambda w: ResidualCNN(w, 10), 4, 1, digits, F.cross_entropy, is_right, 5e-3, 400
    ),
    "mobile CNN": Family(mobile_cnn, 6, 1, digits, F.cross_entropy, is_right, 1e-2, 400),
    "GRU": Family(Recurrent, 8, 1, digits, F.cross_entropy, is_right, 1e-2, 600),
}


class Outcome(NamedTuple):
    score: float  # on the test rows
    params: int
    macs: int


class Task:
    """A family with its rows; test rows are read once, in `outcome`."""

    def __init__(self, family: Family, rng_seed: int, steps: int, budget: float):
        self.family, self.rng_seed, self.steps, self.budget = family, rng_seed, steps, budget
        x, y = family.data()
        a, b = int(0.64 * len(x)), int(0.8 * len(x))
        self.train, self.val, self.test = (x[:a], y[:a]), (x[a:b], y[a:b]), (x[b:], y[b:])
        self.loader = DataLoader(TensorDataset(*self.train), batch_size=BATCH, shuffle=True)

    def start(self, width: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(self.rng_seed)
        model = self.family.make(width)
        rate = self.family.learning_rate
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=WEIGHT_DECAY)
        # constant for 70 % of the steps, then a straight line down to 2 %
        share = lambda step: 1 - 0.98 * max(0.0, step / self.steps - 0.7) / 0.3  # noqa: E731
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)

    def score(self, model: nn.Module, rows: tuple[Tensor, Tensor]) -> float:
        model.eval()
        with torch.no_grad():
            return float(self.family.score(model(rows[0]), rows[1]).mean())

    def macs(self, model: nn.Module) -> int:
        return count_macs(model, self.train[0][:1])

    def outcome(self, model: nn.Module) -> Outcome:
        return Outcome(self.score(model, self.test), count_params(model), self.macs(model))

    def grow(self) -> "esper.GrowthResult":
        model, optimizer, scheduler = self.start(self.family.width)
        return esper.grow(
            model,
            self.loader,
            [self.val],
            loss=self.family.loss,
            metric=self.family.score,
            optimizer=optimizer,
            scheduler=scheduler,
            budget=esper.Budget(params=round(self.budget * count_params(model))),
            steps=self.steps,
            progress=False,
        )

    def train_alone(self, width: int) -> nn.Module:
        """A static network trained the same way; the best of 25 validations."""
        model, optimizer, scheduler = self.start(width)
        best, weights, step = -1.0, {}, 0
        while step < self.steps:
            for x, y in self.loader:
                model.train()
                optimizer.zero_grad()
                self.family.loss(model(x), y).backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if step % max(1, self.steps // 25) == 0:
                    found = self.score(model, self.val)
                    if found > best:
                        best, weights = found, copy.deepcopy(model.state_dict())
                if step == self.steps:
                    break
        model.load_state_dict(weights)
        return model

    def compare(self) -> tuple[dict[str, Outcome], str]:
        """The grown network before any rescue by the twin, the twin, two wider static ones."""
        family, result = self.family, self.grow()
        grown = result.growth.plain_model()
        networks = {"ungrown": result.ungrown, "grown": grown}
        for name, cost in (
            ("as many parameters", count_params),
            ("as many multiply-adds", self.macs),
        ):
            widths = range(family.width, 99, family.step)
            wider = next(w for w in widths if cost(family.make(w)) >= cost(grown))
            networks[name] = self.train_alone(wider)
        kept = ", ".join(f"{b} at {s}" for s, b in result.growth.seeds.items())
        costs = result.ledger.costs
        paid = costs["growing"].macs + costs["measuring"].macs  # the twin's measurements too
        static = 3 * BATCH * self.steps * self.macs(networks["as many parameters"])
        kept = f"{paid / static:.2f}x the compute of as many parameters; {kept}"
        return {name: self.outcome(model) for name, model in networks.items()}, kept


def compare_family(
    name: str, rng_seeds: int, steps: int | None, budget: float
) -> dict[str, dict[str, Any]]:
    """Print a table of all arms; returns the gains over two of them, with bars, by arm."""
    family = FAMILIES[name]
    tasks = [Task(family, seed, steps or family.steps, budget) for seed in range(rng_seeds)]
    rows = []
    print(f"\n{name}: test score after {steps or family.steps} steps (parameters, multiply-adds)")
    for task in tasks:
        row, kept = task.compare()
        if not rows:
            print(f"{'rng seed':<10}" + "".join(f"{arm:>28}" for arm in row))
        rows.append(row)
        cells = [f"{o.score:.3f} ({o.params:,}, {o.macs:,})" for o in row.values()]
        print(f"{task.rng_seed:<10}" + "".join(f"{cell:>28}" for cell in cells) + f"  {kept}")
    means = [statistics.mean(row[arm].score for row in rows) for arm in rows[0]]
    print(f"{'mean':<10}" + "".join(f"{mean:>28.3f}" for mean in means))
    bars = {}
    for arm in ("ungrown", "as many parameters"):
        gains = [row["grown"].score - row[arm].score for row in rows]
        mean = statistics.mean(gains)
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        print(f"gain over {arm}: {mean:+.3f} +- {error:.3f}, least {min(gains):+.3f}", flush=True)
        bars[arm] = {"value": mean, "bar": -2 * error, "met": mean >= -2 * error}
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer blocks, one short run")
    parser.add_argument("--rng-seeds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=2.0, help="parameters, times the model's")
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), help="default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bars: dict[str, dict[str, float | bool]] = {}

    print(f"{'a training step':<46}{'plain':>10}{'dormant slots':>16}")
    for case in CASES:
        plain, share = overhead(case, blocks=21 if options.quick else 101)
        print(f"{case:<46}{plain:>8.2f}ms{share:>+15.1%}")
        name = "overhead_" + case.split()[0].lower()
        bars[name] = {"value": share, "bar": OVERHEAD_BAR, "met": share <= OVERHEAD_BAR}

    for family in options.families or list(FAMILIES)[: 2 if options.quick else None]:
        seeds, steps = (1, 100) if options.quick else (options.rng_seeds, None)
        for arm, bar in compare_family(family, seeds, steps, options.budget).items():
            bars[f"gain_over_{arm}_{family}".lower().replace(" ", "_")] = bar
    print(json.dumps({"benchmark": "grow", "device": "cpu", "bars": bars}))


if __name__ == "__main__":
    main()
