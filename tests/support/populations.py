"""Small populations on random data, for tests that do not care what is learned."""

import torch

from esper.kasmina import lifecycle
from esper.kasmina.blueprints import WIDENINGS, menu_for
from esper.kasmina.hosts import build_host
from esper.leyline.constants import AlphaCurve, BlendStyle
from esper.tolaria.population import Population
from esper.tolaria.tasks import HeldOut, Task, minibatch_indices
from support import moves

BATCH = 8


def random_task(input_shape=(1, 20), num_rows=60, num_views=1, dtype=torch.float64):
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(num_views, num_rows, *input_shape, generator=rng, dtype=dtype)
    y = torch.randint(5, (num_views, num_rows), generator=rng)
    return Task(
        names=tuple(f"view {view}" for view in range(num_views)),
        train_x=x,
        train_y=y,
        num_rows=torch.full((num_views,), num_rows),
        validation_x=x,
        validation_y=y,
        held_out=HeldOut(x, y),
        num_classes=5,
    )


def full_menu(host):
    """All blueprints for a kind of host; those that widen are the last."""
    return (*menu_for(host.sites[0].kind), *WIDENINGS.values())


def small_population(num_hosts=4, task=None, kernels="compiled", **options):
    """Compiled kernels run host by host, so no host's numbers depend on the hosts beside it."""
    task = task or random_task()
    host = build_host("conv1d", input_shape=(1, 20), num_classes=5, widths=(4, 6, 4))
    return Population(
        host,
        full_menu(host),
        task,
        num_hosts=num_hosts,
        batch_size=BATCH,
        kernels=kernels,
        **options,
    )


def rows_for(population, first=0, count=2):
    steps = range(first, first + count)
    num_rows = population.task.num_rows[population.view_ids]
    return minibatch_indices(0, population.host_ids, steps, BATCH, num_rows)


def grow(
    population, hosts, slots, blueprint=0, style=BlendStyle.ADD, shadow_training=False, ramp=1
):
    """New seeds that stand at alpha 1 from the coming step on (ramp 1)."""
    transition = moves.germinate(
        population.states,
        torch.as_tensor(hosts),
        torch.as_tensor(slots),
        blueprint=blueprint,
        style=style,
        ramp_steps=ramp,
        alpha_target=1.0,
        curve=AlphaCurve.LINEAR,
        shadow_training=shadow_training,
    )
    population.adopt(transition)


def take_step(population, step=0, count=2):
    """One step: ramps move, hosts train, seeds age."""
    population.adopt(lifecycle.begin_step(population.states))
    losses = population.train(rows_for(population, step * count, count))
    population.adopt(lifecycle.end_step(population.states))
    return losses


def logits(population):
    x = population.task.train_x[population.view_ids]
    return population.logits(x.movedim(1, -1))
