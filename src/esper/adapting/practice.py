"""What controllers practise on: trained models of several shapes, and many kinds of shift.

Kinds of shift, architectures and data sets that are not listed here are held out: results on them
show what a controller makes of what it never saw.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from esper.adapting.plans import MENU, PLANS, Plan
from esper.adapting.shifts import Rows, Shift
from esper.adapting.trial_envs import Outcomes
from esper.adapting.trials import Scenario, TrialSettings, TrialTable, train_models, try_plans
from esper.tolaria.tasks import mnist1d

INPUT_KINDS = (
    "sign", "noise", "gain", "dead", "saturate", "rectify", "roll", "quantise", "spikes",
    "scramble", "derivative", "local_gain", "contrast", "interference", "power", "echo",
    "jitter", "threshold",
)  # fmt: skip
OUTPUT_KINDS = ("move_labels", "swap_labels", "merge_labels", "new_classes")
HELD_OUT_KINDS = (
    "reverse", "smooth", "drift", "occlude", "resample", "swap_halves", "mixture",
    "permute_labels", "new_classes+reverse", "permute_labels+drift", "smooth+swap_labels",
    "mixture+new_classes",
)  # fmt: skip
ROWS = (30, 1000)  # labelled rows, log-uniform


@dataclass(frozen=True)
class Architecture:
    """Models of one shape on MNIST-1D, whose ten classes are joined to `num_classes`."""

    build: Callable[[int], nn.Module]  # from the number of classes
    num_classes: int
    shape: tuple[int, ...] = (1, 40)  # in which a row is given


def _conv_block(width_in: int, width: int, kernel: int, stride: int, norm: bool) -> nn.Sequential:
    conv = nn.Conv1d(width_in, width, kernel, stride, kernel // 2)
    return nn.Sequential(conv, *([nn.GroupNorm(1, width)] if norm else []), nn.ReLU())


def conv_norm(width: int, num_classes: int) -> nn.Module:
    """Three blocks with norm and a head that reads every position."""
    return nn.Sequential(
        _conv_block(1, width, 5, 1, norm=True),
        _conv_block(width, width, 3, 2, norm=True),
        _conv_block(width, width, 3, 2, norm=True),
        nn.Flatten(),
        nn.Linear(10 * width, num_classes),
    )


def conv_pool(width: int, num_classes: int) -> nn.Module:
    """Four blocks without norm and a head that reads means."""
    return nn.Sequential(
        _conv_block(1, width, 5, 1, norm=False),
        _conv_block(width, width, 3, 2, norm=False),
        _conv_block(width, width, 3, 1, norm=False),
        _conv_block(width, width, 3, 2, norm=False),
        nn.AdaptiveAvgPool1d(2),
        nn.Flatten(),
        nn.Linear(2 * width, num_classes),
    )


def mlp(width: int, norm: bool, num_classes: int) -> nn.Module:
    sizes = [40, width, width, width]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), *([nn.LayerNorm(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def conv_image(width: int, num_classes: int) -> nn.Module:
    """Convolutions along two axes, on rows of 40 values laid out as 5 by 8."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(1, width), nn.ReLU()),
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(1, width), nn.ReLU()),
        nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.GroupNorm(1, width), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(12 * width, num_classes),
    )


class _Mixer(nn.Module):
    """Ten tokens of four values, mixed across tokens and across channels in turn."""

    def __init__(self, width: int, depth: int, num_classes: int):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.Sequential(*(_MixerBlock(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.blocks(self.embed(x.reshape(-1, 10, 4)))
        logits: Tensor = self.head(self.norm(tokens).mean(-2))
        return logits


class _MixerBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.across = nn.LayerNorm(width), nn.Linear(10, 10)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(-1, -2)).relu().transpose(-1, -2)
        added: Tensor = x + self.down(self.up(self.norm2(x)).relu())
        return added


ARCHITECTURES = {
    "conv_norm 16": Architecture(partial(conv_norm, 16), 10),
    "conv_norm 8, 5 classes": Architecture(partial(conv_norm, 8), 5),
    "conv_pool 24": Architecture(partial(conv_pool, 24), 10),
    "conv_pool 12, 4 classes": Architecture(partial(conv_pool, 12), 4),
    "mlp 64": Architecture(partial(mlp, 64, False), 10),
    "mlp 96 with norm, 5 classes": Architecture(partial(mlp, 96, True), 5),
    "image 16": Architecture(partial(conv_image, 16), 10, (1, 5, 8)),
    "mixer 32": Architecture(partial(_Mixer, 32, 3), 10),
}


def practice_rows(device: torch.device | str = "cpu") -> tuple[Rows, Rows]:
    """MNIST-1D, standardised: 4000 rows that models are trained on and 5000 other ones to shift."""
    task = mnist1d(fresh_test_rows=5000, fresh_rng_seed=7)
    x = torch.cat([task.train_x[0], task.validation_x[0]])
    y = torch.cat([task.train_y[0], task.validation_y[0]])
    fresh_x, fresh_y = (part[0] for part in task.held_out.open())
    mean, spread = x.mean(), x.std()
    source, target = ((x - mean) / spread, y), ((fresh_x - mean) / spread, fresh_y)
    return _to(source, device), _to(target, device)


def draw_scenarios(
    count: int,
    rng_seed: int,
    inputs: Sequence[str] = INPUT_KINDS,
    outputs: Sequence[str] = OUTPUT_KINDS,
) -> list[Scenario]:
    """Random shifts: of the inputs, of the labels, of both, of the inputs twice, or none."""
    rng = random.Random(rng_seed)
    scenarios = []
    for number in range(count):
        draw = rng.random()
        if draw < 0.04:
            kinds = "none"
        elif draw < 0.52:
            kinds = inputs[number % len(inputs)]
        elif draw < 0.74:
            kinds = rng.choice(outputs)
        elif draw < 0.88:
            kinds = f"{rng.choice(inputs)}+{rng.choice(outputs)}"
        else:
            kinds = "+".join(rng.sample(inputs, 2))
        rows = round(10 ** rng.uniform(*map(math.log10, ROWS)))
        scenarios.append(Scenario(Shift(kinds, rng.random(), rng_seed * 100_000 + number), rows))
    return scenarios


def practise(
    architecture: Architecture,
    rows: tuple[Rows, Rows],
    scenarios: Sequence[Scenario],
    settings: TrialSettings,
    *,
    num_models: int = 24,
    model_steps: int = 1500,
    plans: Sequence[Plan] = MENU,
    rng_seed: int = 0,
) -> TrialTable:
    """Train models of one architecture and try the plans in every scenario."""
    num_classes = architecture.num_classes
    source, target = ((x.reshape(-1, *architecture.shape), y % num_classes) for x, y in rows)
    pool = train_models(
        lambda: architecture.build(num_classes),
        source,
        num_models=num_models,
        num_classes=num_classes,
        missing_classes=max(1, round(0.3 * num_classes)),
        steps=model_steps,
        rng_seed=rng_seed,
    )
    return try_plans(
        pool, target, scenarios, settings, plans=plans, rng_seed=rng_seed, fit_rng_seed=rng_seed
    )


def outcomes_of(tables: Sequence[TrialTable], plans: Sequence[Plan] = MENU) -> Outcomes:
    """Tables as what a controller learns from: every plan and learning rate is a choice."""
    columns = torch.tensor([PLANS.index(plan) for plan in plans])
    parts = []
    for table in tables:
        criterion = validation_criterion(table.validation_accuracy, table.validation_loss)
        shape = len(table.rows), len(PLANS), criterion.shape[-1]
        added = table.added[:, None].expand_as(criterion)
        whole = [torch.full(shape, torch.nan) for _ in range(3)]
        for full, part in zip(whole, (added, criterion, table.test_accuracy), strict=True):
            full[:, columns] = part
        parts.append((table.signals, *(full.flatten(1) for full in whole)))
    return Outcomes(*map(torch.cat, zip(*parts, strict=True)))


def choose_rates(table: TrialTable) -> tuple[Tensor, Tensor]:
    """Validation criterion and test accuracy `[E, A]` at the learning rate that validates best.

    The criterion is the accuracy; the loss decides between equal ones.
    """
    criterion = validation_criterion(table.validation_accuracy, table.validation_loss)
    best = criterion.nan_to_num(-torch.inf).argmax(-1, keepdim=True)
    return criterion.gather(-1, best)[..., 0], table.test_accuracy.gather(-1, best)[..., 0]


def validation_criterion(accuracy: Tensor, loss: Tensor) -> Tensor:
    """The accuracy; the loss decides between equal ones, and is the worst after divergence."""
    return accuracy - 0.01 * loss.nan_to_num(nan=10.0).clamp(max=10.0)


def _to(rows: Rows, device: torch.device | str) -> Rows:
    return rows[0].to(device), rows[1].to(device)
