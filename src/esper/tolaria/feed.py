"""Minibatches for P hosts, from data sets that stay on the device."""

import torch
from torch import Tensor

CHUNK = 32  # minibatches whose rows are on the device at a time


class Feed:
    """Data `[V, N, ...]` in V views, and the rows of the next minibatches `[M, P, batch]`.

    The cursor is a tensor on the device, so that a captured CUDA graph can advance it.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, view_ids: Tensor, batch_size: int):
        device, num_hosts = inputs.device, len(view_ids)
        self.inputs = inputs.flatten(0, 1)
        self.labels = labels.flatten()
        self._rows_per_view = labels.shape[1]
        self.first_row = torch.zeros(num_hosts, 1, dtype=torch.int64, device=device)
        self.set_views(view_ids)
        shape = (CHUNK, num_hosts, batch_size)
        self.rows = torch.zeros(shape, dtype=torch.int64, device=device)
        self.losses = torch.zeros(CHUNK, num_hosts, dtype=inputs.dtype, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)

    def set_views(self, view_ids: Tensor) -> None:
        """Set the view `[P]` that each host reads from now on."""
        self.first_row.copy_(view_ids.unsqueeze(1) * self._rows_per_view)

    def load(self, rows: Tensor) -> None:
        """Load the rows of at most `CHUNK` minibatches; a host's rows are numbered in its view."""
        if rows.shape[1:] != self.rows.shape[1:]:
            raise ValueError(
                f"minibatch rows {tuple(rows.shape)}; expected [minibatches, hosts, batch] = "
                f"[.., {self.rows.shape[1]}, {self.rows.shape[2]}]"
            )
        self.rows[: len(rows)].copy_(rows, non_blocking=True)
        self.rewind()

    def rewind(self) -> None:
        """Go back to the first loaded minibatch."""
        self._cursor.zero_()

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs `[P, *shape, batch]` and labels `[P, batch]` of the minibatch at the cursor."""
        rows = self.rows.index_select(0, self._cursor).squeeze(0) + self.first_row
        flat = rows.flatten()
        x = self.inputs.index_select(0, flat).view(*rows.shape, *self.inputs.shape[1:])
        return x.movedim(1, -1).contiguous(), self.labels.index_select(0, flat).view(rows.shape)

    def record_loss(self, losses: Tensor) -> None:
        """Store the losses `[P]` of the minibatch at the cursor, and advance the cursor."""
        self.losses.index_copy_(0, self._cursor, losses.unsqueeze(0))
        self._cursor.add_(1)
