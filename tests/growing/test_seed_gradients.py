"""A loop in which seeds could not learn is noticed; one that only looks like it is not."""

import pytest
import torch
import torch.nn.functional as F

from esper import Growth
from esper.leyline.stages import LifecycleOp
from support.growth_loops import X, Y, new_growth, train
from support.models import WAIT, Script, act, build, germinate


def accumulate(growth, parts=2, batches=6):
    """A loop that calls after_step for every part of its batches."""
    for part in range(parts * batches):
        F.cross_entropy(growth.model(X), Y).backward()
        if part % parts == parts - 1:
            growth.optimizer.step()
            growth.optimizer.zero_grad()
        growth.after_step()


def test_a_call_for_every_part_of_a_batch_is_noticed():
    growth = new_growth(Script(germinate(0, blueprint=1)))
    growth.decide(0.5)
    accumulate(growth)
    with pytest.warns(UserWarning, match="call it once after each optimizer.step()") as caught:
        growth.decide(0.5)
    assert caught[0].filename == __file__
    accumulate(growth)
    growth.decide(0.5)  # said once


def test_a_call_before_the_step_is_noticed():
    growth = new_growth(Script(germinate(0, blueprint=1)))
    growth.decide(0.5)
    for _ in range(4):
        growth.optimizer.zero_grad()
        F.cross_entropy(growth.model(X), Y).backward()
        growth.after_step()
        growth.optimizer.step()
    with pytest.warns(UserWarning, match="called 4 times.*used the seeds' gradients 0 times"):
        growth.decide(0.5)


class ThroughData(torch.optim.SGD):
    """Writes its weights in a way that leaves them the version they had."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("new_optimizer", [torch.optim.SGD, ThroughData])
def test_a_loop_with_a_few_skipped_steps_is_not_blamed(new_optimizer):
    """As under a gradient scaler that looks for its scale."""
    model, example = build("mlp")
    optimizer, script = new_optimizer(model.parameters(), 0.1), Script(germinate(0, blueprint=1))
    growth = Growth(model, optimizer, example=example, controller=script, decisions=9)
    growth.decide(0.5)
    for step in range(8):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        if step % 3:
            optimizer.step()
        growth.after_step()
    growth.decide(0.5)


def test_a_step_with_a_closure_uses_the_gradients():
    growth = new_growth(Script(germinate(0, blueprint=1)))
    growth.decide(0.5)

    def closure():
        growth.optimizer.zero_grad()
        loss = F.cross_entropy(growth.model(X), Y)
        loss.backward()
        return loss

    for _ in range(4):
        growth.optimizer.step(closure)
        growth.after_step()
    growth.decide(0.5)


def test_a_seed_that_is_not_felt_any_more_is_not_asked_for():
    """At the end of a slow prune it has no weight, so no gradient, and does not move."""
    slowly = act(LifecycleOp.PRUNE, 0, alpha_speed=1)
    growth = new_growth(Script(germinate(0, blueprint=1, tempo=0), WAIT, slowly))
    for _ in range(6):
        train(growth)
        growth.decide(0.5)
    assert growth.seeds == {}
