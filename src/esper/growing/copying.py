"""Deep copies of models that were called with gradients."""

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def without_graphs(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy` with detached copies of the tensors a model computed and kept.

    Examples: the weight that spectral norm computes in every pass, or stored attention maps. Torch
    refuses to deepcopy a tensor that has a graph.
    """
    kept = pytree.tree_leaves([vars(module) for module in model.modules()])
    return {id(x): x.detach().clone() for x in kept if isinstance(x, Tensor) and not x.is_leaf}
