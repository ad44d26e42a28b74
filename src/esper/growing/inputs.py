"""Batches of a model's inputs (a tensor, a tuple of arguments, or a dict of them), the rows of a
rank, and facts about the training data.
"""

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler

from esper.leyline.ranks import Ranks
from esper.tolaria.tasks import locality


def forward(model: nn.Module, inputs: Any) -> Any:
    """Call the model on a batch of inputs."""
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keyword arguments for a model."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def tensors(values: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses, and attributes of other objects."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors([getattr(leaf, field.name) for field in fields(leaf)])
        elif hasattr(leaf, "__dict__") and not callable(leaf):
            found += [value for value in vars(leaf).values() if isinstance(value, Tensor)]
    return found


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with all tensors on a device."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def batch_size(inputs: Any) -> int:
    """Number of examples in a batch: the length of its first tensor."""
    found = tensors(inputs)
    if not found or found[0].dim() == 0:
        raise ValueError(
            f"inputs of type {type(inputs).__name__} hold no tensor with a batch axis; give a "
            "tensor, a tuple of the model's arguments or a dict of them"
        )
    if len(found[0]) == 0:
        raise ValueError("an empty batch of inputs; give one example or more")
    return len(found[0])


def map_rows(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """The batch with `change` applied to all tensors that have a row for each example."""
    count = batch_size(batch)

    def changed(tensor: Tensor) -> Any:
        return change(tensor) if tensor.dim() > 0 and len(tensor) == count else tensor

    return pytree.tree_map_only(Tensor, changed, batch)


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


def is_split(loader: Iterable[Any] | None) -> bool:
    """Whether every rank reads other rows of a loader."""
    return isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler)


def rows_of(batch: Any, ranks: Ranks) -> tuple[Any, float]:
    """This rank's rows of a batch, and their weight in the mean of the ranks' mean losses."""
    count = batch_size(batch)
    if ranks.size == 1:
        return batch, 1.0
    if count < ranks.size:
        raise ValueError(
            f"a batch of {count} rows for {ranks.size} ranks; use larger batches, fewer ranks, or "
            "drop_last=True if only the last batch is so small"
        )
    own = torch.arange(ranks.rank, count, ranks.size)
    rows = map_rows(batch, lambda tensor: tensor[own.to(tensor.device)])
    return rows, len(own) * ranks.size / count
