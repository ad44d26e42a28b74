"""Train the change of one model."""

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor


def fit(
    change: Mapping[str, Tensor],
    loss_at: Callable[[int], Tensor],
    *,
    rate: float,
    steps: int,
    first: Collection[str] = (),
    report: Callable[[], None] = lambda: None,
) -> None:
    """Train the tensors of a change in place, with Adam.

    The learning rate falls from `rate` to zero along a cosine. The names in `first` train alone for
    the first half of the steps. `loss_at` gives the loss of a step; nothing but the change gets
    gradients.
    """
    if not change:
        return
    adam = torch.optim.Adam(change.values(), lr=rate, fused=True)
    alone = steps // 2 if first else 0
    for step in range(steps):
        active = {name: t for name, t in change.items() if step >= alone or name in first}
        for name, tensor in change.items():
            tensor.requires_grad_(name in active)
        adam.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        adam.zero_grad()
        with torch.enable_grad():
            loss_at(step).backward(inputs=[*active.values()])  # type: ignore[no-untyped-call]
        adam.step()
        report()
    adam.zero_grad()
