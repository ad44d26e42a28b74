"""What an evaluation found: every network's figures, the table, and a sentence for each claim."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from esper.leyline.files import atomic_write
from esper.leyline.plain_config import to_plain
from esper.simic.evaluation.arms import (
    CONSTANT,
    CONSTANT_PER_TYPE,
    HEURISTIC,
    HOST_ALONE,
    LEARNED,
    WIDTH_SEARCH,
    ArmResult,
)
from esper.simic.evaluation.claims import FRONTIER_CLAIMS, Verdict
from esper.simic.evaluation.settings import EvaluationConfig
from esper.simic.evaluation.statistics import Array, Estimate, estimate, estimate_over_groups
from esper.simic.evaluation.tuning import Sweep
from esper.simic.evaluation.variants import OnVariant
from esper.simic.evaluation.widened import FrontierKind, StaticPool
from esper.simic.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.table import Table

_FIELDS = (
    "validation",
    "test",
    "added_params",
    "params",
    "macs",
    "training_flops",
    "watching_flops",
    "rolled_back",
)
FEW_HOSTS = 256  # below, differences of less than a point are not to be read


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationReport:
    config: TrainConfig
    settings: EvaluationConfig
    num_controllers: int
    device: str
    types: tuple[str, ...]
    arms: dict[str, ArmResult]
    learning_rates: Sweep
    heuristic: Sweep
    plans: dict[str, list[str]]  # the best constant plans, one per rent
    searches: list[dict[int, Estimate]]  # for each rent, what the best of k random plans scores
    statics: StaticPool
    verdicts: list[Verdict]
    variants: list[OnVariant]
    stages: dict[str, float]  # seconds

    @property
    def num_hosts(self) -> int:
        return int(next(iter(self.arms.values())).scores.shape[-1])

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    def summary(self) -> str:
        """How much was measured, and how far that goes."""
        size = (
            f"{self.num_hosts} hosts an arm of {len(self.types)} types held out from training, "
            f"{self.num_controllers} controller(s), {self.seconds:.0f} s on {self.device}."
        )
        if self.num_hosts < FEW_HOSTS or self.num_controllers < 3:
            size += (
                " This is a small evaluation: read differences of several points, not of one, and "
                f"use --preset full ({FEW_HOSTS} hosts, three controllers or more) for claims."
            )
        return size

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """The table of arms: its header, and a row for each, best at the middle rent first."""
        header = ["arm", *(f"score, rent {rent:g}" for rent in self.settings.rents)]
        header += ["test accuracy", "params", "multiply-adds", "training GFLOP", "spent before"]
        ranked = sorted(self.arms.values(), key=lambda arm: -arm.scores[:, self._middle].mean())
        return header, [self._row(arm) for arm in ranked]

    def markdown(self) -> str:
        header, rows = self.rows()
        lines = [f"# Evaluation on {self.config.task}", "", self.summary(), "", self._legend(), ""]
        lines += _markdown_table(header, rows)
        lines += ["", self._costs(), "", self._seconds(), "", "## Claims", "", self._coverage(), ""]
        lines += [f"- ({v.letter}) **{v.decision}**: {v.sentence}" for v in self.verdicts]
        lines += ["", "## Where growing helps", "", *self._variant_lines()]
        lines += ["", "## Random search over plans, best of k by validation", ""]
        lines += _markdown_table(
            ["rent", *(f"k = {k}" for k in self.searches[0])],
            [
                [f"{rent:g}", *map(_with_interval, curve.values())]
                for rent, curve in zip(self.settings.rents, self.searches, strict=True)
            ],
        )
        lines += ["", "## Settled before", "", f"Learning rate: {_sweep(self.learning_rates)}"]
        lines += ["", f"Heuristic: {_sweep(self.heuristic)}", "", "## Best constant plans", ""]
        rents = ", ".join(f"{rent:g}" for rent in self.settings.rents)
        lines += [f"At the rents {rents}:", ""]
        lines += [f"- {name}: {'; '.join(plans)}" for name, plans in self.plans.items()]
        return "\n".join(lines) + "\n"

    def table(self) -> "Table":
        """The first columns of the table of arms, for a terminal."""
        from rich.table import Table

        header, rows = self.rows()
        columns = len(self.settings.rents) + 3
        table = Table(title="Arms on hosts and data held out from training")
        for number, name in enumerate(header[:columns]):
            table.add_column(name, justify="right" if number else "left", no_wrap=not number)
        for row in rows:
            table.add_row(*row[:columns])
        return table

    def plain(self) -> dict[str, Any]:
        """Everything, every network's figures too, as JSON has it."""
        return {
            "config": to_plain(self.config),
            "settings": to_plain(self.settings),
            "device": self.device,
            "seconds": self.stages,
            "types": list(self.types),
            "learning_rates": asdict(self.learning_rates),
            "heuristic": asdict(self.heuristic),
            "plans": self.plans,
            "random_search": [
                {k: asdict(found) for k, found in curve.items()} for curve in self.searches
            ],
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "variants": [asdict(found) for found in self.variants],
            "arms": {name: _plain_arm(arm) for name, arm in self.arms.items()},
            "statics": {
                "hosts": [asdict(host) for host in self.statics.hosts],
                "lines": self.statics.lines,
                "params": self.statics.params.tolist(),
                "macs": self.statics.macs.tolist(),
                "validation": self.statics.validation.tolist(),
                "test": self.statics.test.tolist(),
            },
            "plot": self.plot(),
        }

    def plot(self) -> dict[str, Any]:
        """Frontier lines and arms as points: what `nissa.frontier_plot` draws."""
        names: dict[FrontierKind, str] = {"uniform": "one width", "own": "own host widened"}
        lines = [
            {"label": f"{name}, {'with' if norm else 'without'} norm", **self._line(kind, norm)}
            for kind, name in names.items()
            for norm in (False, True)
        ]
        points = [
            {"label": name, **_point(arm, index)}
            for name, arm in self.arms.items()
            for index in range(len(arm.rents))
        ]
        return {"lines": lines, "points": points}

    @property
    def file_name(self) -> str:
        """What files about it are called: by the task, where it is not MNIST-1D."""
        return "evaluation" if self.config.task == "mnist1d" else f"evaluation_{self.config.task}"

    def save(self, folder: Path | str) -> tuple[Path, Path]:
        """Write it as JSON and as Markdown; the two paths."""
        folder = Path(folder)
        paths = folder / f"{self.file_name}.json", folder / f"{self.file_name}.md"
        for path, text in zip(paths, (json.dumps(self.plain()), self.markdown()), strict=True):
            atomic_write(path, methodcaller("write", text.encode()))
        return paths

    @property
    def _middle(self) -> int:
        return (len(self.settings.rents) - 1) // 2

    def _legend(self) -> str:
        return (
            "Scores and accuracies are points on test rows with half their 95 % interval over "
            "hosts; arms are paired, so the claims below tell them apart far better than these "
            f"do. All but the scores are at rent {self.settings.rents[self._middle]:g}. Training counts "
            "seeds as long as they live, and validation. Spent before: networks that were trained "
            "to tune, search or learn."
        )

    def _costs(self) -> str:
        """What searches took beside what training a controller took, in arithmetic."""
        learned = self.arms[LEARNED]
        controller, grown = learned.search.flops, learned.array("training_flops").mean()
        names = (WIDTH_SEARCH, CONSTANT, CONSTANT_PER_TYPE, HEURISTIC)
        parts = [f"{name} {self.arms[name].search.flops / controller:.1%}" for name in names]
        return (
            f"Training a controller took {controller / 1e12:,.2f} TFLOP, as much as growing "
            f"{controller / grown:,.0f} networks with it: grown once, a network costs that and its "
            "own training; grown more often, its share. Of as much, the searches spent: "
            f"{', '.join(parts)}. Validation, with all seeds and without each in turn, is "
            f"{self._watching(LEARNED):.1%} of the training of the learned arm's networks and "
            f"{self._watching(HOST_ALONE):.1%} of that of hosts alone."
        )

    def _watching(self, name: str) -> float:
        arm = self.arms[name]
        return float(arm.array("watching_flops").sum() / arm.array("training_flops").sum())

    def _seconds(self) -> str:
        return f"Seconds: {', '.join(f'{stage} {s:.1f}' for stage, s in self.stages.items())}."

    def _coverage(self) -> str:
        """What the intervals of the claims cover."""
        if self.num_controllers == 1:
            return (
                "Differences are paired by host. Intervals cover which hosts were drawn, of these "
                "types; they say nothing about other controllers trained in the same way."
            )
        return (
            f"Differences are paired by host and averaged over the {self.num_controllers} "
            "controllers. The first interval, which decides, covers which hosts were drawn, of "
            "these types, and which controllers were trained; the second covers hosts alone. After "
            "it comes each controller's own mean."
        )

    def _variant_lines(self) -> list[str]:
        """The leads and excesses on each variant, in points; not all of them, for a page's width."""
        shown = [
            claim.rival
            for claim in FRONTIER_CLAIMS
            if claim.kind == "uniform"
            or (claim.norm == self.config.norm and claim.size == "params")
        ]
        header = ["variant", "rent", *(f"score over {rival}" for rival in self.variants[0].leads)]
        header += [f"accuracy over {rival}" for rival in shown]
        rows = []
        for found in self.variants:
            leads = [*found.leads.values(), *(found.excesses[rival] for rival in shown)]
            cells = [_with_interval(lead, sign="+") for lead in leads]
            rows.append([found.variant, f"{found.rent:g}", *cells])
        return _markdown_table(header, rows)

    def _row(self, arm: ArmResult) -> list[str]:
        middle = self._middle
        scores = [_points(arm.scores[:, index]) for index in range(len(arm.rents))]
        sizes = [estimate(arm.array(name)[:, middle]) for name in ("params", "macs")]
        gflops = estimate(arm.array("training_flops")[:, middle] / 1e9)
        return [
            arm.name,
            *scores,
            _points(arm.array("test")[:, middle]),
            *(f"{size.mean:,.0f} ± {_half(size):,.0f}" for size in sizes),
            f"{gflops.mean:,.2f} ± {_half(gflops):,.2f}",
            f"{arm.search.networks:,}",
        ]

    def _line(self, kind: FrontierKind, norm: bool) -> dict[str, list[float]]:
        """Means over a frontier's groups: of accuracy, and geometric ones of the sizes."""
        by_params, by_macs = (
            self.statics.frontier(kind, norm=norm, by=by) for by in ("params", "macs")
        )
        estimates = [estimate_over_groups(of_size) for of_size in by_params.accuracies]
        return {
            "params": _geometric_mean(by_params.sizes).tolist(),
            "macs": _geometric_mean(by_macs.sizes).tolist(),
            "accuracy": [e.mean for e in estimates],
            "low": [e.low for e in estimates],
            "high": [e.high for e in estimates],
        }


def _plain_arm(arm: ArmResult) -> dict[str, Any]:
    arrays = {name: arm.array(name).tolist() for name in _FIELDS}
    seeds = [h.seeds.blueprint.tolist() for h in arm.harvests]
    return {
        "rents": list(arm.rents),
        "searched": asdict(arm.search),
        "axes": ["controller", "rent", "host"],
        "score": arm.scores.tolist(),
        **arrays,
        "seeds": seeds,
    }


def _point(arm: ArmResult, index: int) -> dict[str, float]:
    """Where an arm lies at one rent; sizes are geometric means over the hosts."""
    found = estimate(arm.array("test")[:, index])
    params, macs = (
        float(_geometric_mean(arm.array(name)[:, index].flatten())) for name in ("params", "macs")
    )
    return {
        "rent": arm.rents[index],
        "params": params,
        "macs": macs,
        "accuracy": found.mean,
        "low": found.low,
        "high": found.high,
    }


def _geometric_mean(values: Array) -> Array:
    """Over the last axis."""
    mean: Array = np.exp(np.log(values).mean(-1))
    return mean


def _points(values: Array) -> str:
    return _with_interval(estimate(values))


def _with_interval(found: Estimate, sign: str = "") -> str:
    """A mean and half its interval, in points."""
    return f"{100 * found.mean:{sign}.1f} ± {100 * _half(found):.1f}"


def _half(found: Estimate) -> float:
    return (found.high - found.low) / 2


def _sweep(sweep: Sweep) -> str:
    tried = [
        f"{', '.join(f'{name} {value:g}' for name, value in settings.items())}: {100 * worth:.1f}"
        for settings, worth in zip(sweep.tried, sweep.worth, strict=True)
    ]
    return f"{'; '.join(tried)} ({sweep.cost.networks:,} networks)."


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_markdown_row(header), _markdown_row(["---"] * len(header)), *map(_markdown_row, rows)]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
