"""Time to store a step in the rollout buffer, against the usual way and a bare copy.

    python benchmarks/rollout_buffer.py [--device cuda] [--quick]

The usual way writes every field of every env by itself. Figures are medians of interleaved runs
in one process; the correctness gate compares what the two ways stored.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from esper.leyline.constants import DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.factored_actions import FactoredActionSpace, tamiyo_action_space
from esper.leyline.sequences import SequenceLayout
from esper.simic.agent.gae import compute_gae
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, TamiyoRolloutStep

NUM_STEPS = 25
STATE_DIM = 128
SPEEDUP_BAR = 50.0


class PerFieldBuffer:
    """The rival: one tensor per field, written env by env, head by head."""

    def __init__(self, num_envs: int, space: FactoredActionSpace, device: str):
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(num_envs, NUM_STEPS, *shape, dtype=dtype, device=device)

        self.step_counts = [0] * num_envs
        self.states = zeros(STATE_DIM)
        self.actions = {h.name: zeros(dtype=torch.long) for h in space}
        self.log_probs = {h.name: zeros() for h in space}
        self.masks = {h.name: zeros(h.size, dtype=torch.bool) for h in space}
        self.values, self.rewards, self.bootstrap_values = zeros(), zeros(), zeros()
        self.terminated, self.truncated = zeros(dtype=torch.bool), zeros(dtype=torch.bool)
        self.hidden_h = zeros(1, DEFAULT_LSTM_HIDDEN_DIM)
        self.hidden_c = zeros(1, DEFAULT_LSTM_HIDDEN_DIM)
        self.space = space

    def add(self, env: int, step: TamiyoRolloutStep) -> None:
        t = self.step_counts[env]
        self.states[env, t] = step.state.detach()
        for i, (name, part) in enumerate(zip(self.space.names, self.space.slices, strict=True)):
            self.actions[name][env, t] = step.actions[i]
            self.log_probs[name][env, t] = step.log_probs[i]
            self.masks[name][env, t] = step.masks[part].detach().bool()
        self.values[env, t] = step.value
        self.rewards[env, t] = step.reward
        self.terminated[env, t] = step.terminated
        self.truncated[env, t] = step.truncated
        self.bootstrap_values[env, t] = step.bootstrap_value
        self.hidden_h[env, t] = step.hidden_h.detach()
        self.hidden_c[env, t] = step.hidden_c.detach()
        self.step_counts[env] += 1


def random_step(num_envs: int, space: FactoredActionSpace, device: str) -> TamiyoRolloutStep:
    hidden = (num_envs, 1, DEFAULT_LSTM_HIDDEN_DIM)
    masks = torch.rand(num_envs, space.num_choices) < 0.6
    masks[:, space.slices[0].start] = True
    step = TamiyoRolloutStep(
        state=torch.randn(num_envs, STATE_DIM),
        actions=torch.stack([torch.randint(size, (num_envs,)) for size in space.sizes], dim=1),
        log_probs=-torch.rand(num_envs, space.num_heads),
        masks=masks,
        value=torch.randn(num_envs),
        reward=torch.randn(num_envs),
        terminated=torch.rand(num_envs) < 0.05,
        truncated=torch.rand(num_envs) < 0.05,
        bootstrap_value=torch.randn(num_envs),
        hidden_h=torch.randn(hidden),
        hidden_c=torch.randn(hidden),
    )
    return TamiyoRolloutStep(*(x.to(device) for x in step if x is not None))


def rows_of(step: TamiyoRolloutStep, num_envs: int) -> list[TamiyoRolloutStep]:
    return [TamiyoRolloutStep(*(x[i] for x in step if x is not None)) for i in range(num_envs)]


def check_same(buffer: TamiyoRolloutBuffer, rival: PerFieldBuffer) -> None:
    """Both ways stored the same rollout."""
    buffer.compute_advantages_and_returns()
    batch = buffer.get_batched_sequences()
    space = rival.space
    for name in ("states", "values", "rewards", "terminated", "truncated", "bootstrap_values",
                 "hidden_h", "hidden_c"):  # fmt: skip
        assert torch.equal(getattr(buffer, name), getattr(rival, name)), name
    for i, name in enumerate(space.names):
        assert torch.equal(batch.actions[..., i], rival.actions[name])
        assert torch.equal(batch.log_probs[..., i], rival.log_probs[name])
        assert torch.equal(space.view(batch.masks, name), rival.masks[name])


def seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(num_envs: int, device: str, repeats: int) -> dict[str, float]:
    """Median microseconds per transition, a rollout of 25 steps at a time."""
    space = tamiyo_action_space(num_slots=3, num_blueprints=8)
    buffer = TamiyoRolloutBuffer(num_envs, NUM_STEPS, STATE_DIM, space, device=device)
    rival = PerFieldBuffer(num_envs, space, device)
    steps = [random_step(num_envs, space, device) for _ in range(NUM_STEPS)]
    for before, step in pairwise(steps):  # an episode starts from a zero state
        for hidden in (step.hidden_h, step.hidden_c):
            hidden[before.terminated | before.truncated] = 0.0
    rows = [rows_of(step, num_envs) for step in steps]
    num_bytes = sum(x.numel() * x.element_size() for x in steps[0] if x is not None)
    source, target = torch.ones(2, num_bytes, dtype=torch.uint8, device=device)

    def batched() -> None:
        buffer.reset()
        for step in steps:
            buffer.add_batch(step)

    def per_field() -> None:
        rival.step_counts = [0] * num_envs
        for t in range(NUM_STEPS):
            for env in range(num_envs):
                rival.add(env, rows[t][env])

    def bare_copy() -> None:
        for _ in range(NUM_STEPS):
            target.copy_(source)

    batched()
    per_field()
    check_same(buffer, rival)
    times: dict[str, list[float]] = {"add_batch": [], "per_field": [], "bare_copy": []}
    for _ in range(repeats):
        for name, work in (
            ("add_batch", batched),
            ("per_field", per_field),
            ("bare_copy", bare_copy),
        ):
            times[name].append(seconds(work, device))
    per_transition = 1e6 / (num_envs * NUM_STEPS)
    return {name: statistics.median(t) * per_transition for name, t in times.items()}


def measure_layouts(num_envs: int, device: str, repeats: int) -> dict[str, tuple[float, float]]:
    """Median microseconds with a row per env `[N, T]` and with a row per step `[T, N]`."""
    row_per_env = torch.randn(num_envs, NUM_STEPS, STATE_DIM, device=device)
    row_per_step = row_per_env.transpose(0, 1).contiguous()
    step = torch.randn(num_envs, STATE_DIM, device=device)
    envs = torch.arange(num_envs, device=device)
    at = NUM_STEPS // 2
    ended = torch.rand(num_envs, NUM_STEPS) < 0.05
    layout = SequenceLayout.from_flags(ended, torch.full((num_envs,), NUM_STEPS))
    rows = layout.rows.to(device)
    rows_by_step = rows % NUM_STEPS * num_envs + rows // NUM_STEPS
    rewards, values, bootstraps = torch.randn(3, num_envs, NUM_STEPS, device=device)
    flags = ended.to(device), torch.zeros_like(ended, device=device)
    by_env = (rewards, values, *flags, bootstraps)
    by_step = tuple(x.t().contiguous().t() for x in by_env)  # [N, T] views of [T, N] storage
    work: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "write one step": (
            lambda: row_per_env.flatten(0, 1).index_put_((envs * NUM_STEPS + at,), step),
            lambda: row_per_step.flatten(0, 1).index_put_((envs + at * num_envs,), step),
        ),
        "gather episodes": (
            lambda: row_per_env.flatten(0, 1)[rows],
            lambda: row_per_step.flatten(0, 1)[rows_by_step],
        ),
        "advantages": (lambda: compute_gae(*by_env), lambda: compute_gae(*by_step)),
    }
    medians = {}
    for name, rivals in work.items():
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range(repeats * 20 + 5):
            for rival, kept in zip(rivals, times, strict=True):
                taken = seconds(rival, device)
                if repeat >= 5:
                    kept.append(taken)
        medians[name] = (statistics.median(times[0]) * 1e6, statistics.median(times[1]) * 1e6)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("microseconds per transition (8 heads, state 128, LSTM 128)")
    print(f"{'envs':>6} {'add_batch':>10} {'per field':>10} {'bare copy':>10} {'speed-up':>9}")
    bars = {}
    for num_envs in (4, 16, 128, 1024)[: 3 if args.quick else 4]:
        repeats = 3 if args.quick else 9
        row = measure(num_envs, args.device, repeats)
        speedup = row["per_field"] / row["add_batch"]
        print(
            f"{num_envs:>6} {row['add_batch']:>10.2f} {row['per_field']:>10.1f} "
            f"{row['bare_copy']:>10.3f} {speedup:>8.0f}x"
        )
        if num_envs == 128:
            met = speedup >= SPEEDUP_BAR
            bars["add_batch_vs_per_field_128"] = {
                "value": round(speedup, 1),
                "bar": SPEEDUP_BAR,
                "met": met,
            }
    print("\nmicroseconds at 128 envs x 25 steps, by memory layout")
    print(f"{'':>16} {'[N, T]':>9} {'[T, N]':>9}")
    for name, (by_env, by_step) in measure_layouts(
        128, args.device, 3 if args.quick else 9
    ).items():
        print(f"{name:>16} {by_env:>9.1f} {by_step:>9.1f}")
    print(json.dumps({"benchmark": "rollout_buffer", "device": args.device, "bars": bars}))


if __name__ == "__main__":
    main()
