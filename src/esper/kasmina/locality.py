"""How much neighbouring positions of inputs have in common: an observation of controllers."""

import torch
from torch import Tensor

MAX_VALUES = 2**22  # of the inputs that `locality` reads


def locality(rows: Tensor) -> float:
    """The mean correlation of neighbouring positions of inputs `[rows, channels, *positions]`.

    Correlations are over the rows, for every pair of neighbours along every axis of positions, in
    every channel: near 1 for smooth inputs, about 0 for inputs without order. Constant positions
    are left out. Without any pair, such as for inputs without positions, the result is 0.
    """
    if rows.numel() == 0:
        return 0.0
    rows = rows[: max(2, MAX_VALUES // rows[0].numel())].double()
    spread = rows.amax(dim=0) - rows.amin(dim=0)
    varies = (spread > 0) & spread.isfinite()
    centred = rows - rows.mean(dim=0)
    units = torch.where(varies, centred / centred.norm(dim=0), 0.0)  # products are correlations
    total, pairs = units.new_zeros(()), units.new_zeros(())
    for axis in range(1, varies.dim()):
        count = varies.shape[axis] - 1
        near, far = units.narrow(axis + 1, 0, count), units.narrow(axis + 1, 1, count)
        total += (near * far).sum()
        pairs += (varies.narrow(axis, 0, count) & varies.narrow(axis, 1, count)).sum()
    return float(total / pairs.clamp(min=1))
