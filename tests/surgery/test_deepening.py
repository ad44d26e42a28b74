"""A block of a stack is copied: it changes nothing at first, and the plain model has one more."""

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.surgery.plain import working_sites
from esper.surgery.sites import count_macs, count_params, trace_sites
from esper.tamiyo.scripted import ConstantPlan
from support.enlarging import check_that_it_resumes, outputs, train
from support.models import ResidualCNN


class PreNorm(nn.Module):
    """A ModuleList of transformer layers, called with another argument."""

    def __init__(self, norm_first=True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True, norm_first=norm_first)
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.embed(x), nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x)


CASES = {
    "transformer": (PreNorm, lambda: torch.randint(0, 11, (4, 6)), "blocks.0->copy", "blocks"),
    "residual CNN": (ResidualCNN, lambda: torch.randn(4, 1, 8, 8), "layer1.1->copy", "layer1"),
}


def start(case, decisions=8):
    torch.manual_seed(0)
    make, example, site, _ = CASES[case]
    model, x = make(), example()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    growth = esper.Growth(
        model, optimizer, example=x, decisions=decisions, sites=[site], blueprints=["deepen"],
        controller=ConstantPlan(torch.tensor([[0]])),
    )  # fmt: skip
    return growth, x


@pytest.mark.parametrize("case", CASES)
def test_a_copy_changes_nothing_at_first_and_ends_as_a_block(case):
    growth, x = start(case)
    model, stack = growth.model, CASES[case][3]
    blocks = len(model.get_submodule(stack))
    before = outputs(model, x)
    growth.decide(0.1)
    assert torch.equal(outputs(model, x), before)
    assert growth.seeds == {CASES[case][2]: "deepen"}
    train(growth, x)
    seed = growth._network.seed(0)
    assert all(w.abs().sum() > 0 for layer in seed.zero_layers for w in layer.parameters())
    for step in range(2, 9):
        trained = outputs(model, x)
        growth.decide(0.1 * step)
        if step < 8:
            train(growth, x)
    assert torch.equal(outputs(model, x), trained)  # the same modules, in the same order
    assert len(model.get_submodule(stack)) == blocks + 1
    assert count_params(model) == growth.params > growth.ledger.before.params
    assert count_macs(model, x) == growth.macs
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    plain = growth.plain_model()
    assert torch.equal(outputs(plain, x), trained)
    assert type(plain.get_submodule(stack)[1]) is type(plain.get_submodule(stack)[0])


def test_the_new_block_trains_on_with_its_optimiser_state():
    growth, x = start("transformer")
    for step in range(7):
        growth.decide(0.1 * step)
        train(growth, x)
    growth.decide(0.9)
    block = growth.model.blocks[1]
    held = {id(p) for group in growth.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in growth.model.parameters()} == held
    assert all(growth.optimizer.state[p]["step"] > 0 for p in block.parameters())
    last = block.linear2.weight.detach().clone()
    train(growth, x)
    assert not torch.equal(block.linear2.weight, last)


@pytest.mark.parametrize("saved_at", [3, 8])
def test_a_deepened_run_resumes_bit_exactly(saved_at, tmp_path):
    check_that_it_resumes(lambda: start("residual CNN"), saved_at, tmp_path / "run.pt")


def test_blocks_that_cannot_be_copied_are_refused_with_the_reason():
    found = trace_sites(PreNorm(norm_first=False), torch.randint(0, 11, (4, 6)))
    assert "not residual" in found.not_larger["blocks.0"]
    model = PreNorm()
    model.blocks[0].linear1.requires_grad_(False)
    found = trace_sites(model, torch.randint(0, 11, (4, 6)))
    assert "frozen" in found.not_larger["blocks.0"]


def test_a_model_that_calls_a_fixed_number_of_blocks_keeps_it():
    class Fixed(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.head(self.blocks[1](self.blocks[0](x)))

    model, x = Fixed(), torch.randint(0, 11, (4, 6))
    sites = trace_sites(model, x).sites
    assert any(site.name.endswith("->copy") for site in sites)
    assert not any(site.name.endswith("->copy") for site in working_sites(model, sites, x))


def test_a_model_of_transformers_counts_its_blocks_again(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=20, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model, x = transformers.LlamaForCausalLM(config), torch.randint(0, 20, (4, 7))
    growth = esper.Growth(
        model, torch.optim.AdamW(model.parameters(), 1e-2), example={"input_ids": x}, decisions=8,
        sites=["model.layers.0->copy"], blueprints=["deepen"],
        controller=ConstantPlan(torch.tensor([[0]])),
    )  # fmt: skip
    before = model(x).logits
    for step in range(8):
        growth.decide(0.1 + 0.1 * step)
        if step == 0:
            assert torch.equal(model(x).logits, before)
        growth.optimizer.zero_grad()
        model(x, labels=x).loss.backward()
        growth.optimizer.step()
        growth.after_step()
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    growth.plain_model().save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert len(again.model.layers) == 3
    plain = growth.plain_model().eval()
    torch.testing.assert_close(again.eval()(x).logits, plain(x).logits)
    greedy = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(again.generate(x, **greedy), plain.generate(x, use_cache=False, **greedy))
