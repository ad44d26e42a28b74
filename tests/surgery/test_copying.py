"""Models that keep tensors of their last forward pass can be copied all the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import esper
from esper.leyline.stages import LifecycleOp
from esper.surgery.export import export
from esper.surgery.plain import without_graphs
from support.growth_loops import X, Y
from support.models import Script, act, germinate, loaders


class Keeping(nn.Module):
    """Makes a weight anew in every pass, and keeps what came of its layers in training."""

    def __init__(self):
        super().__init__()
        self.body = nn.utils.spectral_norm(nn.Linear(5, 6))
        self.head = nn.Linear(6, 3)
        self.seen: dict[str, list[torch.Tensor]] = {"hidden": []}

    def forward(self, x):
        hidden = self.body(x).relu()
        if self.training:
            self.seen["hidden"] = [hidden]
        return self.head(hidden)


def called() -> Keeping:
    torch.manual_seed(0)
    model = Keeping()
    model(X)
    return model


def test_a_copy_computes_the_same_and_shares_nothing():
    model = called().eval()
    twin = copy.deepcopy(model, without_graphs(model))
    assert torch.equal(twin.seen["hidden"][0], model.seen["hidden"][0])
    expected = model(X)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), model.seen["hidden"][0]):
            tensor.zero_()
    assert torch.equal(twin(X), expected)


@pytest.mark.filterwarnings("ignore:The tensor attribute")  # torch's, of what the model keeps
def test_a_plain_model_and_its_files_come_of_one_that_was_called_with_gradients(tmp_path):
    model = called()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    script = Script(germinate(0, blueprint=1, tempo=0), {}, {}, act(LifecycleOp.FOSSILIZE))
    growth = esper.Growth(model, optimizer, example=X, controller=script, decisions=6)
    for step in range(6):
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
            growth.after_step()
        growth.decide(0.5 + step / 100)
    assert growth.seeds
    model(X)
    plain = growth.plain_model()
    torch.testing.assert_close(plain.eval()(X), model.eval()(X))
    plain.train()(X)
    assert export(plain, X, tmp_path, ["torch"])


def test_the_twin_of_a_model_that_was_called_is_trained():
    model, (train, val) = called(), loaders()
    result = esper.grow(
        model,
        train,
        val,
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
        controller=Script(),
        steps=4,
        decisions=2,
        progress=False,
    )
    assert result.verdict.grown == result.verdict.ungrown  # accuracies on the same batches


def test_a_model_with_new_units_can_be_copied_and_saved(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    growth = esper.Growth(
        model, optimizer, example=X, sites=["0->3"], blueprints=["widen_full"], decisions=8,
        controller=Script(germinate(0, blueprint=0, tempo=0)),
    )  # fmt: skip
    for _ in range(3):
        growth.decide(0.5)
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        growth.after_step()
    assert growth._network.active
    expected = model.eval()(X)
    assert torch.equal(copy.deepcopy(model, without_graphs(model))(X), expected)
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(X), expected)
