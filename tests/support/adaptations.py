"""Small classifiers with every kind of place, and changes that are not zero."""

import itertools

import torch
from torch import Tensor, nn

from esper.adapting.adapted import Adapted
from esper.adapting.plans import Places, Plan, find_places
from support.models import ResidualCNN, TokenEncoder


def series_cnn(width: int = 8, classes: int = 4) -> nn.Sequential:
    def block(before: int, stride: int) -> nn.Sequential:
        conv = nn.Conv1d(before, width, 3, stride, 1)
        return nn.Sequential(conv, nn.BatchNorm1d(width), nn.ReLU())

    blocks = block(1, 1), block(width, 2), block(width, 2)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(3 * width, classes))


def mlp(depth: int = 3, width: int = 8, classes: int = 4) -> nn.Sequential:
    sizes = [5] + [width] * depth
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


MODELS = {
    "series": (series_cnn, lambda: torch.randn(6, 1, 12)),
    "mlp": (mlp, lambda: torch.randn(6, 5)),
    "residual": (ResidualCNN, lambda: torch.randn(6, 1, 8, 8)),
    "encoder": (TokenEncoder, lambda: torch.randint(0, 20, (6, 7))),
    "one block": (lambda: mlp(1), lambda: torch.randn(6, 5)),
    "linear": (lambda: nn.Linear(5, 4), lambda: torch.randn(6, 5)),
}


def build(name: str, rng_seed: int = 0) -> tuple[nn.Module, Tensor, Places]:
    """A model in eval mode with uneven statistics of batch norm, an example, and its places."""
    torch.manual_seed(rng_seed)
    new_model, new_example = MODELS[name]
    model = new_model().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    example = new_example()
    return model, example, find_places(model, example)


def changed(model: nn.Module, places: Places, plan: Plan, size: float = 0.1) -> Adapted:
    """The plan's change with random values."""
    adapted = Adapted(model, places, plan).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in adapted.changes().values():
            tensor += size * torch.randn(tensor.shape, generator=rng).to(tensor)
    return adapted
