"""Kinds of shift between the data a model was trained on and the data it meets.

    shifted = Shift("noise", strength=0.7, rng_seed=3)
    x, y = shifted(x, y, num_classes=10)  # rows [n, channels, *positions] or [n, features]

Each kind has a random part (which positions, which labels) that is fixed by the rng seed, so that
the few rows and the test rows have the same shift. Rows are standardised.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shift:
    """One kind of shift, or several joined by "+", at a strength from 0 to 1."""

    kinds: str
    strength: float
    rng_seed: int

    def __call__(self, x: Tensor, y: Tensor, num_classes: int) -> Rows:
        """The rows and labels after the shift; fixed random parts come from the rng seed."""
        if x.dim() == 2:  # a table: one channel
            x, y = self(x.unsqueeze(1), y, num_classes)
            return x.squeeze(1), y
        for number, kind in enumerate(self.kinds.split("+")):
            rng = torch.Generator().manual_seed(1000 * self.rng_seed + number)
            if kind in INPUT_SHIFTS:
                x = INPUT_SHIFTS[kind](x, self.strength, rng)
            elif kind in OUTPUT_SHIFTS:
                y = OUTPUT_SHIFTS[kind](num_classes, self.strength, rng).to(y.device)[y]
            else:  # new classes: what the model was trained on differs, not the rows
                assert kind in ("none", "new_classes"), kind
        return x, y


def _smooth(x: Tensor, strength: float, rng: Generator) -> Tensor:
    width = 3 + 2 * round(2 * strength)
    for axis in range(2, x.dim()):
        moved = x.movedim(axis, -1)
        flat = F.pad(moved.reshape(-1, 1, moved.shape[-1]), (width // 2,) * 2, mode="replicate")
        x = F.avg_pool1d(flat, width, 1).view(moved.shape).movedim(-1, axis)
    return x


def _drift(x: Tensor, strength: float, rng: Generator) -> Tensor:
    slope = _per_row(torch.randn, x, rng)
    ramp = torch.linspace(-1, 1, x.shape[-1], device=x.device)
    return x + (0.5 + 2 * strength) * slope * ramp


def _gain(x: Tensor, strength: float, rng: Generator) -> Tensor:
    factor = math.pow(2.0, _uniform(rng, 1.0, 2.0) * (1 if _uniform(rng, -1, 1) > 0 else -1))
    return x * factor + strength * _uniform(rng, -2.0, 2.0)


def _occlude(x: Tensor, strength: float, rng: Generator) -> Tensor:
    length = x.shape[-1]
    start = _per_row(torch.rand, x, rng) * length
    end = start + (0.2 + 0.4 * strength) * length
    position = torch.arange(length, device=x.device)
    return x.masked_fill((position >= start) & (position < end), 0.0)


def _resample(x: Tensor, strength: float, rng: Generator) -> Tensor:
    """Positions stretched about the middle."""
    factor = 1 + (0.3 + 0.5 * strength) * (1 if _uniform(rng, -1, 1) > 0 else -0.6)
    length = x.shape[-1]
    from_middle = torch.arange(length, device=x.device) - length / 2
    at = (from_middle / factor + length / 2).clamp(0, length - 1)
    low = at.floor().long().clamp(max=length - 2)
    share = at - low
    return x[..., low] * (1 - share) + x[..., low + 1] * share


def _scramble(x: Tensor, strength: float, rng: Generator) -> Tensor:
    """Some positions exchanged, the same in every row."""
    length = x.shape[-1]
    count = max(2, round((0.2 + 0.5 * strength) * length))
    return x[..., _exchanged(length, count, rng).to(x.device)]


def _interference(x: Tensor, strength: float, rng: Generator) -> Tensor:
    """A wave of one frequency and of any phase laid over every row."""
    phase = _per_row(torch.rand, x, rng)
    position = torch.linspace(0, _uniform(rng, 1.0, 8.0), x.shape[-1], device=x.device)
    return x + (0.5 + strength) * torch.sin(2 * torch.pi * (position + phase))


def _jitter(x: Tensor, strength: float, rng: Generator) -> Tensor:
    """Every row moved along its positions by its own distance."""
    length = x.shape[-1]
    by = torch.randint(0, 1 + round((0.2 + 0.6 * strength) * length), (len(x),), generator=rng)
    at = (torch.arange(length) - by[:, None]) % length
    return x.gather(-1, at.view(len(x), *(1,) * (x.dim() - 2), length).expand_as(x).to(x.device))


def _turn(x: Tensor, strength: float, rng: Generator) -> Tensor:
    """Square images turned by 90 degrees to either side; other rows by 180 degrees."""
    if x.dim() < 4 or x.shape[-1] != x.shape[-2]:
        return x.flip(tuple(range(2, x.dim())))
    return x.rot90(1 if strength < 0.5 else -1, (-2, -1))


def _shear(x: Tensor, strength: float, rng: Generator) -> Tensor:
    """Lines of images moved along by a distance that grows from line to line."""
    moved = [round((0.3 + 0.5 * strength) * (line + 1)) for line in range(x.shape[-2])]
    lines = [line.roll(by, -1) for line, by in zip(x.unbind(-2), moved, strict=True)]
    return torch.stack(lines, -2)


def _per_row(draw: Callable[..., Tensor], x: Tensor, rng: Generator) -> Tensor:
    return draw(len(x), *(1,) * (x.dim() - 1), generator=rng).to(x)


def _per_position(draw: Callable[..., Tensor], x: Tensor, rng: Generator) -> Tensor:
    """The same in all rows."""
    return draw(x.shape[2:], generator=rng).to(x)


def _uniform(rng: Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=rng))


def _exchanged(length: int, count: int, rng: Generator) -> Tensor:
    """Positions or classes, `count` of which are exchanged."""
    chosen = torch.randperm(length, generator=rng)[:count]
    order = torch.arange(length)
    order[chosen] = chosen.roll(1)
    return order


# rows after a shift of strength s
INPUT_SHIFTS: dict[str, Callable[[Tensor, float, Generator], Tensor]] = {
    "sign": lambda x, s, rng: -x,
    "reverse": lambda x, s, rng: x.flip(-1),
    "noise": lambda x, s, rng: x + (0.2 + s) * torch.randn(x.shape, generator=rng).to(x),
    "smooth": _smooth,
    "drift": _drift,
    "gain": _gain,
    "contrast": lambda x, s, rng: (
        x * (0.1 + 1.5 * _per_row(torch.rand, x, rng) ** 2) * (1 - 0.5 * s)
    ),
    "dead": lambda x, s, rng: x.masked_fill(_per_position(torch.rand, x, rng) < 0.2 + 0.4 * s, 0.0),
    "occlude": _occlude,
    "saturate": lambda x, s, rng: (x * (1 + 4 * s)).clamp(-1, 1),
    "rectify": lambda x, s, rng: x.abs(),
    "quantise": lambda x, s, rng: (x / (0.5 + 1.5 * s)).round() * (0.5 + 1.5 * s),
    "roll": lambda x, s, rng: x.roll(round((0.1 + 0.3 * s) * x.shape[-1]), dims=-1),
    "resample": _resample,
    "swap_halves": lambda x, s, rng: x.roll(x.shape[-1] // 2, dims=-1),
    "scramble": _scramble,
    # part of each value is replaced by its difference from the next: a sensor that high-passes
    "derivative": lambda x, s, rng: (1 - s) * x + s * 2 * (x - F.pad(x, (0, 1))[..., 1:]),
    "spikes": lambda x, s, rng: x.masked_fill(
        torch.rand(x.shape, generator=rng).to(x) < 0.05 + 0.1 * s, 4.0
    ),
    # every row has part of another one laid over it: a crosstalk between sources
    "mixture": lambda x, s, rng: (
        x + (0.3 + 0.4 * s) * x[torch.randperm(len(x), generator=rng).to(x.device)]
    ),
    "interference": _interference,
    # a sensor with another response curve
    "power": lambda x, s, rng: (
        x.sign() * x.abs() ** (1 + s if _uniform(rng, -1, 1) > 0 else 1 / (1 + 2 * s))
    ),
    "echo": lambda x, s, rng: (
        x + (0.3 + 0.7 * s) * x.roll(round(_uniform(rng, 0.1, 0.4) * x.shape[-1]), dims=-1)
    ),
    "jitter": _jitter,
    "threshold": lambda x, s, rng: x.masked_fill(x.abs() < 0.3 + 0.7 * s, 0.0),
    "local_gain": lambda x, s, rng: x * (s + 0.5) * _per_position(torch.randn, x, rng).exp(),
    "local_offset": lambda x, s, rng: x + (0.5 + 1.5 * s) * _per_position(torch.randn, x, rng),
    "turn": _turn,
    "shear": _shear,
}
# the new class of each old one, for n classes
OUTPUT_SHIFTS: dict[str, Callable[[int, float, Generator], Tensor]] = {
    "permute_labels": lambda n, s, rng: torch.randperm(n, generator=rng),
    "move_labels": lambda n, s, rng: (torch.arange(n) + 1) % n,
    "swap_labels": lambda n, s, rng: _exchanged(n, 2 + round(2 * s), rng),
    "merge_labels": lambda n, s, rng: (
        torch.randperm(n, generator=rng) % max(2, round(n * (0.6 - 0.3 * s)))
    ),
}
