"""Pairs of layers get wider: a branch while it grows, ordinary layers afterwards."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.surgery.plain import working_sites
from esper.surgery.sites import count_macs, count_params, trace_sites
from esper.tamiyo.scripted import ConstantPlan


class SmallCNN(nn.Module):
    """Functions between the layers, a flatten, a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.norm, self.c2 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3)
        self.group, self.c3 = nn.GroupNorm(2, 6), nn.Conv2d(6, 6, 3)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.c1(x)), inplace=True), 2)
        x = F.relu(self.group(self.c2(x)))
        x = F.dropout(F.silu(self.c3(x)), 0.2, self.training)
        return self.head(x.view(x.size(0), -1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)))


def mlp() -> nn.Module:
    norm, relu = nn.BatchNorm1d(8), nn.ReLU(inplace=True)
    return nn.Sequential(
        *(nn.Linear(10, 8), norm, relu, nn.Dropout(0.1)),
        *(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
    )


class Squeezed(nn.Module):
    """`squeeze()` would remove the axis of a single new unit too; a layer called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.adaptive_avg_pool2d(F.relu(self.a(input=x)), 1).squeeze())


def mobile() -> nn.Module:
    depthwise = nn.Conv2d(4, 4, 3, groups=4, padding=1, bias=False)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(), depthwise, nn.ReLU6()),
        *(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


class GPT(nn.Module):
    """The layers of GPT-2, whose weights are transposed, and its activation of several functions."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            n_layer=1, n_embd=8, n_head=2, vocab_size=20, bos_token_id=1, eos_token_id=2
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


GPT_PAIR = "model.transformer.h.0.mlp.c_fc->model.transformer.h.0.mlp.c_proj"

CASES = {
    "gpt": (GPT, lambda: torch.randint(0, 20, (3, 7)), [GPT_PAIR]),
    "mlp": (mlp, lambda: torch.randn(6, 10), ["0->4", "4->6"]),
    "encoder": (Encoder, lambda: torch.randint(0, 11, (3, 7)), ["layer.linear1->layer.linear2"]),
    "cnn": (SmallCNN, lambda: torch.randn(4, 1, 14, 14), ["c1->c2", "c3->head"]),
    "squeezed": (Squeezed, lambda: torch.randn(4, 1, 6, 6), ["a->b"]),
    "mobile": (mobile, lambda: torch.randn(4, 1, 8, 8), ["0->5", "5->8"]),
}


def train(growth, x, steps=2):
    for _ in range(steps):
        growth.optimizer.zero_grad()
        growth.model(x).square().mean().backward()
        growth.optimizer.step()
        growth.after_step()


def outputs(model, x):
    was_training = model.training
    y = model.eval()(x).detach()  # with gradients: torch's fused encoder rounds differently
    model.train(was_training)
    return y


def check_that_it_resumes(start, saved_at, path):
    """A run of eight decisions, saved before one of them, resumes bit-exactly."""
    growth, x = start()
    for step in range(9):
        if step == saved_at:
            growth.save(path)
        if step < 8:
            growth.decide(0.1 * step)
            train(growth, x)
    again, _ = start()
    again.load(path)
    for step in range(saved_at, 8):
        again.decide(0.1 * step)
        train(again, x)
    assert again.params == growth.params
    assert torch.equal(outputs(again.model, x), outputs(growth.model, x))


def start(case, blueprint="widen_full", decisions=8, optimizer=torch.optim.AdamW):
    make, draw, pairs = CASES[case]
    torch.manual_seed(0)
    model, x = make(), draw()
    growth = esper.Growth(
        model,
        optimizer(model.parameters(), 1e-2),
        example=x,
        decisions=decisions,
        sites=pairs,
        blueprints=[blueprint],
        controller=ConstantPlan(torch.arange(len(pairs)).view(1, -1)),
    )
    return growth, x


@pytest.mark.parametrize("case", CASES)
def test_a_pair_grows_without_a_change_and_ends_as_wider_layers(case):
    growth, x = start(case, "widen_quarter" if case == "squeezed" else "widen_full")
    model, keys = growth.model, list(growth.model.state_dict())
    before = outputs(model, x)
    growth.decide(0.1)
    assert torch.equal(outputs(model, x), before)
    assert list(growth.seeds) == [CASES[case][2][0]]
    for step in range(1, 8):
        train(growth, x)
        trained = outputs(model, x)
        growth.decide(0.1 + 0.1 * step)
    torch.testing.assert_close(outputs(model, x), trained, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == keys
    assert count_params(model) == growth.params > growth.ledger.before.params
    assert count_macs(model, x) == growth.macs
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(outputs(growth.plain_model(), x), outputs(model, x))


@pytest.mark.parametrize("case", ["mlp", "gpt"])
def test_the_merged_layers_train_on_with_their_optimiser_state(case):
    growth, x = start(case)
    model = growth.model
    for step in range(7):
        growth.decide(0.1 * step)
        train(growth, x)
    old = {n: growth.optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters()}
    growth.decide(0.9)
    assert sum(len(g["params"]) for g in growth.optimizer.param_groups) == len(old)
    for name, parameter in model.named_parameters():
        moment = growth.optimizer.state[parameter]["exp_avg"]
        assert moment.shape == parameter.shape
        assert torch.equal(moment[tuple(slice(n) for n in old[name].shape)], old[name])
    last = model.get_submodule(CASES[case][2][0].split("->")[1])
    before = last.weight.detach().clone()
    train(growth, x)
    assert not torch.equal(last.weight, before)


def test_optimiser_state_of_rows_and_columns_starts_from_scratch():
    growth, x = start("mlp", optimizer=torch.optim.Adafactor)
    for step in range(8):
        train(growth, x)
        growth.decide(0.1 * step)
    assert growth.is_closed
    wider, state = growth.model[0], growth.optimizer.state
    assert wider.out_features > 8
    before = wider.weight.detach().clone()
    train(growth, x)
    assert not torch.equal(wider.weight, before)
    assert state[wider.weight]["row_var"].shape == (wider.out_features, 1)
    assert state[wider.bias]["step"] > state[wider.weight]["step"]  # of the weight's shape: kept


@pytest.mark.parametrize("saved_at", [3, 8])
def test_a_widened_run_resumes_bit_exactly(saved_at, tmp_path):
    check_that_it_resumes(lambda: start("cnn"), saved_at, tmp_path / "run.pt")


def test_a_pruned_pair_leaves_the_model_as_it_was():
    growth, x = start("encoder", decisions=12)
    growth.decide(0.5)
    train(growth, x)
    growth.decide(0.0)  # broken: the network before the seed is restored
    assert growth.seeds == {}
    assert growth.params == count_params(growth.model) == growth.ledger.before.params


def test_sizes_are_shares_of_the_layer_and_listed_with_prices():
    site = next(s for s in esper.find_sites(mlp(), torch.randn(4, 10)) if s.name == "4->6")
    prices = {b.name: site.params_of(b) for b in site.blueprints()}
    assert prices == {"widen_quarter": 24, "widen_half": 48, "widen_full": 96}


class Odd(nn.Module):
    def __init__(self, between) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(6, 6), nn.Linear(6, 6), between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (nn.LayerNorm(6), "LayerNorm follows it"),
        (nn.GroupNorm(2, 6), "GroupNorm follows it"),
        (nn.Softmax(-1), "softmax follows it"),
        (lambda x: x + x.relu(), "one reader"),
        (lambda x: x * x, "first argument alone"),
        (lambda x: torch.pow(2.0, x), "first argument alone"),
    ],
)
def test_layers_that_cannot_get_wider_are_refused_with_the_reason(between, reason):
    found = trace_sites(Odd(between), torch.randn(3, 6))
    assert not any(site.pair for site in found.sites)
    assert reason in found.not_wider["a"]


def test_layers_get_wider_if_batches_have_other_sizes():
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    found = trace_sites(model, torch.randn(8, 2, 6), torch.randn(5, 2, 6))
    assert [site.name for site in found.sites if site.pair] == ["0->3"]


def test_frozen_and_shared_layers_are_refused():
    model = Odd(torch.relu)
    model.a.requires_grad_(False)
    assert "frozen" in trace_sites(model, torch.randn(3, 6)).not_wider["a"]
    model = Odd(torch.relu)
    model.b.weight = model.a.weight
    assert "shares its weights" in trace_sites(model, torch.randn(3, 6)).not_wider["a"]


def test_a_model_whose_code_knows_the_width_keeps_it():
    model, x = Odd(lambda h: h.relu().contiguous()), torch.randn(3, 6)
    sites = trace_sites(model, x).sites
    assert any(site.pair for site in working_sites(model, sites, x))

    class Split(Odd):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x).relu()
            return self.b(hidden) if hidden.shape[-1] == 6 else self.b(hidden) * 0

    class InTraining(Odd):
        """Other code reads the units, or they are an output, while the model trains."""

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x).relu()
            return (self.b(hidden), self.between(hidden)) if self.training else self.b(hidden)

    for model in (Split(None), InTraining(nn.Linear(6, 2)), InTraining(nn.Identity())):
        sites = trace_sites(model, x).sites
        assert any(site.pair for site in sites)
        assert not any(site.pair for site in working_sites(model, sites, x))


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


def test_units_in_an_output_of_any_class_are_not_a_pair():
    class Named(Odd):
        def forward(self, x: Tensor) -> Output:
            hidden = self.a(x).relu()
            return Output(self.b(hidden), hidden)

    found = trace_sites(Named(None), torch.randn(3, 6))
    assert "an output of the model" in found.not_wider["a"]


def test_a_seed_inside_a_pair_excludes_the_pair():
    x = torch.randn(5, 10)
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    plan = ConstantPlan(torch.tensor([[0, 1]]), torch.tensor([[0, 1]]))
    growth = esper.Growth(
        model,
        optimizer,
        example=x,
        decisions=9,
        controller=plan,
        blueprints=["dense", "widen_half"],
    )
    for step in range(4):
        growth.decide(0.1 + 0.1 * step)
        train(growth, x)
    assert growth.seeds == {"1": "dense"}
