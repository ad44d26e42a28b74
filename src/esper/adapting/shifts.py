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
from torch import Tensor

Rows = tuple[Tensor, Tensor]
_Change = Callable[[Tensor, Tensor, float, torch.Generator, int], Rows]

INPUT_SHIFTS: dict[str, _Change] = {}
OUTPUT_SHIFTS: dict[str, _Change] = {}


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
            if kind in ("none", "new_classes"):
                continue  # new classes: what the model was trained on differs, not the rows
            rng = torch.Generator().manual_seed(1000 * self.rng_seed + number)
            change = (INPUT_SHIFTS | OUTPUT_SHIFTS)[kind]
            x, y = change(x, y, self.strength, rng, num_classes)
        return x, y


def _input(change: Callable[[Tensor, float, torch.Generator], Tensor]) -> None:
    """Register a shift of the inputs under the function's name."""

    def both(x: Tensor, y: Tensor, strength: float, rng: torch.Generator, _: int) -> Rows:
        return change(x, strength, rng), y

    INPUT_SHIFTS[change.__name__] = both


def _output(change: Callable[[Tensor, float, torch.Generator, int], Tensor]) -> None:
    """Register a shift of the labels: a map from old classes to new ones, `[classes]`."""

    def both(x: Tensor, y: Tensor, strength: float, rng: torch.Generator, classes: int) -> Rows:
        old = torch.arange(classes)
        return x, change(old, strength, rng, classes).to(y.device)[y]

    OUTPUT_SHIFTS[change.__name__] = both


def _uniform(rng: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=rng))


@_input
def sign(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return -x


@_input
def reverse(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return x.flip(-1)


@_input
def noise(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return x + (0.2 + strength) * torch.randn(x.shape, generator=rng).to(x)


@_input
def smooth(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    width = 3 + 2 * round(2 * strength)
    for axis in range(2, x.dim()):
        moved = x.movedim(axis, -1)
        flat = F.pad(moved.reshape(-1, 1, moved.shape[-1]), (width // 2,) * 2, mode="replicate")
        x = F.avg_pool1d(flat, width, 1).view(moved.shape).movedim(-1, axis)
    return x


@_input
def drift(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    slope = torch.randn(len(x), *(1,) * (x.dim() - 1), generator=rng).to(x)
    ramp = torch.linspace(-1, 1, x.shape[-1], device=x.device)
    return x + (0.5 + 2 * strength) * slope * ramp


@_input
def gain(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    factor = math.pow(2.0, _uniform(rng, 1.0, 2.0) * (1 if _uniform(rng, -1, 1) > 0 else -1))
    return x * factor + strength * _uniform(rng, -2.0, 2.0)


@_input
def contrast(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    factor = torch.rand(len(x), *(1,) * (x.dim() - 1), generator=rng).to(x)
    return x * (0.1 + 1.5 * factor**2) * (1 - 0.5 * strength)


@_input
def dead(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    is_dead = torch.rand(x.shape[2:], generator=rng).to(x) < 0.2 + 0.4 * strength
    return x.masked_fill(is_dead, 0.0)


@_input
def occlude(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    length = x.shape[-1]
    start = torch.rand(len(x), generator=rng).to(x) * length
    end = start + (0.2 + 0.4 * strength) * length
    position = torch.arange(length, device=x.device)
    hidden = (position >= start[:, None]) & (position < end[:, None])
    return x.masked_fill(hidden.view(len(x), *(1,) * (x.dim() - 2), length), 0.0)


@_input
def saturate(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return (x * (1 + 4 * strength)).clamp(-1, 1)


@_input
def rectify(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return x.abs()


@_input
def quantise(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    step = 0.5 + 1.5 * strength
    return (x / step).round() * step


@_input
def roll(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return x.roll(round((0.1 + 0.3 * strength) * x.shape[-1]), dims=-1)


@_input
def resample(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Positions stretched about the middle."""
    factor = 1 + (0.3 + 0.5 * strength) * (1 if _uniform(rng, -1, 1) > 0 else -0.6)
    length = x.shape[-1]
    at = ((torch.arange(length, device=x.device) - length / 2) / factor + length / 2).clamp(
        0, length - 1
    )
    low = at.floor().long().clamp(max=length - 2)
    share = at - low
    return x[..., low] * (1 - share) + x[..., low + 1] * share


@_input
def swap_halves(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return x.roll(x.shape[-1] // 2, dims=-1)


@_input
def scramble(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Some positions exchanged, the same in every row."""
    length = x.shape[-1]
    chosen = torch.randperm(length, generator=rng)[: max(2, round((0.2 + 0.5 * strength) * length))]
    order = torch.arange(length)
    order[chosen] = chosen.roll(1)
    return x[..., order.to(x.device)]


@_input
def derivative(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Part of each value is replaced by its difference from the next: a sensor that high-passes."""
    difference = x - F.pad(x, (0, 1))[..., 1:]
    return (1 - strength) * x + strength * 2 * difference


@_input
def spikes(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    hit = torch.rand(x.shape, generator=rng).to(x) < 0.05 + 0.1 * strength
    return x.masked_fill(hit, 4.0)


@_input
def mixture(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Every row has part of another one laid over it: a crosstalk between sources."""
    return x + (0.3 + 0.4 * strength) * x[torch.randperm(len(x), generator=rng).to(x.device)]


@_input
def interference(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """A wave of one frequency and of any phase laid over every row."""
    phase = torch.rand(len(x), *(1,) * (x.dim() - 1), generator=rng).to(x)
    position = torch.linspace(0, _uniform(rng, 1.0, 8.0), x.shape[-1], device=x.device)
    return x + (0.5 + strength) * torch.sin(2 * torch.pi * (position + phase))


@_input
def power(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """A sensor with another response curve."""
    exponent = 1 + strength if _uniform(rng, -1, 1) > 0 else 1 / (1 + 2 * strength)
    return x.sign() * x.abs() ** exponent


@_input
def echo(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return x + (0.3 + 0.7 * strength) * x.roll(
        round(_uniform(rng, 0.1, 0.4) * x.shape[-1]), dims=-1
    )


@_input
def jitter(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Every row moved along its positions by its own distance."""
    length = x.shape[-1]
    by = torch.randint(0, 1 + round((0.2 + 0.6 * strength) * length), (len(x),), generator=rng)
    at = (torch.arange(length) - by[:, None]) % length
    return x.gather(-1, at.view(len(x), *(1,) * (x.dim() - 2), length).expand_as(x).to(x.device))


@_input
def threshold(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return x.masked_fill(x.abs() < 0.3 + 0.7 * strength, 0.0)


@_input
def local_gain(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """A gain for every position, the same in all rows."""
    return x * (strength + 0.5) * torch.randn(x.shape[2:], generator=rng).to(x).exp()


@_input
def local_offset(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """An offset for every position, the same in all rows."""
    return x + (0.5 + 1.5 * strength) * torch.randn(x.shape[2:], generator=rng).to(x)


@_input
def turn(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Square images turned by 90 degrees to either side; other rows by 180 degrees."""
    if x.dim() < 4 or x.shape[-1] != x.shape[-2]:
        return x.flip(tuple(range(2, x.dim())))
    return x.rot90(1 if strength < 0.5 else -1, (-2, -1))


@_input
def shear(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Lines of images moved along by a distance that grows from line to line."""
    moved = [round((0.3 + 0.5 * strength) * (line + 1)) for line in range(x.shape[-2])]
    lines = [line.roll(by, -1) for line, by in zip(x.unbind(-2), moved, strict=True)]
    return torch.stack(lines, -2)


@_output
def permute_labels(old: Tensor, strength: float, rng: torch.Generator, classes: int) -> Tensor:
    return torch.randperm(classes, generator=rng)


@_output
def move_labels(old: Tensor, strength: float, rng: torch.Generator, classes: int) -> Tensor:
    return (old + 1) % classes


@_output
def swap_labels(old: Tensor, strength: float, rng: torch.Generator, classes: int) -> Tensor:
    """Two to four classes exchanged, the others as before."""
    chosen = torch.randperm(classes, generator=rng)[: 2 + round(2 * strength)]
    new = old.clone()
    new[chosen] = chosen.roll(1)
    return new


@_output
def merge_labels(old: Tensor, strength: float, rng: torch.Generator, classes: int) -> Tensor:
    return torch.randperm(classes, generator=rng)[old] % max(
        2, round(classes * (0.6 - 0.3 * strength))
    )
