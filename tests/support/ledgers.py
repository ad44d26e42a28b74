"""Small runs for the tests of the ledger and its page."""

from esper.growing.ledger import (
    BlockRecord,
    BudgetRecord,
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
    ledger = new_ledger(budget=BudgetRecord(params=2000), facts={"device": "cpu"})
    ledger.record_step(step(0))
    ledger.record_decision(
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
    ledger.record_seed(seed("a", born=0))
    ledger.record_step(step(1, state("a", "BLENDING", 0.5)))
    ledger.record_step(step(2, state("a", "HOLDING", 1.0, contribution=-0.01)))
    ledger.record_fate(FateRecord(seed="a", step=2, fate="pruned", reason="does not pay"))
    ledger.record_step(step(3))
    ledger.record_rollback(RollbackRecord(step=3, to_step=0, reason="loss is not finite"))
    ledger.record_seed(seed("b", born=4))
    ledger.record_step(step(4))
    ledger.record_step(step(5, state("b", "BLENDING", 0.5)))
    ledger.record_step(step(6, state("b", "BLENDING", 1.0)))
    ledger.record_step(step(7, state("b", "HOLDING", 1.0, contribution=0.03)))
    ledger.record_fate(FateRecord(seed="b", step=7, fate="kept"))
    ledger.record_step(step(8, state("b", "FOSSILIZED", 1.0)))
    ledger.record_step(step(9, state("b", "FOSSILIZED", 1.0)))
    ledger.record_twin(TwinRecord(step=9, metric=0.45))
    ledger.conclude(
        after=NetworkRecord(params=1058, macs=8000),
        verdict=Verdict(grown=0.50, ungrown=0.45, returned="grown", difference_error=0.01),
    )
    return ledger
