"""A state of the network is all of it, whatever the model's state_dict says of it."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from esper import Growth
from support.growth_loops import X, Y, train
from support.models import Script, germinate, mlp


class Partial(nn.Module):
    """Saves its head alone; counts its batches, and keeps their means."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.batches = mlp(classes=6), nn.Linear(6, 3), 0
        self.register_buffer("means", torch.zeros(0))

    def forward(self, x):
        if self.training:
            self.batches += 1
            self.means = torch.cat([self.means, x.mean().reshape(1)])
        return self.head(self.body(x))

    def state_dict(self, *args, **kwargs):
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if name.startswith("head")}

    def get_extra_state(self):
        return self.batches

    def set_extra_state(self, state):
        self.batches = state


def partial_growth() -> Growth:
    torch.manual_seed(0)
    model = Partial()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Growth(model, optimizer, example=X, controller=Script(germinate(0)), decisions=12)


def whole_state(model: Partial) -> list[torch.Tensor]:
    tensors = [*model.parameters(), *model.buffers(), torch.tensor(model.batches)]
    return [tensor.detach().clone() for tensor in tensors]


def test_what_a_state_dict_leaves_out_goes_back_and_goes_on(tmp_path):
    growth = partial_growth()
    train(growth)
    growth.decide(0.5)
    before = whole_state(growth.model)
    growth.save(tmp_path / "run.pt")
    train(growth)
    growth.decide(math.nan)
    resumed = partial_growth()
    resumed.load(tmp_path / "run.pt")
    for model in (growth.model, resumed.model):
        torch.testing.assert_close(whole_state(model), before, rtol=0, atol=0)
        assert "means" in nn.Module.state_dict(model)  # it grew, and is still one to be saved
    growth.close(0.6)
    assert growth.is_closed


def test_a_buffer_that_torch_does_not_write_to_is_no_obstacle():
    """A mask that is expanded: neither at a rollback nor at the end."""
    model = mlp()
    model.register_buffer("mask", torch.arange(4.0).expand(3, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    growth = Growth(model, optimizer, example=X, controller=Script(), decisions=12)
    growth.decide(0.5)
    train(growth)
    growth.decide(math.nan)
    growth.close(0.6)
    assert torch.equal(model.mask, torch.arange(4.0).expand(3, 4))


def test_buffers_are_after_a_shadow_pass_what_they_were():
    """A mask that is expanded, and means that are another tensor after each pass."""
    torch.manual_seed(0)
    model = Partial()
    model.register_buffer("mask", torch.arange(4.0).expand(3, 4), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    script = Script(germinate(0))
    growth = Growth(
        model, optimizer, example=X, controller=script, decisions=12, shadow_training=True
    )
    growth.decide(0.5)
    F.cross_entropy(model(X), Y).backward()
    before = [buffer.clone() for buffer in model.buffers()]
    growth.shadow_loss(lambda: F.cross_entropy(model(X), Y))
    torch.testing.assert_close([*model.buffers()], before, rtol=0, atol=0)
    assert any(p.grad is not None for p in growth._network.seed(0).parameters())
