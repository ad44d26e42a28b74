"""Train a controller of adaptations: practise on many scenarios, then learn by PPO.

    controller = train_controller(PRESETS["quick"])

Practice tries every plan of the menu once in every scenario. Episodes then replay what was found,
so PPO needs no further training of networks.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from adapt_practice.outcomes import Outcomes, choose_rates, outcomes_of, picked
from adapt_practice.scenarios import (
    ARCHITECTURES,
    HELD_OUT_KINDS,
    IMAGE_KINDS,
    INPUT_KINDS,
    OUTPUT_KINDS,
    draw_scenarios,
)
from adapt_practice.shifts import Shift
from adapt_practice.trials import Scenario, TrialSettings, TrialTable, train_models, try_plans
from esper.adapting.controller import (
    ACTION_SPACE,
    MAX_TRIES,
    AdaptationController,
    Tries,
    choices_of,
    new_policy,
)
from esper.adapting.plans import KNOWN_RULES, MENU
from esper.adapting.signals import SIGNALS
from esper.runtime.checks import require_at_least
from esper.runtime.devices import usable_device
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout import RolloutRow
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.trainer import EnvSpec, Observed, Stepped, Trainer
from esper.tamiyo.policy.network import PolicyConfig

BUDGETS = (torch.inf, torch.inf, 0.25, 0.1)  # parameters added, relative to the model
REWARD_SCALE = 10.0
RENT = 0.01  # accuracy that a change of the model's own size must bring
_SOURCE = torch.tensor(
    [name == "has_source" or name.endswith(("mean_shift", "spread_shift")) for name in SIGNALS]
)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """How much a controller practises, and how it learns."""

    rng_seed: int = 0
    device: str = "auto"
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)  # names in `scenarios.ARCHITECTURES`
    scenarios: int = 60  # of each architecture
    held_out_scenarios: int = 48  # to compare with fixed rules after training
    models: int = 24  # trained, of each architecture
    model_steps: int = 1000
    steps: int = 300  # of an adaptation
    num_envs: int = 2048
    rounds: int = 100
    hidden: int = 64

    def __post_init__(self) -> None:
        sizes = ("scenarios", "held_out_scenarios", "model_steps", "steps", "num_envs", "rounds")
        require_at_least(self, 1, *sizes, "hidden")
        require_at_least(self, 3, "models")
        unknown = [name for name in self.architectures if name not in ARCHITECTURES]
        if unknown or not self.architectures:
            raise ValueError(f"no architectures {unknown}; use some of {list(ARCHITECTURES)}")


PRESETS = {
    "full": AdaptConfig(),
    "quick": AdaptConfig(
        architectures=("mlp 64",),
        scenarios=20,
        held_out_scenarios=12,
        models=6,
        model_steps=400,
        steps=80,
        num_envs=512,
        rounds=60,
    ),
}


def train_controller(config: AdaptConfig, say: Say = lambda line: None) -> AdaptationController:
    """Practise on all architectures, then learn; the controller's `facts` hold the settings."""
    tables = []
    for number, name in enumerate(config.architectures):
        began = time.perf_counter()
        rng_seed = config.rng_seed + 10 + number
        scenarios = draw_scenarios(config.scenarios, rng_seed, ARCHITECTURES[name].input_kinds)
        table = _practise(name, scenarios, config, rng_seed)
        tables.append(table)
        say(
            f"practised on {name}: {config.scenarios} scenarios, mean accuracy "
            f"{100 * float(table.test_accuracy.nanmean()):.1f}, "
            f"{time.perf_counter() - began:.0f} s"
        )
    return learn(outcomes_of(tables), config, say)


def _practise(
    name: str, scenarios: list[Scenario], config: AdaptConfig, rng_seed: int
) -> TrialTable:
    """Train models of one architecture and try the menu's plans in every scenario."""
    architecture, num_classes = ARCHITECTURES[name], ARCHITECTURES[name].num_classes
    source, target = (
        (x, y % num_classes) for x, y in architecture.rows(usable_device(config.device))
    )
    pool = train_models(
        lambda: architecture.build(num_classes),
        source,
        num_models=config.models,
        num_classes=num_classes,
        missing_classes=max(1, round(0.3 * num_classes)),
        steps=config.model_steps,
        rng_seed=rng_seed,
    )
    settings = TrialSettings(steps=config.steps, replicas=8192)
    return try_plans(
        pool, target, scenarios, settings, plans=MENU, rng_seed=rng_seed, fit_rng_seed=rng_seed
    )


def compare_on_held_out(controller: AdaptationController, config: AdaptConfig) -> dict[str, float]:
    """Mean accuracy of fixed rules, and of two tries, on kinds of shift never seen before."""
    rng = random.Random(config.rng_seed)
    name = config.architectures[-1]
    scenarios = [
        Scenario(
            Shift(HELD_OUT_KINDS[i % len(HELD_OUT_KINDS)], rng.random(), 900_000 + i),
            (100, 300)[i // len(HELD_OUT_KINDS) % 2],
        )
        for i in range(config.held_out_scenarios)
    ]
    table = _practise(name, scenarios, config, config.rng_seed + 5000)
    _, rules = choose_rates(table)
    shown = ("nothing", "head only", "full fine-tuning", "LP-FT", "LoRA everywhere")
    found = {rule: float(rules[:, MENU.index(KNOWN_RULES[rule])].mean()) for rule in shown}
    outcomes = outcomes_of([table])
    kept = outcomes.kept(controller, budget=torch.inf, tries=2)
    found["controller"] = float(picked(outcomes.test, kept).mean())
    return found


def learn(outcomes: Outcomes, config: AdaptConfig, say: Say) -> AdaptationController:
    """PPO on recorded outcomes, on the CPU: a decision costs less than a transfer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.rng_seed)
        policy = new_policy(PolicyConfig(lstm_hidden_dim=config.hidden))
    ppo = PPOConfig(
        entropy_coefficient=0.05, entropy_schedule="linear", ppo_epochs=6, gamma=1.0, gae_lambda=1.0
    )
    envs = TrialEnvs(outcomes, config.num_envs, config.rng_seed)
    trainer = Trainer(envs, PPOAgent(policy, ppo), horizon=MAX_TRIES + 1, rng_seed=config.rng_seed)
    for number in range(config.rounds):
        metrics = trainer.run_round(number / config.rounds)
        assert metrics is not None
        if (number + 1) % max(1, config.rounds // 5) == 0:
            lead = 100 * metrics["adapt/lead"]
            say(f"round {number + 1}/{config.rounds}: {lead:+.1f} points over the mean plan")
    facts = {
        "config": asdict(config),
        "trained on": ", ".join(config.architectures),
        "shifts": [*INPUT_KINDS, *IMAGE_KINDS, *OUTPUT_KINDS],
        "held out": list(HELD_OUT_KINDS),
    }
    signals = outcomes.signals
    # signals of source data were hidden in half of the episodes: 0 is in their range
    low, high = signals.amin(0).clamp(max=0.0), signals.amax(0).clamp(min=0.0)
    return AdaptationController(policy, low, high, facts)


class TrialEnvs:
    """N episodes at a time over recorded outcomes; a round is one episode in every env.

    An episode is one scenario. A reward is the change in test accuracy of the leader, which is what
    validates best until the policy decides; the first is relative to the mean of all legal plans.
    The number of tries and the limit on parameters vary by episode, so one policy serves all
    budgets.
    """

    def __init__(self, outcomes: Outcomes, num_envs: int, rng_seed: int = 0):
        self.outcomes = outcomes
        self.spec = EnvSpec(num_envs, Tries.num_features, ACTION_SPACE)
        self.rng = torch.Generator().manual_seed(rng_seed)

    def begin_round(self) -> None:
        num, rng = self.spec.num_envs, self.rng
        self._scenarios = torch.randint(len(self.outcomes.signals), (num,), generator=rng)
        budgets = torch.tensor(BUDGETS)[torch.randint(len(BUDGETS), (num,), generator=rng)]
        tries = torch.randint(1, MAX_TRIES + 1, (num,), generator=rng)
        drawn = Outcomes(*(part[self._scenarios] for part in self.outcomes))
        hidden = torch.rand(num, generator=rng) < 0.5  # models rarely come with source rows
        signals = drawn.signals.masked_fill(hidden[:, None] & _SOURCE, 0.0)
        self._validation = drawn.validation
        self._tries = Tries(drawn.known._replace(signals=signals), budgets, tries)
        worth = drawn.test - RENT * drawn.added
        worth = worth.masked_fill(~self._tries.legal, torch.nan)
        self._worth = REWARD_SCALE * (worth - worth.nanmean(1, keepdim=True))
        self._worth_of_leader = torch.zeros(num)  # before the first step: the mean of all legal
        self._starts = torch.ones(num, dtype=torch.bool)

    def observe(self, row: RolloutRow) -> Observed:
        row.states.copy_(self._tries.features())
        return Observed(self._tries.masks(), self._starts)

    def step(self, row: RolloutRow) -> Stepped:
        choices, tries = choices_of(row.actions), self._tries
        is_running, is_last = tries.left >= 0, tries.left == 0
        # where the episode is over, a choice that was tried is noted again
        tries.record(choices, picked(self._validation, choices))
        before = self._worth_of_leader
        worth = picked(self._worth, torch.where(is_last, choices, tries.leader()[1]))
        self._worth_of_leader = torch.where(is_running, worth, before)
        self._starts = torch.zeros_like(is_running)
        row.rewards.copy_(self._worth_of_leader - before)
        row.terminated.copy_(is_last)
        row.truncated.fill_(False)
        return Stepped(is_running, None, round_over=not bool((tries.left >= 0).any()))

    def end_round(self, buffer: TamiyoRolloutBuffer) -> dict[str, float]:
        return {"adapt/lead": float(self._worth_of_leader.mean()) / REWARD_SCALE}

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.get_state()}

    def load_state_dict(self, state: dict[str, Any], generator: torch.Generator) -> None:
        self.rng.set_state(state["rng"])
