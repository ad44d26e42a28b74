"""The models, data and shifts that `adapt.py` judges controllers on, and the tables of all plans.

    python benchmarks/adapt_suites.py OUT [--device cuda] [--quick] [--images fashion=FILE ...]

Writes one file of tables per suite to OUT. Kinds of shift, two architectures and all data sets but
MNIST-1D are held out: controllers never practise on them.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapt_practice.scenarios import HELD_OUT_KINDS, conv_norm, conv_pool, mlp, series
from adapt_practice.shifts import Rows, Shift
from adapt_practice.trials import Scenario, TrialSettings, train_models, try_plans
from esper.adapting.plans import KNOWN_RULES, PLANS, HeadMode
from esper.tolaria.tasks import Task, data, digits

IMAGE_KINDS = (
    "noise", "smooth", "contrast", "occlude", "sign", "reverse", "permute_labels", "new_classes",
)  # fmt: skip
SHORT_TRIAL = 25  # steps
# one plan per place and kind of change, for the arm that tries each of them shortly
PLACES = tuple(plan for plan in PLANS if plan.head == HeadMode.ALONGSIDE)


class Suite(NamedTuple):
    build: Callable[[], nn.Module]
    rows: tuple[Rows, Rows]  # source, target
    kinds: tuple[str, ...]
    labelled: tuple[int, ...]
    per_kind: int
    replicates: int
    test_rows: int = 1000


class Residual(nn.Module):
    """`x + conv(relu(norm(x)))`."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(x).relu())


def residual(width: int = 16) -> nn.Module:
    """A stem with stride, four residual blocks, a head on means."""
    blocks = [Residual(width) for _ in range(4)]
    pool = [nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(4 * width, 10)]
    return nn.Sequential(nn.Conv1d(1, width, 5, 2, 2), *blocks, *pool)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norm1(x)).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for p in parts)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        mixed = (scores.softmax(-1) @ value).transpose(-2, -3).flatten(-2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A classifier of series in ten patches of four values."""

    def __init__(self, width: int = 32, depth: int = 3):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.position = nn.Parameter(0.1 * torch.randn(10, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(1).unflatten(-1, (10, 4))) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(tokens).mean(-2)))
        return logits


def image_cnn(channels: int, size: int, widths: tuple[int, ...]) -> nn.Module:
    """Blocks of convolution, norm and ReLU, each with stride 2."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [
            nn.Sequential(nn.Conv2d(channels, width, 3, 2, 1), nn.GroupNorm(1, width), nn.ReLU())
        ]
        channels, size = width, (size + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * size * size, 10))


def rows_of(task: Task, num_source: int, device: str) -> tuple[Rows, Rows]:
    """All rows of a task, split into those that models know and those that are shifted."""
    x = torch.cat([task.train_x[0], task.validation_x[0], task.held_out.sealed()[0][0]]).to(device)
    y = torch.cat([task.train_y[0], task.validation_y[0], task.held_out.sealed()[1][0]]).to(device)
    return (x[:num_source], y[:num_source]), (x[num_source:], y[num_source:])


def suites(device: str, images: dict[str, Path], quick: bool) -> dict[str, Suite]:
    rows = series(device)
    labelled, per_kind = ((100,), 1) if quick else ((30, 100, 300, 1000), 2)
    common = (rows, HELD_OUT_KINDS[:4] if quick else HELD_OUT_KINDS, labelled, per_kind)
    found = {"conv_norm": Suite(partial(conv_norm, 16, 10), *common, 1 if quick else 2)}
    if quick:
        return found
    found["conv_pool"] = Suite(partial(conv_pool, 24, 10), *common, 2)
    found["mlp"] = Suite(partial(mlp, 64, False, 10), *common, 2)
    found["residual"] = Suite(residual, *common, 1)
    found["transformer"] = Suite(Transformer, *common, 1)
    few = (IMAGE_KINDS, (100, 300), 2, 1)
    eights = rows_of(digits(), 800, device)
    found["digits"] = Suite(partial(image_cnn, 1, 8, (16, 32)), eights, *few, test_rows=600)
    for name, path in images.items():
        rows = rows_of(data(path), 5000, device)
        channels, size = rows[0][0].shape[1:3]
        build = partial(image_cnn, channels, size, (16, 32, 48))
        found[name] = Suite(build, rows, *few)
    return found


def collect(name: str, suite: Suite, settings: TrialSettings, quick: bool) -> dict[str, object]:
    """Train the suite's models, and try every plan in every scenario."""
    rng, number, scenarios = random.Random(name), 0, []
    for kinds in suite.kinds:
        for labelled in suite.labelled:
            for _ in range(suite.per_kind):
                number += 1
                scenarios.append(Scenario(Shift(kinds, rng.random(), 7_000_000 + number), labelled))
    pool = train_models(
        suite.build,
        suite.rows[0],
        num_models=6 if quick else 12,
        num_classes=10,
        steps=300 if quick else 1500,
        rng_seed=99,
    )
    plans = (
        (*KNOWN_RULES.values(), *[p for p in PLANS if p.head == HeadMode.KEEP][:6])
        if quick
        else PLANS
    )
    tried = partial(try_plans, pool, suite.rows[1], scenarios, rng_seed=99)
    tables = [
        tried(settings, plans=plans, fit_rng_seed=1000 * replicate)._asdict()
        for replicate in range(suite.replicates)
    ]
    tuned = [KNOWN_RULES["full fine-tuning"]]
    return {
        "tables": tables,
        "auto_rgn": tried(settings, plans=tuned, auto_rgn=True)._asdict(),
        "short": tried(replace(settings, steps=SHORT_TRIAL), plans=PLACES)._asdict(),
        "plans": [tuple(map(int, p)) for p in plans],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--images", nargs="*", default=[], help="name=file.npz of image data")
    parser.add_argument("--only", nargs="*", help="names of suites")
    arguments = parser.parse_args()
    images = {name: Path(path) for name, path in (pair.split("=") for pair in arguments.images)}
    for name, suite in suites(arguments.device, images, arguments.quick).items():
        if arguments.only and name not in arguments.only:
            continue
        began = time.perf_counter()
        settings = TrialSettings(
            test_rows=suite.test_rows, steps=100 if arguments.quick else 300, replicas=8192
        )
        result = collect(name, suite, settings, arguments.quick)
        torch.save(result, arguments.out / f"{name}.pt")
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
