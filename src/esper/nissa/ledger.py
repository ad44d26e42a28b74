"""The record of a growth run: measurements, decisions, seeds and the verdict.

A *step* is one decision of the controller. Records are plain, immutable data. Everything derived
from them (the stages of a seed, the summary) is computed by methods. The JSON has the same fields.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import groupby
from pathlib import Path
from typing import Literal

from esper.leyline.budget import Budget
from esper.runtime.files import atomic_write
from esper.runtime.plain_config import from_plain

SCHEMA_VERSION = 1
CLEAR_ERRORS = 2.0  # a difference of more standard errors than this counts as clear
# the same for means of 2, 3, ... runs: the 97.5 % points of Student's t
CLEAR_OF_RUNS = (12.7, 4.3, 3.2, 2.8, 2.6, 2.4, 2.4, 2.3, 2.3)

NO_REASON = "the controller gave no reason"

Fate = Literal["kept", "pruned", "uncommitted", "rolled_back"]


@dataclass(frozen=True, kw_only=True)
class BlockRecord:
    """One module of the user's model; blocks are listed in forward order."""

    name: str  # as in model.named_modules()
    kind: str  # the module's class
    shape: tuple[int, ...]  # of its output, without the batch
    params: int
    site_kind: str | None = None  # SiteKind's name; None: not a site


@dataclass(frozen=True, kw_only=True)
class NetworkRecord:
    """A network's size and its modules, without seeds."""

    params: int
    macs: int  # multiply-adds per example
    blocks: tuple[BlockRecord, ...] = ()


class _Measured:
    """A record in which numbers that are not finite become None."""

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if isinstance(value, float) and not math.isfinite(value):
                object.__setattr__(self, name, None)


@dataclass(frozen=True, kw_only=True)
class SeedState(_Measured):
    """A seed before a step's decision."""

    seed: str
    stage: str  # SeedStage's name
    alpha: float
    contribution: float | None = None  # metric lost without the seed; None: not measured
    contribution_error: float | None = None  # its standard error


@dataclass(frozen=True, kw_only=True)
class StepRecord(_Measured):
    """Measurements before a step's decision."""

    step: int
    metric: float | None  # validation
    params: int
    macs: int
    train_loss: float | None = None  # mean since the previous step
    validation_loss: float | None = None
    optimizer_steps: int | None = None  # taken so far
    seeds: tuple[SeedState, ...] = ()  # all seeds in the network, committed ones too


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """The controller's choice at a step, and its alternatives."""

    step: int
    op: str  # LifecycleOp's name
    site: str | None = None  # None: the op has no site
    seed: str | None = None  # the seed that the op changes
    details: Mapping[str, str | int | float] = field(default_factory=dict)  # other heads' choices
    legal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # op -> legal sites
    reason: str = ""  # from the controller; empty: it gave none
    params: int = 0  # added by the decision
    macs: int = 0


@dataclass(frozen=True, kw_only=True)
class SeedRecord:
    """A new seed; its later states are in the steps, its end in the fates."""

    seed: str  # unique in a run, even if a slot is used twice
    site: str
    blueprint: str
    style: str  # BlendStyle's name
    params: int
    macs: int
    born: int  # the step of its germination


@dataclass(frozen=True, kw_only=True)
class FateRecord:
    """How a seed ended."""

    seed: str
    step: int
    fate: Fate
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RollbackRecord:
    """The network was restored to an earlier, healthy state."""

    step: int
    to_step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class TwinRecord(_Measured):
    """The ungrown twin at one step."""

    step: int
    metric: float | None


@dataclass(frozen=True, kw_only=True)
class TrialRecord(_Measured):
    """A plan of an adaptation: trained on some rows, measured on the others."""

    plan: str
    rate: float  # learning rate
    proposer: str  # who wanted it tried
    params: int  # added to the model
    metric: float | None = None
    loss: float | None = None
    trained: int | None = None  # parameters
    seconds: float | None = None  # None: it is in training
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class CostRecord:
    """What one part of a run has cost so far."""

    macs: float = 0.0  # multiply-adds; a training step counts as three forward passes
    seconds: float | None = None  # None: not measured, as for steps of a custom loop


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Grown and ungrown network, measured on the same validation data."""

    grown: float  # metric of the best committed network
    ungrown: float  # metric of the ungrown twin
    returned: Literal["grown", "ungrown"]  # which one the user got
    difference_error: float | None = None  # standard error of grown - ungrown, where known
    repeats: int = 1  # runs; of several, the numbers are means and the error is over runs

    def __post_init__(self) -> None:
        if not (math.isfinite(self.grown) and math.isfinite(self.ungrown)):
            raise ValueError(f"grown={self.grown}, ungrown={self.ungrown}; both must be finite")


@dataclass(kw_only=True)
class Ledger:
    """All records of one run. It can be written at any time."""

    model: str  # class name
    metric: str  # 0 to 1, higher is better
    controller: str
    before: NetworkRecord
    budget: Budget = Budget()
    facts: dict[str, str] = field(default_factory=dict)  # device, versions, rng seed, ...
    steps: list[StepRecord] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)
    seeds: list[SeedRecord] = field(default_factory=list)
    fates: list[FateRecord] = field(default_factory=list)
    rollbacks: list[RollbackRecord] = field(default_factory=list)
    twin: list[TwinRecord] = field(default_factory=list)
    trials: list[TrialRecord] = field(default_factory=list)  # first, the model before adaptation
    costs: dict[str, CostRecord] = field(default_factory=dict)  # of growing, twin and measuring
    after: NetworkRecord | None = None
    verdict: Verdict | None = None
    headline: str = ""  # the verdict of an adaptation

    def summary(self) -> str:
        """The verdict in one sentence."""
        if self.headline:
            return self.headline
        if self.after is None:
            tried = sum(trial.seconds is not None for trial in self.trials[1:])
            done = f"{tried} plans" if self.trials else f"{len(self.steps)} steps"
            return f"The run is not over: {done} so far, no verdict yet."
        added, verdict = self.after.params - self.before.params, self.verdict
        if not added and verdict is None:
            return "Nothing was kept: the network has its original size."
        cost = f"{added:+,} parameters ({added / max(1, self.before.params):+.0%})"
        if verdict is None:
            return f"Grown by {cost}. No ungrown twin was trained, so the gain is not known."
        gain, error = verdict.grown - verdict.ungrown, verdict.difference_error
        grown, ungrown = self.show(verdict.grown), self.show(verdict.ungrown)
        margin = self.show_gain(gain, error)
        runs = f" The means of {verdict.repeats} runs." if verdict.repeats > 1 else ""
        if error is not None and not runs:
            runs = " The error does not include the randomness of training: see repeats=."
        if verdict.returned == "ungrown":
            scores = f"{self.metric} {grown} grown, {ungrown} ungrown ({margin})"
            return f"Growing did not help: {scores}. The ungrown network was returned.{runs}"
        change = f"{self.metric} {ungrown} to {grown} ({margin})"
        if not added:
            return f"Nothing was kept: {change}, at the same size.{runs}"
        clear = (CLEAR_ERRORS, *CLEAR_OF_RUNS, CLEAR_ERRORS)[min(verdict.repeats, 11) - 1]
        is_clear = gain > clear * (error or 0.0)
        opening = "Growing helped" if is_clear else "No clear difference"
        return f"{opening}: {change} for {cost}.{runs}"

    def add_cost(self, part: str, macs: float, seconds: float | None = None) -> None:
        before = self.costs.get(part, CostRecord())
        if seconds is not None:
            seconds += before.seconds or 0.0
        self.costs[part] = CostRecord(macs=before.macs + macs, seconds=seconds or before.seconds)

    def cost_summary(self) -> str:
        """The training cost of the run in one sentence."""
        parts = []
        for part, cost in self.costs.items():
            time = "" if cost.seconds is None else f" in {cost.seconds:.0f} s"
            parts.append(f"{part} {cost.macs:.2g}{time}")
        total = sum(cost.macs for cost in self.costs.values())
        return f"Cost: {total:.2g} multiply-adds ({', '.join(parts)})."

    @property
    def is_share(self) -> bool:
        """Whether to show the metric in per cent."""
        values = [record.metric for record in self.steps if record.metric is not None]
        return "acc" in self.metric.lower() and all(0 <= value <= 1 for value in values)

    def show(self, value: float) -> str:
        """A value of the metric as text."""
        return f"{_fixed(100 * value)}%" if self.is_share else _short(value, 4)

    def show_gain(self, gain: float, error: float | None = None) -> str:
        """A difference of two values as text, with its standard error if given."""
        shown, unit = (_fixed, " points") if self.is_share else (_short, "")
        scale = 100 if self.is_share else 1
        margin = "" if error is None else f" +- {shown(scale * error)}"
        return f"{'+' if gain >= 0 else ''}{shown(scale * gain)}{margin}{unit}"

    def fate_of(self, seed: str) -> FateRecord | None:
        """How a seed ended; None if it has not. The latest record counts."""
        return next((fate for fate in reversed(self.fates) if fate.seed == seed), None)

    def states_of(self, seed: str) -> list[tuple[int, SeedState]]:
        """A seed's states, each with its step."""
        return [(r.step, s) for r in self.steps for s in r.seeds if s.seed == seed]

    def life_of(self, seed: str) -> list[tuple[str, int, int]]:
        """The stages of a seed with their first and last step, to its end or the last step."""
        states, fate = self.states_of(seed), self.fate_of(seed)
        if not states:
            return []
        shown = [next(run) for _, run in groupby(states, key=lambda entry: entry[1].stage)]
        born = next(record.born for record in self.seeds if record.seed == seed)
        starts = [born, *(step for step, _ in shown[1:])]
        end = self.steps[-1].step
        if fate is not None and fate.fate != "kept":
            end = max(fate.step, states[-1][0])
        if fate is not None and shown[-1][1].stage == "FOSSILIZED":
            starts[-1] = min(fate.step, starts[-1])  # committed now, visible one step later
        stages = [state.stage for _, state in shown]
        return list(zip(stages, starts, [*starts[1:], end], strict=True))

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA_VERSION, **asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        data = json.loads(text)
        version = data.pop("schema", None)
        if version != SCHEMA_VERSION:
            raise ValueError(f"a ledger of schema {version}; this version reads {SCHEMA_VERSION}")
        return from_plain(cls, data)

    def write(self, path: str | Path) -> None:
        text = self.to_json().encode()
        atomic_write(Path(path), lambda file: file.write(text))

    @classmethod
    def read(cls, path: str | Path) -> "Ledger":
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


# Both round halves away from zero, as JavaScript does: summary and page show the same numbers.


def _fixed(value: float) -> str:
    """One decimal."""
    return str(Decimal(value).quantize(Decimal("0.1"), ROUND_HALF_UP))


def _short(value: float, digits: int = 3) -> str:
    """At most this many significant digits."""
    rounded = Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal_from_float(value)
    return f"{float(rounded):.{digits}g}"
