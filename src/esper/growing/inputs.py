"""A batch of a model's inputs: a tensor, a tuple of arguments, or a dict of them."""

from collections.abc import Mapping
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


def tensors(inputs: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


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
