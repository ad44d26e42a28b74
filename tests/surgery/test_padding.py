"""Torch's transformer encoder grows as it is built by default, with its own way to pad.

In evaluation it would hand its layers nested tensors, in which no seed could work.
"""

import runpy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.leyline.stages import LifecycleOp
from support.models import Script, act, germinate

# torch's own use of them, where nothing grows inside
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden[:, 0])


def sentences() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 20, (32, 9), generator=torch.Generator().manual_seed(0))
    for row, length in zip(tokens, torch.arange(32) % 7 + 3, strict=True):
        row[length:] = 0
    return tokens, tokens[:, 0] % 3


def grow_at(site: str) -> esper.Growth:
    """A run that commits a seed at a site; it is felt in validation without gradients."""
    torch.manual_seed(0)
    model, (tokens, classes) = Padded(), sentences()
    assert model.encoder.use_nested_tensor
    script = Script(germinate(0, blueprint=1, tempo=0), {}, {}, act(LifecycleOp.FOSSILIZE))
    growth = esper.Growth(
        model,
        torch.optim.AdamW(model.parameters(), 1e-2),
        example=tokens,
        sites=[site],
        exclude=["encoder.layers.1.norm1"],
        decisions=6,
        controller=script,
        val_loader=[(tokens, classes)],
        score=lambda batch: model(batch[0]).softmax(1).gather(1, batch[1][:, None])[:, 0],
    )
    for _ in range(6):
        for _ in range(3):
            growth.optimizer.zero_grad()
            F.cross_entropy(model(tokens), classes).backward()
            growth.optimizer.step()
            growth.after_step()
        growth.decide()
    return growth


@pytest.mark.parametrize(
    "site", ["embedding", "encoder.layers.0.linear1", "encoder.layers.0.norm1", "encoder.layers.1"]
)
def test_a_seed_is_felt_with_padding_and_so_is_it_in_the_plain_model(site):
    growth, (tokens, _) = grow_at(site), sentences()
    assert list(growth.seeds) == [site]
    model, plain = growth.model.eval(), growth.plain_model().eval()
    with torch.no_grad():
        whole = model(tokens)
        torch.testing.assert_close(plain(tokens), whole)
        with growth._network.without([0]):
            assert not torch.allclose(model(tokens), whole, atol=1e-3)


def test_exported_files_compute_the_same(tmp_path):
    growth, (tokens, _) = grow_at("encoder.layers.1"), sentences()
    files = growth.export(tmp_path, formats=("torch", "source"))
    loaded = [
        torch.export.load(files["torch"]).module(),
        runpy.run_path(str(files["source"]))["load"](),
    ]
    growth.model.eval()
    with torch.no_grad():
        for model in loaded:
            torch.testing.assert_close(model(tokens), growth.model(tokens), rtol=1e-5, atol=1e-5)


def test_an_encoder_without_a_site_keeps_its_nested_tensors():
    model, (tokens, _) = Padded(), sentences()
    optimizer = torch.optim.AdamW(model.parameters())
    esper.Growth(model, optimizer, example=tokens, sites=["embedding"], decisions=9)
    assert model.encoder.use_nested_tensor


class Pooled(Padded):
    """Looks at what comes out at the padding, too, which is 0 with nested tensors alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden.mean(1))


def test_the_ungrown_twin_is_measured_alike():
    torch.manual_seed(0)
    model, batch = Pooled(), sentences()
    result = esper.grow(
        model,
        [batch],
        [batch],
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
        metric=lambda output, target: output.softmax(1).gather(1, target[:, None])[:, 0],
        controller=Script(),
        steps=4,
        decisions=2,
        progress=False,
    )
    steps, twin = result.ledger.steps, result.ledger.twin
    assert [s.metric for s in steps] == pytest.approx([t.metric for t in twin], rel=1e-6)
