"""Time of `compute_gae` and of the usual ways, after a check that all agree.

    python benchmarks/gae.py [--device cpu|cuda] [--quick]

CPU figures are for one thread; rivals are timed in turns in one process, and medians compared.
"Ours" is what a rollout buffer does: views [N, T] of time-major storage, results written into it.
"Fresh" is the same kernel with a row per env in memory, and new tensors for its results.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from esper.simic.agent.gae import available_kernels, compute_gae

GAMMA, GAE_LAMBDA = 0.995, 0.97
CPU_SIZES = [(4, 25), (16, 25), (128, 150), (4096, 128)]
CUDA_SIZES = [
    (4, 25),
    (16, 25),
    (128, 150),
    (4096, 128),
    (1024, 8192),
    (65536, 1024),
    (262144, 128),
]
SB3_BARS = {(4, 25): 10.0, (16, 25): 10.0, (128, 150): 5.0, (4096, 128): 1.5}

Way = Callable[[], tuple[Tensor, Tensor]]
Bar = dict[str, float | bool]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 40 seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure = on_cpu if arguments.device == "cpu" else on_cuda
    bars = measure(budget_s=0.3 if arguments.quick else 2.0)
    print(json.dumps({"benchmark": "gae", "device": arguments.device, "bars": bars}))


def rollout(num_envs: int, num_steps: int, device: str = "cpu") -> list[Tensor]:
    """Rewards, values, terminated, truncated and bootstraps of full rows, episodes of 50 steps."""
    rng = torch.Generator(device).manual_seed(0)
    shape = (num_envs, num_steps)
    rewards, values, bootstraps = (
        torch.randn(shape, generator=rng, device=device) for _ in range(3)
    )
    terminated, truncated = (
        torch.rand(shape, generator=rng, device=device) < 0.01 for _ in range(2)
    )
    return [rewards, values, terminated, truncated, bootstraps]


def fresh(data: list[Tensor], kernel: str = "auto") -> tuple[Tensor, Tensor]:
    return compute_gae(*data, gamma=GAMMA, gae_lambda=GAE_LAMBDA, kernel=kernel)


def in_place(data: list[Tensor], kernel: str = "auto") -> Way:
    """The call on time-major views, with results in memory that is there already."""
    views = [x.t().contiguous().t() for x in data]
    out = (torch.empty_like(views[0]), torch.empty_like(views[0]))
    return partial(compute_gae, *views, gamma=GAMMA, gae_lambda=GAE_LAMBDA, kernel=kernel, out=out)


def bar(value: float, limit: float, *, at_most: bool = False) -> Bar:
    met = value <= limit if at_most else value >= limit
    return {"value": round(value, 3), "bar": limit, "met": met}


# CPU


def on_cpu(budget_s: float) -> dict[str, Bar]:
    """Table of times and ratios on one thread; the bars against Stable-Baselines3."""
    has_sb3 = bool(find_spec("stable_baselines3"))
    if not has_sb3:
        print("stable_baselines3 is not installed (extra `bench`): that rival is left out")
    bars = {}
    print("\n| envs x steps | ours us | fresh | SB3 | loop over T | loop per env | vs SB3 |")
    print("|---|---|---|---|---|---|---|")
    for num_envs, num_steps in CPU_SIZES:
        data = rollout(num_envs, num_steps)
        ways: dict[str, Way] = {
            "ours": in_place(data),
            "fresh": partial(fresh, data),
            "torch": in_place(data, "reference"),
        }
        if has_sb3:
            ways["sb3"] = sb3_way(data)
        if num_envs * num_steps <= 20_000:
            ways["python"] = partial(per_env_loop, data)
        check_agreement(data, ways)
        times = interleaved_medians(ways, budget_s)
        ratio = times["sb3"] / times["ours"] if has_sb3 else None
        cells = [f"{times[way] * 1e6:.1f}" if way in times else "-" for way in WAYS]
        cells.append(f"{ratio:.1f}x" if ratio else "-")
        print(f"| {num_envs} x {num_steps} | {' | '.join(cells)} |")
        if ratio:
            bars[f"vs_sb3_{num_envs}x{num_steps}"] = bar(ratio, SB3_BARS[num_envs, num_steps])
    return bars | allocation_bars(cpu_allocations, "cpu")


WAYS = ("ours", "fresh", "sb3", "torch", "python")


def sb3_way(data: list[Tensor]) -> Way:
    """Stable-Baselines3's buffer on the same numbers: [T, N] arrays and one kind of episode end.

    It knows no truncation, so it is given terminations only; `check_agreement` does likewise.
    """
    import numpy as np
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import RolloutBuffer

    rewards, values, terminated, _, bootstraps = data
    num_envs, num_steps = rewards.shape
    space = Box(-1.0, 1.0, (1,))
    buffer = RolloutBuffer(
        num_steps, space, Discrete(2), "cpu", gamma=GAMMA, gae_lambda=GAE_LAMBDA, n_envs=num_envs
    )
    buffer.rewards = rewards.t().contiguous().numpy()
    buffer.values = values.t().contiguous().numpy()
    # its flag says that row t *begins* an episode
    starts = terminated.t().to(torch.float32).roll(1, dims=0)
    starts[0] = 1.0
    buffer.episode_starts = starts.contiguous().numpy()
    last_values, dones = bootstraps[:, -1].clone(), terminated[:, -1].numpy().astype(np.float32)

    def run() -> tuple[Tensor, Tensor]:
        buffer.compute_returns_and_advantage(last_values, dones)
        return torch.from_numpy(buffer.advantages).t(), torch.from_numpy(buffer.returns).t()

    return run


def per_env_loop(data: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The plain way: a Python loop over envs and steps, reading one element at a time."""
    rewards, values, terminated, truncated, bootstraps = data
    advantages = torch.zeros_like(rewards)
    num_envs, num_steps = rewards.shape
    for env in range(num_envs):
        running = 0.0
        for t in reversed(range(num_steps)):
            is_last = t == num_steps - 1
            if terminated[env, t]:
                next_value, running = 0.0, 0.0
            elif truncated[env, t] or is_last:
                next_value, running = float(bootstraps[env, t]), 0.0
            else:
                next_value = float(values[env, t + 1])
            delta = float(rewards[env, t]) + GAMMA * next_value - float(values[env, t])
            running = delta + GAMMA * GAE_LAMBDA * running
            advantages[env, t] = running
    return advantages, advantages + values


def check_agreement(data: list[Tensor], ways: dict[str, Way]) -> None:
    """Raise unless every way gives what the reference gives in float64."""
    exact = [x.double() if x.is_floating_point() else x for x in data]
    truncation_free = [*exact[:3], torch.zeros_like(exact[3]), exact[4]]
    for name, way in ways.items():
        expected = fresh(truncation_free if name == "sb3" else exact, "reference")
        torch.testing.assert_close(way(), expected, check_dtype=False, rtol=1e-4, atol=1e-4)


def interleaved_medians(ways: dict[str, Way], budget_s: float) -> dict[str, float]:
    """Median processor seconds of each way, in turns until about `budget_s` a way is spent.

    Everything runs on this thread; its processor time leaves out the waits for other programs.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    stop = time.perf_counter() + budget_s * len(ways)
    while time.perf_counter() < stop or len(times["ours"]) < 3:
        for name, way in ways.items():
            start = time.thread_time()
            way()  # also brings this way's data and code back into the caches
            calls = min(200, int(2e-3 / (time.thread_time() - start)))
            if calls > 0:  # slower ways than that are timed by the one call
                start = time.thread_time()
                for _ in range(calls):
                    way()
            times[name].append((time.thread_time() - start) / max(calls, 1))
    return {name: statistics.median(values) for name, values in times.items()}


def allocation_bars(count: Callable[[Way], int], device: str) -> dict[str, Bar]:
    """Allocations of one call at 10 and at 1000 steps."""
    data = [rollout(8, steps, device) for steps in (10, 1000)]
    few, many = (count(partial(fresh, x)) for x in data)
    given = max(count(in_place(x)) for x in data)
    print(f"\nAllocations per call: {few} at 10 steps, {many} at 1000 steps; {given} with out=")
    return {
        "allocations_added_by_990_steps": bar(many - few, 0, at_most=True),
        "allocations_with_out": bar(given, 0, at_most=True),
    }


def cpu_allocations(way: Way) -> int:
    way()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        way()
    events = profiler.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)


# CUDA


def on_cuda(budget_s: float) -> dict[str, Bar]:
    """Table of device and wall times; the bars against copy bandwidth and 10 us."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"kernels: {available_kernels(torch.device('cuda'), torch.float32)}")
    bytes_per_s = copy_bandwidth()
    print(f"copy bandwidth {bytes_per_s / 1e12:.2f} TB/s")
    print("\n| envs x steps | device us | fresh | call | loop over T | speed-up | of copy |")
    print("|---|---|---|---|---|---|---|")
    bars = {}
    for num_envs, num_steps in CUDA_SIZES:
        data = rollout(num_envs, num_steps, "cuda")
        check_on_cuda(data)
        # what fits the L2 cache is found there in practice too, and is too short for one event
        copies = 20 if data[0].nbytes < 4e6 else 1
        ours = in_place(data)
        device_s = device_seconds(ours, copies)
        rows_s = device_seconds(partial(fresh, data), copies)
        loop_s = device_seconds(in_place(data, "reference"), repeats=3)
        call_s = call_seconds(ours, budget_s / 10)
        share = bytes_needed(data) / device_s / bytes_per_s
        print(
            f"| {num_envs} x {num_steps} | {device_s * 1e6:.1f} | {rows_s * 1e6:.1f} | {call_s * 1e6:.1f} "
            f"| {loop_s * 1e6:.0f} | {loop_s / device_s:.0f}x | {share:.0%} |"
        )
        if (num_envs, num_steps) == (262144, 128):
            bars["copy_bandwidth_share_262144x128"] = bar(share, 0.8)
        if (num_envs, num_steps) == (128, 150):
            bars["device_us_128x150"] = bar(device_s * 1e6, 10.0, at_most=True)
        del data
    return bars | allocation_bars(cuda_allocations, "cuda")


def cuda_allocations(way: Way) -> int:
    way()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    way()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


def check_on_cuda(data: list[Tensor]) -> None:
    """Raise unless the GPU kernel agrees with the CPU kernel on the first 4096 envs in float64."""
    some = [x[:4096] for x in data]
    exact = [x.cpu().double() if x.is_floating_point() else x.cpu() for x in some]
    expected = fresh(exact)
    for way in (in_place(data), partial(fresh, data)):
        actual = tuple(x[:4096].cpu() for x in way())
        torch.testing.assert_close(actual, expected, check_dtype=False, rtol=1e-4, atol=1e-4)


def bytes_needed(data: list[Tensor]) -> int:
    """Bytes that must cross the memory bus: each tensor once, of bootstraps the sectors read.

    A GPU fetches sectors of 32 bytes, eight float32; those without a needed bootstrap stay.
    """
    rewards, _, terminated, truncated, _ = data
    needed = truncated.clone()
    needed[:, -1] = True
    needed &= ~terminated
    padded = torch.nn.functional.pad(needed.flatten(), (0, -needed.numel() % 8))
    sectors = int(padded.view(-1, 8).any(dim=1).sum())
    return rewards.numel() * (4 * 4 + 2) + 32 * sectors


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a plain copy of one GiB; the best of ten."""
    source = torch.ones(2**28, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(10):  # outside a graph, where a copy is not at its fastest
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.nbytes / min(times)


def device_seconds(way: Way, copies: int = 1, repeats: int = 30) -> float:
    """Median device time of a call, from replays of a CUDA graph that holds `copies` of it."""
    way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            way()
    flush = torch.empty(2**26, device="cuda")  # 256 MB, several times the L2 cache
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeats):
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / copies)
    return statistics.median(times)


def call_seconds(way: Way, budget_s: float) -> float:
    """Median wall time of a call and the wait for its result."""
    times = []
    stop = time.perf_counter() + budget_s
    while time.perf_counter() < stop or len(times) < 5:
        torch.cuda.synchronize()
        start = time.perf_counter()
        way()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
