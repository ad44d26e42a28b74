"""New weights in a user's optimiser: the settings of their place, whatever drives them."""

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

from esper.growing.seed_groups import SeedGroups


def optimizer_with_two_groups(kind=optim.SGD, **settings):
    body, head = nn.Linear(3, 3), nn.Linear(3, 2)
    groups = [
        {"params": list(body.parameters()), "lr": 0.1, "weight_decay": 0.01},
        {"params": list(head.parameters()), "lr": 0.3},
    ]
    return body, head, kind(groups, **{"lr": 0.2, **settings})


SCHEDULERS = {
    "StepLR": lambda o: schedules.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 10),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, [0.4, 0.9], total_steps=12),
    "LambdaLR": lambda o: schedules.LambdaLR(o, [lambda s: 0.9**s, lambda s: 0.8**s]),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda s: 0.9),
    "CyclicLR": lambda o: schedules.CyclicLR(o, [0.1, 0.2], [0.5, 0.9], 3),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.1, 3), schedules.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, total_iters=4), schedules.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
}


def alone(make):
    """The user's learning rates, step by step, without growth."""
    _, _, optimizer = optimizer_with_two_groups(momentum=0.9)
    scheduler = make(optimizer)
    return [drive(optimizer, scheduler) for _ in range(10)]


def drive(optimizer, scheduler):
    optimizer.step()
    if isinstance(scheduler, schedules.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_a_schedule_drives_new_weights_like_the_weights_they_grow_on(name):
    _, head, optimizer = optimizer_with_two_groups(momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    groups = SeedGroups(optimizer, scheduler)
    seed = nn.Linear(2, 2)
    rates = []
    for step in range(10):
        if step == 3:
            groups.join(groups.owner(head.parameters()), seed.named_parameters())
        if step == 7:
            groups.leave(seed.parameters())
        rates.append(drive(optimizer, scheduler))
    assert [own[:2] for own in rates] == alone(SCHEDULERS[name])  # the user's are untouched
    assert all(own[2:] == own[:2] for own in rates)


def test_a_scheduler_made_later_sees_the_new_groups():
    _, _, optimizer = optimizer_with_two_groups()
    SeedGroups(optimizer)
    scheduler = schedules.StepLR(optimizer, 1, 0.5)
    assert drive(optimizer, scheduler) == [0.05, 0.15, 0.05, 0.15]


def test_a_scheduler_that_was_not_given_is_an_error():
    _, _, optimizer = optimizer_with_two_groups()
    schedules.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="pass it as scheduler="):
        SeedGroups(optimizer)


def test_new_weights_have_the_settings_of_the_weights_they_grow_on():
    body, head, optimizer = optimizer_with_two_groups()
    groups = SeedGroups(optimizer)
    assert (groups.owner(body.parameters()), groups.owner(head.parameters())) == (0, 1)
    assert groups.owner(nn.Linear(1, 1).parameters()) == 0  # frozen: not in the optimiser
    assert optimizer.param_groups[2]["weight_decay"] == 0.01
    assert optimizer.param_groups[3]["lr"] == 0.3


@pytest.mark.parametrize(
    "kind",
    ["SGD", "Adam", "AdamW", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"],
)
def test_old_weights_train_as_if_no_one_had_joined(kind):
    """Joining and leaving touches neither the weights nor the state of the others."""
    results = []
    for joins in (False, True):
        torch.manual_seed(0)
        body, _, optimizer = optimizer_with_two_groups(getattr(optim, kind))
        groups = SeedGroups(optimizer)
        seed = nn.Linear(2, 2)
        for step in range(6):
            if joins and step == 2:
                groups.join(0, seed.named_parameters())
            if joins and step == 4:
                groups.leave(seed.parameters())
                assert all(parameter not in optimizer.state for parameter in seed.parameters())
            optimizer.zero_grad()
            x = torch.arange(6.0).view(2, 3) * (step + 1)
            (body(x).square().sum() + seed(torch.ones(1, 2)).square().sum()).backward()
            optimizer.step()
        state = optimizer.state[body.weight]
        results.append([body.weight, *(v for v in state.values() if isinstance(v, torch.Tensor))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_named_parameters_stay_named():
    body = nn.Linear(3, 3)
    optimizer = optim.AdamW(body.named_parameters())
    groups = SeedGroups(optimizer)
    seed = nn.Linear(2, 2)
    groups.join(0, seed.named_parameters())
    assert optimizer.param_groups[1]["param_names"] == ["weight", "bias"]
    groups.leave([seed.weight])
    assert optimizer.param_groups[1]["param_names"] == ["bias"]


@pytest.mark.parametrize("kind", [optim.Adagrad, optim.LBFGS])
def test_optimizers_that_take_in_no_one_are_refused(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} does not support adding weights"):
        SeedGroups(kind(nn.Linear(2, 2).parameters()))


def test_an_optimizer_of_matrices_alone_is_refused():
    with pytest.raises(ValueError, match="Muon trains matrices only"):
        SeedGroups(optim.Muon(nn.Linear(2, 2, bias=False).parameters()))
