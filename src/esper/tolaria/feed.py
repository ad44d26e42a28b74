"""Minibatches for P hosts, read from data sets that stay on the device."""

import torch
from torch import Tensor

CHUNK = 32  # minibatches whose rows are on the device at a time


class Feed:
    """Data `[V, N, ...]` in V views, and the rows of the coming minibatches `[M, P, batch]`.

    What comes next is decided by a cursor on the device, so that a captured program can move
    from minibatch to minibatch by itself.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, view_ids: Tensor, batch_size: int):
        device, num_hosts = inputs.device, len(view_ids)
        self._inputs = inputs.flatten(0, 1)
        self._labels = labels.flatten()
        self._first_row = (view_ids.to(device) * labels.shape[1]).unsqueeze(1)
        shape = (CHUNK, num_hosts, batch_size)
        self._rows = torch.zeros(shape, dtype=torch.int64, device=device)
        self._losses = torch.zeros(CHUNK, num_hosts, dtype=inputs.dtype, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)

    def load(self, rows: Tensor) -> None:
        """The rows of at most `CHUNK` minibatches, for each host of its own view."""
        if rows.shape[1:] != self._rows.shape[1:]:
            raise ValueError(
                f"minibatch rows {tuple(rows.shape)}; expected [minibatches, hosts, batch] = "
                f"[.., {self._rows.shape[1]}, {self._rows.shape[2]}]"
            )
        self._rows[: len(rows)].copy_(rows, non_blocking=True)
        self.rewind()

    def rewind(self) -> None:
        """Back to the first of the minibatches loaded."""
        self._cursor.zero_()

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs `[P, *shape, batch]` and labels `[P, batch]` of the minibatch at the cursor."""
        rows = self._rows.index_select(0, self._cursor).squeeze(0) + self._first_row
        flat = rows.flatten()
        x = self._inputs.index_select(0, flat).view(*rows.shape, *self._inputs.shape[1:])
        return x.movedim(1, -1).contiguous(), self._labels.index_select(0, flat).view(rows.shape)

    def finish(self, losses: Tensor) -> None:
        """Keep the losses `[P]` of the minibatch at the cursor, and move on."""
        self._losses.index_copy_(0, self._cursor, losses.unsqueeze(0))
        self._cursor.add_(1)

    def losses(self, count: int) -> Tensor:
        """Of the first minibatches loaded, `[count, P]`."""
        return self._losses[:count].clone()
