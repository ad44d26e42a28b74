"""Train a controller of adaptations: practise on many scenarios, then learn by PPO.

    controller = train_controller(PRESETS["quick"])

Practice tries every plan of the menu once in every scenario. Episodes then replay what was found,
so PPO needs no further training of networks.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from esper.adapting.controller import AdaptationController, new_policy
from esper.adapting.practice import (
    ARCHITECTURES,
    HELD_OUT_KINDS,
    INPUT_KINDS,
    OUTPUT_KINDS,
    draw_scenarios,
    outcomes_of,
    practice_rows,
    practise,
)
from esper.adapting.trial_envs import MAX_TRIES, Outcomes, TrialEnvs
from esper.adapting.trials import TrialSettings
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
    architectures: int = len(ARCHITECTURES)  # the first so many of `practice.ARCHITECTURES`
    scenarios: int = 400  # of each architecture
    models: int = 24  # trained, of each architecture
    model_steps: int = 1000
    steps: int = 300  # of an adaptation
    num_envs: int = 2048
    rounds: int = 150
    hidden: int = 64

    def __post_init__(self) -> None:
        sizes = ("architectures", "scenarios", "model_steps", "steps", "num_envs", "rounds")
        require_at_least(self, 1, *sizes, "hidden")
        require_at_least(self, 3, "models")
        if self.architectures > len(ARCHITECTURES):
            raise ValueError(f"architectures={self.architectures}; there are {len(ARCHITECTURES)}")


PRESETS = {
    "full": AdaptConfig(),
    "quick": AdaptConfig(
        architectures=2, scenarios=20, models=6, model_steps=300, steps=60, num_envs=512, rounds=60
    ),
}


def train_controller(config: AdaptConfig, say: Say = lambda line: None) -> AdaptationController:
    """Practise, then learn; the controller's `facts` hold the settings."""
    return learn(practise_all(config, say), config, say)


def practise_all(config: AdaptConfig, say: Say) -> Outcomes:
    """The outcomes of every plan in scenarios of all architectures."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = usable_device(automatic if config.device == "auto" else config.device)
    rows = practice_rows(device)
    settings = TrialSettings(steps=config.steps, replicas=8192)
    tables = []
    for number, architecture in enumerate(ARCHITECTURES[: config.architectures]):
        began = time.perf_counter()
        rng_seed = config.rng_seed + 10 + number
        table = practise(
            architecture,
            rows,
            draw_scenarios(config.scenarios, rng_seed),
            settings,
            num_models=config.models,
            model_steps=config.model_steps,
            rng_seed=rng_seed,
        )
        tables.append(table)
        say(
            f"practised on {architecture.name}: {config.scenarios} scenarios, mean accuracy "
            f"{100 * float(table.test_accuracy.nanmean()):.1f}, "
            f"{time.perf_counter() - began:.0f} s"
        )
    return outcomes_of(tables)


def learn(outcomes: Outcomes, config: AdaptConfig, say: Say) -> AdaptationController:
    """PPO on recorded outcomes, on the CPU: a decision costs less than a transfer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.rng_seed)
        policy = new_policy(PolicyConfig(lstm_hidden_dim=config.hidden))
    ppo = PPOConfig(
        entropy_coefficient=0.05,
        entropy_schedule="linear",
        ppo_epochs=6,
        gamma=1.0,
        gae_lambda=1.0,
    )
    envs = TrialEnvs(outcomes, config.num_envs, config.rng_seed)
    trainer = Trainer(envs, PPOAgent(policy, ppo), horizon=MAX_TRIES, rng_seed=config.rng_seed)
    for number in range(config.rounds):
        metrics = trainer.run_round(number / config.rounds)
        assert metrics is not None
        if (number + 1) % max(1, config.rounds // 5) == 0:
            lead = 100 * metrics["adapt/lead"]
            say(f"round {number + 1}/{config.rounds}: {lead:+.1f} points over the mean plan")
    facts = {
        "config": asdict(config),
        "trained on": "MNIST-1D: "
        + ", ".join(a.name for a in ARCHITECTURES[: config.architectures]),
        "shifts": [*INPUT_KINDS, *OUTPUT_KINDS],
        "held out": list(HELD_OUT_KINDS),
    }
    signals = outcomes.signals
    # signals of source data were hidden in half of the episodes: 0 is in their range
    low, high = signals.amin(0).clamp(max=0.0), signals.amax(0).clamp(min=0.0)
    return AdaptationController(policy, low, high, facts)
