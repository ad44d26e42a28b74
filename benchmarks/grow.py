"""The overhead of growth without seeds, and its gain on users' models of several families.

    python benchmarks/grow.py [--quick] [--workers 14 --seconds 440 --out grow.json] [...]

1. CPU time of a training step with all slots dormant, compared with the same step without Esper:
   medians of interleaved blocks in one process, for a small MLP and a residual CNN.
2. Typical scripts (`grow_families.py`): AdamW with a decaying learning rate, `esper.grow` with
   defaults, no twin, and twice the parameters as budget. The rivals are static networks, trained the
   same way: the small one, a wider one with as many parameters, one with as many multiply-adds, and
   the one with as many parameters trained for as many multiply-adds as growing took in total.

   Every arm is trained with the same three learning rates for each rng seed. The rate and the moment
   of training (25 validations) are chosen on validation rows. Only the chosen network reads the test
   rows. Training compute counts a step as three forward passes, and every validation; of growing
   also the evidence. The runs are spread over processes of one thread; with `--seconds` no run starts
   after that time, and unfinished comparisons are left out.
"""

import argparse
import copy
import heapq
import io
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from grow_families import FAMILIES, residual_cnn
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.surgery.sites import count_macs, count_params

OVERHEAD_BAR, COMPUTE_BAR = 0.03, 1.5
CALLS = 10  # steps per measurement
WEIGHT_DECAY = 0.01
RATES = (0.4, 1.0, 2.5)  # times the learning rate of the family
VALIDATIONS = 25
RIVALS = ("ungrown", "as many parameters", "as many multiply-adds", "as much training")
QUANTILE = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # of Student's t, 95 % on both sides


class Run(NamedTuple):
    """One network to train."""

    family: str
    rng_seed: int
    arm: str
    rate: float
    steps: int
    width: int
    budget: float


class Trained(NamedTuple):
    run: Run
    score: float  # on the validation rows
    params: int
    macs: int
    training: float  # multiply-adds in total
    seconds: float
    seeds: list[str]  # what was grown
    model: bytes


class Task:
    """A family with its rows."""

    def __init__(self, run: Run):
        self.run, self.family = run, FAMILIES[run.family]
        x, y = self.family.data()
        a, b = int(0.64 * len(x)), int(0.8 * len(x))
        self.train, self.val, self.test = (x[:a], y[:a]), (x[a:b], y[a:b]), (x[b:], y[b:])

    def start(self) -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader]:
        torch.manual_seed(self.run.rng_seed)
        model, rate = self.family.make(self.run.width), self.run.rate * self.family.learning_rate
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=WEIGHT_DECAY)
        # constant for 70 % of the steps, then a straight line down to 2 %
        share = lambda step: 1 - 0.98 * max(0.0, step / self.run.steps - 0.7) / 0.3  # noqa: E731
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        rows = TensorDataset(*self.train)
        return model, optimizer, scheduler, DataLoader(rows, self.family.batch, shuffle=True)

    def score(self, model: nn.Module, rows: tuple[Tensor, Tensor]) -> float:
        model.eval()
        with torch.no_grad():
            return float(self.family.score(model(rows[0]), rows[1]).mean())

    def macs(self, model: nn.Module) -> int:
        return count_macs(model, self.train[0][:1])

    def static_compute(self, macs: int, steps: int) -> float:
        return macs * (3.0 * self.family.batch * steps + VALIDATIONS * len(self.val[0]))

    def grow(self) -> tuple[nn.Module, float, list[str]]:
        """The grown network, its training compute and its seeds."""
        model, optimizer, scheduler, loader = self.start()
        result = esper.grow(
            model,
            loader,
            [self.val],
            loss=self.family.loss,
            metric=self.family.score,
            optimizer=optimizer,
            scheduler=scheduler,
            budget=esper.Budget(params=round(self.run.budget * count_params(model))),
            steps=self.run.steps,
            decisions=VALIDATIONS,
            progress=False,
            twin=False,
        )
        paid = float(sum(cost.macs for cost in result.ledger.costs.values()))
        return result.model, paid, [f"{b} at {s}" for s, b in result.growth.seeds.items()]

    def train_alone(self) -> tuple[nn.Module, float, list[str]]:
        """A static network: the best of all validations."""
        model, optimizer, scheduler, loader = self.start()
        every = max(1, self.run.steps // VALIDATIONS)
        best, weights = -1.0, {}
        for step, (x, y) in enumerate(batches(loader, self.run.steps), start=1):
            model.train()
            optimizer.zero_grad()
            self.family.loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            if step % every == 0 and (found := self.score(model, self.val)) > best:
                best, weights = found, copy.deepcopy(model.state_dict())
        model.load_state_dict(weights)
        return model, self.static_compute(self.macs(model), self.run.steps), []


def batches(loader: DataLoader, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    done = 0
    while True:
        for batch in loader:
            if done == steps:
                return
            done += 1
            yield batch


def train(run: Run) -> Trained:
    """Train one network, in a process of one thread."""
    torch.set_num_threads(1)
    task, start = Task(run), time.process_time()
    model, paid, seeds = task.grow() if run.arm == "grown" else task.train_alone()
    seconds, file = time.process_time() - start, io.BytesIO()
    torch.save(model, file)
    score, size = task.score(model, task.val), (count_params(model), task.macs(model))
    return Trained(run, score, *size, paid, seconds, seeds, file.getvalue())


class Comparison:
    """All arms of one family and rng seed. The static ones follow when the grown one is known."""

    def __init__(self, first: Run, rates: tuple[float, ...]):
        self.first, self.rates = first, rates
        self.found: dict[str, list[Trained]] = {}

    def runs(self, arm: str, width: int, steps: int | None = None) -> list[Run]:
        changed = self.first._replace(arm=arm, width=width, steps=steps or self.first.steps)
        return [changed._replace(rate=rate) for rate in self.rates]

    def start(self) -> list[Run]:
        return [run for arm in ("grown", "ungrown") for run in self.runs(arm, self.first.width)]

    def add(self, done: Trained) -> list[Run]:
        """Keep a result; returns the runs that can start now."""
        self.found.setdefault(done.run.arm, []).append(done)
        if done.run.arm != "grown" or len(self.found["grown"]) < len(self.rates):
            return []
        task, grown = Task(done.run), self.best("grown")
        wide, heavy = (
            self._wider(cost, least)
            for cost, least in ((count_params, grown.params), (task.macs, grown.macs))
        )
        per_step = task.static_compute(task.macs(task.family.make(wide)), 1000) / 1000
        return [
            *self.runs("as many parameters", wide),
            *self.runs("as many multiply-adds", heavy),
            *self.runs(
                "as much training", wide, max(VALIDATIONS, round(grown.training / per_step))
            ),
        ]

    def _wider(self, cost: Callable[[nn.Module], int], least: int) -> int:
        family = FAMILIES[self.first.family]
        widths = range(family.width, 99, family.step)
        return next(width for width in widths if cost(family.make(width)) >= least)

    def best(self, arm: str) -> Trained:
        return max(self.found[arm], key=lambda done: done.score)

    @property
    def is_complete(self) -> bool:
        return all(len(self.found.get(arm, ())) == len(self.rates) for arm in ("grown", *RIVALS))

    def test(self) -> dict[str, dict[str, Any]]:
        """The chosen network of each arm with its test score: the only look at the test rows."""
        task, table = Task(self.first), {}
        for arm in ("grown", *RIVALS):
            chosen = self.best(arm)
            model = torch.load(io.BytesIO(chosen.model), weights_only=False)
            table[arm] = {
                "test": task.score(model, task.test),
                "rate": chosen.run.rate,
                **{name: getattr(chosen, name) for name in ("params", "macs", "training", "seeds")},
            }
        return table


def compare(first: list[Run], rates: tuple[float, ...], workers: int, seconds: float) -> list[Any]:
    """Train all arms; returns the comparisons that are complete, and the results of all runs."""
    end, order = time.monotonic() + seconds, 0
    comparisons = {(run.family, run.rng_seed): Comparison(run, rates) for run in first}
    ready: list[tuple[int, int, Run]] = []  # rng seed by rng seed, and in order

    def add(runs: list[Run]) -> None:
        nonlocal order
        for run in runs:
            order += 1
            heapq.heappush(ready, (run.rng_seed, order, run))

    for comparison in comparisons.values():
        add(comparison.start())
    results: list[Trained] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running: dict[Future[Trained], Run] = {}
        while running or (ready and time.monotonic() < end):
            while ready and len(running) < workers and time.monotonic() < end:
                run = heapq.heappop(ready)[2]
                running[pool.submit(train, run)] = run
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                if error := future.exception():  # the other comparisons go on
                    print(f"{run} failed: {error!r}", flush=True)
                    continue
                result = future.result()
                results.append(result)
                add(comparisons[result.run.family, result.run.rng_seed].add(result))
    return [[c for c in comparisons.values() if c.is_complete], results]


def report(name: str, tables: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Print the test scores of a family and the gains over each rival; returns the bars."""
    print(f"\n{name}: test score (parameters, multiply-adds), learning rates, compute, seeds")
    print(f"{'rng seed':<10}" + "".join(f"{arm:>28}" for arm in tables[0]))
    ratios = []
    for number, table in enumerate(tables):
        ratios.append(table["grown"]["training"] / table["as many parameters"]["training"])
        cells = (f"{a['test']:.3f} ({a['params']:,}, {a['macs']:,})" for a in table.values())
        rates = " ".join(f"{arm['rate']:g}" for arm in table.values())
        grown = ", ".join(table["grown"]["seeds"])
        print(f"{number:<10}" + "".join(f"{cell:>28}" for cell in cells), end="")
        print(f"  rates {rates}  {ratios[-1]:.2f}x  {grown}")
    means = (statistics.mean(table[arm]["test"] for table in tables) for arm in tables[0])
    print(f"{'mean':<10}" + "".join(f"{mean:>28.3f}" for mean in means))
    bars = {}
    for arm in RIVALS:
        gains = [table["grown"]["test"] - table[arm]["test"] for table in tables]
        spread = statistics.stdev(gains) if gains[1:] else 1.0
        half = QUANTILE.get(len(gains), 2.0) * spread / len(gains) ** 0.5
        mean = statistics.mean(gains)
        print(f"gain over {arm}: {mean:+.3f} +- {half:.3f} (95 %), least {min(gains):+.3f}")
        bars[f"gain_over_{arm}"] = {"value": mean, "bar": -half, "met": mean >= -half}
    ratio = statistics.mean(ratios)
    bars["compute"] = {"value": ratio, "bar": COMPUTE_BAR, "met": ratio <= COMPUTE_BAR}
    print(f"training compute of growing: {ratio:.2f} times that of as many parameters", flush=True)
    return bars


# ---- the overhead of dormant slots


def wide_mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 64-128-128-10, batch 64": (wide_mlp, (64, 64)),
    "residual CNN, 8 channels, 16 x 16, batch 32": (lambda: residual_cnn(8), (32, 1, 16, 16)),
}


def training_steps(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Callable[[], None], ...]:
    """A step without Esper and one with dormant slots, for the same weights.

    Both use one model, because its place in memory changes a step's time by some per cent. Growth
    adds only a call, a step hook and parameter groups.
    """
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    own_groups, own_hooks = list(optimizer.param_groups), optimizer._optimizer_step_pre_hooks.copy()
    growth = esper.Growth(model, optimizer, example=x, decisions=8)
    all_groups, all_hooks = optimizer.param_groups, optimizer._optimizer_step_pre_hooks

    def step(groups: list[dict[str, Any]], hooks: Any) -> None:
        optimizer.param_groups, optimizer._optimizer_step_pre_hooks = groups, hooks
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def plain() -> None:
        step(own_groups, own_hooks)

    def dormant() -> None:
        step(all_groups, all_hooks)
        growth.after_step()

    return plain, dormant


def overhead(case: str, blocks: int) -> tuple[float, float]:
    """Milliseconds of a plain step, and the share that dormant slots add to it."""
    make, shape = CASES[case]
    torch.manual_seed(0)
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
    plain, dormant = training_steps(make(), x, y)
    cpu_seconds(plain), cpu_seconds(dormant)
    times: dict[Callable[[], None], list[float]] = {plain: [], dormant: []}
    for block in range(blocks):
        for step in (plain, dormant) if block % 2 else (dormant, plain):
            times[step].append(cpu_seconds(step))
    # paired: load on the machine affects neighbouring blocks equally
    ratios = [with_slots / alone for alone, with_slots in zip(*times.values(), strict=True)]
    return 1e3 * statistics.median(times[plain]), statistics.median(ratios) - 1


def cpu_seconds(step: Callable[[], None]) -> float:
    """CPU seconds of one step on one thread; other work on the machine does not count."""
    start = time.process_time()
    for _ in range(CALLS):
        step()
    return (time.process_time() - start) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer blocks, one short run")
    parser.add_argument("--parts", nargs="*", default=["overhead", "families"])
    parser.add_argument("--rng-seeds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=2.0, help="parameters, times the model's")
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), help="default: all")
    parser.add_argument("--rates", nargs="*", type=float, default=RATES)
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to start runs in")
    parser.add_argument("--out", type=Path, help="JSON of every run and the bars")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bars: dict[str, dict[str, float | bool]] = {}
    if "overhead" in options.parts:
        print(f"{'a training step':<46}{'plain':>10}{'dormant slots':>16}")
        for case in CASES:
            plain, share = overhead(case, blocks=21 if options.quick else 101)
            print(f"{case:<46}{plain:>8.2f}ms{share:>+15.1%}", flush=True)
            name = "overhead_" + case.split()[0].lower()
            bars[name] = {"value": share, "bar": OVERHEAD_BAR, "met": share <= OVERHEAD_BAR}
    runs: list[dict[str, Any]] = []
    if "families" in options.parts:
        bars |= families(options, runs)
    found = {"benchmark": "grow", "device": "cpu", "bars": bars}
    if options.out:
        options.out.write_text(json.dumps({**found, "runs": runs}, indent=1))
    print(json.dumps(found))


def families(options: argparse.Namespace, kept: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the arms of all families; adds what every run gave to `kept`."""
    names = options.families or list(FAMILIES)[: 1 if options.quick else None]
    rng_seeds, rates = (1, (1.0,)) if options.quick else (options.rng_seeds, tuple(options.rates))
    first = [
        Run(name, s, "grown", rates[0], 100 if options.quick else FAMILIES[name].steps,
            FAMILIES[name].width, options.budget)
        for s in range(rng_seeds)
        for name in names
    ]  # fmt: skip
    complete, results = compare(first, rates, options.workers, options.seconds)
    kept += [{**r.run._asdict(), **r._asdict(), "run": None, "model": None} for r in results]
    spent = sum(result.seconds for result in results)
    print(f"{len(results)} runs, {spent:.0f} CPU seconds; {len(complete)} of {len(first)} complete")
    bars = {}
    for name in names:
        tables = [c.test() for c in complete if c.first.family == name]
        if tables:
            kept += [{"family": name, "rng_seed": n, "test": t} for n, t in enumerate(tables)]
            for bar, value in report(name, tables).items():
                bars[f"{bar}_{name}".lower().replace(" ", "_")] = value
    return bars


if __name__ == "__main__":
    main()
