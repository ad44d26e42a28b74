"""A custom blueprint and a custom host, grown in a small population.

    python examples/02_your_own_seed_and_host.py

A blueprint is a function from a site to layers. A host is a function from its sizes to the layers of
each segment and of the head. Costs, initial weights and batching follow from the layers.
"""

import torch

from esper.kasmina import lifecycle
from esper.kasmina.blueprints import Site, blueprint, blueprint_menu
from esper.kasmina.hosts import build_host, host
from esper.kasmina.layers import Conv, Flatten, Linear, Norm, Relu
from esper.leyline.constants import AlphaCurve, BlendStyle, SiteKind
from esper.leyline.stages import LifecycleOp
from esper.tolaria.host_validation import validate_hosts
from esper.tolaria.population import Population
from esper.tolaria.tasks import minibatch_indices, mnist1d


@blueprint(SiteKind.SERIES)
def wide_then_narrow(site: Site):
    return (Conv(2 * site.width), Norm(), Relu(), Conv(site.width, kernel=1))


@host
def two_scales(input_shape, num_classes, widths, norm):
    coarse, fine = widths
    return (
        (Conv(coarse, kernel=7, stride=4), Relu()),
        (Conv(fine, stride=2), Relu()),
        (Flatten(), Linear(num_classes)),
    )


def main() -> None:
    torch.set_num_threads(1)
    task = mnist1d()
    network = build_host("two_scales", input_shape=(1, 40), num_classes=10, widths=(6, 8))
    menu = blueprint_menu("wide_then_narrow", "conv")
    seed = menu[0].program(network.sites[0])
    print(f"host: {network.num_params} parameters, {network.macs} multiply-adds")
    print(f"seed in slot 0: {seed.num_params} parameters, {seed.macs} multiply-adds")

    population = Population(network, menu, task, num_hosts=8)
    for step in range(10):
        if step == 2:  # the first four hosts grow, the others are the control
            transition = lifecycle.request(
                population.states,
                LifecycleOp.GERMINATE,
                torch.arange(4),
                torch.zeros(4, dtype=torch.int64),
                blueprint=0,
                style=BlendStyle.ADD,
                ramp_steps=2,
                alpha_target=1.0,
                curve=AlphaCurve.LINEAR,
            )
            population.adopt(transition)
        population.adopt(lifecycle.begin_step(population.states))
        steps = range(20 * step, 20 * step + 20)
        population.train(
            minibatch_indices(
                0, population.host_ids, steps, 100, task.num_rows[population.view_ids]
            )
        )
        population.adopt(lifecycle.end_step(population.states))
    found = validate_hosts(population)
    print(f"with a seed    {found.accuracy[:4].mean():.3f}")
    print(f"without        {found.accuracy[4:].mean():.3f}")
    worth = found.contribution[:4, 0].mean()
    print(f"switched off, the seeds cost {worth:.3f} of accuracy")


if __name__ == "__main__":
    main()
