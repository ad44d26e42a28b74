"""Growth in a user's own loop: it keeps its promises whatever the controller does."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper import Budget, Growth
from esper.growing.controllers import blueprints_for
from esper.leyline.stages import LifecycleError, LifecycleOp, SeedStage
from esper.tamiyo.heuristic import HeuristicController
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from esper.tamiyo.scripted import RandomController
from support.growth_loops import X, Y, frozen_state, new_growth, stages, train
from support.models import WAIT, Script, act, build, germinate, mlp


def seed_parameters(growth):
    """Those of all seeds, in the order of their slots and layers."""
    own = {id(parameter) for parameter in growth.model.parameters()}
    return [parameter for parameter in growth.parameters() if id(parameter) not in own]


def test_a_seeds_whole_life_leaves_the_old_weights_and_their_optimiser_alone():
    """Germination, blending, retargeting, fossilising, pruning: only training moves old weights."""
    controller = Script(
        germinate(0, blueprint=3, tempo=0),
        germinate(1, blueprint=0, tempo=0),
        WAIT,
        act(LifecycleOp.FOSSILIZE, 0),
        act(LifecycleOp.PRUNE, 1, alpha_speed=0),
    )
    growth = new_growth(controller)
    seen = []
    for _ in range(6):
        train(growth)
        before = frozen_state(growth)
        growth.decide(0.5)
        assert all(torch.equal(a, b) for a, b in zip(before, frozen_state(growth), strict=True))
        seen.append(stages(growth)[:2])
    dormant, blending, holding = SeedStage.DORMANT, SeedStage.BLENDING, SeedStage.HOLDING
    assert seen == [
        [blending, dormant],
        [blending, blending],
        [holding, blending],
        [SeedStage.FOSSILIZED, holding],
        [SeedStage.FOSSILIZED, SeedStage.EMBARGOED],
        [SeedStage.FOSSILIZED, SeedStage.EMBARGOED],
    ]


@pytest.mark.parametrize("name", ["mlp", "residual", "encoder", "series"])
def test_a_germination_and_a_prune_change_no_bit_of_the_output(name):
    growth = new_growth(Script(germinate(0), act(LifecycleOp.PRUNE, 0)), name=name)
    growth.model.eval()
    before = growth.model(growth.example)
    growth.decide(0.5)
    assert growth.seeds
    assert torch.equal(growth.model(growth.example), before)
    growth.decide(0.5)
    assert not growth.seeds
    assert torch.equal(growth.model(growth.example), before)


def test_alpha_moves_by_the_ramp_and_is_what_the_model_feels():
    growth = new_growth(Script(germinate(0, blueprint=1, tempo=1)))
    alphas = []
    for _ in range(7):
        growth.decide(0.5)
        alphas.append(growth._network.slots[0].alpha)
    assert alphas == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


def test_new_weights_learn_and_the_others_keep_their_state():
    growth = new_growth(Script(germinate(0, blueprint=1)))
    train(growth)
    growth.decide(0.5)
    seed = seed_parameters(growth)
    train(growth)
    assert all((parameter != 0).any() for parameter in seed)
    assert growth.optimizer.state[seed[0]]["step"] == 3
    assert growth.optimizer.state[growth.model[0].weight]["step"] == 6


@settings(max_examples=25)
@given(
    rng_seed=st.integers(0, 10_000),
    params=st.integers(42, 200),  # room for the smallest seed
    macs=st.integers(36, 200),
    shadow_training=st.booleans(),
)
def test_budgets_are_never_exceeded(rng_seed, params, macs, shadow_training):
    model, example = build("mlp", rng_seed)
    own_params = sum(p.numel() for p in model.parameters())
    own_macs = 5 * 6 + 6 * 6 + 6 * 3
    budget = Budget(params=own_params + params, macs=own_macs + macs)
    growth = Growth(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        example=example,
        controller=RandomController(torch.Generator().manual_seed(rng_seed)),
        decisions=15,
        budget=budget,
        shadow_training=shadow_training,
    )
    while not growth.is_closed:
        growth.decide(0.5)
        held = sum(p.numel() for p in growth.parameters())
        assert growth.params == held <= budget.params
        assert growth.macs <= budget.macs
    assert sum(p.numel() for p in growth.plain_model().parameters()) == growth.params


def test_budgets_stand_where_floats_are_coarse():
    """Beyond 2^24 a float32 skips whole numbers: rounding may only ever be to the safe side."""
    growth = new_growth(Script(germinate(0, blueprint=1)))
    reporter = growth._reporter
    reporter.model_size = (2**26 + 1, 84)
    reporter._budget = Budget(params=2**27 + 7)  # leaves 2**26 + 6; the nearest float is larger
    report = partial(reporter.observe, 0, 5, growth._history, max_germinations=9, rent=0.0)
    left = int(report().params_left)
    assert 2**26 <= left <= 2**26 + 6
    reporter._of_sites["cost_params"].fill_(2**25 + 1)
    costs = report().cost_params.double()
    assert ((costs >= 2**25 + 1) & (costs <= 2**25 + 4)).all()


def test_accumulated_gradients_are_those_of_the_whole_batch():
    results = []
    for parts in (1, 2):
        growth = new_growth(Script(germinate(0, blueprint=1)))
        growth.model.eval()  # no dropout: the two ways draw differently
        growth.decide(0.5)
        growth.optimizer.zero_grad()
        for rows in torch.arange(32).chunk(parts):
            (F.cross_entropy(growth.model(X[rows]), Y[rows]) / parts).backward()
        results.append([p.grad.clone() for p in growth.parameters() if p.grad is not None])
    assert len(results[0]) == len(results[1]) > 8
    for whole, accumulated in zip(*results, strict=True):
        torch.testing.assert_close(whole, accumulated)


def test_seeds_run_in_the_precision_of_their_site():
    growth = new_growth(Script(germinate(0, blueprint=3), germinate(1, blueprint=0)))
    for _ in range(4):
        growth.decide(0.5)
        growth.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = growth.model(X)
            assert output.dtype == torch.bfloat16
            loss = F.cross_entropy(output.float(), Y)
        loss.backward()
        growth.optimizer.step()
        growth.after_step()
    assert all(torch.isfinite(p).all() for p in growth.parameters())
    assert len(growth.seeds) == 2
    weights = seed_parameters(growth)
    assert all(weight.dtype == torch.float32 for weight in weights)
    assert all((weight != 0).any() for weight in weights)


class Shadowed(nn.Module):
    """Has running statistics and dropout: what a second pass could disturb."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(self.body(x)))


def shadow_growth():
    torch.manual_seed(0)
    model = Shadowed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    script = Script(germinate(0, blueprint=1))
    return Growth(model, optimizer, example=X, controller=script, decisions=9, shadow_training=True)


def test_behind_the_host_nothing_of_the_host_changes():
    growth = shadow_growth()
    growth.decide(0.5)
    assert stages(growth)[0] == SeedStage.TRAINING
    assert not growth._network.active
    loss = F.cross_entropy(growth.model(X), Y)
    loss.backward()
    gradients = [p.grad.clone() for p in growth.model.parameters()]
    buffers = [b.clone() for b in growth.model.buffers()]
    randomness = torch.get_rng_state()
    growth.shadow_loss(lambda: F.cross_entropy(growth.model(X), Y))
    assert torch.equal(torch.get_rng_state(), randomness)
    for parameter, gradient in zip(growth.model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    for buffer, before in zip(growth.model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, before)
    assert all(parameter.grad is not None for parameter in seed_parameters(growth))


def test_the_shadow_gradient_is_that_of_the_seed_at_its_target():
    growth = shadow_growth()
    growth.decide(0.5)
    growth.model.eval()
    growth.shadow_loss(lambda: F.cross_entropy(growth.model(X), Y))
    seed = seed_parameters(growth)
    weight, bias = (p.detach().clone().requires_grad_() for p in seed)
    y = growth.model.body(X)
    logits = growth.model.head(y + 1.0 * F.linear(y, weight, bias))
    expected = torch.autograd.grad(F.cross_entropy(logits, Y), (weight, bias))
    for parameter, gradient in zip(seed, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_step_without_its_shadow_is_noticed():
    growth = shadow_growth()
    train(growth)  # no seed yet: no shadow needed
    growth.decide(0.5)
    F.cross_entropy(growth.model(X), Y).backward()
    growth.shadow_loss(lambda: F.cross_entropy(growth.model(X), Y))
    growth.optimizer.step()
    growth.after_step()
    with pytest.raises(ValueError, match="shadow_loss was not called in the last step"):
        train(growth)


def test_without_a_seed_behind_the_host_the_shadow_costs_nothing():
    growth = shadow_growth()
    growth.shadow_loss(lambda: pytest.fail("a pass that no one needs"))


def test_the_run_ends_with_the_best_committed_network():
    script = Script(germinate(0, blueprint=1, tempo=0), WAIT, act(LifecycleOp.FOSSILIZE, 0))
    growth = new_growth(script, decisions=6)
    metrics = [0.5, 0.6, 0.7, 0.75, 0.9, 0.6]
    outputs = {}
    for metric in metrics:
        train(growth)
        growth.model.eval()
        outputs[metric] = growth.model(X).detach()
        growth.model.train()
        growth.decide(metric)
    assert growth.is_closed
    assert growth.best_metric == 0.9
    growth.model.eval()
    assert torch.equal(growth.model(X), outputs[0.9])
    assert torch.equal(growth.plain_model()(X), outputs[0.9])
    assert growth.ledger.fate_of("s1").fate == "kept"
    assert growth.ledger.after.params == growth.params > growth.ledger.before.params


def test_seeds_that_were_not_committed_are_not_in_the_result():
    growth = new_growth(Script(germinate(0, blueprint=1)), decisions=4)
    before = growth.params
    for metric in (0.5, 0.4, 0.4):
        growth.decide(metric)
        train(growth)
    growth.close(0.5)
    assert growth.params == before
    assert growth.ledger.fate_of("s1").fate == "uncommitted"


def test_a_call_after_the_last_does_nothing_but_warn_once():
    growth = new_growth(Script(germinate(0, blueprint=1)), decisions=3)
    for _ in range(3):
        train(growth)
        growth.decide(0.5)
    train(growth)  # its owner trains on
    before, story = frozen_state(growth), growth.ledger.to_json()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert growth.decide(0.9) is None
        growth.close(0.9)
    (warning,) = caught
    assert "decisions=3 is closed" in str(warning.message)
    assert warning.filename == __file__  # the owner's line, not one of ours
    assert all(torch.equal(a, b) for a, b in zip(before, frozen_state(growth), strict=True))
    assert growth.ledger.to_json() == story


def test_how_many_decisions_there_will_be_has_no_default():
    model = mlp()
    with pytest.raises(TypeError, match="decisions"):
        Growth(model, torch.optim.SGD(model.parameters(), 0.1), example=X)


@pytest.mark.parametrize("ramp_is_over", [False, True])
def test_the_last_network_stays_if_it_was_measured_to_be_the_best(ramp_is_over):
    """Else a run whose seeds are felt to the end would go back to its first weights."""
    growth = new_growth(Script(germinate(0, blueprint=1, tempo=0 if ramp_is_over else 2)))
    for metric in (0.5, 0.6, 0.7, 0.8):
        train(growth)
        growth.decide(metric)
    train(growth)
    growth.model.eval()
    last = growth.model(X)
    growth.close(0.9)
    assert torch.equal(growth.model(X), last)
    assert torch.equal(growth.plain_model()(X), last)
    assert growth.best_metric == 0.9
    assert growth.params > growth.ledger.before.params
    fate = growth.ledger.fate_of("s1")
    assert (fate.fate, fate.reason) == ("kept", "the best metric was measured with it")


def test_ranks_that_are_not_connected_are_warned(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="not connected, so each grows its own model") as warned:
        new_growth(Script())
    assert len(warned) == 1


def test_who_stops_without_closing_is_warned(tmp_path):
    growth = new_growth(Script(germinate(0, blueprint=1, tempo=0)))
    growth.decide(0.5)
    for metric in (0.6, 0.7):
        train(growth)
        growth.decide(metric)
    told = r"not closed, and the seeds at 1 are not committed: .* call close\(\) first"
    with pytest.warns(UserWarning, match=told) as warned:
        growth.plain_model()
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match=told) as warned:
        growth.export(tmp_path, formats="torch")
    assert warned[0].filename == __file__
    growth.close(0.7)
    assert growth.seeds
    growth.plain_model()


def test_what_a_controller_sees():
    script = Script(germinate(0, blueprint=2), WAIT, WAIT)
    growth = new_growth(script, decisions=6, budget=Budget(params=400), rent=0.07)
    for metric in (0.4, 0.5, 0.6):
        train(growth)
        growth.decide(metric, val_loss=1.5)
    first, _, third = script.reports
    assert (int(first.step), int(first.steps_left)) == (0, 5)
    assert (int(third.step), int(third.steps_left)) == (2, 3)
    assert third.accuracy_history[0, :3].tolist() == pytest.approx([0.6, 0.5, 0.4])
    assert third.accuracy_history_known.tolist() == [[True, True, True, False, False]]
    own = sum(p.numel() for p in growth.model.parameters())
    seed = growth.params - own
    assert int(first.params_left) == 400 - own
    assert int(third.params_left) == 400 - own - seed
    assert float(third.seed_params[0, 0]) == seed
    assert float(third.rent) == pytest.approx(0.07)
    assert float(third.validation_loss) == 1.5
    assert third.gradient_known[0].tolist() == [True, False, False]
    assert not third.contribution_known.any()
    assert int(third.last_action[0, 0]) == LifecycleOp.WAIT
    assert third.total_age[0].tolist() == [2, 0, 0]


def test_gradient_norms_are_root_mean_squares():
    script = Script(germinate(0, blueprint=1), WAIT)
    growth = new_growth(script)
    growth.decide(0.5)
    growth.optimizer.zero_grad()
    F.cross_entropy(growth.model(X), Y).backward()
    gradients = [parameter.grad.flatten() for parameter in seed_parameters(growth)]
    expected = torch.cat(gradients).square().mean().sqrt()
    growth.after_step()
    growth.decide(0.5)
    torch.testing.assert_close(script.reports[1].gradient_norm[0, 0], expected)


def test_seed_gradients_do_not_pile_up_without_the_optimisers_zero_grad():
    growth = new_growth(Script(germinate(0, blueprint=1)))
    growth.decide(0.5)
    for _ in range(2):
        growth.model.zero_grad()
        F.cross_entropy(growth.model(X), Y).backward()
        growth.optimizer.step()
        growth.after_step()
    assert all(parameter.grad is None for parameter in seed_parameters(growth))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (math.nan, "the validation metric is nan"),
        (87.5, "Use a share instead of per cent"),
        (-0.1, "0 to 1, higher is better"),
        (None, "needs the validation metric"),
    ],
)
def test_a_metric_that_cannot_be_one_is_refused(metric, message):
    with pytest.raises(ValueError, match=message):
        new_growth().decide(metric)


def test_a_metric_that_was_left_out_can_be_given_again():
    growth = new_growth(Script(germinate(0, blueprint=1, tempo=0)))
    growth.decide(0.5)
    ages = growth._network.states.total_age.clone()
    with pytest.raises(ValueError, match="needs the validation metric"):
        growth.decide()
    with pytest.raises(ValueError, match="only one element tensors"):
        growth.decide(torch.ones(3))
    assert torch.equal(growth._network.states.total_age, ages)
    growth.decide(0.5)


def test_a_controller_that_breaks_the_masks_is_stopped():
    growth = new_growth(Script(act(LifecycleOp.FOSSILIZE, 0)))
    with pytest.raises(LifecycleError, match="chose 4 for 'op'; legal now: \\[0, 1\\]"):
        growth.decide(0.5)
    own = growth.params
    growth = new_growth(Script(germinate(0, blueprint=3)), budget=Budget(params=own + 42))
    with pytest.raises(LifecycleError, match="chose 3 for 'blueprint'; legal now: \\[1\\]"):
        growth.decide(0.5)
    assert growth.params == own


def step_around(growth):
    """A step that does not call the first site."""
    growth.optimizer.zero_grad()
    growth.model[6](growth.model[3](X @ growth.model[0].weight.T)).sum().backward()
    growth.optimizer.step()
    growth.after_step()


def test_a_seed_that_the_model_never_calls_is_noticed():
    """Whatever validation, which does call it."""
    growth = new_growth(Script(germinate(0, blueprint=1)))
    growth.decide(0.5)
    for _ in range(3):
        for _ in range(5):
            step_around(growth)
        growth.model(X)
        growth.decide(0.5)
    with pytest.raises(ValueError, match="not called its site '1' in 16 steps"):
        step_around(growth)


def test_a_seed_that_the_model_calls_now_and_then_lives():
    """And the steps without it are no waste of its gradients."""
    growth = new_growth(Script(germinate(0, blueprint=1)))
    growth.decide(0.5)
    train(growth, steps=1)
    for _ in range(40):
        step_around(growth)
    train(growth, steps=1)
    growth.decide(0.5)
    assert growth.seeds


def test_before_the_run_sites_and_budget_are_shown():
    growth = new_growth(budget=Budget(params=500))
    text = growth.describe()
    assert "at most 500 grown" in text
    assert [site.name for site in growth.sites] == ["1", "5", "0->3"]
    assert "no limit" in text


def test_the_ledger_tells_what_was_decided():
    growth = new_growth(Script(germinate(0, blueprint=1), WAIT))
    growth.decide(0.5)
    growth.decide(0.6)
    ledger = growth.ledger
    assert [decision.op for decision in ledger.decisions] == ["GERMINATE", "WAIT"]
    assert ledger.decisions[0].params == growth.params - ledger.before.params
    assert ledger.decisions[0].details["blueprint"] == "dense"
    assert ledger.decisions[0].legal == {"WAIT": (), "GERMINATE": ("1", "5", "0->3")}
    assert ledger.steps[1].seeds[0].stage == "BLENDING"


def test_the_ledger_shows_the_layers_and_where_they_can_grow():
    blocks = new_growth(name="residual").ledger.before.blocks
    assert [(block.name, block.site_kind) for block in blocks] == [
        ("stem.0", None),
        ("stem.1", None),
        ("stem.2", "IMAGE"),
        ("layer1.0", "IMAGE"),
        ("layer1.1", "IMAGE"),
        ("layer2.0", "IMAGE"),
        ("fc", None),
    ]
    assert blocks[0].params == 1 * 4 * 9 + 4


def test_frozen_trains_the_head_and_seeds_only():
    model = nn.Sequential(
        nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, target = torch.randn(8, 1, 16), torch.randint(3, (8,))
    growth = Growth(
        model, optimizer, example=inputs, decisions=4, controller=Script(germinate()), frozen=True
    )
    for _ in range(4):
        for _ in range(3):
            loss = F.cross_entropy(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            growth.after_step()
        growth.decide(0.5)
    after = model.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["3.weight"], before["3.weight"])


def test_frozen_warns_of_batch_norm_in_training_mode():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def frozen():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        growth = Growth(model, optimizer, example=torch.randn(8, 4), decisions=8, frozen=True)
        growth.close(0.5)

    with pytest.warns(UserWarning, match="'1' is in training mode, so its statistics follow"):
        frozen()
    model.eval()
    frozen()


def test_a_learned_controller_is_offered_the_blueprints_it_was_trained_with():
    controller = LearnedController(tamiyo_policy(FeatureLayout(1, 2)), ("conv", "pointwise"))
    assert blueprints_for(controller, None) == ("conv", "pointwise")
    assert blueprints_for(controller, ["conv"]) == ["conv"]
    with pytest.warns(UserWarning, match=r"trained with .*not with \['mixer'\]"):
        assert blueprints_for(controller, ["conv", "mixer"]) == ["conv", "mixer"]
    assert blueprints_for(HeuristicController(), None) is None
