"""The same population on two kernels: how to build it, and how far the two may differ."""

import torch

from esper.kasmina import lifecycle
from esper.kasmina.hosts import build_host
from esper.leyline.factored_actions import tamiyo_action_space
from esper.tolaria.host_optimizer import AdamW
from esper.tolaria.host_validation import validate_hosts
from esper.tolaria.population import Population
from support.legal_actions import legal_actions
from support.populations import BATCH, full_menu, random_task, rows_for

HOSTS = {
    "conv1d": dict(input_shape=(1, 20), widths=(4, 6, 9), norm=False),
    "conv2d": dict(input_shape=(2, 9, 8), widths=(4, 3), norm=True),
    "mlp": dict(input_shape=(3, 4), widths=(6, 5), norm=True),
}
OPTIMIZER = AdamW(learning_rate=1e-2, weight_decay=0.05)


def build(kind, kernels, device="cpu", num_hosts=6, dtype=torch.float64):
    host = build_host(kind, num_classes=5, **HOSTS[kind])
    return Population(
        host,
        full_menu(host),
        random_task(host.input_shape, num_views=2).to(device, dtype),
        num_hosts=num_hosts,
        batch_size=BATCH,
        optimizer=OPTIMIZER,
        view_ids=torch.arange(num_hosts) % 2,
        kernels=kernels,
    )


def assert_agree(first, second, num_steps, shadow_training=False, atol=1e-9):
    """Two populations under the same random actions keep the same weights, losses and worth."""
    space = tamiyo_action_space(first.num_slots, len(first.menu))
    rng = torch.Generator().manual_seed(2)
    close = {"rtol": 0, "atol": atol}
    for step in range(num_steps):
        actions = legal_actions(first.states, space, rng)
        losses = []
        for population in (first, second):
            transition = lifecycle.apply(
                population.states, actions, space, shadow_training=shadow_training
            )
            population.adopt(transition.then(lifecycle.begin_step))
            rows = rows_for(population, 3 * step, 3).to(population.task.device)
            losses.append(population.train(rows).cpu())
        torch.testing.assert_close(*losses, **close)
        weights = [population.parameter_table.params.cpu() for population in (first, second)]
        torch.testing.assert_close(*weights, **close)
        grads = [population.parameter_table.grads.cpu() for population in (first, second)]
        torch.testing.assert_close(*grads, **close)
        found = [validate_hosts(population) for population in (first, second)]
        torch.testing.assert_close(found[0].loss.cpu(), found[1].loss.cpu(), **close)
        worth = [f.contribution.cpu() * f.contribution_known.cpu() for f in found]
        torch.testing.assert_close(*worth, **close)
        for population in (first, second):
            population.adopt(lifecycle.end_step(population.states))
    assert bool(first.states.has_seed.any())
