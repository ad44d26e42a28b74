"""What a copy of a user's model starts from."""

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def without_graphs(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy`: what the model keeps of a forward pass, without its graph.

    Such as the weight that spectral norm makes anew in every pass, or maps of attention to look
    at. By itself torch copies no tensor that was computed with gradients.
    """
    kept = pytree.tree_leaves([vars(module) for module in model.modules()])
    return {id(x): x.detach().clone() for x in kept if isinstance(x, Tensor) and not x.is_leaf}
