"""The population against the oracle that trains one host at a time, side by side in float64."""

from dataclasses import dataclass, field, fields

import pytest
import torch

from esper.kasmina import lifecycle
from esper.kasmina.hosts import build_host
from esper.kasmina.lifecycle import SlotStates, Transition
from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tolaria.host_optimizer import AdamW
from esper.tolaria.population import Population
from esper.tolaria.tasks import minibatch_indices
from support.fused_on_cpu import allow_cpu, needs_compiler
from support.legal_actions import legal_actions
from support.per_host import PerHost
from support.populations import full_menu, random_task

NUM_HOSTS, NUM_ROWS, BATCH = 4, 60, 8
VIEWS = torch.tensor([0, 1, 1, 0])
HOSTS = {
    "conv1d": {"input_shape": (1, 20), "widths": (4, 6, 4), "norm": False},
    "conv2d": {"input_shape": (2, 9, 9), "widths": (4, 3), "norm": True},
    "mlp": {"input_shape": (12,), "widths": (6, 5), "norm": True},
}
BATCHED = AdamW(learning_rate=1e-2, weight_decay=0.05)


def stock(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.05)


@dataclass
class Run:
    """A population and the same hosts one by one."""

    population: Population
    alone: list[PerHost]
    ops: set[LifecycleOp] = field(default_factory=set)
    minibatches: int = 0

    def act(self, actions: torch.Tensor, shadow_training: bool) -> None:
        states = self.population.states
        space = action_space(self.population)
        self.population.adopt(
            lifecycle.apply(states, actions, space, shadow_training=shadow_training).then(
                lifecycle.begin_step
            )
        )
        for host, row in enumerate(actions.tolist()):
            choice = dict(zip(space.names, row, strict=True))
            self.alone[host].act(choice, shadow_training)
            self.ops.add(LifecycleOp(choice["op"]))
            if choice["op"] == LifecycleOp.GERMINATE:  # both start from the same birth
                slot = choice["slot"]
                self.alone[host].load_seed(slot, seed_weights(self.population, host, slot))
            self.alone[host].begin_step()

    def train(self, count: int) -> None:
        steps = range(self.minibatches, self.minibatches + count)
        rows = minibatch_indices(0, torch.arange(NUM_HOSTS), steps, BATCH, NUM_ROWS)
        losses = self.population.train(rows)
        for host, alone in enumerate(self.alone):
            x, labels = rows_seen_by(self.population, host)
            expected = [alone.train(x[r], labels[r]) for r in rows[:, host]]
            torch.testing.assert_close(losses[:, host].tolist(), expected, rtol=0, atol=1e-9)
        self.minibatches += count

    def end_step(self) -> None:
        self.population.adopt(lifecycle.end_step(self.population.states))
        for alone in self.alone:
            alone.end_step()


def start(kind: str, kernels: str | None = None) -> Run:
    host = build_host(kind, num_classes=5, **HOSTS[kind])
    population = Population(
        host,
        full_menu(host),
        random_task(host.input_shape, NUM_ROWS, num_views=2),
        num_hosts=NUM_HOSTS,
        batch_size=BATCH,
        optimizer=BATCHED,
        view_ids=VIEWS,
        kernels=kernels,
    )
    rows = population.parameter_table.params[:, population.parameter_table.layout.host_columns()]
    alone = [PerHost(host, population.menu, stock, rows[i].clone()) for i in range(NUM_HOSTS)]
    return Run(population, alone)


def rows_seen_by(population: Population, host: int) -> tuple[torch.Tensor, torch.Tensor]:
    view = population.view_ids[host]
    return population.task.train_x[view], population.task.train_y[view]


def action_space(population: Population):
    return tamiyo_action_space(population.num_slots, len(population.menu))


def seed_weights(population: Population, host: int, slot: int) -> torch.Tensor:
    count = int(population.seed_params()[host, slot])
    return population.parameter_table.params[
        host, population.parameter_table.layout.seed_columns(slot, count)
    ].clone()


def assert_same(run: Run, tolerance: float = 1e-9) -> None:
    """Weights, lives and logits of every host, with everything on and with each seed off."""
    population = run.population
    x = population.task.train_x[population.view_ids]
    logits = population.logits(x.movedim(1, -1)).movedim(-1, 1)
    host_columns = population.parameter_table.layout.host_columns()
    close = {"rtol": 0, "atol": tolerance}
    for host, alone in enumerate(run.alone):
        weights = population.parameter_table.params[host, host_columns]
        torch.testing.assert_close(weights, alone.weights(), **close)
        torch.testing.assert_close(logits[host], alone.logits(x[host]).detach(), **close)
        for slot, life in enumerate(alone.slots):
            assert_same_life(population.states, host, slot, life)
            if alone.seeds[slot] is not None:
                weights = seed_weights(population, host, slot)
                torch.testing.assert_close(weights, alone.seed_weights(slot), **close)


def assert_same_life(states: SlotStates, host: int, slot: int, life) -> None:
    for entry in fields(SlotStates):
        batched = getattr(states, entry.name)[host, slot].item()
        assert batched == pytest.approx(getattr(life, entry.name), abs=1e-12), entry.name


@pytest.mark.parametrize("shadow_training", [False, True], ids=["in host", "behind host"])
@pytest.mark.parametrize("kind", HOSTS)
def test_a_population_trains_as_its_hosts_would_alone(kind, shadow_training):
    live_through_everything(start(kind), shadow_training)


@needs_compiler
def test_so_does_one_run_by_the_fused_kernel(monkeypatch):
    allow_cpu(monkeypatch)
    live_through_everything(start("conv1d", "fused"), shadow_training=True)


def live_through_everything(run: Run, shadow_training: bool) -> None:
    """Random legal actions and a rollback, 25 steps long."""
    rng = torch.Generator().manual_seed(7)
    saved = None
    for step in range(25):
        space = action_space(run.population)
        run.act(legal_actions(run.population.states, space, rng), shadow_training)
        run.train(2)
        run.end_step()
        if step == 8:
            saved = run.population.save(), run.alone[1].save()
        if step == 14:
            host = torch.tensor([1])
            run.population.restore(saved[0], host)
            run.population.adopt(lifecycle.remove_live_seeds(run.population.states, host))
            run.alone[1].roll_back(saved[1])
        if step % 4 == 0:
            assert_same(run)
    assert run.ops == set(LifecycleOp)  # every op was part of it


@pytest.mark.parametrize("kind", HOSTS)
def test_one_step_agrees_in_float32_too(kind):
    run = start(kind)
    population = run.population
    single = Population(
        population.host,
        population.menu,
        population.task.to("cpu", torch.float32),
        num_hosts=NUM_HOSTS,
        batch_size=BATCH,
        optimizer=population.optimizer,
        view_ids=VIEWS,
    )
    grow = torch.zeros(NUM_HOSTS, action_space(population).num_heads, dtype=torch.int64)
    grow[:, 0] = LifecycleOp.GERMINATE
    run.act(grow, shadow_training=False)
    single.adopt(Transition.of(population.states, germinated=population.states.has_seed))
    single.parameter_table.params.copy_(population.parameter_table.params)
    rows = minibatch_indices(0, torch.arange(NUM_HOSTS), range(1), BATCH, NUM_ROWS)
    single.train(rows)
    run.train(1)
    columns = population.parameter_table.layout.host_columns()
    for host, alone in enumerate(run.alone):
        weights = single.parameter_table.params[host, columns].double()
        torch.testing.assert_close(weights, alone.weights(), rtol=0, atol=1e-5)


def test_a_host_does_not_depend_on_the_others():
    together, rng = start("conv1d"), torch.Generator().manual_seed(3)
    population = together.population
    alone = Population(
        population.host,
        population.menu,
        population.task,
        num_hosts=1,
        batch_size=BATCH,
        optimizer=population.optimizer,
        host_ids=torch.tensor([2]),
        view_ids=VIEWS[2:3],
    )
    space = action_space(population)
    for step in range(10):
        actions = legal_actions(population.states, space, rng)
        for hosts, chosen in ((population, actions), (alone, actions[2:3])):
            hosts.adopt(lifecycle.apply(hosts.states, chosen, space).then(lifecycle.begin_step))
            ids = hosts.host_ids
            hosts.train(minibatch_indices(0, ids, range(2 * step, 2 * step + 2), BATCH, NUM_ROWS))
            hosts.adopt(lifecycle.end_step(hosts.states))
    assert (population.states.stage[2] != SeedStage.DORMANT).any()
    torch.testing.assert_close(
        population.parameter_table.params[2], alone.parameter_table.params[0], rtol=0, atol=1e-9
    )
