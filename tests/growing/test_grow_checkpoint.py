"""A run that goes on from a file is the run that was never interrupted."""

import json
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR, OneCycleLR

from esper import Budget, Growth
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.surgery.eval_mode import random_states, set_random_states
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from support.models import Script, act, blobs, build, germinate, mlp

X, Y = blobs()
SCHEDULERS = {
    "cosine": lambda o: CosineAnnealingLR(o, 40),
    "one cycle": lambda o: OneCycleLR(o, 0.05, total_steps=60),
    "lambda": lambda o: LambdaLR(o, lambda step: 0.98**step),
    "milestones": lambda o: MultiStepLR(o, [5, 11, 20]),
}


def new_growth(scheduler="cosine", controller="heuristic", rng_seed=0, **options):
    model, example = build("mlp", rng_seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = SCHEDULERS[scheduler](optimizer)
    settings = dict(
        controller=controller,
        scheduler=schedule,
        decisions=12,
        val_loader=[(X, Y)],
        score=lambda batch: (model(batch[0]).argmax(1) == batch[1]).float(),
    )
    return Growth(model, optimizer, example=example, **{**settings, **options})


def train(growth: Growth, steps: int) -> None:
    """Rows and dropout come from the global generator: a resumed run must draw the same."""
    for _ in range(steps):
        rows = torch.randint(0, len(X), (16,))
        growth.optimizer.zero_grad()
        loss = F.cross_entropy(growth.model(X[rows]), Y[rows])
        loss.backward()
        growth.optimizer.step()
        growth.scheduler.step()
        growth.after_step(loss)


def finish(growth: Growth) -> None:
    while not growth.is_closed:
        train(growth, 3)
        growth.decide()


def assert_same(one: Growth, other: Growth) -> None:
    ledgers = [json.loads(growth.ledger.to_json()) for growth in (one, other)]
    for ledger in ledgers:
        for cost in ledger["costs"].values():
            cost.pop("seconds")
    assert ledgers[0] == ledgers[1]
    assert one.seeds == other.seeds
    first, second = one._network.named_parameters(), other._network.named_parameters()
    assert first.keys() == second.keys()
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name
        ours, theirs = one.optimizer.state[parameter], other.optimizer.state[second[name]]
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), (name, key)
    rates = [[group["lr"] for group in g.optimizer.param_groups] for g in (one, other)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
def test_in_the_middle_of_a_blend(scheduler, tmp_path):
    growth = new_growth(scheduler)
    growth.decide()
    train(growth, 6)
    growth.decide()
    train(growth, 1)
    assert 0 < max(slot.alpha for slot in growth._network.slots) < 0.5  # it moves every step
    assert SeedStage.BLENDING in growth._network.states.stage
    growth.save(tmp_path / "run.pt")
    finish(growth)

    resumed = new_growth(scheduler, rng_seed=7)  # another model, other randomness
    torch.manual_seed(123)
    resumed.load(tmp_path / "run.pt")
    finish(resumed)
    assert_same(growth, resumed)


def test_at_every_decision(tmp_path):
    growth = new_growth()
    for step in range(11):
        growth.decide()
        train(growth, 1)
        growth.save(tmp_path / f"{step}.pt")
    growth.decide()
    for step in range(0, 11, 3):
        resumed = new_growth(rng_seed=3)
        resumed.load(tmp_path / f"{step}.pt")
        for _ in range(step + 1, 11):
            resumed.decide()
            train(resumed, 1)
        resumed.decide()
        assert_same(growth, resumed)


def test_a_learned_controller_goes_on_with_what_it_remembers(tmp_path):
    torch.manual_seed(0)
    policy = tamiyo_policy(FeatureLayout(1, 1), PolicyConfig(lstm_hidden_dim=16))
    path = tmp_path / "controller.pt"
    LearnedController(policy).save(path)
    growth = new_growth(controller=path)
    for _ in range(4):
        growth.decide()
        train(growth, 1)
    growth.save(tmp_path / "run.pt")
    finish(growth)
    resumed = new_growth(controller=path, rng_seed=3)
    resumed.load(tmp_path / "run.pt")
    assert resumed.controller.memory()["h"].abs().sum() > 0
    finish(resumed)
    assert_same(growth, resumed)


def test_births_go_on_where_they_were(tmp_path):
    """A pruned seed has drawn its weights as well: the next one must not draw them again."""
    later = germinate(1, blueprint=3)
    growth = new_growth(controller=Script(germinate(0), act(LifecycleOp.PRUNE, 0), later))
    growth.decide()
    train(growth, 1)
    growth.decide()
    growth.save(tmp_path / "run.pt")
    growth.decide()
    resumed = new_growth(controller=Script(later))
    resumed.load(tmp_path / "run.pt")
    resumed.decide()
    assert growth.seeds == resumed.seeds == {"5": "dense_dense"}
    assert_same(growth, resumed)


def test_every_source_of_randomness_goes_on(tmp_path):
    states = random_states([])
    draws = [torch.rand(3).tolist(), random.random(), np.random.rand()]  # noqa: NPY002
    set_random_states(states)
    assert [torch.rand(3).tolist(), random.random(), np.random.rand()] == draws  # noqa: NPY002


def test_a_file_of_another_run_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    new_growth().save(path)
    with pytest.raises(ValueError, match=r"here sites is \['1', '0->3'\], was \['1', '5', "):
        new_growth(exclude=["5"]).load(path)
    model, example = build("mlp")
    groups = [{"params": [p]} for p in model.parameters()]
    other = Growth(model, torch.optim.AdamW(groups), example=example, decisions=12)
    with pytest.raises(ValueError, match=r"weights per group is \[1, 1, 1.*, was \[8, 0\]"):
        other.load(path)
    growth = new_growth()
    growth.decide()
    with pytest.raises(ValueError, match="load into a new one"):
        growth.load(path)
    saved = path.read_bytes()
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="not a file that Esper wrote"):
        new_growth().load(path)
    for damaged in (b"", b"hello", saved[: len(saved) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged, or not a file that Esper wrote"):
            new_growth().load(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        new_growth().load(path)


def test_another_optimizer_is_refused(tmp_path):
    new_growth().save(tmp_path / "run.pt")
    model, example = build("mlp")
    other = Growth(model, torch.optim.SGD(model.parameters(), 0.1), example=example, decisions=12)
    with pytest.raises(ValueError, match="optimizer is SGD, was AdamW"):
        other.load(tmp_path / "run.pt")


@pytest.mark.parametrize(
    ("width", "scheduler", "message"),
    [
        (6, None, "scheduler is None, was CosineAnnealingLR"),
        (6, LambdaLR, "scheduler is LambdaLR, was CosineAnnealingLR"),
        (8, CosineAnnealingLR, r"weights.0.weight is \(8, 5\), was \(6, 5\)"),
    ],
)
def test_another_schedule_or_width_is_refused_before_anything_is_loaded(
    width, scheduler, message, tmp_path
):
    new_growth("cosine").save(tmp_path / "run.pt")
    model = mlp(width)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {LambdaLR: lambda step: 1.0, CosineAnnealingLR: 40}
    made = scheduler and scheduler(optimizer, settings[scheduler])
    other = Growth(model, optimizer, example=X, decisions=12, scheduler=made)
    with pytest.raises(ValueError, match=message):
        other.load(tmp_path / "run.pt")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_run_that_cannot_hold_the_saved_one_is_refused(tmp_path):
    growth = new_growth(controller=Script(germinate(0)))
    for _ in range(9):
        growth.decide()
    growth.save(tmp_path / "run.pt")
    for options, message in (
        (dict(decisions=9), "has made 9 decisions; use decisions=10 or more"),
        (dict(budget=Budget(params=growth.params - 1)), "more than Budget"),
        (dict(budget=Budget(macs=growth.macs - 1)), "more than Budget"),
    ):
        with pytest.raises(ValueError, match=message):
            new_growth(**options).load(tmp_path / "run.pt")
    exact = dict(decisions=10, budget=Budget(params=growth.params, macs=growth.macs))
    resumed = new_growth(**exact)
    resumed.load(tmp_path / "run.pt")
    resumed.decide()
    assert resumed.is_closed


class Drifting(nn.Module):
    """Has a buffer that its state_dict leaves out, and one that grows."""

    def __init__(self):
        super().__init__()
        self.body = build("mlp")[0]
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("seen", torch.zeros(0), persistent=False)

    def forward(self, x):
        y = self.body(x)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
            self.seen = torch.cat([self.seen, y.detach().mean().reshape(1)])
        return y - self.mean


def with_loss_weights():
    """A run whose optimizer trains the loss as well, and that loss."""
    torch.manual_seed(0)
    model, head = Drifting(), nn.Linear(3, 3)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 1e-2)
    return Growth(model, optimizer, example=X, controller=Script(), decisions=12), head


def train_with(growth, head):
    for _ in range(3):
        growth.optimizer.zero_grad()
        F.cross_entropy(head(growth.model(X)), Y).backward()
        growth.optimizer.step()
        growth.after_step()


def whole_state(growth, head):
    """Copies of all that training moves, in and beside the model."""
    moved = [*growth.model.parameters(), *growth.model.buffers(), *head.parameters()]
    for parameter in (*growth.model.parameters(), *head.parameters()):
        moved += growth.optimizer.state[parameter].values()
    return [tensor.detach().clone() for tensor in moved]


def test_buffers_outside_the_state_dict_and_weights_outside_the_model_go_on(tmp_path):
    growth, head = with_loss_weights()
    train_with(growth, head)
    growth.decide(0.5)
    growth.save(tmp_path / "run.pt")
    resumed, other_head = with_loss_weights()
    resumed.load(tmp_path / "run.pt")
    before, after = whole_state(growth, head), whole_state(resumed, other_head)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(ValueError, match="is of another run: here"):
        new_growth().load(tmp_path / "run.pt")


def test_a_rollback_takes_them_back_too():
    growth, head = with_loss_weights()
    train_with(growth, head)
    growth.decide(0.5)
    before = whole_state(growth, head)
    train_with(growth, head)
    growth.decide(math.nan)
    after = whole_state(growth, head)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Holding(nn.Module):
    """Saves something of its own with its weights."""

    def __init__(self, held):
        super().__init__()
        self.body, self.held = build("mlp")[0], held

    def forward(self, x):
        return self.body(x)

    def get_extra_state(self):
        return {"held": self.held}

    def set_extra_state(self, state):
        self.held = state["held"]


def holding(held, lr=1e-2, milestones=()):
    model = Holding(held)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    scheduler = MultiStepLR(optimizer, milestones)
    script = Script(germinate(0))
    return Growth(model, optimizer, example=X, controller=script, decisions=12, scheduler=scheduler)


def test_numbers_of_numpy_are_saved(tmp_path):
    """As a sweep gives rates and milestones."""
    made = dict(lr=np.logspace(-3, -1, 3)[1], milestones=np.array([2, 4]))
    growth, resumed = (holding(np.float64(3), **made) for _ in range(2))
    growth.decide(0.5)
    train(growth, 3)
    growth.save(tmp_path / "run.pt")
    resumed.load(tmp_path / "run.pt")
    assert resumed.model.held == 3.0
    for run in (growth, resumed):
        torch.manual_seed(0)
        train(run, 3)
    assert_same(growth, resumed)


def test_what_could_not_be_read_again_is_told_when_it_is_saved(tmp_path):
    path = tmp_path / "run.pt"
    growth = holding(1.0)
    growth.save(path)
    before = path.read_bytes()
    growth.model.held = Budget(params=1)
    with pytest.raises(ValueError, match=r"was not written.*Unsupported global.*Budget"):
        growth.save(path)
    growth.model.held = lambda: None
    with pytest.raises(ValueError, match=r"was not written.*<lambda>"):
        growth.save(path)
    assert path.read_bytes() == before
    torch.save({"held": Budget(params=1)}, path)
    with pytest.raises(ValueError, match="holds more than tensors and plain containers"):
        holding(1.0).load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    growth = new_growth(controller=Script(germinate(0)))
    growth.save(path)
    before = path.read_bytes()

    def fail(contents, file):
        file.write(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        growth.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
