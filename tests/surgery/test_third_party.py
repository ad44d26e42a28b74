"""A model from a library that knows nothing of growth: it grows, trains, exports and comes back."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import esper
from esper import Budget
from esper.leyline.constants import SiteKind
from esper.tamiyo.scripted import FixedSchedule

transformers = pytest.importorskip("transformers")

TOKENS, CLASSES = 40, 3


def tiny_bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=CLASSES,
        max_position_embeddings=16,
    )
    return transformers.BertForSequenceClassification(config)


def batches(number: int = 4) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """The class is that of the first token; half of the tokens are padding."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(number):
        tokens = torch.randint(0, TOKENS, (16, 8), generator=generator)
        mask = torch.ones_like(tokens)
        mask[:, 5:] = 0
        made.append(({"input_ids": tokens, "attention_mask": mask}, tokens[:, 0] % CLASSES))
    return made


@pytest.fixture(scope="module")
def result():
    model = tiny_bert()
    own = sum(p.numel() for p in model.parameters())
    data = batches()
    return esper.grow(
        model,
        data,
        data,
        loss=lambda output, target: F.cross_entropy(output.logits, target),
        metric=lambda output, target: (output.logits.argmax(1) == target).float(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        budget=Budget(params=own + 2_000),
        controller=FixedSchedule(every=1, size=0.05),
        steps=24,
        decisions=8,
        progress=False,
    )


def test_its_blocks_are_sites(result):
    names = [site.name for site in result.growth.sites]
    assert "bert.encoder.layer.0" in names
    assert "bert.embeddings.LayerNorm" in names
    assert not any("query" in name for name in names)  # a skip connection goes around them
    kinds = {site.name: site.kind for site in result.growth.sites}
    assert kinds["bert.encoder.layer.1"] == SiteKind.TOKENS
    assert kinds["bert.pooler.activation"] == SiteKind.VECTOR


def test_it_grows_within_budget_and_learns(result):
    before = result.ledger.before.params
    assert before < result.growth.params <= before + 2_000
    assert len(result.growth.seeds) >= 2
    metrics = [step.metric for step in result.ledger.steps]
    assert max(metrics) > metrics[0]


def test_the_export_runs_where_there_is_no_esper(result, tmp_path):
    plain = result.growth.plain_model().eval()
    files = result.growth.export(tmp_path / "grown", formats=("torch", "source"))
    inputs = batches(1)[0][0]
    with torch.no_grad():
        expected = plain(**inputs).logits
    torch.save({"inputs": inputs, "expected": expected}, tmp_path / "case.pt")
    code = f"""
    import sys, torch
    class NoEsper:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("esper", "transformers"):
                raise ImportError(name)
    sys.meta_path.insert(0, NoEsper())
    case = torch.load({str(tmp_path / "case.pt")!r})
    model = torch.export.load({str(files["torch"])!r}).module()
    sys.path.insert(0, {str(files["source"].parent)!r})
    from model import load
    for exported in (model, load()):
        logits = exported(**case["inputs"])["logits"]
        torch.testing.assert_close(logits, case["expected"], rtol=1e-5, atol=1e-5)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
