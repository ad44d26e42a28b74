"""Small runs for the tests of the ledger and its page."""

from esper.leyline.budget import Budget
from esper.nissa.ledger import (
    BlockRecord,
    DecisionRecord,
    FateRecord,
    Ledger,
    NetworkRecord,
    RollbackRecord,
    SeedRecord,
    SeedState,
    StepRecord,
    TwinRecord,
    Verdict,
)

NETWORK = NetworkRecord(
    params=858,
    macs=4000,
    blocks=(
        BlockRecord(name="stem", kind="Conv1d", shape=(8, 20), params=48, site_kind="SERIES"),
        BlockRecord(name="head", kind="Linear", shape=(10,), params=810),
    ),
)


def seed(name: str, born: int, site: str = "stem") -> SeedRecord:
    return SeedRecord(
        seed=name, site=site, blueprint="conv", style="ADD", params=200, macs=4000, born=born
    )


def step(number: int, *states: SeedState, metric: float = 0.5) -> StepRecord:
    return StepRecord(step=number, metric=metric, params=858, macs=4000, seeds=states)


def state(name: str, stage: str, alpha: float, contribution: float | None = None) -> SeedState:
    return SeedState(seed=name, stage=stage, alpha=alpha, contribution=contribution)


def new_ledger(**changes: object) -> Ledger:
    return Ledger(
        **{"model": "M", "metric": "accuracy", "controller": "c", "before": NETWORK} | changes
    )


def full_ledger() -> Ledger:
    """Seed a is pruned, b takes its slot and is kept."""
    ledger = new_ledger(budget=Budget(params=2000), facts={"device": "cpu"})
    ledger.steps.append(step(0))
    ledger.decisions.append(
        DecisionRecord(
            step=0,
            op="GERMINATE",
            site="stem",
            seed="a",
            details={"blueprint": "conv", "tempo": 2},
            legal={"WAIT": (), "GERMINATE": ("stem",)},
            reason="early slots pay most",
            params=200,
        )
    )
    ledger.seeds.append(seed("a", born=0))
    ledger.steps.append(step(1, state("a", "BLENDING", 0.5)))
    ledger.steps.append(step(2, state("a", "HOLDING", 1.0, contribution=-0.01)))
    ledger.fates.append(FateRecord(seed="a", step=2, fate="pruned", reason="does not pay"))
    ledger.steps.append(step(3))
    ledger.rollbacks.append(RollbackRecord(step=3, to_step=0, reason="loss is not finite"))
    ledger.seeds.append(seed("b", born=4))
    ledger.steps.append(step(4))
    ledger.steps.append(step(5, state("b", "BLENDING", 0.5)))
    ledger.steps.append(step(6, state("b", "BLENDING", 1.0)))
    ledger.steps.append(step(7, state("b", "HOLDING", 1.0, contribution=0.03)))
    ledger.fates.append(FateRecord(seed="b", step=7, fate="kept"))
    ledger.steps.append(step(8, state("b", "FOSSILIZED", 1.0)))
    ledger.steps.append(step(9, state("b", "FOSSILIZED", 1.0)))
    ledger.twin.append(TwinRecord(step=9, metric=0.45))
    ledger.after = NetworkRecord(params=1058, macs=8000)
    ledger.verdict = Verdict(grown=0.50, ungrown=0.45, returned="grown", difference_error=0.01)
    return ledger
