"""What controllers practise on: trained models of several shapes, and many kinds of shift.

Data of ten classes are drawn here: rows that models are trained on, and other ones to shift.

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
import torch.nn.functional as F
from torch import Tensor, nn

from adapt_practice.shifts import Rows, Shift
from adapt_practice.trials import Scenario
from esper.tolaria.tasks import mnist1d

INPUT_KINDS = (
    "sign", "noise", "gain", "dead", "saturate", "rectify", "roll", "quantise", "spikes",
    "scramble", "derivative", "local_gain", "contrast", "interference", "power", "echo",
    "jitter", "threshold", "local_offset",
)  # fmt: skip
IMAGE_KINDS = ("turn", "shear")  # of images, besides
OUTPUT_KINDS = ("move_labels", "swap_labels", "merge_labels", "new_classes")
HELD_OUT_KINDS = (
    "reverse", "smooth", "drift", "occlude", "resample", "swap_halves", "mixture",
    "permute_labels", "new_classes+reverse", "permute_labels+drift", "smooth+swap_labels",
    "mixture+new_classes",
)  # fmt: skip
ROWS = (30, 1000)  # labelled rows, log-uniform
_CLASSES = 10
_SOURCE, _TARGET = 4000, 5000  # rows to train models on, and others to shift


def series(device: torch.device | str = "cpu") -> tuple[Rows, Rows]:
    """MNIST-1D, `[n, 1, 40]`."""
    task = mnist1d(fresh_test_rows=_TARGET, fresh_rng_seed=7)
    x = torch.cat([task.train_x[0], task.validation_x[0]])
    y = torch.cat([task.train_y[0], task.validation_y[0]])
    fresh_x, fresh_y = (part[0] for part in task.held_out.open())
    return _standardised((x, y), (fresh_x, fresh_y), device)


def glyphs(device: torch.device | str = "cpu") -> tuple[Rows, Rows]:
    """Images `[n, 1, 12, 12]`: three random shapes per class, turned, scaled, moved and blurred."""
    coarse = torch.randn(_CLASSES, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    shapes = _enlarged(coarse)

    def draw(count: int, rng_seed: int) -> Rows:
        rng = torch.Generator().manual_seed(rng_seed)
        y = torch.randint(_CLASSES, (count,), generator=rng)
        shape = shapes[y, torch.randint(3, (count,), generator=rng)]
        angle, size, right, down = torch.randn(4, count, generator=rng)
        size = 1 + 0.15 * size
        cosine, sine = size * (0.2 * angle).cos(), size * (0.2 * angle).sin()
        rows = (cosine, -sine, 0.15 * right, sine, cosine, 0.15 * down)
        grid = F.affine_grid(
            torch.stack(rows, 1).view(-1, 2, 3), [count, 1, 12, 12], align_corners=False
        )
        x = F.grid_sample(shape[:, None], grid, align_corners=False)
        x = x + 0.3 * _enlarged(torch.randn(count, 1, 4, 4, generator=rng))
        return x + 0.2 * torch.randn(x.shape, generator=rng), y

    return _standardised(draw(_SOURCE, 1), draw(_TARGET, 2), device)


def clusters(device: torch.device | str = "cpu") -> tuple[Rows, Rows]:
    """Tables `[n, 24]`: two clusters of each class in 12 features, and 12 that mix these."""
    rng = torch.Generator().manual_seed(0)
    centres = 1.6 * torch.randn(_CLASSES, 2, 12, generator=rng)
    spreads = torch.randn(_CLASSES, 2, 12, 12, generator=rng) / 12**0.5
    mixing = torch.randn(12, 12, generator=rng) / 12**0.5

    def draw(count: int, rng_seed: int) -> Rows:
        rng = torch.Generator().manual_seed(rng_seed)
        y = torch.randint(_CLASSES, (count,), generator=rng)
        cluster = y, torch.randint(2, (count,), generator=rng)
        around = torch.randn(count, 1, 12, generator=rng) @ spreads[cluster]
        x = centres[cluster] + 1.6 * around.squeeze(1)
        mixed = x @ mixing + 0.5 * torch.randn(count, 12, generator=rng)
        return torch.cat([x, mixed], 1), y

    return _standardised(draw(_SOURCE, 1), draw(_TARGET, 2), device)


def _enlarged(coarse: Tensor) -> Tensor:
    return F.interpolate(coarse, size=(12, 12), mode="bicubic")


def _standardised(source: Rows, target: Rows, device: torch.device | str) -> tuple[Rows, Rows]:
    """By the source's mean and spread: of every feature of a table, else of all values."""
    x = source[0]
    axes = (0,) if x.dim() == 2 else tuple(range(x.dim()))
    mean, spread = x.mean(axes), x.std(axes)
    (x, y), (other_x, other_y) = (((rows[0] - mean) / spread, rows[1]) for rows in (source, target))
    return (x.to(device), y.to(device)), (other_x.to(device), other_y.to(device))


@dataclass(frozen=True)
class Architecture:
    """Models of one shape, and their data, whose ten classes are joined to `num_classes`."""

    build: Callable[[int], nn.Module]  # from the number of classes
    num_classes: int
    rows: Callable[[torch.device | str], tuple[Rows, Rows]] = series
    input_kinds: tuple[str, ...] = INPUT_KINDS


def _block(layer: nn.Module, width: int, norm: bool) -> nn.Sequential:
    normed = nn.LayerNorm(width) if isinstance(layer, nn.Linear) else nn.GroupNorm(1, width)
    return nn.Sequential(layer, *([normed] if norm else []), nn.ReLU())


def _series_blocks(width: int, strides: tuple[int, ...], norm: bool) -> list[nn.Module]:
    first = _block(nn.Conv1d(1, width, 5, 1, 2), width, norm)
    return [first, *(_block(nn.Conv1d(width, width, 3, s, 1), width, norm) for s in strides)]


def conv_norm(width: int, num_classes: int) -> nn.Module:
    """Three blocks with norm and a head that reads every position."""
    blocks = _series_blocks(width, (2, 2), norm=True)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(10 * width, num_classes))


def conv_pool(width: int, num_classes: int) -> nn.Module:
    """Four blocks without norm and a head that reads means."""
    blocks = _series_blocks(width, (2, 1, 2), norm=False)
    head = nn.Linear(2 * width, num_classes)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(2), nn.Flatten(), head)


def mlp(width: int, norm: bool, num_classes: int, inputs: int = 40) -> nn.Module:
    layers = [
        layer
        for before, after in pairwise([inputs, width, width, width])
        for layer in _block(nn.Linear(before, after), after, norm)
    ]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, num_classes))


def image_cnn(width: int, norm: bool, num_classes: int) -> nn.Module:
    """Two blocks with stride, or three with norm and a hidden layer less, on images of 12 by 12."""
    widths = [1, width, 2 * width, 2 * width] if norm else [1, width, 2 * width]
    blocks = [
        _block(nn.Conv2d(before, after, 3, 2 if before > 1 else 1, 1), after, norm)
        for before, after in pairwise(widths)
    ]
    if norm:
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2 * width * 9, num_classes))
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(2 * width * 36, 48), nn.ReLU())
    return nn.Sequential(*blocks, hidden, nn.Linear(48, num_classes))


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
        self.norm2, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

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
    "mixer 32": Architecture(partial(_Mixer, 32, 3), 10),
    "image 12": Architecture(
        partial(image_cnn, 12, False), 10, glyphs, (*INPUT_KINDS, *IMAGE_KINDS)
    ),
    "image 12 with norm, 5 classes": Architecture(
        partial(image_cnn, 12, True), 5, glyphs, (*INPUT_KINDS, *IMAGE_KINDS)
    ),
    "table 64": Architecture(partial(mlp, 64, False, inputs=24), 10, clusters),
    "table 48 with norm, 4 classes": Architecture(partial(mlp, 48, True, inputs=24), 4, clusters),
}


def draw_scenarios(
    count: int, rng_seed: int, inputs: Sequence[str] = INPUT_KINDS
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
            kinds = rng.choice(OUTPUT_KINDS)
        elif draw < 0.88:
            kinds = f"{rng.choice(inputs)}+{rng.choice(OUTPUT_KINDS)}"
        else:
            kinds = "+".join(rng.sample(inputs, 2))
        rows = round(10 ** rng.uniform(*map(math.log10, ROWS)))
        scenarios.append(Scenario(Shift(kinds, rng.random(), rng_seed * 100_000 + number), rows))
    return scenarios
