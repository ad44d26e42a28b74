"""Facts about the training data that a controller sees."""

from collections.abc import Iterable, Sized
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from esper.kasmina.locality import locality
from esper.surgery.inputs import batch_size, tensors

LEAST_ROWS = 8  # with two rows every correlation is 1 or -1


USUAL_TRAIN_ROWS = 3200  # if unknown: the size of the data that controllers are trained on


class DataFacts(NamedTuple):
    """The part of a report that describes the data."""

    train_rows: int
    locality: float

    @classmethod
    def of(cls, example: Any, train_rows: int | None) -> "DataFacts":
        """Facts from a batch of inputs (channels first) and the number of training rows, if known.

        Locality is that of the first float input with positions; 0 if there is none, or if it has
        fewer than `LEAST_ROWS` rows.
        """
        if train_rows is not None and train_rows < 1:
            raise ValueError(f"train_rows={train_rows}; use 1 or more, or leave it out")
        floats = (x for x in tensors(example) if x.is_floating_point())
        with_positions = (x for x in floats if x.dim() >= 3 and len(x) >= LEAST_ROWS)
        inputs = next(with_positions, None)
        return cls(
            train_rows=USUAL_TRAIN_ROWS if train_rows is None else train_rows,
            locality=0.0 if inputs is None else locality(inputs.detach()),
        )


def count_rows(loader: Iterable[Any], inputs: Any) -> int | None:
    """Rows of a training loader whose first batch has these inputs; None if unknown."""
    if isinstance(loader, DataLoader):
        return len(loader.dataset) if isinstance(loader.dataset, Sized) else None
    return len(loader) * batch_size(inputs) if isinstance(loader, Sized) else None
