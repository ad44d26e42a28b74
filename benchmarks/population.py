"""Training speed of a population of growing hosts, against the same hosts trained one by one.

    python benchmarks/population.py [--device cuda] [--quick]

The rival is the tests' oracle: stock modules and stock optimisers, a host at a time. It is timed
in the same process, on the same device, on hosts with the same seeds, a sample of them: its time
is a sum over hosts. Random data of MNIST-1D's shape.
"""

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from esper.kasmina import lifecycle
from esper.kasmina.blueprints import menu_for
from esper.kasmina.hosts import build_host
from esper.kasmina.lifecycle import Transition
from esper.leyline.constants import AlphaCurve, BlendStyle
from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.stages import LifecycleOp
from esper.tolaria.governor import Governor
from esper.tolaria.host_optimizer import AdamW
from esper.tolaria.host_validation import validate_hosts
from esper.tolaria.population import Kernels, Population
from esper.tolaria.tasks import HeldOut, Task, minibatch_indices
from support.legal_actions import legal_actions
from support.per_host import PerHost

BATCH, NUM_ROWS, VALIDATION_ROWS = 100, 3200, 800
STEP_MINIBATCHES = 32
WIDTH = {"cpu": 8, "cuda": 16}
OPTIMIZER = AdamW(learning_rate=1e-2)
STEP_MINIBATCHES, STEP_ROWS = 20, 400  # of an RL step in `esper train`
Widths = tuple[tuple[int, ...], ...]
MIXED_WIDTHS: Widths = (
    (16, 16, 16), (4, 8, 16), (16, 8, 4), (8, 8, 8), (12, 4, 12), (8, 16, 8), (4, 4, 4), (12, 12, 16),
)  # fmt: skip
CONV_CONV = 5  # its place in the menu for series


def random_task(device: str, dtype: torch.dtype = torch.float32) -> Task:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_ROWS + VALIDATION_ROWS, 1, 40, generator=rng)
    y = torch.randint(10, x.shape[:2], generator=rng)
    return Task(
        names=("random",),
        train_x=x[:, :NUM_ROWS],
        train_y=y[:, :NUM_ROWS],
        num_rows=torch.tensor([NUM_ROWS]),
        validation_x=x[:, NUM_ROWS:],
        validation_y=y[:, NUM_ROWS:],
        held_out=HeldOut(x[:, :0], y[:, :0]),
        num_classes=10,
    ).to(device, dtype)


def build(
    num_hosts: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    widths: tuple[int, ...] | None = None,
    kernels: Kernels | None = None,
) -> Population:
    """Hosts of the device's usual width, run the fastest way, if nothing else is said."""
    widths = widths or (WIDTH[device],) * 3
    host = build_host("conv1d", input_shape=(1, 40), num_classes=10, widths=widths)
    return Population(
        host,
        menu_for(host.sites[0].kind),
        random_task(device, dtype),
        num_hosts=num_hosts,
        batch_size=BATCH,
        optimizer=OPTIMIZER,
        kernels=kernels,
    )


def grow_everywhere(population: Population, blueprints: Tensor | int, style: Tensor | int) -> None:
    """A seed in every slot of every host, at alpha 1."""
    hosts = torch.arange(population.num_hosts).repeat_interleave(population.num_slots)
    slots = torch.arange(population.num_slots).repeat(population.num_hosts)
    transition = lifecycle.request(
        population.states,
        LifecycleOp.GERMINATE,
        hosts,
        slots,
        blueprint=blueprints,
        style=style,
        ramp_steps=1,
        alpha_target=1.0,
        curve=AlphaCurve.LINEAR,
    )
    population.adopt(transition.then(lifecycle.begin_step))


def rows_for(population: Population, first: int, count: int) -> Tensor:
    ids = population.host_ids.to(population.task.device)
    return minibatch_indices(0, ids, range(first, first + count), BATCH, NUM_ROWS)


def copy_hosts(population: Population, hosts: Sequence[int]) -> list[PerHost]:
    """Copies of some hosts of a population, each on its own; moments start at zero."""

    def stock(params):
        return torch.optim.AdamW(
            params, lr=OPTIMIZER.learning_rate, weight_decay=OPTIMIZER.weight_decay
        )

    layout, states = population.parameter_table.layout, population.states
    copies = []
    for host in hosts:
        row = population.parameter_table.params[host]
        alone = PerHost(population.host, population.menu, stock, row[layout.host_columns()].clone())
        for slot in states.has_seed[host].nonzero().flatten().tolist():
            life = alone.slots[slot]
            for name in ("stage", "alpha", "alpha_target", "style", "blueprint"):
                setattr(life, name, getattr(states, name)[host, slot].item())
            alone.add_seed(slot)
            size = int(population.seed_params()[host, slot])
            alone.load_seed(slot, row[layout.seed_columns(slot, size)].clone())
        copies.append(alone)
    return copies


def train_alone(copies: list[PerHost], population: Population, rows: Tensor, ids: Sequence[int]):
    x, labels = population.task.train_x[0], population.task.train_y[0]
    for alone, host in zip(copies, ids, strict=True):
        for taken in rows[:, host]:
            alone.train(x[taken], labels[taken])


def check_parity(device: str) -> float:
    """Largest difference of any weight, population against one by one, in float64."""
    population = build(9, device, torch.float64)
    kinds = len(population.menu)
    blueprints = torch.arange(9 * 3) % kinds
    grow_everywhere(population, blueprints, torch.arange(9 * 3) // 2 % len(BlendStyle))
    all_hosts = range(9)
    alone = copy_hosts(population, all_hosts)
    rows = rows_for(population, 0, 10)
    population.train(rows)
    train_alone(alone, population, rows, all_hosts)
    layout, worst = population.parameter_table.layout, 0.0
    for host, one in enumerate(alone):
        row = population.parameter_table.params[host]
        pairs = [(row[layout.host_columns()], one.weights())]
        for slot in range(population.num_slots):
            weights = one.seed_weights(slot)
            pairs.append((row[layout.seed_columns(slot, len(weights))], weights))
        worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
    assert worst < 1e-9, f"population and per-host training differ by {worst}"
    return worst


def seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_churn(num_hosts: int, device: str, num_steps: int, episodes: int) -> dict[str, float]:
    """Milliseconds per minibatch of the whole population under a random controller.

    All effects of an action are timed: initialisation, regrouping. The controller's own
    time is not.
    """
    population = build(num_hosts, device)
    space = tamiyo_action_space(population.num_slots, len(population.menu))
    rng = torch.Generator().manual_seed(0)
    minibatches, busy, loop, seeds, macs = 0, 0.0, [], [], []
    sample = list(range(0, num_hosts, max(1, num_hosts // 8)))[:8]
    for episode in range(episodes):
        busy += seconds(partial(population.reset, episode), device)
        for step in range(num_steps):
            actions = legal_actions(population.states, space, rng)
            rows = rows_for(population, minibatches, STEP_MINIBATCHES)

            def act(actions=actions, rows=rows):
                transition = lifecycle.apply(population.states, actions, space)
                population.adopt(transition.then(lifecycle.begin_step))
                population.train(rows)
                population.adopt(lifecycle.end_step(population.states))

            busy += seconds(act, device)
            minibatches += STEP_MINIBATCHES
            seeds.append(population.states.has_seed.double().mean().item())
            macs.append(arithmetic(population))
            if step % 5 == 2:
                alone = copy_hosts(population, sample)
                train_alone(alone, population, rows[:1], sample)  # warm-up
                taken = seconds(partial(train_alone, alone, population, rows[1:3], sample), device)
                loop.append(taken / (2 * len(sample)))
    per_minibatch = busy / minibatches
    return {
        "ms": per_minibatch * 1e3,
        "loop_ms": statistics.mean(loop) * num_hosts * 1e3,
        "speedup": statistics.mean(loop) * num_hosts / per_minibatch,
        "seeds_per_slot": statistics.mean(seeds),
        "gflops": 6 * statistics.mean(macs) * BATCH / per_minibatch / 1e9,
    }


def arithmetic(population: Population) -> int:
    """Multiply-adds of one example's forward pass through every host and its seeds."""
    macs = population.num_hosts * population.host.macs
    states = population.states
    for slot, site in enumerate(population.host.sites):
        for blueprint in states.blueprint[:, slot].tolist():
            macs += population.menu[blueprint].program(site).macs if blueprint >= 0 else 0
    return macs


def time_training(population: Population, repeats: int) -> float:
    """Median seconds per minibatch with the seeds as they are."""
    device = population.task.device.type
    rows = rows_for(population, 0, 8)
    population.train(rows)
    return (
        statistics.median(seconds(lambda: population.train(rows), device) for _ in range(repeats))
        / 8
    )


def measure_mix(num_hosts: int, device: str, repeats: int) -> dict[str, float]:
    """Time per arithmetic: every host with other seeds against all alike, interleaved."""
    alike, different = build(num_hosts, device), build(num_hosts, device)
    grow_everywhere(alike, CONV_CONV, BlendStyle.ADD)
    rng = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(num_hosts * 3, generator=rng) % len(different.menu)
    grow_everywhere(different, shuffled, BlendStyle.ADD)
    per_mac: dict[str, list[float]] = {"alike": [], "different": []}
    for _ in range(3):
        for name, population in (("alike", alike), ("different", different)):
            per_mac[name].append(time_training(population, repeats) / arithmetic(population))
    found = {name: statistics.median(times) for name, times in per_mac.items()}
    return {
        "alike_ms": found["alike"] * arithmetic(alike) * 1e3,
        "different_ms": found["different"] * arithmetic(different) * 1e3,
        "ratio": found["different"] / found["alike"],
    }


def measure_step(num_hosts: int, device: str, repeats: int) -> dict[str, float]:
    """Median milliseconds of the phases of one RL step, with mixed seeds in every slot."""
    population = build(num_hosts, device)
    rng = torch.Generator().manual_seed(0)
    count = (num_hosts * 3,)
    grow_everywhere(
        population,
        torch.randint(len(population.menu), count, generator=rng),
        torch.randint(len(BlendStyle), count, generator=rng),
    )
    governor = Governor(population)
    phases: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        losses: list[Tensor] = []
        rows: list[Tensor] = []
        work = {
            "choose rows": lambda r=repeat, rows=rows: rows.append(
                rows_for(population, r * STEP_MINIBATCHES, STEP_MINIBATCHES)
            ),
            "regroup": lambda: population.adopt(Transition.of(population.states)),
            "train": lambda rows=rows, losses=losses: losses.append(population.train(rows[0])),
            "validate": lambda: validate_hosts(population),
            "govern": lambda losses=losses: governor.check(losses[0]),
        }
        for name, phase in work.items():
            taken = seconds(phase, device)
            if repeat:
                phases.setdefault(name, []).append(taken * 1e3)
    return {name: statistics.median(times) for name, times in phases.items()}


def measure_host_batch(
    kernels: Kernels, num_hosts: int, widths: Widths, repeats: int
) -> list[float]:
    """Median milliseconds of an RL step's training and validation, on CUDA.

    A population per entry of `widths`, mixed seeds in every slot, 20 minibatches, 400 validation
    rows. Fused populations run on a stream each; batched operations one after the other.
    """
    rng = torch.Generator().manual_seed(0)
    populations = [build(num_hosts, "cuda", widths=shape, kernels=kernels) for shape in widths]
    for population in populations:
        count = (num_hosts * population.num_slots,)
        blueprints = torch.randint(len(population.menu), count, generator=rng)
        grow_everywhere(population, blueprints, torch.randint(3, count, generator=rng))
    rows = [rows_for(population, 0, STEP_MINIBATCHES) for population in populations]
    main = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() if kernels == "fused" else main for _ in populations]

    def everywhere(work: Callable[[Population, Tensor], object]) -> None:
        for population, taken, stream in zip(populations, rows, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                work(population, taken)
        for stream in streams:
            main.wait_stream(stream)

    phases = (
        partial(everywhere, lambda population, taken: population.train(taken)),
        partial(everywhere, lambda population, _: validate_hosts(population, STEP_ROWS)),
    )
    times = [[seconds(phase, "cuda") for _ in range(repeats + 1)][1:] for phase in phases]
    return [statistics.median(taken) * 1e3 for taken in times]


def compare_host_batches(repeats: int) -> dict[str, float]:
    """How many times faster than batched operations an RL step is, by population sizes."""
    host_batches: dict[str, tuple[int, Widths]] = {
        "128 hosts": (128, ((16,) * 3,)),
        "512 hosts": (512, ((16,) * 3,)),
        "8 x 16 hosts": (16, MIXED_WIDTHS),
        "8 x 64 hosts": (64, MIXED_WIDTHS),
    }
    ratios = {}
    for name, (num_hosts, widths) in host_batches.items():
        fused = measure_host_batch("fused", num_hosts, widths, repeats)
        eager = measure_host_batch("eager", num_hosts, widths, repeats)
        ratios[name] = sum(eager) / sum(fused)
        print(
            f"{name}, one RL step, ms to train and validate: fused {fused[0]:.2f} + {fused[1]:.2f}, "
            f"eager {eager[0]:.2f} + {eager[1]:.2f}, {ratios[name]:.1f}x"
        )
    return ratios


def measure_memory(device: str) -> float:
    """Peak GiB of training and validating 1024 hosts with three seeds each."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    population = build(1024, device)
    grow_everywhere(population, torch.arange(1024 * 3) % len(population.menu), BlendStyle.ADD)
    population.train(rows_for(population, 0, 1))
    validate_hosts(population)
    if device == "cuda":
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_roofline(num_hosts: int, device: str, repeats: int) -> dict[str, float]:
    """Arithmetic rates of the parts, against a large float32 matrix product and a large copy."""
    side = 4096 if device == "cuda" else 1024
    a, b = torch.randn(2, side, side, device=device)
    product = statistics.median(seconds(lambda: a @ b, device) for _ in range(repeats + 3))
    big = torch.empty(2**28 if device == "cuda" else 2**24, device=device)
    copy = statistics.median(seconds(lambda: big.add_(1), device) for _ in range(repeats + 3))
    bare, grown = build(num_hosts, device), build(num_hosts, device)
    grow_everywhere(grown, CONV_CONV, BlendStyle.ADD)
    bare_s, grown_s = time_training(bare, repeats), time_training(grown, repeats)
    flops = [6 * BATCH * arithmetic(population) for population in (bare, grown)]
    return {
        "peak_gflops": 2 * side**3 / product / 1e9,
        "copy_gb_s": 2 * big.numel() * 4 / copy / 1e9,
        "host_gflops": flops[0] / bare_s / 1e9,
        "seeds_gflops": (flops[1] - flops[0]) / max(grown_s - bare_s, 1e-9) / 1e9,
        "host_ms_per_host": bare_s / num_hosts * 1e3,
        "grown_ms_per_host": grown_s / num_hosts * 1e3,
    }


def show(title: str, figures: dict[str, float]) -> None:
    print(f"{title}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats")
    args = parser.parse_args()
    device, quick = args.device, args.quick
    torch.set_num_threads(1)
    print(f"kernels: {build(2, device).kernels}")
    print(f"parity in float64: largest difference {check_parity(device):.1e}")
    time_training(build(2, device), repeats=1)  # compiles what float32 needs
    bars: dict[str, dict[str, float | bool]] = {}

    def bar(name: str, value: float, limit: float, at_most: bool = False) -> None:
        met = value <= limit if at_most else value >= limit
        bars[name] = {"value": round(value, 3), "bar": limit, "met": met}

    sizes = {"cpu": ((32, 5.0),), "cuda": ((128, 100.0), (512, 100.0))}[device]
    steps, episodes, repeats = (6, 1, 2) if quick else (25, 2, 7)
    for num_hosts, limit in sizes:
        churn = measure_churn(num_hosts, device, steps, episodes)
        show(f"P={num_hosts}, width {WIDTH[device]}, random controller", churn)
        bar(f"speedup_p{num_hosts}", churn["speedup"], limit)
    num_hosts = sizes[0][0]
    mix = measure_mix(num_hosts, device, repeats)
    show(f"P={num_hosts}, seeds alike or all different", mix)
    bar("different_to_alike_per_arithmetic", mix["ratio"], 2.0, at_most=True)
    phases = measure_step(num_hosts, device, repeats)
    show(f"P={num_hosts}, one RL step, ms", {**phases, "all": sum(phases.values())})
    if device == "cuda":
        ratios = compare_host_batches(repeats)
        bar("fused_vs_eager_8x16", ratios["8 x 16 hosts"], 10.0)
    roofline = measure_roofline(num_hosts, device, repeats)
    show(f"P={num_hosts}, roofline", roofline)
    if not (quick and device == "cpu"):
        memory = measure_memory(device)
        show("P=1024, three seeds each, peak GiB", {"memory": memory})
        bar("memory_p1024_gib", memory, 8.0, at_most=True)
    print(json.dumps({"benchmark": "population", "device": device, "bars": bars}))


if __name__ == "__main__":
    main()
