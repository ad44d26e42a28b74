"""A trained controller of adaptations: from signals to plans, one proposal after another.

controller = AdaptationController.load("controller.pt")
chooser = controller.choose(known, budget=0.25, tries=3)
plan, rate = next(chooser)          # the first proposal
plan, rate = chooser.send(0.71)     # the next one, given the validation result of the last
"""

from collections.abc import Generator
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from esper.adapting.evidence import SIGNALS
from esper.adapting.plans import MENU, RATES, Plan
from esper.adapting.trial_envs import (
    ACTION_SPACE,
    Known,
    Outcomes,
    Tries,
    choices_of,
    plan_and_rate,
)
from esper.leyline.files import read_file, write_file
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic, PolicyConfig, RecurrentState
from esper.tamiyo.policy.plain_heads import flat_policy

_KIND, _VERSION = "adaptation controller", 2
_FOLDER = resources.files("esper.adapting") / "controllers"  # that ship with Esper

Choice = tuple[Plan, float]  # what to change, and the learning rate


class AdaptationController:
    """A policy, what it was offered in training, and where it comes from.

    Signals are limited to the range that the policy saw in training.
    """

    def __init__(
        self,
        policy: FactoredRecurrentActorCritic,
        low: Tensor,
        high: Tensor,
        facts: dict[str, Any] | None = None,
    ):
        self.policy, self.low, self.high = policy, low, high
        self.facts = facts or {}

    @torch.no_grad()
    def choose_many(self, outcomes: Outcomes, *, budget: float, tries: int) -> Tensor:
        """The choice kept in each of E scenarios whose outcomes are known, `[E]`."""
        state, recurrent = self._begin(outcomes.known(), budget, tries)
        everywhere = torch.ones(len(outcomes.signals), dtype=torch.bool)
        for _ in range(tries):
            choices, recurrent = self._propose(state, recurrent)
            state.record(choices, outcomes.validation.gather(1, choices[:, None])[:, 0], everywhere)
        return self._propose(state, recurrent)[0]

    def choose(self, known: Known, *, budget: float, tries: int) -> Generator[Choice, float, None]:
        """Proposals for one model; send the validation result of each to get the next.

        After so many tries comes the choice to keep, one of those tried.
        """
        state, recurrent = self._begin(known, budget, tries)
        for _ in range(tries):
            choice, recurrent = self._propose(state, recurrent)
            value = yield plan_and_rate(int(choice))
            state.record(choice, torch.tensor([value]), torch.ones(1, dtype=torch.bool))
        choice, _ = self._propose(state, recurrent)
        yield plan_and_rate(int(choice))

    def _begin(self, known: Known, budget: float, tries: int) -> tuple[Tries, RecurrentState]:
        num = len(known.signals)
        limited = known._replace(signals=known.signals.clamp(self.low, self.high))
        limit, left = (torch.full((num,), value) for value in (budget, tries))
        return Tries(limited, limit, left), self.policy.initial_state(num)

    @torch.no_grad()
    def _propose(self, state: Tries, recurrent: RecurrentState) -> tuple[Tensor, RecurrentState]:
        decision = self.policy.act(state.features(), state.masks(), recurrent, deterministic=True)
        return choices_of(decision.actions), decision.state

    def save(self, path: str | Path) -> None:
        contents = _offered() | {
            "policy": asdict(self.policy.config),
            "weights": {name: weight.cpu() for name, weight in self.policy.state_dict().items()},
            "low": self.low,
            "high": self.high,
            "facts": self.facts,
        }
        write_file(path, _KIND, contents, version=_VERSION)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        contents = read_file(path, _KIND, version=_VERSION)
        for name, expected in _offered().items():
            if contents[name] != expected:
                raise ValueError(
                    f"{path} was trained with other {name} than this version of Esper uses; "
                    "train a controller again with `esper train-adapt`"
                )
        with torch.random.fork_rng(devices=[]):
            policy = new_policy(PolicyConfig(**contents["policy"]))
        policy.load_state_dict(contents["weights"])
        return cls(policy, contents["low"], contents["high"], contents["facts"])


def _offered() -> dict[str, Any]:
    """What a controller was trained with; one from another version of Esper may differ."""
    menu = [str(plan) for plan in MENU]
    return {"signals": list(SIGNALS), "menu": menu, "rates": list(RATES)}


def new_policy(config: PolicyConfig) -> FactoredRecurrentActorCritic:
    return flat_policy(ACTION_SPACE, Tries.num_features(), config)


def controllers() -> dict[str, dict[str, Any]]:
    """The controllers in the package: name -> what it was trained on, and how it did."""
    files = (Path(str(entry)) for entry in _FOLDER.iterdir() if entry.name.endswith(".pt"))
    return {path.stem: _load(path).facts for path in sorted(files)}


def find_controller(controller: str | Path | AdaptationController) -> AdaptationController:
    """A controller given as itself, as the name of one that ships, or as a file."""
    if isinstance(controller, AdaptationController):
        return controller
    shipped = Path(str(_FOLDER / f"{controller}.pt"))
    if isinstance(controller, str) and shipped.exists():
        return _load(shipped)
    if not isinstance(controller, str | Path) or not Path(controller).exists():
        raise ValueError(
            f"no controller {str(controller)!r}: there are {list(controllers())}, or give the path "
            "of a file from `esper train-adapt`"
        )
    return AdaptationController.load(controller)  # not cached: the file may be written again


@cache
def _load(path: Path) -> AdaptationController:
    return AdaptationController.load(path)
