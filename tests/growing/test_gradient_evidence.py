"""Evidence for seeds, and the controller that decides by it."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper import Budget, Growth
from esper.growing.gradient_evidence import BATCHES, ROWS, Evidence
from esper.tamiyo.growth_rules import EvidenceConfig, EvidenceController
from support.growth_loops import X, new_growth, train
from support.models import Script, germinate


@pytest.mark.parametrize("name", ["mlp", "residual", "encoder", "series"])
def test_probes_change_no_bit_of_the_output_and_leave_no_hook(name):
    growth = new_growth(Script(), name=name)
    model, example = growth.model.eval(), growth.example
    before = model(example)
    evidence = Evidence(growth._network, growth._reporter.may_grow)
    evidence.start(0)
    assert torch.equal(model(example), before)
    evidence.stop()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_only_seeds_that_fit_into_the_budget_are_measured():
    growth = new_growth(Script(), name="series", budget=Budget(params=200))
    room = 200 - growth.ledger.before.params
    evidence = Evidence(growth._network, growth._reporter.may_grow)
    evidence.start(0)
    sites, menu = growth.sites, growth._network.menu
    measured = {(p.index, b) for p in evidence._probes for b in p.blueprints}
    costs = {
        (s, b): site.params_of(entry)
        for s, site in enumerate(sites)
        for b, entry in enumerate(menu)
        if site.fits(entry) and site.facts_of(entry).depth > 1
    }
    assert measured == {place for place, cost in costs.items() if cost <= room}
    assert 0 < len(measured) < len(costs)


@pytest.mark.parametrize("macs", [None, 10**9])
def test_multiply_adds_grow_in_step_with_the_budget_of_parameters(macs):
    """Unless there is a budget of multiply-adds."""
    controller = EvidenceController(EvidenceConfig(macs_ratio=0.7))
    growth = new_growth(controller, "series", 25, budget=Budget(params=300, macs=macs))
    before = growth.ledger.before
    for step in range(24):
        F.cross_entropy(
            growth.model(growth.example), torch.arange(len(growth.example)) % 3
        ).backward()
        growth.optimizer.step()
        growth.after_step()
        growth.decide(0.3 + 0.02 * step)
    most = max(record.macs for record in growth.ledger.steps)
    limit = 0.7 * 300 / before.params * before.macs
    assert (most <= limit) == (macs is None)
    assert most > before.macs


def test_the_gain_of_units_is_larger_where_the_model_lacks_them():
    """The second layer can represent the target; the first, of one unit, cannot."""
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    y = (x[:, :3].abs().sum(1, keepdim=True)) - 2.4
    model = nn.Sequential(nn.Linear(6, 1), nn.Tanh(), nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    growth = Growth(model, optimizer, example=x[:8], decisions=10, controller=Script())
    evidence = Evidence(growth._network, growth._reporter.may_grow)
    for step in range(60 + BATCHES):
        if step == 60:
            evidence.start(step)
        rows = torch.randint(0, 400, (50,))
        optimizer.zero_grad()
        F.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        evidence.after_step()
    names = [site.name for site in growth.sites]
    full = [b.name for b in growth._network.menu].index("widen_full")
    quarter = [b.name for b in growth._network.menu].index("widen_quarter")
    gain = evidence.gains()
    assert gain[names.index("0->2"), full] > 0
    wide = gain[names.index("2->4")]
    torch.testing.assert_close(wide[full], 4 * wide[quarter])  # 4 times the units
    assert gain[names.index("1")].sum() == 0  # a dense seed between dense layers


def test_nothing_grows_before_evidence_nor_late():
    growth = new_growth("heuristic", decisions=25, rent=0.0)
    for step in range(24):
        growth.decide(min(1.0, 0.3 + 0.05 * step))
        train(growth)
    born = [d.step for d in growth.ledger.decisions if d.op == "GERMINATE"]
    assert born
    assert min(born) == 1  # before decision 0 it was not trained
    assert max(born) <= 0.4 * 24
    paid = growth.ledger.costs["measuring"].macs
    assert paid > 0
    growth.decide(1.0)
    assert growth.ledger.costs["measuring"].macs == paid  # no evidence is measured any more


def test_random_labels_keep_nothing_in_a_loop_without_scores():
    generator = torch.Generator().manual_seed(1)
    growth = new_growth("heuristic", decisions=25, budget=Budget(params=1_000))
    for _ in range(25):
        train(growth)
        growth.decide(0.1 + 0.03 * float(torch.rand((), generator=generator)))
    assert any(d.op == "GERMINATE" for d in growth.ledger.decisions)
    assert growth.seeds == {}
    assert growth.params == growth.ledger.before.params


def test_a_clear_rise_without_scores_is_committed():
    growth = new_growth("heuristic", decisions=25, budget=Budget(params=200))
    for step in range(25):
        train(growth)
        growth.decide(0.3 + 0.02 * step)
    assert growth.seeds
    kept = [fate.reason for fate in growth.ledger.fates if fate.fate == "kept"]
    assert all("the metric has risen" in reason for reason in kept)


def test_alpha_moves_at_every_optimiser_step_of_the_first_half():
    growth = new_growth(Script(germinate(0, blueprint=1, tempo=0)))
    train(growth, 8)
    growth.decide(0.5)
    slot, alphas = growth._network.slots[0], []
    for _ in range(4):
        alphas.append(slot.alpha)
        train(growth, 1)
    assert alphas == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert slot.alpha == 0.5


def test_evidence_that_was_saved_is_complete_in_a_new_run():
    growth = new_growth(Script())
    evidence = Evidence(growth._network, growth._reporter.may_grow)
    evidence.start(0)
    for _ in range(BATCHES):
        growth.model(X).square().mean().backward()
        evidence.after_step()
    gains = evidence.gains()
    assert gains.max() > 0
    menu = growth._network.menu
    costs = [p.slot.site.macs_of(menu[next(iter(p.blueprints))]) for p in evidence._probes]
    assert evidence.macs == 2 * BATCHES * ROWS * sum(costs)
    again = Evidence(growth._network, growth._reporter.may_grow)
    again.step, again.steps_left = evidence.step, evidence.steps_left
    again.load(evidence.measured())
    assert torch.equal(again.gains(), gains)
    assert again.macs == evidence.macs
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in growth.model.modules())


def test_a_model_is_copied_and_saved_while_evidence_is_measured():
    growth = new_growth(Script())
    evidence = Evidence(growth._network, growth._reporter.may_grow)
    evidence.start(0)
    output = growth.model.eval()(X)
    assert torch.equal(copy.deepcopy(growth.model)(X), output)
    torch.save(growth.model, io.BytesIO())
