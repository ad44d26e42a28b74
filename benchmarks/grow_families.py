"""Models and data of users, for `grow.py`: eight families."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.tolaria.data_files import mnist1d_rows
from esper.tolaria.tasks import DATA_DIR

ROOT = Path(__file__).parents[1]
LETTERS = "abcdefghijklmnopqrstuvwxyz .,:;-()`\n"  # and one symbol for all others
Rows = tuple[Tensor, Tensor]


class Family(NamedTuple):
    """A user's model and data; the loss and the score are of an output and its targets."""

    make: Callable[[int], nn.Module]  # by width
    width: int
    step: int  # between possible widths
    data: Callable[[], Rows]  # 64 % to train, 16 % to validate, 20 % to test
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]  # one per example, 0 to 1
    learning_rate: float  # the middle of the rates tried
    steps: int
    batch: int = 100


def series_cnn(width: int) -> nn.Module:
    """As published with MNIST-1D, narrower."""
    sizes = ((1, 5), (width, 3), (width, 3))
    convs = [
        part for n, k in sizes for part in (nn.Conv1d(n, width, k, stride=2, padding=1), nn.ReLU())
    ]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(5 * width, 10))


def mlp(inputs: int, width: int, outputs: int) -> nn.Module:
    hidden = (nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Transformer(nn.Module):
    """Two blocks, pre-norm: of tokens with a causal mask, or of image patches with a mean."""

    def __init__(self, embed: nn.Module, width: int, length: int, classes: int, *, causal: bool):
        super().__init__()
        self.embed, self.head = embed, nn.Linear(width, classes)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        mask = nn.Transformer.generate_square_subsequent_mask(length) if causal else None
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        x = self.norm(x)
        return self.head(x) if self.mask is not None else self.head(x.mean(1))


class Residual(nn.Module):
    """Two convolutions with batch norm, and the input or a projection of it added."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        is_same = stride == 1 and before == width
        self.skip = nn.Identity() if is_same else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def residual_cnn(width: int) -> nn.Module:
    stem = (nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    blocks = (Residual(width, width, 1), Residual(width, 2 * width, 2))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))
    return nn.Sequential(*stem, *blocks, *head)


def mobile_cnn(width: int) -> nn.Module:
    """Inverted blocks: pointwise, depthwise, pointwise."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU6()]
    for _ in range(2):
        inner = 2 * width
        layers += [nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner), nn.ReLU6()]
        layers += [nn.Conv2d(inner, inner, 3, 2, 1, groups=inner), nn.BatchNorm2d(inner)]
        layers += [nn.ReLU6(), nn.Conv2d(inner, width, 1), nn.BatchNorm2d(width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Recurrent(nn.Module):
    """A GRU over the rows of an image."""

    def __init__(self, width: int):
        super().__init__()
        self.rnn = nn.GRU(8, width, batch_first=True)
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.rnn(x.squeeze(1))[0][:, -1])))


def mnist1d() -> Rows:
    x, y = mnist1d_rows(ROOT / DATA_DIR, 5000, 42)
    return torch.tensor(x), torch.tensor(y)


def tabular() -> Rows:
    from sklearn.datasets import make_classification

    x, y = make_classification(
        5000, 20, n_informative=15, n_classes=5, n_clusters_per_class=4, random_state=0
    )
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def regression() -> Rows:
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(4000, noise=1.0, random_state=0)
    y = (y - y.mean()) / y.std()
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32).unsqueeze(1)


def characters(length: int = 24) -> Rows:
    """The documentation of this repository; the target is the next character."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).lower()
    codes = torch.tensor([LETTERS.find(sign) % (len(LETTERS) + 1) for sign in text])
    rows = codes[: len(codes) // (length + 1) * (length + 1)].view(-1, length + 1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:4000]]
    return rows[:, :-1], rows[:, 1:]


def digits() -> Rows:
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images / 8 - 1, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order].unsqueeze(1), torch.tensor(found.target)[order]


def patches() -> Rows:
    x, y = digits()
    return x[:, 0].unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(x), 16, 4), y


def is_right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().reshape(len(target), -1).mean(1)


def closeness(output: Tensor, target: Tensor) -> Tensor:
    """The targets have a variance of 1."""
    return 1 / (1 + (output - target).square().mean(1))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def small_gpt(width: int) -> nn.Module:
    symbols = len(LETTERS) + 1
    return Transformer(nn.Embedding(symbols, width), width, 24, symbols, causal=True)


FAMILIES = {
    "series CNN": Family(series_cnn, 8, 1, mnist1d, F.cross_entropy, is_right, 2e-2, 1000),
    "residual CNN": Family(residual_cnn, 4, 1, digits, F.cross_entropy, is_right, 1e-2, 400),
    "mobile CNN": Family(mobile_cnn, 6, 1, digits, F.cross_entropy, is_right, 1e-2, 400),
    "tabular MLP": Family(
        lambda w: mlp(20, w, 5), 16, 1, tabular, F.cross_entropy, is_right, 5e-3, 2000
    ),
    "regression MLP": Family(
        lambda w: mlp(10, w, 1), 8, 1, regression, F.mse_loss, closeness, 5e-3, 1500
    ),
    "GRU": Family(Recurrent, 8, 1, digits, F.cross_entropy, is_right, 1e-2, 600),
    "small GPT": Family(small_gpt, 16, 2, characters, token_loss, is_right, 1e-2, 600, batch=64),
    "small ViT": Family(
        lambda w: Transformer(nn.Linear(4, w), w, 16, 10, causal=False),
        *(16, 2, patches, F.cross_entropy, is_right, 3e-3, 600),
        batch=50,
    ),
}
