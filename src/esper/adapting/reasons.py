"""What the signals say in words, and the ledger of an adaptation."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from esper.adapting.plans import Place, Places, Plan, What
from esper.growing.ledger import (
    BlockRecord,
    DecisionRecord,
    Ledger,
    NetworkRecord,
    StepRecord,
    TwinRecord,
    Verdict,
)
from esper.growing.sites import count_params


def reasons_for(signals: Mapping[str, float]) -> str:
    """The signals that matter most for the choice, in a sentence."""
    accuracy = signals["accuracy"]
    said = [f"the model is right on {accuracy:.0%} of them"]
    if signals["relabelling_gain"] > 0.1:
        said.append(f"{signals['relabelled_accuracy']:.0%} if its classes were renamed")
    if signals["classes_seen"] < 1:
        said.append(f"the labels name {signals['classes_seen']:.0%} of its classes")
    probe = signals["probe_accuracy"]
    if probe > accuracy + 0.1:
        said.append(f"a new head on its features would be right on {probe:.0%}")
    places = [place for place in Place if f"{place.name.lower()}.probe_accuracy" in signals]
    shift = {p: signals.get(f"{p.name.lower()}.mean_shift", 0.0) for p in places}
    if signals["has_source"] and shift:
        most = max(shift, key=lambda place: shift[place])
        said.append(f"activations moved most at the place {most.name.lower()}")
    return ", ".join(said)


def adaptation_ledger(
    model: nn.Module,
    places: Places,
    trials: Sequence[Any],
    kept: Any,
    costs: Mapping[Plan, int],
    reasons: str,
    is_perfect: bool,
) -> Ledger:
    """The tries as steps and decisions of a ledger; the twin is the model as it is."""
    params = count_params(model)
    blocks = tuple(
        BlockRecord(
            name=site.name or "input",
            kind=site.module_class,
            shape=site.shape,
            params=0,
            site_kind=site.kind.name,
        )
        for site in places.sites.values()
    )
    ledger = Ledger(
        model=type(model).__name__,
        metric="accuracy",
        controller="tamiyo",
        before=NetworkRecord(params=params, macs=0, blocks=blocks),
        facts={"signals": reasons},
    )
    # tuned and low-rank weights merge: only branches add parameters
    costs = {p: cost if p.what in (What.SCALE, What.SEED) else 0 for p, cost in costs.items()}
    as_is = trials[0].accuracy
    for step, trial in enumerate(trials):
        size = params + costs.get(trial.plan, 0)
        ledger.steps.append(
            StepRecord(
                step=step, metric=trial.accuracy, params=size, macs=0, validation_loss=trial.loss
            )
        )
        ledger.twin.append(TwinRecord(step=step, metric=as_is))
        if step:
            ledger.decisions.append(
                DecisionRecord(
                    step=step,
                    op="KEEP" if trial is kept else "TRY",
                    details={"plan": str(trial.plan), "learning rate": trial.rate},
                    reason=reasons if step == 1 else "compared on held-out rows",
                    params=costs.get(trial.plan, 0),
                )
            )
    if is_perfect:
        ledger.facts["result"] = "the model is right on every row; nothing was changed"
    added = costs.get(kept.plan, 0)
    ledger.after = NetworkRecord(params=params + added, macs=0, blocks=blocks)
    ledger.headline = (
        f"{'Not changed' if kept is trials[0] else 'Adapted'}: {kept.plan}, accuracy "
        f"{ledger.show(as_is)} to {ledger.show(kept.accuracy)} on held-out rows, {added:+,} parameters."
    )
    ledger.verdict = Verdict(
        grown=kept.accuracy,
        ungrown=as_is,
        returned="ungrown" if kept is trials[0] else "grown",
    )
    return ledger
