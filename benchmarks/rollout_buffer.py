"""Time to store a step in the rollout buffer, and what the layout of its memory costs or saves.

    python benchmarks/rollout_buffer.py [--device cuda] [--quick]

The usual way writes every field of every env by itself. Figures are medians of interleaved runs
in one process; what the ways stored, or read, is compared first.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from esper.leyline.constants import DEFAULT_LSTM_HIDDEN_DIM
from esper.leyline.factored_actions import FactoredActionSpace, tamiyo_action_space
from esper.simic.agent.gae import compute_gae
from esper.simic.agent.rollout_buffer import RolloutRow, TamiyoRolloutBuffer, TamiyoRolloutStep

NUM_STEPS = 25
STATE_DIM = 128
SPEEDUP_BAR = 50.0
LAYOUT_SIZES = [(8, 128), (128, 25), (512, 128)]

Work = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 40 seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bars = compare_writes(args.device, args.quick)
    compare_layouts(args.device, args.quick)
    print(json.dumps({"benchmark": "rollout_buffer", "device": args.device, "bars": bars}))


# Writing


def compare_writes(device: str, quick: bool) -> dict[str, dict[str, float | bool]]:
    """Table of microseconds per transition; the bar against the usual way."""
    print("microseconds per transition (8 heads, 128 features, LSTM 128)\n")
    print(
        "| envs | row, commit | add_batch | per field and env | bare copy | add_batch: speed-up |"
    )
    print("|---|---|---|---|---|---|")
    bars = {}
    for num_envs in (4, 16, 128) if quick else (4, 16, 128, 1024):
        times = measure_writes(num_envs, device, repeats=3 if quick else 9)
        per_transition = 1e6 / (num_envs * NUM_STEPS)
        cells = [f"{times[way] * per_transition:.3g}" for way in WAYS]
        speedup = times["per_field"] / times["add_batch"]
        print(f"| {num_envs} | {' | '.join(cells)} | {speedup:.0f}x |")
        if num_envs == 128:
            bars["add_batch_vs_per_field_128"] = {
                "value": round(speedup, 1),
                "bar": SPEEDUP_BAR,
                "met": speedup >= SPEEDUP_BAR,
            }
    return bars


WAYS = ("row", "add_batch", "per_field", "bare_copy")
ROW = RolloutRow._fields[:-1]  # without pictures
FIELDS = dict(zip(ROW, TamiyoRolloutStep._fields, strict=False))


def measure_writes(num_envs: int, device: str, repeats: int) -> dict[str, float]:
    """Median seconds to store a rollout of 25 steps."""
    space = tamiyo_action_space(num_slots=3, num_blueprints=8)
    by_row = TamiyoRolloutBuffer(num_envs, NUM_STEPS, STATE_DIM, space, device=device)
    by_batch = TamiyoRolloutBuffer(num_envs, NUM_STEPS, STATE_DIM, space, device=device)
    rival = PerFieldBuffer(num_envs, space, device)
    steps = [random_step(num_envs, space, device) for _ in range(NUM_STEPS)]
    for before, step in pairwise(steps):  # an episode starts from a zero state
        for hidden in (step.hidden_h, step.hidden_c):
            hidden[before.terminated | before.truncated] = 0.0
    of_envs = [steps_of_envs(step, num_envs) for step in steps]
    of_rows = [[getattr(step, argument) for argument in FIELDS.values()] for step in steps]
    num_bytes = sum(value.nbytes for value in of_rows[0])
    source, target = torch.ones(2, num_bytes, dtype=torch.uint8, device=device)

    def write_rows() -> None:
        by_row.reset()
        by_row.set_initial_state(steps[0].hidden_h, steps[0].hidden_c)
        for values in of_rows:
            row = by_row.row()
            for name, value in zip(ROW, values, strict=True):
                getattr(row, name).copy_(value)
            by_row.commit(row)

    def write_batches() -> None:
        by_batch.reset()
        for step in steps:
            by_batch.add_batch(step)

    def write_fields() -> None:
        rival.step_counts = [0] * num_envs
        for of_env in of_envs:
            for env in range(num_envs):
                rival.add(env, of_env[env])

    def copy_bytes() -> None:
        for _ in range(NUM_STEPS):
            target.copy_(source)

    ways = dict(zip(WAYS, (write_rows, write_batches, write_fields, copy_bytes), strict=True))
    for way in ways.values():
        way()
    for buffer in (by_row, by_batch):
        check_same(buffer, rival)
    return interleaved_medians(ways, device, repeats)


class PerFieldBuffer:
    """The rival: one tensor per field, written env by env, head by head."""

    def __init__(self, num_envs: int, space: FactoredActionSpace, device: str):
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
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


def steps_of_envs(step: TamiyoRolloutStep, num_envs: int) -> list[TamiyoRolloutStep]:
    return [TamiyoRolloutStep(*(x[i] for x in step if x is not None)) for i in range(num_envs)]


def check_same(buffer: TamiyoRolloutBuffer, rival: PerFieldBuffer) -> None:
    """Both ways stored the same rollout."""
    buffer.compute_advantages_and_returns()
    batch = buffer.get_batched_sequences()
    for name in ("states", "values", "rewards", "terminated", "truncated", "bootstrap_values"):
        assert torch.equal(batch[name], getattr(rival, name)), name
    for i, name in enumerate(rival.space.names):
        assert torch.equal(batch["actions"][..., i], rival.actions[name])
        assert torch.equal(batch["log_probs"][..., i], rival.log_probs[name])
        assert torch.equal(rival.space.view(batch["masks"], name), rival.masks[name])
    assert torch.equal(batch["initial_hidden_h"], rival.hidden_h[:, 0])
    assert torch.equal(batch["initial_hidden_c"], rival.hidden_c[:, 0])


# Layouts


def compare_layouts(device: str, quick: bool) -> None:
    """Table of microseconds by layout: a row per env, a row per step, and packed episodes."""
    print("\nmicroseconds by layout of the same rollout, 128 features, an end every 20 steps\n")
    print("| envs x steps | | row per env `[N, T]` | row per step `[T, N]` | packed episodes |")
    print("|---|---|---|---|---|")
    for num_envs, num_steps in LAYOUT_SIZES:
        work = layout_work(num_envs, num_steps, device)
        for name, ways in work.items():
            times = interleaved_medians(ways, device, repeats=15 if quick else 60)
            cells = [f"{times[way] * 1e6:.1f}" if way in times else "-" for way in LAYOUTS]
            print(f"| {num_envs} x {num_steps} | {name} | {' | '.join(cells)} |")


LAYOUTS = ("by_env", "by_step", "packed")


def layout_work(num_envs: int, num_steps: int, device: str) -> dict[str, dict[str, Work]]:
    """What collecting and learning do with a rollout, on each layout, after a check that they agree.

    A minibatch is a quarter of the envs, in the order in which an LSTM reads its rows: step by step,
    or, packed, in the order of a `PackedSequence`.
    """
    by_env = torch.randn(num_envs, num_steps, STATE_DIM, device=device)
    by_step = by_env.transpose(0, 1).contiguous()
    step = torch.randn(num_envs, STATE_DIM, device=device)
    at = num_steps // 2
    envs = torch.randperm(num_envs)[: max(1, num_envs // 4)]
    ended = torch.rand(num_envs, num_steps) < 0.05
    rows = packed_rows(ended, envs).to(device)
    envs = envs.to(device)
    rewards, values, bootstraps = torch.randn(3, num_envs, num_steps, device=device)
    data = (rewards, values, ended.to(device), torch.zeros_like(ended, device=device), bootstraps)
    of_envs = tuple(x.clone() for x in data)
    of_steps = tuple(x.t().contiguous().t() for x in data)  # [N, T] views, as of a buffer
    out_of_envs = (torch.empty_like(of_envs[0]), torch.empty_like(of_envs[0]))
    out_of_steps = (torch.empty_like(of_steps[0]), torch.empty_like(of_steps[0]))
    work: dict[str, dict[str, Work]] = {
        "write a step of all envs": {
            "by_env": lambda: by_env[:, at].copy_(step),
            "by_step": lambda: by_step[at].copy_(step),
        },
        "gather a minibatch": {
            "by_env": lambda: by_env[envs].transpose(0, 1).contiguous(),
            "by_step": lambda: by_step.index_select(1, envs),
            "packed": lambda: by_env.flatten(0, 1)[rows],
        },
        "advantages": {
            "by_env": lambda: compute_gae(*of_envs, out=out_of_envs),
            "by_step": lambda: compute_gae(*of_steps, out=out_of_steps),
        },
    }
    for ways in work.values():
        results = {layout: way() for layout, way in ways.items()}
        if "packed" in results:  # in another order: the same rows
            packed = results.pop("packed")
            torch.testing.assert_close(packed.sum(), results["by_step"].sum(), rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(results["by_env"], results["by_step"])
    return work


def packed_rows(ended: Tensor, envs: Tensor) -> Tensor:
    """The rows `env * T + step` of the episodes of some envs, in the order of a `PackedSequence`."""
    num_steps = ended.shape[1]
    episodes = []
    for env in envs.tolist():
        ends = [0, *(ended[env, :-1].nonzero()[:, 0] + 1).tolist(), num_steps]
        episodes += [range(env * num_steps + a, env * num_steps + b) for a, b in pairwise(ends)]
    episodes.sort(key=len, reverse=True)
    longest = len(episodes[0])
    in_order = [e[t] for t in range(longest) for e in episodes if t < len(e)]
    return torch.tensor(in_order)


# Time


def interleaved_medians(ways: dict[str, Work], device: str, repeats: int) -> dict[str, float]:
    """Median seconds of each way, in turns; a way of microseconds is called many times a turn."""
    calls = {name: max(1, int(1e-3 / seconds(way, device))) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            way()  # brings its data and code back into the caches
            times[name].append(seconds(way, device, calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def seconds(work: Work, device: str, calls: int = 1) -> float:
    """Seconds of a call; on a CPU, processor time of this thread: other programs do not count."""
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device == "cuda" else time.thread_time
    start = clock()
    for _ in range(calls):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / calls


if __name__ == "__main__":
    main()
