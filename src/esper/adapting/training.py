"""Train a controller of adaptations: practise on many scenarios, then learn by PPO.

    controller = train_controller(PRESETS["quick"])

Practice tries every plan of the menu once in every scenario. Episodes then replay what was found,
so PPO needs no further training of networks.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from esper.adapting.controller import AdaptationController, new_policy
from esper.adapting.plans import KNOWN_RULES, MENU
from esper.adapting.practice import (
    ARCHITECTURES,
    HELD_OUT_KINDS,
    IMAGE_KINDS,
    INPUT_KINDS,
    OUTPUT_KINDS,
    choose_rates,
    draw_scenarios,
    outcomes_of,
)
from esper.adapting.shifts import Shift
from esper.adapting.trial_envs import MAX_TRIES, Outcomes, TrialEnvs
from esper.adapting.trials import Scenario, TrialSettings, TrialTable, train_models, try_plans
from esper.leyline.checks import require_at_least
from esper.leyline.devices import usable_device
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.training.trainer import Trainer
from esper.tamiyo.policy.network import PolicyConfig

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """How much a controller practises, and how it learns."""

    rng_seed: int = 0
    device: str = "auto"
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)  # names in `practice.ARCHITECTURES`
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
    """Practise, then learn; the controller's `facts` hold the settings."""
    return learn(practise_all(config, say), config, say)


def practise_all(config: AdaptConfig, say: Say) -> Outcomes:
    """The outcomes of every plan in scenarios of all architectures."""
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
    return outcomes_of(tables)


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
    kept = controller.choose_many(outcomes, budget=torch.inf, tries=2)
    found["controller"] = float(outcomes.test.gather(1, kept[:, None]).mean())
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
