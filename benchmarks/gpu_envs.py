"""Steps per second with environments that live on the GPU as tensors, learning included.

    python benchmarks/gpu_envs.py [--device cuda] [--num-envs 4096] [--rounds 20] [--rsl-rl]

The task needs memory and has masks: name the symbol of four steps ago, among the legal ones
(`symbol_game.py`). It is passed to `esper.PPO` as anybody's simulator is. Rows:

| row | what it is |
|---|---|
| one head | LSTM of 128, 1, 4 and 10 passes over 4,096 envs x 64 steps |
| dependent head | a second choice that is given the first one |
| two layers | as much recurrent work as the two networks of rsl_rl |
| loop | without the recurrent kernel: torch's operations, captured |
| eager | without CUDA graphs |
| few envs | 16 envs x 512 steps |
| many envs | 16,384 envs |

With `--rsl-rl`, rsl_rl plays the same game on the same machine, with its own recurrent policy: two
networks, each with an LSTM of 128, Gaussian actions, no masks.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from symbol_game import SymbolGame

import esper
from esper.leyline.factored_actions import Head
from esper.simic.agent.ppo import PPOConfig
from esper.simic.gym.ppo_model import GymConfig
from esper.tamiyo.policy import recurrence
from esper.tamiyo.policy.network import PolicyConfig

TWO_HEADS = (Head("action_0", 8), Head("action_1", 8, given=("action_0",)))


class Row(NamedTuple):
    """One line of the table."""

    name: str
    passes: int
    num_envs: int = 4096
    horizon: int = 64
    num_heads: int = 1
    lstm_layers: int = 1
    has_kernel: bool = True
    has_graphs: bool = True


def rows_of(num_envs: int) -> list[Row]:
    return [
        *(Row("one head", passes, num_envs) for passes in (1, 4, 10)),
        *(Row("dependent head", passes, num_envs, num_heads=2) for passes in (1, 10)),
        *(Row("two layers", passes, num_envs, lstm_layers=2) for passes in (1, 4, 10)),
        *(Row("loop", passes, num_envs, has_kernel=False) for passes in (1, 10)),
        Row("eager", 1, num_envs, has_graphs=False),
        Row("few envs", 4, num_envs=16, horizon=512),
        Row("many envs", 1, num_envs=4 * num_envs),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="rows, by name, comma-separated")
    parser.add_argument("--rsl-rl", action="store_true")
    parser.add_argument("--quick", action="store_true", help="on the CPU, within 40 seconds")
    arguments = parser.parse_args()
    if arguments.quick:
        parser.set_defaults(device="cpu", num_envs=64, rounds=2, only="one head")
        arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else []
    rates: dict[tuple[str, int], float] = {}
    for row in rows_of(arguments.num_envs):
        if not chosen or row.name in chosen:
            rates[row.name, row.passes] = measured(row, arguments.device, arguments.rounds)
    if arguments.rsl_rl:
        from rsl_rl_game import steps_per_second

        for passes in (1, 4, 10):
            rate = steps_per_second(arguments.num_envs, passes, arguments.rounds, arguments.device)
            rates["rsl_rl", passes] = rate
            print(f"rsl_rl, {passes:2} passes: {rate:12,.0f} steps/s", flush=True)
    bars = {
        f"{name.replace(' ', '_')}_{passes}": {"value": round(rate)}
        for (name, passes), rate in rates.items()
    }
    print(json.dumps({"benchmark": "gpu_envs", "device": arguments.device, "bars": bars}))


def measured(row: Row, device: str, rounds: int) -> float:
    """Steps per second over all rounds but the first three, which compile, capture and allocate."""
    torch.manual_seed(0)
    game = SymbolGame(row.num_envs, device, num_heads=row.num_heads)
    config = GymConfig(
        horizon=row.horizon,
        previous_reward=True,
        policy=PolicyConfig(lstm_layers=row.lstm_layers),
        ppo=PPOConfig(ppo_epochs=row.passes, gamma=0.9, gae_lambda=0.9, target_kl=None),
    )
    kernel = recurrence.fits_triton
    if not row.has_kernel:
        recurrence.fits_triton = lambda *_: False  # type: ignore[assignment]
    try:
        model = esper.PPO(game, TWO_HEADS if row.num_heads == 2 else None, config)
        if not row.has_graphs:
            model.agent.graphs = None
        rate, ready, phases = timed_rounds(model.trainer.run_round, rounds, device)
    finally:
        recurrence.fits_triton = kernel
    share = float(game.num_correct) / (row.num_envs * row.horizon)
    steps = rate * row.num_envs * row.horizon
    parts = ", ".join(f"{name} {1e3 * seconds / rounds:.1f}" for name, seconds in phases.items())
    print(
        f"{row.name}, {row.num_envs} envs x {row.horizon}, {row.passes:2} passes: {steps:12,.0f} "
        f"steps/s; ms a round: {parts}; first update after {ready:.1f} s; "
        f"{share / (rounds + 3):.2f} correct",
        flush=True,
    )
    return steps


def timed_rounds(
    run_round: Callable[[float], dict[str, float] | None], rounds: int, device: str
) -> tuple[float, float, dict[str, float]]:
    """Rounds per second, seconds until the first update was done, and the seconds of each phase."""
    phases: defaultdict[str, float] = defaultdict(float)
    begin = time.perf_counter()
    ready = 0.0
    for done in range(rounds + 3):
        if done == 3:
            synchronize(device)
            start = time.perf_counter()
            phases.clear()
        metrics = run_round(0.0)
        assert metrics is not None
        if done == 0:
            synchronize(device)
            ready = time.perf_counter() - begin
        for name, value in metrics.items():
            if name.startswith("time/") and name != "time/steps_per_second":
                phases[name.removeprefix("time/")] += value
    synchronize(device)
    return rounds / (time.perf_counter() - start), ready, dict(phases)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
