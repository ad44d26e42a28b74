"""Data to practise on: series, images and tables of ten classes, all drawn here, standardised.

Each returns the rows that models are trained on, and other ones to shift: `[n, 1, 40]`,
`[n, 1, 12, 12]` and `[n, 24]`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.adapting.shifts import Rows
from esper.tolaria.tasks import mnist1d

_CLASSES = 10
_SOURCE, _TARGET = 4000, 5000  # rows


def series(device: torch.device | str = "cpu") -> tuple[Rows, Rows]:
    """MNIST-1D."""
    task = mnist1d(fresh_test_rows=_TARGET, fresh_rng_seed=7)
    x = torch.cat([task.train_x[0], task.validation_x[0]])
    y = torch.cat([task.train_y[0], task.validation_y[0]])
    fresh_x, fresh_y = (part[0] for part in task.held_out.open())
    return _standardised((x, y), (fresh_x, fresh_y), device)


def glyphs(device: torch.device | str = "cpu") -> tuple[Rows, Rows]:
    """Smooth random shapes, three of each class, turned, scaled, moved and blurred a little."""
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
    """A table: two clusters of each class in 12 features, and 12 features that mix these."""
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
