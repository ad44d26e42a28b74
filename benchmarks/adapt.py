"""Adapting trained models with few rows: the learned controller against fixed rules.

    python benchmarks/adapt_suites.py TABLES --device cuda --images cifar=FILE fashion=FILE
    python benchmarks/adapt.py TABLES [--controllers FILE ...] [--page FILE.md] [--plot FILE.png]
    python benchmarks/adapt.py --quick

Every rule is trained with three learning rates, and the rate is chosen on held-out rows: three
trainings. The controller compares the head alone, LP-FT and fine-tuning, at one rate each, with its
tries: with one try that is one training more than a rule takes, with three tries three more. The
ceiling knows the best plan of every scenario from one set of trainings and is measured on another.
Intervals are 95 %, bootstrapped over scenarios and controllers. `--quick` collects a small suite in
a minute on two cores and judges the controller that ships.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from adapt_suites import PLACES, collect, suites
from torch import Tensor

from adapt_practice.outcomes import choose_rates, outcomes_of
from adapt_practice.trials import TrialSettings, TrialTable
from esper.adapting.controller import AdaptationController, find_controller
from esper.adapting.plans import KNOWN_RULES, MENU, PLANS, RATES, HeadMode, Place, Plan, What
from esper.adapting.signals import SIGNALS

SERIES = ("conv_norm", "conv_pool", "mlp", "residual")  # MNIST-1D; residual is held out
OTHERS = ("transformer", "digits", "fashion", "cifar")  # architectures and data held out
SHOWN = (
    "nothing", "head only", "full fine-tuning", "LP-FT", "LoRA everywhere", "seeds everywhere",
    "norms and biases",
)  # fmt: skip
TRIES = 3
DRAWS = 2000
EVERY_PLAN = f"every plan validated ({len(PLANS) * len(RATES)} trainings)"


@dataclass
class Judged:
    """Test accuracies of a suite, per scenario."""

    rows: Tensor  # [E]
    kinds: tuple[str, ...]
    rules: Tensor  # [E, A] plans with the rate chosen on held-out rows
    criterion: Tensor  # [E, A] what chose it
    ceiling: Tensor  # [E] the best plan by one set of trainings, measured on another
    others: dict[str, Tensor]  # [E] further arms
    ours: dict[str, Tensor]  # [controllers, E] by number of tries or budget


def judge(saved: dict, controllers: list[AdaptationController]) -> Judged:
    tables = [TrialTable(**table) for table in saved["tables"]]
    plans = [Plan(*codes) for codes in saved["plans"]]
    first, short = tables[0], TrialTable(**saved["short"])
    criterion, rules = choose_rates(first)
    ceiling = rules.nan_to_num(0).amax(1)
    if len(tables) > 1:
        again = choose_rates(tables[1])[1]
        pairs = ((rules, again), (again, rules))
        ceiling = torch.stack([_at(b, a.nan_to_num(0).argmax(1)) for a, b in pairs]).mean(0)
    rgn = choose_rates(TrialTable(**saved["auto_rgn"]))[1][:, 0]
    tried, _ = choose_rates(short)
    best = tried.nan_to_num(-9).argmax(1)
    columns = torch.tensor([plans.index(plan) if plan in plans else 0 for plan in PLACES])
    others = {
        "Auto-RGN": rgn,
        EVERY_PLAN: _at(rules, criterion.nan_to_num(-9).argmax(1)),
        "best after 25 steps of every place": _at(rules, columns[best]),
        "a random plan": rules.nanmean(1),
        "a rule by hand": _at(rules, _by_hand(first.signals, plans)),
    }
    budgets = {str(n): (n, torch.inf) for n in (1, 2, 3, 6)} | {"quarter": (TRIES, 0.25)}
    ours = {
        name: torch.stack([_chosen(c, first, plans, tries, budget) for c in controllers])
        for name, (tries, budget) in budgets.items()
    }
    return Judged(first.rows, tuple(first.kinds), rules, criterion, ceiling, others, ours)


def _chosen(
    controller: AdaptationController,
    table: TrialTable,
    plans: list[Plan],
    tries: int,
    budget: float,
) -> Tensor:
    """Test accuracy `[E]` of what the controller keeps; it sees no source statistics."""
    outcomes = outcomes_of([table], plans)
    offered = torch.tensor([plan in MENU for plan in PLANS]).repeat_interleave(len(RATES))
    hidden = torch.tensor(
        [n == "has_source" or n.endswith(("mean_shift", "spread_shift")) for n in SIGNALS]
    )
    outcomes = outcomes._replace(
        signals=outcomes.signals.masked_fill(hidden, 0.0),
        added=outcomes.added.masked_fill(~offered, torch.nan),
    )
    kept = outcomes.kept(controller, budget=budget, tries=tries)
    return _at(outcomes.test, kept)


def _by_hand(signals: Tensor, plans: list[Plan]) -> Tensor:
    """Labels renamed, or few rows: a seed before the head; else seeds everywhere, head first."""
    late, everywhere = (
        plans.index(plan) if plan in plans else 0
        for plan in (
            Plan(Place.LATE, What.SEED, HeadMode.KEEP),
            Plan(Place.EVERYWHERE, What.SEED, HeadMode.FIRST),
        )
    )
    renamed = signals[:, SIGNALS.index("relabelling_gain")] > 0.15
    few = signals[:, SIGNALS.index("rows")] < 1.8
    return torch.where(renamed | few, late, everywhere)


def _at(table: Tensor, columns: Tensor) -> Tensor:
    return table.gather(1, columns[:, None])[:, 0]


def joined(suites_: list[Judged], rows: int) -> Judged:
    """Several suites as one, at one number of labelled rows."""
    keep = [suite.rows == rows for suite in suites_]

    def stack(values: list[Tensor], dim: int = 0) -> Tensor:
        return torch.cat([v[:, k] if dim else v[k] for v, k in zip(values, keep, strict=True)], dim)

    first = suites_[0]
    return Judged(
        stack([s.rows for s in suites_]),
        tuple(
            kind
            for s, k in zip(suites_, keep, strict=True)
            for kind, on in zip(s.kinds, k, strict=True)
            if on
        ),
        stack([s.rules for s in suites_]),
        stack([s.criterion for s in suites_]),
        stack([s.ceiling for s in suites_]),
        {name: stack([s.others[name] for s in suites_]) for name in first.others},
        {name: stack([s.ours[name] for s in suites_], 1) for name in first.ours},
    )


def interval(ours: Tensor, rival: Tensor) -> tuple[float, float, float]:
    """Mean difference in points and its 95 % interval; `ours` is `[controllers, E]`."""
    rng = np.random.default_rng(0)
    difference = (ours - rival).numpy()
    controllers, scenarios = difference.shape
    draws = [
        difference[
            rng.integers(controllers, size=(controllers, 1)),
            rng.integers(scenarios, size=scenarios),
        ].mean()
        for _ in range(DRAWS)
    ]
    low, high = np.quantile(draws, [0.025, 0.975])
    return 100 * float(difference.mean()), 100 * float(low), 100 * float(high)


def worth_in_plans(data: Judged, ours: Tensor) -> int:
    """How many random plans a validated choice needs, each trained three times, to do as well."""
    rng = torch.Generator().manual_seed(0)
    target = float(ours.mean())
    usable = ~data.rules.isnan().any(0)
    rules, criterion = data.rules[:, usable], data.criterion[:, usable]
    for count in range(1, rules.shape[1] + 1):
        results = []
        for _ in range(200):
            chosen = torch.randperm(rules.shape[1], generator=rng)[:count]
            results.append(_at(rules[:, chosen], criterion[:, chosen].argmax(1)).mean())
        if float(torch.stack(results).mean()) >= target:
            return count
    return rules.shape[1] + 1


def best_fixed(data: Judged) -> tuple[str, Tensor]:
    means = data.rules.nanmean(0).nan_to_num(0)
    best = int(means.argmax())
    return str(PLANS[best]), data.rules[:, best]


def report(data: dict[str, Judged]) -> tuple[str, dict[str, dict[str, object]]]:
    """The page in markdown, and the claims as bars."""
    series = [data[name] for name in SERIES if name in data]
    per_rows = {rows: joined(series, rows) for rows in (30, 100, 300, 1000)}
    claims = [claim for rows, here in per_rows.items() for claim in series_claims(rows, here)]
    claims += [
        transfer_claim(name, rows, joined([data[name]], rows))
        for name in OTHERS
        if name in data
        for rows in sorted(set(data[name].rows.tolist()))
    ]
    lines = [
        "## MNIST-1D, kinds of shift that the controllers never saw",
        f"Mean accuracy over {', '.join(n for n in SERIES if n in data)}; ours with {TRIES} tries.",
        "",
        *accuracy_table(per_rows),
        "",
        "| rows | ours with 1 try | 2 | 3 | 6 | 3 tries, a quarter of the parameters |",
        "|---|---|---|---|---|---|",
    ]
    for rows, here in per_rows.items():
        cells = " | ".join(_points(here.ours[k]) for k in ("1", "2", "3", "6", "quarter"))
        lines.append(f"| {rows} | {cells} |")
    lines += ["", "## Claims", "| claim | measured | verdict |", "|---|---|---|"]
    lines += [f"| {c.text} | {c.shown} | {c.verdict} |" for c in claims]
    bars = {c.key: {"value": c.shown, "met": c.verdict == "holds"} for c in claims}
    return "\n".join(lines), bars


def accuracy_table(per_rows: dict[int, Judged]) -> list[str]:
    others = {
        "Auto-RGN": "Auto-RGN",
        "short trials": "best after 25 steps of every place",
        "by hand": "a rule by hand",
    }
    last = ("best fixed rule", "**ours**", "ceiling", "every plan validated")
    names = (*SHOWN, *others, *last)
    lines = [f"| rows | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for rows, here in per_rows.items():
        name, fixed = best_fixed(here)
        cells = [_points(here.rules[:, PLANS.index(KNOWN_RULES[n])]) for n in SHOWN]
        cells += [_points(here.others[n]) for n in others.values()]
        cells += [f"{_points(fixed)} ({name})", f"**{_points(here.ours[str(TRIES)])}**"]
        cells += [_points(here.ceiling), _points(here.others[EVERY_PLAN])]
        lines.append(f"| {rows} | " + " | ".join(cells) + " |")
    return lines


class Claim(NamedTuple):
    key: str
    text: str
    shown: str
    verdict: str  # "holds", "undecided" or "**fails**"


def _claim(key: str, text: str, shown: str, holds: bool, is_open: bool = False) -> Claim:
    return Claim(key, text, shown, "holds" if holds else "undecided" if is_open else "**fails**")


def series_claims(rows: int, here: Judged) -> list[Claim]:
    """(a) to (d) at one number of rows."""
    name, fixed = best_fixed(here)
    ours = here.ours[str(TRIES)]
    over_fixed, over_rgn = interval(ours, fixed), interval(ours, here.others["Auto-RGN"])
    least, wording = (0.0, "above") if rows in (100, 300) else (-0.5, "not half a point below")
    lead = float((here.ceiling - fixed).mean())
    share = float((ours.mean(0) - fixed).mean()) / lead
    quarter = interval(here.ours["quarter"], here.rules[:, PLANS.index(KNOWN_RULES["LP-FT"])])
    count = worth_in_plans(here, ours)
    return [
        _claim(
            f"a_fixed_{rows}",
            f"(a) {rows} rows: {wording} the best of all {len(PLANS)} fixed rules ({name})",
            _interval(over_fixed),
            over_fixed[1] > least,
        ),
        _claim(
            f"a_rgn_{rows}",
            f"(a) {rows} rows: above Auto-RGN",
            _interval(over_rgn),
            over_rgn[1] > 0,
        ),
        _claim(
            f"b_{rows}",
            f"(b) {rows} rows: share of the ceiling's lead ({100 * lead:.1f} points)",
            f"{share:.2f}",
            share >= 0.5,
        ),
        _claim(
            f"c_{rows}",
            f"(c) {rows} rows: with a quarter of the parameters at least LP-FT",
            _interval(quarter),
            quarter[0] >= 0,
        ),
        _claim(
            f"d_{rows}",
            f"(d) {rows} rows: plans that a validated random choice needs to do as well",
            f"{count} plans, {3 * count} trainings",
            count >= 4,
        ),
    ]


def transfer_claim(suite: str, rows: int, here: Judged) -> Claim:
    """(e): data or an architecture that no controller has seen."""
    name, fixed = best_fixed(here)
    ours = here.ours[str(TRIES)]
    over = interval(ours, here.rules[:, PLANS.index(KNOWN_RULES["LP-FT"])])
    return _claim(
        f"e_{suite}_{rows}",
        f"(e) {suite}, {rows} rows: above LP-FT; over the best fixed rule ({name})",
        f"{_interval(over)}; {_interval(interval(ours, fixed))}",
        over[1] > 0,
        is_open=over[2] > 0,
    )


def _interval(found: tuple[float, float, float]) -> str:
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*found)


def _points(values: Tensor) -> str:
    return f"{100 * float(values.nanmean()):.1f}"


def plot(data: dict[str, Judged], path: Path) -> None:
    """Accuracy by kind of shift, ours and the rules that people use."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    here = [joined([data[n] for n in SERIES if n in data], rows) for rows in (100, 300)]
    kinds = sorted({kind for part in here for kind in part.kinds})

    def by_kind(values: list[Tensor]) -> list[float]:
        joined_, names = torch.cat(values), [k for part in here for k in part.kinds]
        return [
            100 * float(joined_[torch.tensor([name == kind for name in names])].mean())
            for kind in kinds
        ]

    shown = {
        name: by_kind([part.rules[:, PLANS.index(KNOWN_RULES[name])] for part in here])
        for name in ("full fine-tuning", "LoRA everywhere", "LP-FT")
    }
    shown["Esper, 3 tries"] = by_kind([part.ours[str(TRIES)].mean(0) for part in here])
    order = np.argsort(shown["Esper, 3 tries"])
    colours = {
        "full fine-tuning": "#9aa5b1",
        "LoRA everywhere": "#c8b28a",
        "LP-FT": "#7fa8c9",
        "Esper, 3 tries": "#c2410c",
    }
    figure, axes = plt.subplots(figsize=(8.5, 5.2))
    for name, values in shown.items():
        axes.scatter(
            [values[i] for i in order], range(len(kinds)), s=90 if "Esper" in name else 46,
            color=colours[name], label=name, zorder=3,
        )  # fmt: skip
    axes.set_yticks(range(len(kinds)), [kinds[i].replace("_", " ") for i in order])
    axes.set_xlabel(
        "accuracy on shifted test rows (%), mean of 100 and 300 labelled rows, four architectures"
    )
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title("Kinds of shift that the controller never saw", loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def quick() -> dict[str, Judged]:
    suite = suites("cpu", {}, quick=True)["conv_norm"]
    saved = collect("conv_norm", suite, TrialSettings(steps=100, test_rows=500), quick=True)
    return {"conv_norm": judge(saved, [find_controller("tamiyo")])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="?")
    parser.add_argument("--controllers", type=Path, nargs="*", default=[])
    parser.add_argument("--page", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.quick:
        (here,) = quick().values()
        rules = {n: here.rules[:, i] for i, n in enumerate(KNOWN_RULES)}
        ours = here.ours[str(TRIES)]
        print({name: _points(values) for name, values in rules.items()}, "ours", _points(ours))
        mean, _, _ = interval(ours, rules["LP-FT"])
        bars = {"above_lp_ft": {"value": round(mean, 1), "bar": 0.0, "met": mean > 0}}
        print(json.dumps({"benchmark": "adapt", "device": "cpu", "bars": bars}))
        return
    if arguments.tables is None:
        sys.exit("give the folder of tables that adapt_suites.py wrote, or --quick")
    loaded = [find_controller(path) for path in arguments.controllers or ["tamiyo"]]
    data = {
        path.stem: judge(torch.load(path, weights_only=True), loaded)
        for path in sorted(arguments.tables.glob("*.pt"))
    }
    page, bars = report(data)
    print(page)
    if arguments.page:
        arguments.page.write_text(page + "\n")
    if arguments.plot:
        plot(data, arguments.plot)
    print(json.dumps({"benchmark": "adapt", "device": "tables", "bars": bars}))


if __name__ == "__main__":
    main()
