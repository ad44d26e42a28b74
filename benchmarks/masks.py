"""Time to build masks and features from reports, against building them env by env.

    python benchmarks/masks.py [--device cuda] [--quick]

The rival converts the same reports to Python numbers, one list per field. It loops over envs, slots
and choices, makes a small tensor for each env, and stacks them. Both are first checked for equal
results. Figures are medians of interleaved measurements in one process.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline.factored_actions import tamiyo_action_space
from esper.leyline.reports import Reports
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import FeatureLayout

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.per_env import looped_features, looped_masks, unpack
from support.random_reports import random_reports

NUM_BLUEPRINTS = 8
MASKS_BAR, FEATURES_BAR = 100.0, 50.0
CALLS = 20  # of the batched way, per measurement: one call alone is near the clock's grain


def per_env_masks(reports: Reports) -> dict[str, Tensor]:
    masks = [looped_masks(row) for row in unpack(reports)]
    device = reports.device
    return {name: torch.stack([m[name] for m in masks]).to(device) for name in masks[0]}


def per_env_features(reports: Reports) -> Tensor:
    return torch.stack([looped_features(row) for row in unpack(reports)]).to(reports.device)


def seconds(work: Callable[[], object], device: str, calls: int = 1) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def measure(num_envs: int, num_slots: int, device: str, repeats: int) -> dict[str, float]:
    """Median milliseconds for all envs."""
    reports = random_reports(num_envs, num_slots, NUM_BLUEPRINTS).to(device)
    space = tamiyo_action_space(num_slots, NUM_BLUEPRINTS)
    layout = FeatureLayout(num_slots, NUM_BLUEPRINTS)

    masks, looped = compute_batch_masks(reports, space), per_env_masks(reports)
    assert all(torch.equal(masks[name], looped[name]) for name in space.names)
    torch.testing.assert_close(
        layout.features(reports), per_env_features(reports), atol=2e-5, rtol=1e-4
    )
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "masks": (lambda: compute_batch_masks(reports, space), CALLS),
        "masks per env": (lambda: per_env_masks(reports), 1),
        "features": (lambda: layout.features(reports), CALLS),
        "features per env": (lambda: per_env_features(reports), 1),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (work, calls) in ways.items():
            times[name].append(seconds(work, device, calls))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    args = parser.parse_args()
    torch.set_num_threads(1)

    sizes = [(1, 3), (128, 3), (128, 10)] if args.quick else [
        (1, 3), (16, 3), (128, 3), (1024, 3), (4096, 3), (128, 10), (1024, 10),
    ]  # fmt: skip
    speedups: dict[tuple[str, int, int], float] = {}
    print("envs  slots |  masks ms  per env ms  ratio |  features ms  per env ms  ratio")
    for num_envs, num_slots in sizes:
        repeats = 9 if args.quick else max(3, min(31, 4096 // num_envs))
        ms = measure(num_envs, num_slots, args.device, repeats)
        for kind in ("masks", "features"):
            speedups[kind, num_envs, num_slots] = ms[f"{kind} per env"] / ms[kind]
        print(
            f"{num_envs:4}  {num_slots:5} | {ms['masks']:9.3f} {ms['masks per env']:11.2f} "
            f"{speedups['masks', num_envs, num_slots]:6.0f} | {ms['features']:12.3f} "
            f"{ms['features per env']:11.2f} {speedups['features', num_envs, num_slots]:6.0f}"
        )
    bars = {
        "masks_vs_per_env_128": (speedups["masks", 128, 3], MASKS_BAR),
        "features_vs_per_env_128x3": (speedups["features", 128, 3], FEATURES_BAR),
        "features_vs_per_env_128x10": (speedups["features", 128, 10], FEATURES_BAR),
    }
    figures = {
        name: {"value": round(value, 1), "bar": bar, "met": value >= bar}
        for name, (value, bar) in bars.items()
    }
    print(json.dumps({"benchmark": "masks", "device": args.device, "bars": figures}))


if __name__ == "__main__":
    main()
