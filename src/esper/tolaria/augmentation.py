"""Random crops and flips of training images, on the device of the data.

The change of an example is a function of its key (see `randomness`): of the rng seed, the host id,
the minibatch and the place in it. So siblings see the same images, and a resumed run is bit-exact.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.runtime.checks import require_at_least
from esper.tolaria.randomness import uniform

PURPOSE = -2  # first part of the keys; other keys start with a host id or -1


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of training images; off by default."""

    crop: int = 0
    """Pad images by this many zeros on each side, then cut out a window of their own size."""
    flip: bool = False
    """Mirror half of the images left to right."""

    def __post_init__(self) -> None:
        require_at_least(self, 0, "crop")

    def is_on(self, input_shape: tuple[int, ...]) -> bool:
        """Whether inputs of this shape are changed; raises if they are not images."""
        is_on = self.crop > 0 or self.flip
        if is_on and len(input_shape) != 3:
            raise ValueError(
                f"augment.crop and augment.flip need images [channels, height, width]; the inputs "
                f"are {input_shape}"
            )
        return is_on

    def apply(self, x: Tensor, keys: Tensor) -> Tensor:
        """Images `[N, channels, height, width]`, each changed by its key `[N]`."""
        height, width = x.shape[2:]
        random = uniform(keys, 3)
        top, left = (random[:, :2] * (2 * self.crop + 1)).long().unbind(1)
        rows = top.unsqueeze(1) + torch.arange(height, device=x.device)
        columns = left.unsqueeze(1) + torch.arange(width, device=x.device)
        if self.flip:
            columns = torch.where(random[:, 2:] < 0.5, columns.flip(1), columns)
        images = torch.arange(len(x), device=x.device).view(-1, 1, 1, 1)
        channels = torch.arange(x.shape[1], device=x.device).view(-1, 1, 1)
        padded = F.pad(x, [self.crop] * 4)
        return padded[images, channels, rows[:, None, :, None], columns[:, None, None, :]]


NO_AUGMENTATION = Augmentation()
