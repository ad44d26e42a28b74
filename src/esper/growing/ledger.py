"""What a growth run writes down: every measurement, every decision, every seed's life, the verdict.

    ledger = Ledger(model="ResNet", metric="accuracy", controller="heuristic", before=network)
    ledger.record_step(StepRecord(step=0, metric=0.41, params=858, macs=4000))
    ledger.record_decision(DecisionRecord(step=0, op="GERMINATE", site="layer1", seed="s1"))
    ledger.record_seed(SeedRecord(seed="s1", site="layer1", blueprint="conv", born=0, ...))
    ledger.record_fate(FateRecord(seed="s1", step=9, fate="kept"))
    ledger.conclude(after=network, verdict=Verdict(...))
    ledger.write("run.json")

A *step* is one decision of the controller. Records are plain data and never change; what can be
told from them (a seed's life, its evidence, what came of a decision) is worked out by functions,
so that there is no second account to disagree with. The JSON is the same, field by field.
"""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

SCHEMA_VERSION = 1
CLEAR_ERRORS = 2.0  # standard errors from which a difference is called one

NO_REASON = "the controller gave no reason"

Fate = Literal["kept", "pruned", "uncommitted", "rolled_back"]


@dataclass(frozen=True, kw_only=True)
class BlockRecord:
    """One part of the user's model, in the order in which the forward pass reaches it."""

    name: str  # as in model.named_modules()
    kind: str  # the module's class
    shape: tuple[int, ...]  # of its output, without the batch
    params: int
    site_kind: str | None = None  # SiteKind's name; None: nothing can grow here


@dataclass(frozen=True, kw_only=True)
class NetworkRecord:
    """A network and what it costs; the seeds in it stand in the ledger, not here."""

    params: int
    macs: int  # multiply-adds per example
    blocks: tuple[BlockRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BudgetRecord:
    """The most that the grown network may have, all in all; None: no limit."""

    params: int | None = None
    macs: int | None = None


@dataclass(frozen=True, kw_only=True)
class SeedState:
    """A seed as it stood when a step's decision was made. A number that is not finite is None."""

    seed: str
    stage: str  # SeedStage's name
    alpha: float
    contribution: float | None = None  # metric lost when it is switched off; None: not measured now
    contribution_error: float | None = None  # its standard error

    def __post_init__(self) -> None:
        _drop_not_finite(self, "contribution", "contribution_error")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What was measured at a step, before its decision. A number that is not finite is None."""

    step: int
    metric: float | None  # validation
    params: int
    macs: int
    train_loss: float | None = None  # mean since the step before
    validation_loss: float | None = None
    optimizer_steps: int | None = None  # taken so far
    seeds: tuple[SeedState, ...] = ()  # those in the network now, committed ones too

    def __post_init__(self) -> None:
        _drop_not_finite(self, "metric", "train_loss", "validation_loss")


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """What the controller chose at a step, out of what."""

    step: int
    op: str  # LifecycleOp's name
    site: str | None = None  # None: the op needs none
    seed: str | None = None  # the seed it is about
    details: Mapping[str, str | float] = field(default_factory=dict)  # what the other heads chose
    legal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # op -> sites it could have
    reason: str = ""  # the controller's own, where it states one
    params: int = 0  # that the decision adds
    macs: int = 0


@dataclass(frozen=True, kw_only=True)
class SeedRecord:
    """A seed at its birth. What became of it: its states in the steps, and its fate."""

    seed: str  # unique in a run; also after a slot was used twice
    site: str
    blueprint: str
    style: str  # BlendStyle's name
    params: int
    macs: int
    born: int  # the step of its germination


@dataclass(frozen=True, kw_only=True)
class FateRecord:
    """How a seed's story ends."""

    seed: str
    step: int
    fate: Fate
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RollbackRecord:
    """The network was taken back to an earlier, healthy state."""

    step: int
    to_step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class TwinRecord:
    """The same model, trained alike without growth, at one step. A number not finite is None."""

    step: int
    metric: float | None

    def __post_init__(self) -> None:
        _drop_not_finite(self, "metric")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Did growing help? Both networks on the same validation data."""

    grown: float  # metric of the best committed network
    ungrown: float  # metric of the ungrown network trained alike
    returned: Literal["grown", "ungrown"]  # which of them the user got
    difference_error: float | None = None  # standard error of grown - ungrown, where known

    def __post_init__(self) -> None:
        if not (math.isfinite(self.grown) and math.isfinite(self.ungrown)):
            raise ValueError(f"grown={self.grown}, ungrown={self.ungrown}; a verdict needs numbers")


class StageSpan(NamedTuple):
    """A stage of a seed's life, from the step that first shows it to the step that ends it."""

    stage: str
    start: int
    end: int


@dataclass(kw_only=True)
class Ledger:
    """The book of one run. Filled as the run goes; safe to write out at any time."""

    model: str  # what the user grows, in a word
    metric: str  # 0 to 1, higher is better
    controller: str
    before: NetworkRecord
    budget: BudgetRecord = BudgetRecord()
    facts: dict[str, str] = field(default_factory=dict)  # device, versions, rng seed, ...
    steps: list[StepRecord] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)
    seeds: list[SeedRecord] = field(default_factory=list)
    fates: list[FateRecord] = field(default_factory=list)
    rollbacks: list[RollbackRecord] = field(default_factory=list)
    twin: list[TwinRecord] = field(default_factory=list)
    after: NetworkRecord | None = None
    verdict: Verdict | None = None

    def record_step(self, step: StepRecord) -> None:
        self.steps.append(step)

    def record_decision(self, decision: DecisionRecord) -> None:
        self.decisions.append(decision)

    def record_seed(self, seed: SeedRecord) -> None:
        if any(known.seed == seed.seed for known in self.seeds):
            raise ValueError(f"seed {seed.seed!r} is in the ledger already; ids must differ")
        self.seeds.append(seed)

    def record_fate(self, fate: FateRecord) -> None:
        if all(known.seed != fate.seed for known in self.seeds):
            raise ValueError(f"no seed {fate.seed!r} in the ledger; record its birth first")
        self.fates.append(fate)

    def record_rollback(self, rollback: RollbackRecord) -> None:
        self.rollbacks.append(rollback)

    def record_twin(self, twin: TwinRecord) -> None:
        self.twin.append(twin)

    def conclude(self, *, after: NetworkRecord, verdict: Verdict | None = None) -> None:
        self.after, self.verdict = after, verdict

    def summary(self) -> str:
        """The verdict in a sentence."""
        if self.after is None:
            return f"The run is not over: {len(self.steps)} steps so far, no verdict yet."
        added = self.after.params - self.before.params
        if not added and self.verdict is None:
            return "Nothing was kept: the network is the size it was."
        cost = f"{added:+,} parameters ({added / max(1, self.before.params):+.0%})"
        if self.verdict is None:
            return f"Grown by {cost}. No ungrown twin was trained: whether it helped is not known."
        verdict = self.verdict
        gain, error = verdict.grown - verdict.ungrown, verdict.difference_error
        grown, ungrown = (self.show(value) for value in (verdict.grown, verdict.ungrown))
        margin = self.show_gain(gain, error)
        if verdict.returned == "ungrown":
            told = f"{self.metric} {grown} grown, {ungrown} ungrown ({margin})"
            return f"Growing did not help: {told}. The ungrown network was returned."
        if not added:
            told = f"{self.metric} {ungrown} to {grown} ({margin})"
            return f"Nothing was kept: {told}, at the same size."
        is_clear = gain > CLEAR_ERRORS * (error or 0.0)
        opening = "Growing helped" if is_clear else "No clear difference"
        return f"{opening}: {self.metric} {ungrown} to {grown} ({margin}) for {cost}."

    @property
    def is_share(self) -> bool:
        """Whether the metric is a share of 1, which reads best in percent."""
        values = [record.metric for record in self.steps if record.metric is not None]
        return "acc" in self.metric.lower() and all(0 <= value <= 1 for value in values)

    def show(self, value: float) -> str:
        """A value of the metric as text."""
        return f"{_fixed(100 * value)}%" if self.is_share else _short(value, 4)

    def show_gain(self, gain: float, error: float | None = None) -> str:
        """A difference of two values as text, with its standard error if there is one."""
        shown, unit = (_fixed, " points") if self.is_share else (_short, "")
        scale = 100 if self.is_share else 1
        margin = "" if error is None else f" +- {shown(scale * error)}"
        return f"{'+' if gain >= 0 else ''}{shown(scale * gain)}{margin}{unit}"

    def fate_of(self, seed: str) -> FateRecord | None:
        """How a seed ended; None while it lives. The last word counts: a rollback revokes."""
        return next((fate for fate in reversed(self.fates) if fate.seed == seed), None)

    def states_of(self, seed: str) -> list[tuple[int, SeedState]]:
        """A seed at every step that shows it."""
        return [(r.step, s) for r in self.steps for s in r.seeds if s.seed == seed]

    def life_of(self, seed: str) -> list[StageSpan]:
        """The stages of a seed one after the other, from its birth to its end or the last step."""
        states = self.states_of(seed)
        if not states:
            return []
        shown = [next(run) for _, run in groupby(states, key=lambda entry: entry[1].stage)]
        born = next(record.born for record in self.seeds if record.seed == seed)
        starts = [born, *(step for step, _ in shown[1:])]
        fate = self.fate_of(seed)
        if fate is None or fate.fate == "kept":
            end = self.steps[-1].step
        else:
            end = max(fate.step, states[-1][0])
        if fate is not None and shown[-1][1].stage == "FOSSILIZED":
            starts[-1] = min(fate.step, starts[-1])  # committed at once, shown a step later
        ends = [*starts[1:], end]
        return [
            StageSpan(state.stage, start, end)
            for (_, state), start, end in zip(shown, starts, ends, strict=True)
        ]

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA_VERSION, **asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        data = json.loads(text)
        version = data.pop("schema", None)
        if version != SCHEMA_VERSION:
            raise ValueError(f"a ledger of schema {version}; this version reads {SCHEMA_VERSION}")
        ledger: Ledger = _decode(cls, data)
        return ledger

    def write(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> "Ledger":
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


# Halves away from zero, as a browser rounds: what is said and what the page shows are the same.


def _fixed(value: float) -> str:
    """With one decimal."""
    return str(Decimal(value).quantize(Decimal("0.1"), ROUND_HALF_UP))


def _short(value: float, digits: int = 3) -> str:
    """With so many digits that count, at most."""
    rounded = Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal_from_float(value)
    return f"{float(rounded):.{digits}g}"


def _drop_not_finite(record: SeedState | StepRecord | TwinRecord, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if value is not None and not math.isfinite(value):
            object.__setattr__(record, name, None)


def _decode(kind: Any, value: Any) -> Any:
    """A JSON value as the type that a field is declared with."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{f.name: _decode(hints[f.name], value[f.name]) for f in fields(kind)})
    if origin in (Union, types.UnionType) and value is not None:
        choices = [choice for choice in arguments if choice is not type(None)]
        return _decode(choices[0], value) if len(choices) == 1 else value
    if origin in (list, tuple) and value is not None:
        return origin(_decode(arguments[0], item) for item in value)
    if origin in (dict, Mapping):
        return {key: _decode(arguments[1], item) for key, item in value.items()}
    return value
