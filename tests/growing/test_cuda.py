"""Growth on a GPU: half precision with a scaler, exact resumption, a twin that is the same."""

import json

import pytest
import torch
import torch.nn.functional as F

import esper
from esper import Growth
from esper.leyline.stages import SeedStage
from support.models import Script, blobs, build, germinate, loaders, mlp

pytestmark = pytest.mark.gpu


def new_growth(controller="heuristic", rng_seed=0, shadow_training=False):
    model, example = build("mlp", rng_seed)
    model, x, y = model.cuda(), *(part.cuda() for part in blobs())
    growth = Growth(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        example=example.cuda(),
        controller=controller,
        decisions=10,
        shadow_training=shadow_training,
        val_loader=[(x, y)],
        score=lambda batch: (model(batch[0]).argmax(1) == batch[1]).float(),
    )
    return growth, x, y


@pytest.mark.parametrize("shadow_training", [False, True])
def test_half_precision_with_a_gradient_scaler(shadow_training):
    growth, x, y = new_growth(Script(germinate(0, blueprint=3)), shadow_training=shadow_training)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)

    def loss():
        with torch.autocast("cuda", dtype=torch.float16):
            return scaler.scale(F.cross_entropy(growth.model(x), y))

    for _ in range(4):
        growth.decide()
        growth.optimizer.zero_grad()
        loss().backward()
        growth.shadow_loss(loss)
        scaler.step(growth.optimizer)
        scaler.update()
        growth.after_step()
    seed = growth._network.slots[0].seed
    assert seed.layers[-1].weight.device.type == "cuda"
    assert (seed.layers[-1].weight != 0).any()
    assert all(torch.isfinite(p).all() for p in growth.parameters())


def train(growth: Growth, x, y) -> None:
    rows = torch.randint(0, len(x), (16,), device="cuda")
    growth.optimizer.zero_grad()
    F.cross_entropy(growth.model(x[rows]), y[rows]).backward()
    growth.optimizer.step()
    growth.after_step()


def finish(growth: Growth, x, y) -> None:
    while not growth.is_closed:
        growth.decide()
        train(growth, x, y)


def test_a_run_goes_on_bit_for_bit(tmp_path):
    growth, x, y = new_growth(Script(germinate(0, blueprint=3)))
    growth.decide()
    train(growth, x, y)
    assert SeedStage.BLENDING in growth._network.states.stage
    growth.save(tmp_path / "run.pt")
    finish(growth, x, y)
    resumed, _, _ = new_growth(Script(), rng_seed=5)
    resumed.load(tmp_path / "run.pt")
    finish(resumed, x, y)
    ledgers = [json.loads(run.ledger.to_json()) for run in (growth, resumed)]
    for ledger in ledgers:
        for cost in ledger["costs"].values():
            cost.pop("seconds")
    assert ledgers[0] == ledgers[1]
    for one, other in zip(growth.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_without_growth_both_networks_are_the_same():
    torch.manual_seed(0)
    model = mlp().cuda()
    train_loader, val_loader = loaders()
    result = esper.grow(
        model,
        train_loader,
        val_loader,
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-2),
        controller=Script(),
        steps=24,
        decisions=6,
        progress=False,
    )
    assert [s.metric for s in result.ledger.steps] == [t.metric for t in result.ledger.twin]
    assert next(result.model.parameters()).is_cuda
