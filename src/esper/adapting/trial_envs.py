"""Recorded trials as environments of the training loop: Tamiyo learns to choose plans.

An episode is one scenario. The usual rules (`ANCHORS`) are tried first. Then the policy sees the
scenario's signals and proposes a plan and a learning rate per step; each is tried, and the policy
sees its validation accuracy. Its last action names which of all that was tried is kept: few
validation rows say little, so it may prefer anything within `TRUST` standard errors of the best. A reward
is the change in test accuracy of the leader, which is what validates best until the policy decides;
the first is relative to the mean of all legal plans. The number of tries and the limit on parameters vary by
episode, so one policy serves all budgets.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.adapting.evidence import SIGNALS
from esper.adapting.plans import KNOWN_RULES, PLANS, RATES, HeadMode, Place, Plan, What
from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head
from esper.leyline.ranks import ALONE, EnvShare
from esper.simic.training.trainer import Outcome, PhaseClock, TrainingEnvs

MAX_TRIES = 6
BUDGETS = (torch.inf, torch.inf, 0.25, 0.1)  # parameters added, relative to the model
REWARD_SCALE = 10.0
TRUST = 0.5  # all are judged on the same rows, so differences vary less than each accuracy does
RENT = 0.01  # accuracy that a change of the model's own size must bring

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
# Tried before the policy's proposals: the model as it is, the head alone, LP-FT, fine-tuning.
ANCHORS = tuple(
    PLANS.index(KNOWN_RULES[name]) * len(RATES) + rate
    for name, rate in (("nothing", 1), ("head only", 1), ("LP-FT", 1), ("full fine-tuning", 0))
)

# a plan that changes nothing needs no other rate
_USELESS = [choice for choice in range(len(RATES)) if choice != ANCHORS[0]]


def plan_and_rate(choice: int) -> tuple[Plan, float]:
    """A flat choice as the plan and the learning rate it stands for."""
    plan, rate = divmod(choice, len(RATES))
    return PLANS[plan], RATES[rate]


_SOURCE = torch.tensor(
    [name == "has_source" or name.endswith(("mean_shift", "spread_shift")) for name in SIGNALS]
)


class Outcomes(NamedTuple):
    """What trials found, for every plan and learning rate."""

    signals: Tensor  # [E, S]
    held_out: Tensor  # [E] rows that validate
    added: Tensor  # [E, choices] parameters relative to the model; NaN: not offered
    validation: Tensor  # [E, choices]
    test: Tensor  # [E, choices]

    def known(self) -> "Known":
        anchors = self.validation[:, torch.tensor(ANCHORS)]
        return Known(self.signals, self.held_out, self.added, anchors)


class Known(NamedTuple):
    """What is known of N scenarios before the first try."""

    signals: Tensor  # [N, S]
    held_out: Tensor  # [N] rows that validate
    added: Tensor  # [N, choices] parameters relative to the model; NaN: not offered
    anchors: Tensor  # [N, len(ANCHORS)] validation results of the usual rules


class Tries:
    """What a policy has tried in N scenarios, and the features and masks it sees."""

    def __init__(self, known: Known, budgets: Tensor, tries: Tensor):
        self.signals, self.held_out, added, anchors = known
        self.budgets, self.left = budgets, tries.clone()
        self.legal = added <= budgets[:, None]  # NaN is not
        self.legal[:, _USELESS] = False
        codes = torch.tensor(ANCHORS)
        self.values = torch.full_like(added, -torch.inf)  # validation results of what was tried
        self.values[:, codes] = torch.where(self.legal[:, codes], anchors, -torch.inf)
        self.last_value, self.last = self.leader()

    @staticmethod
    def num_features() -> int:
        return len(SIGNALS) + 4 + len(ANCHORS) + 2 * _ONE_HOT.shape[1]

    def leader(self) -> tuple[Tensor, Tensor]:
        """The best validation result, and the choice it belongs to."""
        return self.values.max(1)

    def record(self, choices: Tensor, values: Tensor, rows: Tensor) -> None:
        """Note the validation results of choices tried in some scenarios."""
        index = rows.nonzero()[:, 0]
        values = values.nan_to_num(-1.0)  # a training that failed
        self.values[index, choices[index]] = values[index]
        self.last = torch.where(rows, choices, self.last)
        self.last_value = torch.where(rows, values, self.last_value)
        self.left = self.left - rows.long()

    def features(self) -> Tensor:
        value, leader = self.leader()
        limit = self.budgets.clamp(max=4.0).log()
        anchors = self.values[:, torch.tensor(ANCHORS)].clamp(min=-0.1)
        return torch.cat(
            [
                self.signals,
                torch.stack([self.left, limit, value, self.last_value], dim=1),
                anchors,
                _ONE_HOT[leader],
                _ONE_HOT[self.last],
            ],
            dim=1,
        )

    def masks(self) -> ActionMasks:
        """What was not tried yet may be tried; what was tried and is near the leader may be kept."""
        untried = self.legal & self.values.isneginf()
        untried = torch.where(untried.any(1, keepdim=True), untried, self.legal)
        allowed = torch.where((self.left == 0)[:, None], self.near_leader(), untried)
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


def choices_of(actions: Tensor) -> Tensor:
    """Flat choices `[N]` of the heads' actions `[N, 4]`."""
    return _INDEX[tuple(actions.T)]


class TrialEnvs(TrainingEnvs):
    """N episodes at a time over recorded outcomes; a round is one episode in every env."""

    def __init__(self, outcomes: Outcomes, num_envs: int, rng_seed: int = 0):
        self.outcomes, self.num_envs = outcomes, num_envs
        self.share = EnvShare.split(num_envs, ALONE)
        self.num_features, self.action_space = Tries.num_features(), ACTION_SPACE
        self.rng = torch.Generator().manual_seed(rng_seed)
        self.clock = PhaseClock()
        self.round_over = True

    def begin_round(self) -> Tensor:
        num, rng = self.num_envs, self.rng
        self._scenarios = torch.randint(len(self.outcomes.signals), (num,), generator=rng)
        budgets = torch.tensor(BUDGETS)[torch.randint(len(BUDGETS), (num,), generator=rng)]
        tries = torch.randint(1, MAX_TRIES + 1, (num,), generator=rng)
        signals = self.outcomes.signals[self._scenarios]
        hidden = torch.rand(num, generator=rng) < 0.5  # models rarely come with source rows
        signals = signals.masked_fill(hidden[:, None] & _SOURCE, 0.0)
        known = self.outcomes.known()
        known = Known(*(part[self._scenarios] for part in known))._replace(signals=signals)
        self._tries = Tries(known, budgets, tries)
        worth = self.outcomes.test - RENT * self.outcomes.added
        worth = worth[self._scenarios].masked_fill(~self._tries.legal, torch.nan)
        self._worth = REWARD_SCALE * (worth - worth.nanmean(1, keepdim=True))
        self._running = torch.ones(num, dtype=torch.bool)
        self._kept = torch.zeros(num, dtype=torch.int64)
        self._is_first, self.round_over = True, False
        self._observe()
        return self._running.clone()

    def step(self, actions: Tensor) -> Outcome:
        choices = choices_of(actions)
        was_running, tries = self._running, self._tries
        before = 0.0 if self._is_first else self._worth_of(tries.leader()[1])
        self._is_first = False
        values = self.outcomes.validation[self._scenarios].gather(1, choices[:, None])[:, 0]
        is_last = was_running & (tries.left == 0)
        tries.record(choices, values, was_running & ~is_last)
        self._kept = torch.where(is_last, choices, self._kept)
        leader = torch.where(was_running & ~is_last, tries.leader()[1], self._kept)
        rewards = (self._worth_of(leader) - before) * was_running
        self._running = was_running & ~is_last
        self.round_over = not bool(self._running.any())
        self._observe()
        never = torch.zeros_like(is_last)
        return Outcome(rewards, is_last, never, was_running, is_last, self.features)

    def _worth_of(self, choices: Tensor) -> Tensor:
        """What choices are worth, relative to the mean of all legal ones."""
        return self._worth.gather(1, choices[:, None])[:, 0]

    def _observe(self) -> None:
        self.features, self.masks = self._tries.features(), self._tries.masks()

    def metrics(self, seconds: float) -> dict[str, float]:
        return {"adapt/lead": float(self._worth_of(self._kept).mean()) / REWARD_SCALE}

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.get_state()}

    def load_state_dict(self, state: dict[str, Any], generator: torch.Generator) -> None:
        self.rng.set_state(state["rng"])
