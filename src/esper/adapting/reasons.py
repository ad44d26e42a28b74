"""What the signals say in words, and the ledger of an adaptation."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from esper.adapting.plans import Place, Plan, What
from esper.growing.ledger import Ledger, NetworkRecord, Verdict
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


def new_ledger(model: nn.Module, controller: str, **facts: str) -> Ledger:
    """An empty ledger for an adaptation."""
    return Ledger(
        model=type(model).__name__,
        metric="accuracy",
        controller=controller,
        before=NetworkRecord(params=count_params(model), macs=0),
        facts=facts,
    )


def added_params(plan: Plan, costs: Mapping[Plan, int]) -> int:
    """Parameters that a plan adds: tuned and low-rank weights merge, only branches stay."""
    return costs.get(plan, 0) if plan.what in (What.SCALE, What.SEED) else 0


def conclude(ledger: Ledger, kept: int) -> None:
    """Note which of the trials is kept, and the verdict against the first: the model as it is."""
    as_is, chosen = ledger.trials[0], replace(ledger.trials[kept], kept=True)
    ledger.trials[kept] = chosen
    ledger.after = replace(ledger.before, params=ledger.before.params + chosen.params)
    before, after = as_is.metric or 0.0, chosen.metric or 0.0
    ledger.headline = (
        f"{'Adapted' if kept else 'Not changed'}: {chosen.plan}, accuracy {ledger.show(before)} to "
        f"{ledger.show(after)} on held-out rows, {chosen.params:+,} parameters."
    )
    ledger.verdict = Verdict(grown=after, ungrown=before, returned="grown" if kept else "ungrown")
