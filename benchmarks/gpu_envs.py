"""Steps per second with environments that live on the GPU as tensors, learning included.

    python benchmarks/gpu_envs.py [--device cuda] [--num-envs 4096] [--rounds 20]

The task needs memory and has masks: name the symbol of four steps ago, among the legal ones. The
same trainer runs it as any other environments: `SymbolEnvs` follows the `Environments` protocol.
"""

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout import RolloutRow
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.trainer import EnvSpec, Observed, Stepped, Trainer
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.policy.plain_heads import flat_policy

NUM_SYMBOLS, LAG, EPISODE_STEPS = 8, 4, 52


class SymbolEnvs:
    """N games in tensors; all results stay on the device."""

    action_space = FactoredActionSpace((Head("symbol", NUM_SYMBOLS),))

    def __init__(self, num_envs: int, device: str, rng_seed: int = 0):
        self.spec = EnvSpec(num_envs, NUM_SYMBOLS, self.action_space)
        self.device = device
        self._rng = torch.Generator(device).manual_seed(rng_seed)
        self._age = torch.randint(EPISODE_STEPS, (num_envs,), device=device, generator=self._rng)
        self._past = self._symbols((num_envs, LAG + 1))  # the newest last
        self._starts = torch.ones(num_envs, dtype=torch.bool, device=device)
        self._correct = torch.zeros((), device=device)
        self._answers = 0

    def begin_round(self) -> None: ...

    def observe(self, row: RolloutRow) -> Observed:
        row.states.copy_(torch.nn.functional.one_hot(self._past[:, -1], NUM_SYMBOLS))
        legal = torch.rand(row.masks.shape, device=self.device, generator=self._rng) < 0.5
        legal.scatter_(1, self._past[:, :1], True)
        return Observed(ActionMasks(self.action_space, {"symbol": legal}), self._starts)

    def step(self, row: RolloutRow) -> Stepped:
        is_correct = row.actions[:, 0] == self._past[:, 0]
        row.rewards.copy_(torch.where(is_correct, 1.0, -1.0) * (self._age >= LAG))
        self._correct += is_correct.sum()
        self._answers += len(is_correct)
        self._age += 1
        self._starts = self._age == EPISODE_STEPS
        self._age.masked_fill_(self._starts, 0)
        row.terminated.copy_(self._starts)
        row.truncated.fill_(False)
        self._past = torch.cat([self._past[:, 1:], self._symbols((len(is_correct), 1))], dim=1)
        return Stepped(None, None)

    def end_round(self, buffer: TamiyoRolloutBuffer) -> dict[str, float]:
        share = float(self._correct) / self._answers
        self._correct.zero_()
        self._answers = 0
        return {"episode/correct": share}

    def _symbols(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(NUM_SYMBOLS, shape, device=self.device, generator=self._rng)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], generator: torch.Generator) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--horizon", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--passes", type=int, nargs="*", default=[1, 4, 10])
    parser.add_argument("--quick", action="store_true", help="on the CPU, within 40 seconds")
    arguments = parser.parse_args()
    if arguments.quick:
        parser.set_defaults(device="cpu", num_envs=64, rounds=3, passes=[1])
        arguments = parser.parse_args()
    rates = {}
    for passes in arguments.passes:
        rates[passes] = measured(arguments, passes)
    bars = {f"steps_per_second_{n}_passes": {"value": round(r)} for n, r in rates.items()}
    print(json.dumps({"benchmark": "gpu_envs", "device": arguments.device, "bars": bars}))


def measured(arguments: argparse.Namespace, passes: int) -> float:
    """Steps per second over all rounds but the first two, which compile and allocate."""
    torch.manual_seed(0)
    envs = SymbolEnvs(arguments.num_envs, arguments.device)
    policy = flat_policy(envs.action_space, NUM_SYMBOLS, PolicyConfig())
    config = PPOConfig(ppo_epochs=passes, gae_lambda=0.9, target_kl=None)
    agent = PPOAgent(policy.to(arguments.device), config)
    trainer = Trainer(envs, agent, horizon=arguments.horizon)
    phases: dict[str, float] = {}
    for done in range(arguments.rounds + 2):
        if done == 2:
            start, before, phases = time.perf_counter(), trainer.progress.steps, {}
        metrics = trainer.run_round(done / (arguments.rounds + 2))
        assert metrics is not None
        for name, value in metrics.items():
            if name.startswith("time/") and name != "time/steps_per_second":
                phases[name] = phases.get(name, 0.0) + value
    rate = (trainer.progress.steps - before) / (time.perf_counter() - start)
    shares = {name.removeprefix("time/"): f"{s:.2f} s" for name, s in phases.items()}
    print(
        f"{arguments.num_envs} envs x {arguments.horizon} steps, {passes:2} passes: {rate:12,.0f} "
        f"steps/s, {metrics['episode/correct']:.2f} correct; {shares}",
        flush=True,
    )
    return rate


if __name__ == "__main__":
    main()
