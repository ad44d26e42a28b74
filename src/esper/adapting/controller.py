"""A trained controller of adaptations: from signals to plans, one proposal after another.

    controller = AdaptationController.load("controller.pt")
    plan, rate = controller.choose(known, try_plan, budget=0.25, tries=3)

The usual rules (`ANCHORS`) are tried first. Then the policy sees the signals and proposes a plan and
a learning rate per step; each is tried, and the policy sees its validation accuracy. Its last action
names which of all that was tried is kept: few validation rows say little, so it may prefer anything
within `TRUST` standard errors of the best.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.adapting.plans import KNOWN_RULES, MENU, PLANS, RATES, HeadMode, Place, Plan, What
from esper.adapting.signals import SIGNALS
from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head
from esper.runtime.files import read_file, write_file
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic, PolicyConfig
from esper.tamiyo.policy.plain_heads import flat_policy

_KIND, _VERSION = "adaptation controller", 2
_FOLDER = resources.files("esper.adapting") / "controllers"  # that ship with Esper

MAX_TRIES = 6
TRUST = 0.5  # all are judged on the same rows, so differences vary less than each accuracy does

ACTION_SPACE = FactoredActionSpace(
    (
        Head("place", len(Place)),
        Head("what", len(What), given=("place",)),
        Head("head", len(HeadMode), given=("place", "what")),
        Head("rate", len(RATES), given=("place", "what", "head")),
    )
)
# A choice is a plan and a rate; choice `plan * len(RATES) + rate` of the flat tables.
_CODES = torch.tensor([[*map(int, plan), rate] for plan in PLANS for rate in range(len(RATES))])
_INDEX = torch.full(ACTION_SPACE.sizes, -1)
_INDEX[tuple(_CODES.T)] = torch.arange(len(_CODES))
_ONE_HOT = torch.cat(
    [F.one_hot(codes, n) for codes, n in zip(_CODES.T, ACTION_SPACE.sizes, strict=True)], dim=1
).float()  # [choices, sum of sizes]
NUM_CHOICES = len(_CODES)

Choice = tuple[Plan, float]  # what to change, and the learning rate


def plan_and_rate(choice: int) -> Choice:
    """A flat choice as the plan and the learning rate it stands for."""
    plan, rate = divmod(choice, len(RATES))
    return PLANS[plan], RATES[rate]


def flat_choice(plan: Plan, rate: float) -> int:
    """The place of a plan and a learning rate in the flat tables."""
    return PLANS.index(plan) * len(RATES) + RATES.index(rate)


# Tried before the policy's proposals: the model as it is, the head alone, LP-FT, fine-tuning.
ANCHORS = [
    flat_choice(KNOWN_RULES[name], rate)
    for name, rate in (
        ("nothing", 4e-3), ("head only", 4e-3), ("LP-FT", 4e-3), ("full fine-tuning", 1e-3),
    )
]  # fmt: skip
# a plan that changes nothing needs no other rate
_USELESS = [choice for choice in range(len(RATES)) if choice != ANCHORS[0]]


def choices_of(actions: Tensor) -> Tensor:
    """Flat choices `[N]` of the heads' actions `[N, 4]`."""
    return _INDEX[tuple(actions.T)]


def validation_criterion(accuracy: Tensor, loss: Tensor) -> Tensor:
    """The accuracy; the loss decides between equal ones, and is the worst after divergence."""
    return accuracy - 0.01 * loss.nan_to_num(nan=10.0).clamp(max=10.0)


class Known(NamedTuple):
    """What is known of N models before the policy proposes."""

    signals: Tensor  # [N, S]
    held_out: Tensor  # [N] rows that validate
    added: Tensor  # [N, choices] parameters relative to the model; NaN: not offered
    usual: Tensor  # [N, len(ANCHORS)] validation results of the usual rules; NaN: not tried


class Tries:
    """What a policy has tried on N models, and the features and masks it sees."""

    num_features = len(SIGNALS) + 4 + len(ANCHORS) + 2 * _ONE_HOT.shape[1]

    def __init__(self, known: Known, budgets: Tensor, tries: Tensor):
        self.signals, self.held_out = known.signals, known.held_out
        self.budgets, self.left = budgets, tries
        self.legal = known.added <= budgets[:, None]  # NaN is not
        self.legal[:, _USELESS] = False
        self.values = torch.full_like(known.added, -torch.inf)  # results of what was tried
        self.values[:, ANCHORS] = known.usual
        self.values[~self.legal] = -torch.inf
        self.last_value, self.last = self.leader()

    def leader(self) -> tuple[Tensor, Tensor]:
        """The best validation result, and the choice it belongs to."""
        return self.values.max(1)

    def record(self, choices: Tensor, values: Tensor) -> None:
        """Note the validation result of a choice for each model."""
        self.last, self.last_value = choices, values.nan_to_num(-1.0)  # a training that failed
        self.values.scatter_(1, choices[:, None], self.last_value[:, None])
        self.left = self.left - 1

    def features(self) -> Tensor:
        value, leader = self.leader()
        limit = self.budgets.clamp(max=4.0).log()
        numbers = torch.stack([self.left, limit, value, self.last_value], dim=1)
        anchors = self.values[:, ANCHORS].clamp(min=-0.1)
        parts = [self.signals, numbers, anchors, _ONE_HOT[leader], _ONE_HOT[self.last]]
        return torch.cat(parts, dim=1)

    def masks(self) -> ActionMasks:
        """What was not tried yet may be tried; what was tried and is near the leader may be kept."""
        untried = self.legal & self.values.isneginf()
        untried = torch.where(untried.any(1, keepdim=True), untried, self.legal)
        allowed = torch.where((self.left <= 0)[:, None], self.near_leader(), untried)
        grid = allowed[:, _INDEX.clamp(min=0)] & (_INDEX >= 0)  # [N, place, what, head, rate]
        rows = {"rate": grid}
        for name in ("head", "what", "place"):
            grid = grid.any(-1)
            rows[name] = grid
        return ActionMasks(ACTION_SPACE, rows)

    def near_leader(self) -> Tensor:
        """Choices at most `TRUST` standard errors of the validation accuracy below the leader."""
        best = self.values.amax(1)
        right = (best.clamp(0, 1) * self.held_out + 1) / (self.held_out + 2)  # never 0 or 1
        error = (right * (1 - right) / self.held_out).sqrt()
        return self.values >= (best - TRUST * error)[:, None]


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

    def choose(
        self, known: Known, try_plan: Callable[[Choice], float], *, budget: float, tries: int
    ) -> Choice:
        """What to keep for one model; `try_plan` gives the validation result of each proposal."""

        def validate(choices: Tensor) -> Tensor:
            return torch.tensor([try_plan(plan_and_rate(int(choices)))])

        return plan_and_rate(int(self.choose_many(known, validate, budget=budget, tries=tries)))

    def choose_many(
        self, known: Known, validate: Callable[[Tensor], Tensor], *, budget: float, tries: int
    ) -> Tensor:
        """What to keep for each of N models, `[N]`; `validate` gives the results of proposals."""
        num = len(known.signals)
        limited = known._replace(signals=known.signals.clamp(self.low, self.high))
        limit, left = (torch.full((num,), value) for value in (budget, tries))
        state, recurrent = Tries(limited, limit, left), self.policy.initial_state(num)
        for number in range(tries + 1):
            with torch.no_grad():
                decision = self.policy.act(
                    state.features(), state.masks(), recurrent, deterministic=True
                )
            choices, recurrent = choices_of(decision.actions), decision.state
            if number < tries:
                state.record(choices, validate(choices))
        return choices

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
                    "train a controller again: `python -m adapt_practice`, in a clone of Esper"
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
    return flat_policy(ACTION_SPACE, Tries.num_features, config)


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
            "of a file from `python -m adapt_practice`"
        )
    return AdaptationController.load(controller)  # not cached: the file may be written again


_load = cache(AdaptationController.load)
