"""Tables of trials: many models together give what each gives alone."""

import pytest
import torch
import torch.nn.functional as F

from adapt_practice.fitting import fit, logits_of_many
from adapt_practice.outcomes import choose_rates
from adapt_practice.shifts import Shift
from adapt_practice.trials import Scenario, TrialSettings, train_models, try_plans
from esper.adapting.adapted import Adapted
from esper.adapting.plans import KNOWN_RULES, HeadMode, Place, Plan, What
from support.adaptations import mlp

CLASSES = 4
SEED = Plan(Place.INPUT, What.SEED, HeadMode.FIRST)
PLANS = (KNOWN_RULES["nothing"], KNOWN_RULES["LP-FT"], SEED)
SETTINGS = TrialSettings(steps=6, batch=8, rates=(1e-3, 1e-2), test_rows=30, replicas=5)


def rows(num, rng_seed):
    rng = torch.Generator().manual_seed(rng_seed)
    y = torch.arange(num) % CLASSES
    centres = torch.randn(CLASSES, 5, generator=torch.Generator().manual_seed(7))
    return 3 * centres[y] + torch.randn(num, 5, generator=rng), y


@pytest.fixture(scope="module")
def pool():
    return train_models(
        lambda: mlp(2),
        rows(300, 0),
        num_models=4,
        num_classes=CLASSES,
        missing_classes=1,
        steps=120,
    )


@pytest.fixture(scope="module")
def scenarios():
    kinds = ("sign", 20), ("move_labels", 33), ("new_classes", 12), ("none", 40)
    return [Scenario(Shift(kind, 0.5, seed), num) for seed, (kind, num) in enumerate(kinds)]


@pytest.fixture(scope="module")
def table(pool, scenarios):
    return try_plans(pool, rows(200, 1), scenarios, SETTINGS, plans=PLANS)


def test_models_learn_the_classes_they_see(pool):
    assert pool.classes_seen.sum(1).tolist() == [4, 4, 3, 4]
    x, y = rows(100, 2)
    for number in range(4):
        weights = {n: w[number] for n, w in pool.weights.items()}
        predicted = torch.func.functional_call(pool.model, weights, (x,)).argmax(-1)
        is_seen = pool.classes_seen[number][y]
        assert (predicted == y)[is_seen].float().mean() > 0.8
        assert not (predicted == y)[~is_seen].any()


def test_shapes_and_costs_of_a_table(table, pool):
    assert table.validation_accuracy.shape == (4, 3, 2)
    assert table.kinds == ("sign", "move_labels", "new_classes", "none")
    size = sum(p.numel() for p in pool.model.parameters())
    assert size == 48 + 72 + 36
    adapter = (5 * 16 + 16) + 32 + (16 * 5 + 5)  # without the head
    expected = torch.tensor([0.0, (48 + 72) / size, adapter / size])
    torch.testing.assert_close(table.added, expected)
    assert table.test_accuracy[3, 0].min() > 0.8  # no shift: the model as it is
    assert table.test_accuracy[1, 0].max() < 0.2  # moved labels
    assert torch.equal(table.test_accuracy[:, 0, 0], table.test_accuracy[:, 0, 1])


def test_a_trial_is_the_same_in_any_company(table, pool, scenarios):
    """Replicas are split into groups of 5 above, and are all together here."""
    settings = TrialSettings(**SETTINGS.__dict__ | {"replicas": 100})
    again = try_plans(pool, rows(200, 1), scenarios, settings, plans=PLANS)
    for name in ("signals", "validation_loss"):
        torch.testing.assert_close(
            getattr(again, name), getattr(table, name), rtol=1e-3, atol=1e-4, msg=name
        )


def test_one_replica_against_training_alone(table, pool, scenarios):
    """The third scenario at the second rate, from the rows that its rng seed draws."""
    env, rate = 2, 1
    rng = torch.Generator().manual_seed(0)
    x, y = rows(200, 1)
    complete = [0, 1, 3]
    for shift, num in scenarios[: env + 1]:
        candidates = [2] if shift.kinds == "new_classes" else complete
        number = candidates[int(torch.randint(len(candidates), (), generator=rng))]
        order = torch.randperm(200, generator=rng)[: num + 30]
        few = shift(x[order], y[order], CLASSES)
    num = scenarios[env].rows
    train = num - max(2, round(num * 0.25))
    adapted = Adapted(pool.model, pool.places, SEED, (env * 2 + rate) // 2 % 16).eval()
    weights = {f"model.{n}": w[number] for n, w in pool.weights.items()}
    change = {n: t.detach() for n, t in adapted.changes().items()}
    for name in pool.places.head:
        change[f"change.tuned.{name.replace('.', '/')}"] = weights[f"model.{name}"]
    draws = torch.rand(6, 4, 8, generator=torch.Generator().manual_seed(0))[:, env]

    def logits(change, x):
        one = {n: t[None] for n, t in (weights | change).items()}
        return logits_of_many(adapted, one, x[None])[0]

    def loss_of(change, clock):
        drawn = (draws[clock][0] * train).long()
        return F.cross_entropy(logits(change, few[0][drawn]), few[1][drawn])

    rates = torch.tensor([SETTINGS.rates[rate]])
    trained = fit(change, loss_of, rates=rates, steps=6, first=adapted.trained_first)
    held = slice(train, num)
    loss = F.cross_entropy(logits(trained, few[0][held]), few[1][held])
    torch.testing.assert_close(table.validation_loss[env, 2, rate], loss, rtol=1e-3, atol=1e-4)
    right = logits(trained, few[0][held]).argmax(-1) == few[1][held]
    assert float(table.validation_accuracy[env, 2, rate]) == pytest.approx(
        float(right.float().mean())
    )
    right = logits(trained, few[0][num:]).argmax(-1) == few[1][num:]
    assert float(table.test_accuracy[env, 2, rate]) == pytest.approx(
        float(right.float().mean()), abs=0.04
    )


def test_the_rate_that_validates_best_is_chosen(table):
    criterion, test = choose_rates(table)
    for env in range(4):
        for plan in range(3):
            values = (
                table.validation_accuracy[env, plan]
                - 0.01 * table.validation_loss[env, plan].clamp(max=10)
            ).tolist()
            best = values.index(max(values))
            assert float(criterion[env, plan]) == pytest.approx(values[best])
            assert test[env, plan] == table.test_accuracy[env, plan, best]
