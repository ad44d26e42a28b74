"""Batches of a model's inputs: a tensor, a tuple of arguments, or a dict of them."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


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
