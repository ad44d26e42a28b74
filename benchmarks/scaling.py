"""Training on several ranks: hosts per second, overhead and bytes by number of ranks.

    python benchmarks/scaling.py [--quick] [--device cuda]

On a CPU every case is a short run of `GrowthTraining` on MNIST-1D, with one thread per rank, started by
torchrun on this machine. On a GPU the preset is `full` and all ranks share the GPU, over gloo: start
NVIDIA's MPS first, or their kernels take turns. Cases take turns; a figure is the best round of a case, because other work
on the machine only slows rounds down. `cpu s` is rank 0's CPU time in its best round: where other
work holds the cores, it shows what the wall clock hides, but no waiting for the other rank.
Correctness first: after two rounds, two ranks have the weights of one.

| figure | cases |
|---|---|
| weak scaling | 2 ranks with 2N hosts against 1 rank with N, hosts per second |
| strong scaling | 2 ranks with N hosts against 1 rank with N |
| overhead | 1 rank under torchrun against none |
| two runs | two processes that do not know of each other: what the machine gives |
| bytes | sent by each rank per round: gradients and statistics, and records |
"""

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

from esper.leyline.records import RoundRecord
from esper.runtime.ranks import join_ranks
from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.train_config import PRESETS

torch.set_num_threads(1)

WEAK_BAR, OVERHEAD_BAR = 1.8, 0.02
CASES = {
    "cpu": {
        "alone": (0, 1),
        "one rank": (1, 1),
        "weak, two ranks": (2, 2),
        "strong, two ranks": (2, 1),
        "weak, four ranks": (4, 4),
        "strong, four ranks": (4, 1),
    },
    "cuda": {
        "one rank": (1, 1),
        "strong, two ranks": (2, 1),
        "strong, four ranks": (4, 1),
        "one rank, 2x": (1, 2),
        "weak, two ranks": (2, 2),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="finish within 40 seconds")
    parser.add_argument("--device", choices=list(CASES), default="cpu")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)  # rounds, size, result
    asked = parser.parse_args()
    if asked.worker:
        work(asked.device, int(asked.worker[0]), int(asked.worker[1]), Path(asked.worker[2]))
        return
    cases, begun = CASES[asked.device], time.perf_counter()
    gate = 2 if asked.device == "cpu" else 1  # rounds; later, rounding may change a decision
    check(asked.device, *(run(asked.device, ranks, 1, gate) for ranks in (1, 2)))
    turns, rounds = (1, 3) if asked.quick or asked.device == "cuda" else (3, 5)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    apart: list[dict[str, Any]] = []
    for _ in range(turns):
        for name, (ranks, size) in cases.items():
            found[name].append(run(asked.device, ranks, size, rounds))
            print(f"{name}: done after {time.perf_counter() - begun:.0f} s", flush=True)
        apart += runs(asked.device, 0, 1, rounds, copies=2)
    rate, cpu = report(found)
    apart_rate = 2 * statistics.fmean(
        best_round(r["rounds"])["time/hosts_per_second"] for r in apart
    )
    print(f"two runs at the same time, without messages: {apart_rate / rate['one rank']:.2f}")
    if asked.device == "cuda":
        time_nccl()
    else:
        print_bars(rate, cpu)


def check(device: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    """Two ranks must have the weights of one; on a GPU, where other shapes round otherwise, nearly."""
    tolerance = 1e-4 if device == "cpu" else 1e-2
    for name, weight in one["policy"].items():
        other = two["policy"][name]
        torch.testing.assert_close(weight, other, rtol=tolerance, atol=tolerance, msg=name)


def run(device: str, ranks: int, size: int, rounds: int) -> dict[str, Any]:
    """A case in new processes: `ranks` 0 is without torchrun, `size` multiplies the hosts."""
    return runs(device, ranks, size, rounds, copies=1)[0]


def runs(device: str, ranks: int, size: int, rounds: int, copies: int) -> list[dict[str, Any]]:
    """Copies of a case that run at the same time and do not know of each other."""
    start = [sys.executable]
    if ranks:
        start += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / str(copy) for copy in range(copies)]
        options = [__file__, f"--device={device}", "--worker", str(rounds), str(size)]
        started = [subprocess.Popen([*start, *options, str(result)]) for result in results]
        if any(process.wait() for process in started):
            raise RuntimeError(f"{ranks} ranks failed")
        return [pickle.loads(result.read_bytes()) for result in results]


def work(device: str, rounds: int, size: int, result: Path) -> None:
    ranks, sent = join_ranks(), count_bytes()
    config = PRESETS["quick" if device == "cpu" else "full"]
    batch = replace(config.host_batch, envs_per_type=config.host_batch.envs_per_type * size)
    ppo = replace(config.ppo, target_kl=None)  # every update makes all its passes
    config = replace(config, ppo=ppo, rounds=rounds, device=device)
    if device == "cpu":
        batch = replace(batch, num_types=1, envs_per_type=48 * size)
        config = replace(config, host_batch=batch, widths=(6,), held_out_widths=())
    else:
        config = replace(config, host_batch=batch)
    training = GrowthTraining(config, ranks)
    records: list[dict[str, float]] = []
    before = time.process_time()

    def on_round(record: RoundRecord) -> None:
        nonlocal before
        now = time.process_time()
        records.append({**record.metrics, "cpu": now - before})
        before = now

    training.run(on_round)
    if ranks.is_first:
        policy = training.agent.policy.state_dict()
        found = {"rounds": records[1:], "policy": policy, "hosts": config.num_envs}
        found |= {"sums": sent["sums"] / rounds, "records": sent["records"] / rounds}
        result.write_bytes(pickle.dumps(found))


def count_bytes() -> dict[str, int]:
    """Bytes that this rank gives to collectives, counted from now on."""
    sent = {"sums": 0, "records": 0}
    reduce, gather = dist.all_reduce, dist.gather_object

    def all_reduce(tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        sent["sums"] += tensor.numel() * tensor.element_size()
        return reduce(tensor, *rest, **options)

    def gather_object(value: Any, *rest: Any, **options: Any) -> Any:
        sent["records"] += len(pickle.dumps(value))
        return gather(value, *rest, **options)

    dist.all_reduce, dist.gather_object = all_reduce, gather_object
    return sent


def report(found: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Print the best round of each case; its hosts per second and CPU seconds."""
    best, cpu = dict[str, float](), dict[str, float]()
    names = ("hosts", "hosts/s", "hosts s", "update s", "other s", "cpu s")
    print(f"{'case':20}" + "".join(f"{name:>9}" for name in names))
    for name, results in found.items():
        rounds = [each for result in results for each in result["rounds"]]
        top = best_round(rounds)
        hosts, update = top["time/hosts"], top["time/update"]
        count = results[0]["hosts"]
        other = count / top["time/hosts_per_second"] - hosts - update
        rate = best[name] = top["time/hosts_per_second"]
        cpu[name] = min(each["cpu"] for each in rounds)
        times = "".join(f"{seconds:9.3f}" for seconds in (hosts, update, other, cpu[name]))
        print(f"{name:20}{count:9}{rate:9.2f}{times}")
    sent = found["weak, two ranks"][0]
    print(
        f"bytes per round and rank: {sent['sums']:,.0f} summed, {sent['records']:,.0f} of records"
    )
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return best, cpu


def best_round(rounds: list[dict[str, float]]) -> dict[str, float]:
    return max(rounds, key=lambda each: each["time/hosts_per_second"])


def time_nccl() -> None:
    """Time one sum of a policy's gradients over NCCL, with the one rank that a GPU can have."""
    gradients = torch.randn(793_000 // 4, device="cuda")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    seconds = []
    for _ in range(200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        dist.all_reduce(gradients)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    print(f"NCCL with one rank: {1e6 * sorted(seconds)[100]:.0f} us per sum of 793 kB")


def print_bars(rate: dict[str, float], cpu: dict[str, float]) -> None:
    weak = rate["weak, two ranks"] / rate["one rank"]
    strong = rate["strong, two ranks"] / rate["one rank"]
    overhead = rate["alone"] / rate["one rank"] - 1
    by_cpu = 2 * cpu["one rank"] / cpu["weak, two ranks"]
    print(f"weak scaling {weak:.2f} ({by_cpu:.2f} by CPU time), strong scaling {strong:.2f}")
    print(f"overhead {overhead:.1%} ({cpu['one rank'] / cpu['alone'] - 1:.1%} by CPU time)")
    bars = {
        "weak_scaling_2_ranks": {"value": round(weak, 2), "bar": WEAK_BAR, "met": weak >= WEAK_BAR},
        "overhead_of_one_rank": {
            "value": round(overhead, 4), "bar": OVERHEAD_BAR, "met": overhead < OVERHEAD_BAR,
        },
    }  # fmt: skip
    print(json.dumps({"benchmark": "scaling", "device": "cpu", "bars": bars}))


if __name__ == "__main__":
    main()
