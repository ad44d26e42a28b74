"""Labelled rows in the forms that users have them, as tensors: to train on, and held out.

data = read_rows(rows, labels, like=first_float(model), validation=0.25, rng_seed=0)
inputs, labels = data.part(data.train)
"""

import warnings
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.surgery.inputs import batch_size, tensors

MIN_ROWS = 8
MIN_ROWS_PER_CLASS = 3  # fewer warn
_LABELS = "give one whole number per row, the index of its class"


class LabelledRows(NamedTuple):
    inputs: Any
    labels: Tensor
    train: Tensor  # indices of rows
    held_out: Tensor

    def part(self, rows: Tensor) -> tuple[Any, Tensor]:
        inputs = pytree.tree_map_only(Tensor, lambda tensor: tensor[rows], self.inputs)
        return inputs, self.labels[rows]


def first_float(model: nn.Module) -> Tensor:
    """A parameter with the model's device and precision."""
    floats = (p for p in model.parameters() if p.is_floating_point())
    return next(floats, torch.zeros(0))


def read_rows(
    rows: Any, labels: Any, like: Tensor, validation: float, rng_seed: int
) -> LabelledRows:
    """The rows on the device of `like`, in random order; raises for what cannot be used."""
    if not isinstance(validation, Real) or not 0 < validation <= 0.5:
        raise ValueError(f"validation={validation!r}; use a share above 0 and up to 0.5")
    if labels is None:
        rows, labels = _from_loader(rows)
    inputs, labels = as_inputs(rows, like), _as_labels(labels).to(like.device)
    count = batch_size(inputs)
    sizes = [tuple(tensor.shape) for tensor in tensors(inputs)]
    if any(size[:1] != (count,) for size in sizes):
        raise ValueError(f"inputs of shapes {sizes}; the first axis of each must be the rows")
    if len(labels) != count:
        is_list = isinstance(rows, list) and len(rows) == len(labels)
        remedy = "rows as one tensor: torch.stack(rows)" if is_list else "one label per row"
        raise ValueError(f"{count} rows and {len(labels)} labels; give {remedy}")
    if count < MIN_ROWS:
        raise ValueError(f"{count} rows; adaptation needs at least {MIN_ROWS}, to hold some out")
    num_classes = len(labels.unique())
    if num_classes < 2:
        raise ValueError(
            f"all rows have the label {int(labels[0])}; give rows of two or more classes"
        )
    if count < MIN_ROWS_PER_CLASS * num_classes:
        warnings.warn(
            f"{count} rows of {num_classes} classes are too few to compare plans reliably; give "
            f"{MIN_ROWS_PER_CLASS} or more per class",
            stacklevel=3,
        )
    for tensor in tensors(inputs):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError("the rows are not finite; replace NaN and inf by numbers")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(rng_seed)).to(like.device)
    held_out = max(2, round(count * validation))
    return LabelledRows(inputs, labels, order[held_out:], order[:held_out])


def as_inputs(rows: Any, like: Tensor, name: str = "rows") -> Any:
    """Tensors, or arrays as tensors, on the model's device; floats in the model's precision."""

    def fitting(array: Any) -> Tensor:
        tensor = torch.as_tensor(array)
        tensor = tensor.clone() if tensor.is_inference() else tensor
        return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)

    try:
        found = dict(rows) if isinstance(rows, Mapping) else rows
        found = pytree.tree_map_only((Tensor, np.ndarray), fitting, found)
        return found if tensors(found) else fitting(found)  # lists of numbers
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} of type {type(rows).__name__} cannot be read ({error}); give a tensor or an "
            "array, or a tuple or dict of the model's arguments; a loader of pairs goes without labels"
        ) from error


def _as_labels(given: Any) -> Tensor:
    try:
        labels = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"labels cannot be numbers ({error}); {_LABELS}") from error
    if labels.shape[1:] == (1,) and bool(((labels == 0) | (labels == 1)).all()):
        labels = labels[:, 0]  # as a loss of one logit takes them
    is_whole = not labels.is_floating_point() or bool((labels == labels.round()).all())
    if labels.dim() != 1 or not is_whole:
        shown = f"labels are {labels.dtype} {tuple(labels.shape)}; {_LABELS}"
        raise ValueError(f"{shown}: labels.argmax(1)" if labels.dim() == 2 else shown)
    return labels.to(torch.int64, copy=labels.is_inference())


def _from_loader(loader: Any) -> tuple[Any, Tensor]:
    """All rows of a loader of pairs."""
    is_loader = isinstance(loader, Iterable) and not isinstance(loader, Tensor | Mapping | str)
    batches = list(loader) if is_loader else []
    if any(isinstance(batch, Mapping) for batch in batches):
        raise ValueError(
            "the loader gives dicts; give pairs, such as "
            '[(batch, batch.pop("labels")) for batch in loader]'
        )
    if not batches or any(not isinstance(b, tuple | list) or len(b) != 2 for b in batches):
        raise ValueError(
            "there are no labels: give adapt(model, rows, labels), or a loader of pairs "
            "(inputs, labels), such as torch.utils.data.DataLoader(dataset, 64)"
        )
    inputs, labels = zip(*batches, strict=True)
    inputs = tuple(dict(part) if isinstance(part, Mapping) else part for part in inputs)

    def joined(*parts: Any) -> Tensor:
        return torch.cat([*map(torch.as_tensor, parts)])

    try:
        return pytree.tree_map(joined, *inputs), joined(*labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the loader's batches cannot be joined ({error}); give batches, not single rows, of "
            "rows of one shape with their labels"
        ) from error
