"""Ways to add a seed to its host: ramps, initialisation and isolation, on the same hosts.

    python benchmarks/ramps.py [--quick]

MNIST-1D, hosts of 8 channels, one conv-norm-relu-conv seed in the first slot from step 5 of 25 on.
Every arm has the same hosts (weights, data order, initial seed); all arms of the population run as
one program. Isolation by a straight-through seed (`x + seed - seed.detach()`) is not part of Esper,
since it does not train a seed well: its arms run on the tests' per-host oracle.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from esper.kasmina import lifecycle
from esper.kasmina.blueprints import blueprint_menu
from esper.kasmina.hosts import build_host
from esper.leyline.constants import AlphaCurve, BlendStyle
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tolaria.host_optimizer import AdamW
from esper.tolaria.population import Population
from esper.tolaria.tasks import DATA_DIR, Task, minibatch_indices, mnist1d

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.per_host import PerHost, blended

NUM_STEPS, GERMINATION_STEP, BATCH, SLOT = 25, 5, 100, 0
OPTIMIZER = AdamW(learning_rate=2e-2, weight_decay=0.01)


@dataclass(frozen=True)
class Arm:
    """One way to grow, and the accuracy in percent that is known for it."""

    name: str
    known: float
    ramp_steps: int | None = None  # None: no seed at all
    shadow_steps: int = 0  # steps in TRAINING before the blend
    silent: bool = True  # last layer starts at zero

    @property
    def blend_step(self) -> int:
        return GERMINATION_STEP + self.shadow_steps


ARMS = (
    Arm("host alone", 77.4),
    Arm("zero last layer, alpha 1 at once", 84.3, 1),
    Arm("zero last layer, ramp 2", 87.1, 2),
    Arm("zero last layer, ramp 5", 86.8, 5),
    Arm("default birth, alpha 1 at once", 81.1, 1, silent=False),
    Arm("default birth, ramp 2", 86.7, 2, silent=False),
    Arm("default birth, ramp 5", 87.1, 5, silent=False),
    Arm("shadow pass 2 steps, then at once", 84.4, 1, shadow_steps=2),
    Arm("shadow pass 5 steps, then at once", 83.9, 1, shadow_steps=5),
    Arm("shadow pass 2 steps, then ramp 2", 84.4, 2, shadow_steps=2),
    Arm("shadow pass 5 steps, then ramp 2", 83.9, 2, shadow_steps=5),
)
STRAIGHT_THROUGH_ARMS = (
    Arm("straight-through 2 steps, then at once", 62.0, 1, shadow_steps=2),
    Arm("straight-through 5 steps, then at once", 26.2, 1, shadow_steps=5),
    Arm("straight-through 2 steps, then ramp 2", 83.1, 2, shadow_steps=2),
    Arm("straight-through 5 steps, then ramp 2", 56.0, 2, shadow_steps=5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few hosts and minibatches")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR)
    options = parser.parse_args()
    hosts, isolated_hosts, minibatches = (3, 1, 8) if options.quick else (40, 10, 40)
    task = mnist1d(data_dir=options.data_dir).to(options.device)
    accuracies = grow_population(task, hosts, minibatches)
    accuracies |= {
        arm: grow_straight_through(arm, task.to("cpu"), isolated_hosts, minibatches)
        for arm in STRAIGHT_THROUGH_ARMS
    }
    report(accuracies, options.device, options.quick)


def grow_population(task: Task, hosts_per_arm: int, minibatches: int) -> dict[Arm, Tensor]:
    """Validation accuracy in percent of each arm's hosts, `[hosts_per_arm]`."""
    host_ids = torch.arange(hosts_per_arm).repeat(len(ARMS))
    population = new_population(task, host_ids)
    rows_of = torch.arange(len(host_ids)).view(len(ARMS), hosts_per_arm)
    for step in range(NUM_STEPS):
        before = validation_logits(population)
        for arm, rows in zip(ARMS, rows_of, strict=True):
            request(population, arm, rows, step)
        assert torch.equal(validation_logits(population), before), (
            "a request changed the output at once"
        )
        population.adopt(lifecycle.begin_step(population.states))
        train(population, step, minibatches)
        population.adopt(lifecycle.end_step(population.states))
    return dict(zip(ARMS, validate(population).cpu()[rows_of], strict=True))


def new_population(task: Task, host_ids: Tensor) -> Population:
    host = build_host(
        "conv1d", input_shape=task.input_shape, num_classes=task.num_classes, widths=(8, 8, 8)
    )
    menu = blueprint_menu("conv_conv")
    return Population(
        host,
        menu,
        task,
        num_hosts=len(host_ids),
        batch_size=BATCH,
        optimizer=OPTIMIZER,
        host_ids=host_ids,
    )


def request(population: Population, arm: Arm, rows: Tensor, step: int) -> None:
    """Germinate an arm's seed, or end its shadow training, at the steps of the arm."""
    slots = torch.full_like(rows, SLOT)
    if arm.ramp_steps is not None and step == GERMINATION_STEP:
        transition = lifecycle.request(
            population.states,
            LifecycleOp.GERMINATE,
            rows,
            slots,
            blueprint=0,
            style=BlendStyle.ADD,
            ramp_steps=arm.ramp_steps,
            alpha_target=1.0,
            curve=AlphaCurve.LINEAR,
            shadow_training=arm.shadow_steps > 0,
        )
        population.adopt(transition)
        if not arm.silent:
            sample_last_layer(population, rows)
    elif arm.shadow_steps and step == arm.blend_step:
        population.adopt(lifecycle.request(population.states, LifecycleOp.ADVANCE, rows, slots))


def sample_last_layer(population: Population, rows: Tensor) -> None:
    """Initialise the last layer like torch does; the other layers stay as they are."""
    silent = population.menu[0].program(population.host.sites[SLOT])
    centre, spread = replace(silent, silent=False).init()
    columns = population.parameter_table.layout.seed_columns(SLOT, silent.num_params)
    seeds = population.parameter_table.params[rows, columns].double().cpu()
    rng = torch.Generator().manual_seed(0)
    sampled = centre + spread * (2 * torch.rand(seeds.shape, generator=rng) - 1)
    population.parameter_table.place(rows, columns, torch.where(seeds == 0, sampled, seeds))


def train(population: Population, step: int, minibatches: int) -> None:
    steps = range(step * minibatches, (step + 1) * minibatches)
    rows = minibatch_indices(0, population.host_ids, steps, BATCH, population.task.num_rows[0])
    for minibatch, chosen in zip(steps, rows.split(1), strict=True):
        population.learning_rates.fill_(learning_rate(minibatch, minibatches))
        population.train(chosen)


def learning_rate(minibatch: int, per_step: int) -> float:
    """Constant for 70 % of the run, then linear down to 2 %."""
    progress = minibatch / (NUM_STEPS * per_step)
    return OPTIMIZER.learning_rate * min(1.0, 1.0 - 0.98 * (progress - 0.7) / 0.3)


def validate(population: Population) -> Tensor:
    """Accuracy in percent, `[P]`."""
    right = validation_logits(population).argmax(1) == population.task.validation_y
    return 100 * right.double().mean(1)


def validation_logits(population: Population) -> Tensor:
    """`[P, classes, rows]`."""
    x = population.task.validation_x.expand(population.num_hosts, -1, -1, -1)
    return population.logits(x.movedim(1, -1).contiguous())


class StraightThrough(PerHost):
    """A host whose TRAINING seed does not change its output, but gets the gradient there."""

    def logits(self, x: Tensor, without: int | None = None) -> Tensor:
        for slot, segment in enumerate(self.module.segments):
            x = segment(x)
            seed, life = self.seeds[slot], self.slots[slot]
            if seed is None:
                continue
            if life.stage == SeedStage.TRAINING:
                output = seed(x.detach())
                x = x + output - output.detach()
            else:
                x = blended(x, seed(x), life.alpha, life.style)
        return self.module.head(x)

    def _train_in_shadow(self, x: Tensor, labels: Tensor) -> None:
        """Not needed: the seed has its straight-through gradient."""


def grow_straight_through(arm: Arm, task: Task, num_hosts: int, minibatches: int) -> Tensor:
    """Validation accuracy in percent, `[num_hosts]`; hosts and data order as in the population."""
    host_ids = torch.arange(num_hosts)
    initial = new_population(task, host_ids)
    host_rows = initial.parameter_table.params[
        :, initial.parameter_table.layout.host_columns()
    ].clone()
    request(initial, replace(arm, shadow_steps=0), host_ids, GERMINATION_STEP)
    columns = initial.parameter_table.layout.seed_columns(SLOT)
    seed_rows = initial.parameter_table.params[:, columns].clone()
    accuracies = []
    for host_id in host_ids.tolist():
        host = StraightThrough(initial.host, initial.menu, stock_optimizer, host_rows[host_id])
        for step in range(NUM_STEPS):
            if step == GERMINATION_STEP:
                host.slots[SLOT].germinate(0, BlendStyle.ADD, arm.ramp_steps, 1.0, 0, True)
                host.add_seed(SLOT)
                host.load_seed(SLOT, seed_rows[host_id])
            elif step == arm.blend_step:
                host.slots[SLOT].advance()
            train_alone(host, task, host_id, step, minibatches)
        logits = host.logits(task.validation_x[0])
        accuracies.append((logits.argmax(1) == task.validation_y[0]).double().mean().item())
    return 100 * torch.tensor(accuracies, dtype=torch.float64)


def stock_optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        params, lr=OPTIMIZER.learning_rate, weight_decay=OPTIMIZER.weight_decay
    )


def train_alone(host: PerHost, task: Task, host_id: int, step: int, minibatches: int) -> None:
    steps = range(step * minibatches, (step + 1) * minibatches)
    rows = minibatch_indices(0, torch.tensor([host_id]), steps, BATCH, task.num_rows[0])
    host.begin_step()
    for minibatch, chosen in zip(steps, rows[:, 0], strict=True):
        for optimizer in (host.optimizer, host.seed_optimizers[SLOT]):
            if optimizer is not None:
                optimizer.param_groups[0]["lr"] = learning_rate(minibatch, minibatches)
        host.train(task.train_x[0, chosen], task.train_y[0, chosen])
    host.end_step()


def report(accuracies: dict[Arm, Tensor], device: str, quick: bool) -> None:
    """A table, and the last line as JSON: a figure is met where it is within the noise.

    A quick run only shows that everything works; there are no known accuracies for it.
    """
    alone = accuracies[ARMS[0]]
    print(f"| arm | accuracy | standard error | over the host alone | known |\n|{'---|' * 5}")
    bars = {}
    for arm, values in accuracies.items():
        error = standard_error(values)
        gain = values - alone[: len(values)]
        print(
            f"| {arm.name} | {values.mean():.1f} | {error:.1f} "
            f"| {gain.mean():+.1f} +- {standard_error(gain):.1f} | {arm.known} |"
        )
        # the known figures are means of 40 hosts each, with a deviation of up to 3.9 points
        known_error = max(3.9, values.std().item()) / 40**0.5
        noise = 2 * (error**2 + known_error**2) ** 0.5
        met = abs(values.mean().item() - arm.known) <= noise
        bars[arm.name] = {"value": round(values.mean().item(), 1), "bar": arm.known, "met": met}
    print(json.dumps({"benchmark": "ramps", "device": device, "bars": {} if quick else bars}))


def standard_error(values: Tensor) -> float:
    return (values.std() / len(values) ** 0.5).item() if len(values) > 1 else float("nan")


if __name__ == "__main__":
    main()
