"""Training of changes against torch's own optimiser, schedules and convolutions."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from adapt_practice.fitting import ConvolutionsAsProducts, fit, logits_of_many
from esper.adapting.adapted import Adapted
from esper.adapting.fitting import fit as fit_alone
from esper.adapting.plans import KNOWN_RULES, HeadMode, Place, Plan, What
from support.adaptations import build
from support.fits import HEAD, RATE, STEPS, assert_same, by_torch, problem


def fitted(start, loss, **options):
    return fit(
        start,
        lambda change, clock: loss(change, int(clock)),
        rates=torch.tensor([RATE]),
        steps=STEPS,
        **options,
    )


# torch divides by the corrected deviation plus epsilon; here epsilon is added before the correction
CLOSE = dict(rtol=1e-3, atol=5e-5, check_dtype=False)


def test_fit_is_adam_with_a_cosine():
    start, loss = problem()
    before = {name: tensor.clone() for name, tensor in start.items()}
    found = fitted(start, loss)
    assert_same(found, by_torch(start, loss, [([*start], STEPS)]), **CLOSE)
    assert_same(start, before, rtol=0, atol=0)
    assert (found["body"] - start["body"]).abs().max() > 0.05


def test_what_comes_first_trains_alone_for_half_of_the_steps():
    start, loss = problem()
    found = fitted(start, loss, first=HEAD)
    phases = [(["head", "bias"], STEPS // 2), ([*start], STEPS - STEPS // 2)]
    assert_same(found, by_torch(start, loss, phases), **CLOSE)


@pytest.mark.parametrize("first", [(), HEAD])
def test_one_replica_learns_as_a_single_change(first):
    """The batched program against the one that adapts a user's model."""
    start, loss = problem()
    many = fit(
        {name: tensor[None] for name, tensor in start.items()},
        lambda change, clock: torch.vmap(lambda c: loss(c, int(clock)))(change).sum(),
        rates=torch.tensor([RATE]),
        steps=STEPS,
        first=first,
    )
    alone = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    fit_alone(alone, lambda step: loss(alone, step), rate=RATE, steps=STEPS, first=first)
    assert_same({name: tensor[0] for name, tensor in many.items()}, alone, **CLOSE)


def replicas(num=3):
    """Several of the problems stacked, with rates of their own."""
    start, loss = problem()
    rng = torch.Generator().manual_seed(1)
    many = {
        name: tensor + 0.3 * torch.randn(num, *tensor.shape, generator=rng, dtype=torch.float64)
        for name, tensor in start.items()
    }
    rates = RATE * torch.tensor([1.0, 0.3, 2.0])
    options = dict(first=HEAD, steps=STEPS)
    return many, loss, rates, options


def test_replicas_learn_as_each_alone():
    many, loss, rates, options = replicas()
    together = fit(
        many,
        lambda change, clock: torch.vmap(lambda c: loss(c, int(clock)))(change).sum(),
        rates=rates,
        **options,
    )
    for number in range(3):
        alone = fit(
            {name: tensor[number] for name, tensor in many.items()},
            lambda change, clock: loss(change, int(clock)),
            rates=rates[number : number + 1],
            **options,
        )
        same = {name: tensor[number] for name, tensor in together.items()}
        assert_same(same, alone, rtol=1e-9, atol=1e-11)


def test_rates_by_relative_gradient():
    """Auto-RGN from its formula: rates times |gradient| / |weights| over the largest of them."""
    many, loss, rates, _ = replicas()
    del many["scale"]  # a single number has no norm over its axes
    whole = lambda change: {**change, "scale": torch.ones((), dtype=torch.float64)}  # noqa: E731
    found = fit(
        many,
        lambda change, clock: torch.vmap(lambda c: loss(whole(c), int(clock)))(change).sum(),
        rates=rates,
        steps=STEPS,
        by_relative_gradient=True,
    )
    for number in range(3):
        weights = {name: tensor[number].clone() for name, tensor in many.items()}
        first = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        second = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for step in range(STEPS):
            leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
            gradients = torch.autograd.grad(loss(whole(leaves), step), [*leaves.values()])
            shares = {
                n: float(g.norm() / weights[n].norm())
                for n, g in zip(weights, gradients, strict=True)
            }
            rate = float(rates[number]) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
            for name, gradient in zip(weights, gradients, strict=True):
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.999 * second[name] + 0.001 * gradient**2
                mean = first[name] / (1 - 0.9 ** (step + 1))
                square = second[name] / (1 - 0.999 ** (step + 1))
                factor = shares[name] / max(shares.values())
                weights[name] = weights[name] - rate * factor * mean / (square.sqrt() + 1e-8)
        assert_same({n: t[number] for n, t in found.items()}, weights, **CLOSE)


def test_a_weight_that_the_loss_does_not_use_stays():
    start, loss = problem()
    start["unused"] = torch.ones(2, dtype=torch.float64)
    found = fitted(start, loss)
    assert torch.equal(found["unused"], start["unused"])


def many_models(name, plan, num=3):
    """The weights and non-zero changes of several models, rows `[P, ...]`, and the adapted model."""
    models = [build(name, seed) for seed in range(num)]
    model, _example, places = models[0]
    adapted = Adapted(model, places, plan).eval()
    states = [m.state_dict() for m, *_ in models]
    frozen = {f"model.{n}": torch.stack([s[n] for s in states]) for n in states[0]}
    rng = torch.Generator().manual_seed(0)
    change = {
        n: t.detach() + 0.1 * torch.randn(num, *t.shape, generator=rng)
        for n, t in adapted.changes().items()
    }
    x = torch.stack([x for _, x, _ in models])
    return adapted, frozen, change, x


@pytest.mark.parametrize("name", ["series", "mlp", "residual"])
@pytest.mark.parametrize("plan", ["seeds everywhere", "LoRA everywhere", "LP-FT"])
def test_many_models_give_the_outputs_of_each_alone(name, plan):
    adapted, frozen, change, x = many_models(name, KNOWN_RULES[plan])
    together = logits_of_many(adapted, frozen | change, x)
    for number in range(len(x)):
        one = {n: t[number] for n, t in (frozen | change).items()}
        alone = functional_call(adapted, one, (x[number],))
        torch.testing.assert_close(together[number], alone, rtol=1e-4, atol=1e-5)


def test_many_scales_give_the_outputs_of_each_alone():
    plan = Plan(Place.EVERYWHERE, What.SCALE, HeadMode.FIRST)
    adapted, frozen, change, x = many_models("series", plan)
    together = logits_of_many(adapted, frozen | change, x)
    one = {n: t[1] for n, t in (frozen | change).items()}
    torch.testing.assert_close(together[1], functional_call(adapted, one, (x[1],)))


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_products_equal_convolutions(axes, stride, padding, bias):
    layer = (nn.Conv1d, nn.Conv2d)[axes - 1](3, 4, 3, stride, padding, bias=bias).double()
    x = torch.randn(2, 3, *(9, 8)[:axes], dtype=torch.float64, requires_grad=True)
    expected = layer(x)
    with ConvolutionsAsProducts():
        found = layer(x)
    torch.testing.assert_close(found, expected)
    pairs = [
        torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()]) for y in (found, expected)
    ]
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got, want)


def test_products_with_uneven_kernels():
    x, weight = torch.randn(2, 3, 9, 7).double(), torch.randn(4, 3, 3, 5).double()
    expected = F.conv2d(x, weight, None, (2, 1), (0, 2))
    with ConvolutionsAsProducts():
        torch.testing.assert_close(F.conv2d(x, weight, None, (2, 1), (0, 2)), expected)
        torch.testing.assert_close(
            F.conv2d(x, weight=weight, stride=(2, 1), padding=(0, 2)), expected
        )


@pytest.mark.parametrize(
    "options",
    [
        dict(groups=3),
        dict(dilation=2),
        dict(padding="same"),
        dict(padding=1, padding_mode="circular"),
    ],
)
def test_other_convolutions_are_left_to_torch(options):
    layer, x = nn.Conv2d(3, 6, 3, **options), torch.randn(2, 3, 8, 8)
    expected = layer(x)
    with ConvolutionsAsProducts():
        torch.testing.assert_close(layer(x), expected)


def test_group_norm_of_images_mapped_over_models():
    x, weight = torch.randn(3, 2, 4, 5, 5), torch.randn(3, 4)
    call = lambda x, weight: F.group_norm(x, 2, weight)  # noqa: E731
    with ConvolutionsAsProducts():
        found = torch.vmap(call)(x, weight)
    expected = torch.stack([call(*pair) for pair in zip(x, weight, strict=True)])
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("is_first", [False, True])
def test_a_captured_graph_trains_as_the_plain_loop(is_first):
    adapted, frozen, change, x = many_models("series", KNOWN_RULES["LP-FT"])
    adapted = adapted.cuda()
    frozen, change = ({n: t.cuda() for n, t in d.items()} for d in (frozen, change))
    x, y = x.cuda(), torch.arange(6, device="cuda").remainder(4).expand(3, 6)
    steps = 20
    order = torch.randint(6, (steps, 4), generator=torch.Generator().manual_seed(0)).cuda()

    def loss_of(change, clock):
        drawn = order[clock][0]
        logits = logits_of_many(adapted, frozen | change, x[:, drawn])
        return F.cross_entropy(logits.flatten(0, 1), y[:, drawn].flatten(), reduction="sum") / 4

    plain, graph = (
        fit(
            change,
            loss_of,
            rates=torch.tensor([1e-3, 4e-3, 1e-2], device="cuda"),
            steps=steps,
            first=adapted.head if is_first else (),
            as_graph=as_graph,
        )
        for as_graph in (False, True)
    )
    for name, tensor in graph.items():
        assert not torch.equal(tensor, change[name])
        torch.testing.assert_close(tensor, plain[name], rtol=1e-4, atol=1e-5)
