"""Models that were not written for growth, small enough to train in a test."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from esper.leyline.factored_actions import ActionMasks
from esper.leyline.reports import Reports
from esper.leyline.stages import LifecycleOp
from esper.surgery.sites import find_sites


class ResidualBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and before == width
            else nn.Conv2d(before, width, 1, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResidualCNN(nn.Module):
    def __init__(self, width: int = 4, classes: int = 3):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.layer1 = nn.Sequential(ResidualBlock(width, width), ResidualBlock(width, width))
        self.layer2 = nn.Sequential(ResidualBlock(width, 2 * width, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.layer2(self.layer1(self.stem(x)))).flatten(1))


class TokenEncoder(nn.Module):
    def __init__(self, width: int = 8, classes: int = 3):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def mlp(width: int = 6, classes: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Linear(width, classes),
    )


def series_cnn(width: int = 4, classes: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(1, width, 3, 2, 1),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(width, width, 3, 1, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


MODELS = {
    "residual": (ResidualCNN, lambda: torch.randn(6, 1, 8, 8)),
    "encoder": (TokenEncoder, lambda: torch.randint(0, 20, (6, 7))),
    "mlp": (mlp, lambda: torch.randn(6, 5)),
    "series": (series_cnn, lambda: torch.randn(6, 1, 16)),
}


def block_sites(model, *examples):
    """The sites after modules, without the pairs of layers."""
    return tuple(site for site in find_sites(model, *examples) if site.pair is None)


def build(name: str, rng_seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A model and an example batch for it."""
    torch.manual_seed(rng_seed)
    new_model, new_example = MODELS[name]
    return new_model(), new_example()


def blobs(rows: int = 96, rng_seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three noisy clusters of five numbers each: an MLP learns them within a few steps."""
    generator = torch.Generator().manual_seed(rng_seed)
    labels = torch.randint(0, 3, (rows,), generator=generator)
    centres = torch.randn(3, 5, generator=torch.Generator().manual_seed(99)) * 2
    return centres[labels] + torch.randn(rows, 5, generator=generator), labels


def loaders(batch_size: int = 16, shuffle: bool = True) -> tuple[DataLoader, DataLoader]:
    train = DataLoader(TensorDataset(*blobs()), batch_size=batch_size, shuffle=shuffle)
    return train, DataLoader(TensorDataset(*blobs(64, rng_seed=1)), batch_size=32)


class Script:
    """A controller that does as it is told: a dict of choices per step, by head; then it waits."""

    def __init__(self, *steps: dict[str, int]):
        self.steps = steps
        self.reports: list[Reports] = []

    def begin(self, env_ids: Tensor) -> None:
        """Nothing to forget."""

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        space = masks.action_space
        choices = self.steps[len(self.reports)] if len(self.reports) < len(self.steps) else {}
        self.reports.append(reports)
        action = [choices.get(head.name, 0) for head in space]
        return torch.tensor([action])


WAIT = dict(op=int(LifecycleOp.WAIT))


def germinate(slot: int = 0, **choices: int) -> dict[str, int]:
    return dict(op=int(LifecycleOp.GERMINATE), slot=slot, alpha_target=2) | choices


def act(op: LifecycleOp, slot: int = 0, **choices: int) -> dict[str, int]:
    return dict(op=int(op), slot=slot) | choices
